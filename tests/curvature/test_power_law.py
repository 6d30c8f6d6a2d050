"""The scaling law: its powers, which weights enter it, and that storage does not matter."""

import pytest
import torch
from torch import nn

from blockopt import find_blocks
from blockopt.blocks import block_numel
from blockopt.curvature import power_law
from blockopt.curvature.power_law import EXPONENTS
from tests.helpers.attention_layouts import contiguous, conv1d, interleaved, random_values, separate
from tests.helpers.dense_hessians import build
from tests.helpers.models import FAMILIES

HEADS, GROUPS = 4, 2


def by_role(model, **options):
    """Return {role: the values of its blocks, in order} for the weights."""
    blocks = options.pop("blocks", None) or find_blocks(model)
    found = power_law(model, blocks=blocks, **options)
    roles = {}
    for name, p in model.named_parameters():
        for role, value in zip(blocks[name].block_roles, found[name], strict=True):
            if p.ndim > 1:
                roles.setdefault(role, []).append(float(value))
    return {role: torch.tensor(values, dtype=torch.float64) for role, values in roles.items()}


def ratio(model, change, **options):
    """Return by how much a change of the model multiplies the value of each role."""
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


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("gated", [True, False])
def test_powers_of_the_input(gated):
    model = Layer(gated)
    for scale in (2.0, 0.5):
        one, other = by_role(model, input_scale=1.0), by_role(model, input_scale=scale)
        for role, power in EXPONENTS.items():
            if role in one:
                more = 2 if gated and role.startswith("mlp") else 0  # the gate sees the input too
                assert_close(other[role], scale ** (power + more) * one[role])
    assert set(one) == set(EXPONENTS) - (set() if gated else {"mlp_gate"})
    assert [EXPONENTS[role] for role in ("query", "key", "value")] == [6, 6, 2]


def test_own_exponents():
    model = Layer()
    one, other = (by_role(model, input_scale=s, exponents={"query": 1.5}) for s in (1.0, 4.0))
    assert_close(other["query"], 8 * one["query"])
    assert_close(other["key"], 4.0**6 * one["key"])


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
    def double(model):
        model.get_submodule(weight).weight.mul_(2.0)

    for role, values in ratio(Layer(gated=True), double, input_scale=1.0).items():
        assert_close(values, torch.full_like(values, 4.0 if role in ENTERS[weight] else 1.0))


def test_heads_of_a_group():
    """The curvature of a key head that two queries share is the sum of theirs."""
    model = Layer()
    first_query = model.attention.q_proj.weight[:4]
    changed = ratio(model, lambda _: first_query.mul_(3.0), input_scale=1.0)
    assert changed["key"][0] > 1.5
    assert changed["key"][1] == 1
    assert torch.equal(changed["query"], torch.ones(4, dtype=torch.float64))
    values = by_role(model, input_scale=1.0)
    attention = model.attention
    weights = {"query": attention.q_proj, "key": attention.k_proj, "value": attention.v_proj}
    weights = {role: linear.weight for role, linear in weights.items()}
    weights["output"] = attention.o_proj.weight.T
    gains = {
        role: (w.detach().unflatten(0, (-1, 4)) ** 2).sum((1, 2)) / 4 for role, w in weights.items()
    }
    query, output = (gains[role].view(2, 2) for role in ("query", "output"))
    key = (query * gains["value"][:, None] * output).sum(1)
    assert_close(values["key"], key)
    assert_close(values["value"], output.sum(1))
    shared = (gains["key"] * gains["value"]).repeat_interleave(2)
    assert_close(values["query"], shared * gains["output"])
    assert_close(values["output"], gains["value"].repeat_interleave(2))


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("kv", [4, 2, 1])
def test_storage_does_not_matter(kv, per_head):
    found = []
    for layout in (separate, contiguous, conv1d, interleaved):
        module = layout(kv).double()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter, value in random_values(module, layout, generator, kv):
                parameter.copy_(value)
        blocks = find_blocks(module, per_head=per_head)
        found.append(by_role(module, input_scale=1.3, blocks=blocks))
    heads = {"query": 4, "key": kv, "value": kv, "output": 4}
    for other in found[1:]:
        for role, number in heads.items():
            assert len(found[0][role]) == (number if per_head else 1)
            assert_close(other[role], found[0][role])


def test_fused_gate_is_two_matrices():
    separate, fused = Layer(gated=True), Layer()
    fused.mlp = nn.Module()
    fused.mlp.gate_up_proj = nn.Linear(6, 20, bias=False)
    fused.mlp.down_proj = nn.Linear(10, 6, bias=False)
    halves = [separate.mlp.gate_proj.weight, separate.mlp.up_proj.weight]
    with torch.no_grad():
        fused.mlp.gate_up_proj.weight.copy_(torch.cat(halves))
        fused.mlp.down_proj.weight.copy_(separate.mlp.down_proj.weight)
    one, other = by_role(separate, input_scale=1.0), by_role(fused, input_scale=1.0)
    for role in ("mlp_gate", "mlp_in", "mlp_out"):
        assert_close(other[role], one[role])


def test_norms_give_the_scale_of_the_input():
    model = Layer()
    model.norm_1, model.norm_2 = nn.RMSNorm(6), nn.LayerNorm(6)
    one = by_role(model)
    torch.testing.assert_close(one["query"], by_role(model, input_scale=1.0)["query"])
    with torch.no_grad():
        model.norm_1.weight.fill_(3.0)[:3] = -3.0
        model.norm_2.weight.fill_(3.0)
    assert_close(by_role(model)["query"], 3.0**6 * one["query"])


def test_other_blocks_are_neutral():
    """They get the mean of the logarithms of all others, weighted by entries."""
    model = FAMILIES["nanogpt"]()
    found, blocks = power_law(model), find_blocks(model)
    logs, sizes, rest = [], [], set()
    for name, p in model.named_parameters():
        numel = block_numel(tuple(p.shape), blocks[name].split)
        for role, value, size in zip(blocks[name].block_roles, found[name], numel):
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
    values = {True: set(), False: set()}
    for name, entry in blocks.items():
        for role, value in zip(entry.block_roles, found[name], strict=True):
            values[role in EXPONENTS].add(float(value))
    assert len(values[False]) <= 1
    assert values[True].isdisjoint(values[False])  # no weight of attention or MLP was left out


def test_unknown_exponents():
    with pytest.raises(ValueError, match=r"exponents for \['norm'\]. Must be for query, key"):
        power_law(FAMILIES["nanogpt"](), exponents={"norm": 1.0})
