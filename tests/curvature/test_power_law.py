"""The scaling law: its powers, which weights enter it, and that storage does not matter."""

import pytest
import torch
from torch import nn

from blockopt import find_blocks
from blockopt.blocks.split import block_numel
from blockopt.curvature import power_law
from blockopt.curvature.power_law import EXPONENTS
from tests.blocks.test_layouts_agree import (
    assign,
    canonical,
    contiguous,
    conv1d,
    interleaved,
    pack,
    separate,
)
from tests.helpers.dense_hessians import build
from tests.helpers.models import FAMILIES

HEADS, GROUPS = 4, 2


def by_role(model, **options):
    """{role: the values of its blocks, in order}, of the weights."""
    blocks = options.pop("blocks", None) or find_blocks(model)
    found = power_law(model, blocks=blocks, **options)
    roles = {}
    for name, p in model.named_parameters():
        for role, value in zip(blocks[name].block_roles, found[name], strict=True):
            if p.ndim > 1:
                roles.setdefault(role, []).append(float(value))
    return {role: torch.tensor(values, dtype=torch.float64) for role, values in roles.items()}


def ratio(model, change, **options):
    """By how much a change of the model multiplies the value of each role."""
    before = by_role(model, **options)
    with torch.no_grad():
        change(model)
    after = by_role(model, **options)
    return {role: after[role] / before[role] for role in before}


class Layer(nn.Module):
    """Attention and an MLP, with a gate or without."""

    def __init__(self, gated=False):
        super().__init__()
        self.attention = build(heads=HEADS, groups=GROUPS).layers[0]
        self.mlp = nn.Module()
        for name, shape in {"gate_proj": (6, 10), "up_proj": (6, 10), "down_proj": (10, 6)}.items():
            if gated or name != "gate_proj":
                setattr(self.mlp, name, nn.Linear(*shape, bias=False, dtype=torch.float64))


@pytest.mark.parametrize("gated", [True, False])
def test_powers_of_the_input(gated):
    model = Layer(gated)
    for scale in (2.0, 0.5):
        one, other = by_role(model, input_scale=1.0), by_role(model, input_scale=scale)
        for role, power in EXPONENTS.items():
            if role in one:
                more = 2 if gated and role.startswith("mlp") else 0  # the gate sees the input too
                torch.testing.assert_close(
                    other[role], scale ** (power + more) * one[role], rtol=1e-5, atol=0.0
                )
    assert set(one) == set(EXPONENTS) - (set() if gated else {"mlp_gate"})
    assert [EXPONENTS[role] for role in ("query", "key", "value")] == [6, 6, 2]


def test_own_exponents():
    model = Layer()
    one, other = (by_role(model, input_scale=s, exponents={"query": 1.5}) for s in (1.0, 4.0))
    torch.testing.assert_close(other["query"], 8 * one["query"], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(other["key"], 4.0**6 * one["key"], rtol=1e-5, atol=0.0)


ENTERS = {  # which roles a weight multiplies
    "attention.q_proj": {"key"},
    "attention.k_proj": {"query"},
    "attention.v_proj": {"query", "key", "output"},
    "attention.o_proj": {"query", "key", "value"},
    "mlp.up_proj": {"mlp_out", "mlp_gate"},
    "mlp.gate_proj": {"mlp_out", "mlp_in"},
    "mlp.down_proj": {"mlp_in", "mlp_gate"},
}


@pytest.mark.parametrize("weight", ENTERS)
def test_squares_of_the_other_weights(weight):
    ratios = ratio(
        Layer(gated=True),
        lambda model: model.get_submodule(weight).weight.mul_(2.0),
        input_scale=1.0,
    )
    for role, values in ratios.items():
        expected = torch.full_like(values, 4.0 if role in ENTERS[weight] else 1.0)
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=0.0)


def test_heads_of_a_group():
    """The curvature of a key head that two queries share is the sum of theirs."""
    model = Layer()
    weight = model.attention.q_proj.weight
    changed = ratio(
        model, lambda _: weight[:4].mul_(3.0), input_scale=1.0
    )  # the first of four queries
    assert changed["key"][0] > 1.5
    assert changed["key"][1] == 1
    assert torch.equal(changed["query"], torch.ones(4, dtype=torch.float64))
    values = by_role(model, input_scale=1.0)
    gains = {
        role: (w.unflatten(0, (-1, 4)) ** 2).sum((1, 2)) / 4
        for role, w in weights_of(model.attention).items()
    }
    query, output = (gains[role].view(2, 2) for role in ("query", "output"))
    key = (query * gains["value"][:, None] * output).sum(1)
    torch.testing.assert_close(values["key"], key, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(values["value"], output.sum(1), rtol=1e-5, atol=0.0)
    shared = (gains["key"] * gains["value"]).repeat_interleave(2)
    torch.testing.assert_close(values["query"], shared * gains["output"], rtol=1e-5, atol=0.0)
    torch.testing.assert_close(
        values["output"], gains["value"].repeat_interleave(2), rtol=1e-5, atol=0.0
    )


def weights_of(attention):
    weights = {"query": attention.q_proj, "key": attention.k_proj, "value": attention.v_proj}
    return {role: linear.weight.detach() for role, linear in weights.items()} | {
        "output": attention.o_proj.weight.detach().T
    }


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("kv", [4, 2, 1])
def test_storage_does_not_matter(kv, per_head):
    found = []
    for layout in (separate, contiguous, conv1d, interleaved):
        module = layout(kv).double()
        with torch.no_grad():
            for parameter, value in assign(
                module, pack(layout, canonical(torch.Generator().manual_seed(0), kv), kv)
            ).values():
                parameter.copy_(value)
        found.append(
            by_role(module, input_scale=1.3, blocks=find_blocks(module, per_head=per_head))
        )
    for other in found[1:]:
        for role in ("query", "key", "value", "output"):
            assert len(found[0][role]) == (
                1 if not per_head else kv if role in ("key", "value") else 4
            )
            torch.testing.assert_close(other[role], found[0][role], rtol=1e-5, atol=0.0)


def test_fused_gate_is_two_matrices():
    separate, fused = Layer(gated=True), Layer()
    fused.mlp = nn.Module()
    fused.mlp.gate_up_proj, fused.mlp.down_proj = (
        nn.Linear(6, 20, bias=False),
        nn.Linear(10, 6, bias=False),
    )
    with torch.no_grad():
        fused.mlp.gate_up_proj.weight.copy_(
            torch.cat([separate.mlp.gate_proj.weight, separate.mlp.up_proj.weight])
        )
        fused.mlp.down_proj.weight.copy_(separate.mlp.down_proj.weight)
    one, other = by_role(separate, input_scale=1.0), by_role(fused, input_scale=1.0)
    for role in ("mlp_gate", "mlp_in", "mlp_out"):
        torch.testing.assert_close(other[role], one[role], rtol=1e-5, atol=0.0)


def test_norms_give_the_scale_of_the_input():
    model = Layer()
    model.norm_1, model.norm_2 = nn.RMSNorm(6), nn.LayerNorm(6)
    one = by_role(model)
    torch.testing.assert_close(one["query"], by_role(model, input_scale=1.0)["query"])
    with torch.no_grad():
        model.norm_1.weight.fill_(3.0)[:3] = -3.0
        model.norm_2.weight.fill_(3.0)
    torch.testing.assert_close(by_role(model)["query"], 3.0**6 * one["query"], rtol=1e-5, atol=0.0)


def test_other_blocks_are_neutral():
    """They get the mean of the logarithms of all others, weighted by entries."""
    model = FAMILIES["nanogpt"]()
    found, blocks = power_law(model), find_blocks(model)
    logs, sizes, rest = [], [], set()
    for name, p in model.named_parameters():
        for role, value, size in zip(
            blocks[name].block_roles, found[name], block_numel(tuple(p.shape), blocks[name].split)
        ):
            if role in EXPONENTS:
                logs.append(float(value.double().log()))
                sizes.append(float(size))
            else:
                rest.add(float(value))
    assert len(rest) == 1
    mean = sum(a * b for a, b in zip(logs, sizes)) / sum(sizes)
    assert torch.tensor(rest.pop()).log().item() == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family):
    model = FAMILIES[family]()
    if family in ("mlp", "cnn") or family.startswith("lora"):
        with pytest.raises(ValueError, match="Found neither attention nor an MLP"):
            power_law(model)
        return
    found, blocks = power_law(model), find_blocks(model)
    assert {name: values.shape for name, values in found.items()} == {
        name: (b.num_blocks,) for name, b in blocks.items()
    }
    assert all(bool((values > 0).all() and values.isfinite().all()) for values in found.values())
    rest = {
        float(v)
        for n, b in blocks.items()
        for r, v in zip(b.block_roles, found[n], strict=True)
        if r not in EXPONENTS
    }
    own = [
        float(v)
        for n, b in blocks.items()
        for r, v in zip(b.block_roles, found[n], strict=True)
        if r in EXPONENTS
    ]
    assert len(rest) <= 1
    assert not rest & set(own)  # no weight of attention or MLP was passed over


def test_unknown_exponents():
    with pytest.raises(
        ValueError, match=r"Invalid exponents for \['norm'\]. Must be for query, key"
    ):
        power_law(FAMILIES["nanogpt"](), exponents={"norm": 1.0})
