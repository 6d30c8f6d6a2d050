"""Blocks from one forward pass: hand-written models, every known family, no trace."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from blockopt import BlockAdamW, Blocks, Split, find_blocks, param_groups
from blockopt.blocks import ROW_ROLES, UnknownBlocksError
from blockopt.blocks.layouts import Layout
from blockopt.blocks.watch import layouts_of_pass, reconcile, warn_of_disagreements
from tests.helpers.models import FAMILIES, loss_of
from tests.helpers.research_models import RESEARCH, D, H, Letters, research_model, tokens


@pytest.mark.parametrize("name", RESEARCH)
def test_a_research_model_is_understood(name):
    _, example, expected = RESEARCH[name]
    assert find_blocks(research_model(name), example=example()) == expected


@pytest.mark.parametrize("name", RESEARCH)
def test_names_alone_are_right_or_refuse_or_say_that_they_do_not_know(name):
    expected = RESEARCH[name][2]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found = find_blocks(research_model(name))
        except UnknownBlocksError:
            return
    if not any("no role in a transformer" in str(w.message) for w in warned):
        # By their names, tables are embeddings, also those of positions.
        told = {n for n, b in found.items() if b.roles[0] not in ("bias", "norm", "other")}
        tables = ("embedding", "position")
        told -= {n for n in told if (*found[n].roles, *expected[n].roles) == tables}
        assert {n: found[n] for n in told} == {n: expected[n] for n in told}


# What names tell and a pass does not: what is no part of a transformer, or no linear map.
BY_NAME_ALONE = {
    "cnn": ("classifier",),
    "attention-bias-kv": ("bias_k", "bias_v"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pass_alone_finds_what_names_tell(name):
    model = FAMILIES[name]()
    example = lambda: loss_of(name, model)  # noqa: E731
    seen = layouts_of_pass(model, example, per_head=True, per_row=ROW_ROLES).layouts
    by_name_alone = BY_NAME_ALONE.get(name, ())
    parameters = dict(model.named_parameters())
    for parameter_name, entry in find_blocks(model).items():
        if any(part in parameter_name for part in by_name_alone):
            continue
        found = seen.get(parameters[parameter_name])
        if entry.roles == ("other",):
            assert found is None, parameter_name
        else:
            assert found == (entry.roles, entry.split), parameter_name


@pytest.mark.parametrize("name", FAMILIES)
def test_both_readings_together_are_the_named_one(name):
    model = FAMILIES[name]()
    found = find_blocks(model, example=lambda: loss_of(name, model))
    assert found == find_blocks(model)


def test_experts_are_read_by_neuron_and_routers_by_expert():
    model = FAMILIES["mixtral"]()
    found = find_blocks(model, example=lambda: loss_of("mixtral", model))
    roles, layer, split = found["model.layers.1.mlp.experts.gate_up_proj"]
    assert (roles, layer) == (("mlp_gate", "mlp_in"), 1)
    assert split == Split(1, (24, 24), (24, 24), stack=3)
    assert found["model.layers.1.mlp.experts.down_proj"].split == Split(1, (16,), (16,), stack=3)
    assert found["model.layers.1.mlp.gate.weight"] == Blocks(("router",), 1, Split(0, (3,), (3,)))


@pytest.mark.parametrize("options", [{"per_head": False}, {"per_row": ()}, {"per_row": ("head",)}])
@pytest.mark.parametrize("name", ["gpt2", "phi3", "gpt_neox"])
def test_options_mean_the_same_with_a_pass(name, options):
    model = FAMILIES[name]()
    found = find_blocks(model, example=lambda: loss_of(name, model), **options)
    assert found == find_blocks(model, **options)


def state_of(model):
    return {
        "weights": copy.deepcopy(model.state_dict()),
        "gradients": {n: copy.deepcopy(p.grad) for n, p in model.named_parameters()},
        "flags": {n: p.requires_grad for n, p in model.named_parameters()},
        "versions": {n: p._version for n, p in model.named_parameters()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "hooks": {n: len(m._forward_pre_hooks) for n, m in model.named_modules()},
        "random": torch.get_rng_state(),
    }


class WithBatchNorm(Letters):
    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(5)

    def forward(self, ids):
        return super().forward(ids) + self.batch_norm(torch.rand(2, 5, 1).to(self.e.weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("training", [True, False])
def test_a_pass_leaves_no_trace(dtype, training):
    torch.manual_seed(0)
    model = WithBatchNorm().to(dtype).train(training)
    model.blocks[0].q.weight.requires_grad_(False)
    model.blocks[1].eval()
    model(tokens()).float().logsumexp(-1).sum().backward()
    before = state_of(model)
    blocks = find_blocks(model, example=tokens())
    torch.testing.assert_close(state_of(model), before, rtol=0, atol=0, equal_nan=True)
    assert "blocks.0.q.weight" not in blocks
    assert blocks["blocks.1.q.weight"] == Blocks(("query",), 1, Split(0, (D,), (H,)))


def test_a_pass_that_fails_leaves_no_trace():
    model = research_model("letters")
    before = state_of(model)
    with pytest.raises(IndexError):
        find_blocks(model, example=tokens() + 100)
    torch.testing.assert_close(state_of(model), before, rtol=0, atol=0)


def test_weights_that_start_at_zero_hide_nothing():
    model, (_, example, expected) = research_model("rotary-grouped"), RESEARCH["rotary-grouped"]
    for scale in (model.n2.weight, model.p4.weight):
        nn.init.zeros_(scale)
    before = state_of(model)
    assert find_blocks(model, example=example()) == expected
    torch.testing.assert_close(state_of(model), before, rtol=0, atol=0, equal_nan=True)


def test_under_autocast_and_without_gradients_the_answer_is_the_same():
    model, expected = research_model("letters"), RESEARCH["letters"][2]
    with torch.no_grad():
        assert find_blocks(model, example=tokens()) == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert find_blocks(model, example=tokens()) == expected


@pytest.mark.parametrize(
    "as_example",
    [
        lambda model: tokens(),
        lambda model: (tokens(),),
        lambda model: {"ids": tokens()},
        lambda model: lambda: model(tokens()).sum(),
    ],
    ids=["tensor", "tuple", "dict", "function"],
)
def test_any_form_of_example(as_example):
    model = research_model("letters")
    assert find_blocks(model, example=as_example(model)) == RESEARCH["letters"][2]


def test_an_example_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"Invalid example of type int.*a tensor, a tuple"):
        find_blocks(research_model("letters"), example=3)


def test_an_example_that_does_not_run_the_model_is_refused():
    with pytest.raises(ValueError, match=r"uses no parameter of Letters"):
        find_blocks(research_model("letters"), example=lambda: torch.zeros(2) + 1)


def test_a_pass_of_one_token_or_in_inference_mode_is_refused():
    model = research_model("letters")
    with pytest.raises(ValueError, match="two or more tokens"):
        find_blocks(model, example=tokens()[:, :1])
    with torch.inference_mode(), pytest.raises(ValueError, match=r"torch\.inference_mode"):
        find_blocks(model, example=tokens())


def test_a_model_that_runs_without_gradients_is_refused():
    class Frozen(Letters):
        @torch.no_grad()
        def forward(self, ids):
            return super().forward(ids)

    with pytest.raises(ValueError, match=r"ran without gradients.*no_grad"):
        find_blocks(Frozen(), example=tokens())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile
def test_a_compiled_and_a_checkpointed_model_are_understood():
    class Checkpointed(Letters.Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    model, expected = research_model("letters"), RESEARCH["letters"][2]
    found = find_blocks(torch.compile(model), example=tokens())
    assert {name.removeprefix("_orig_mod."): blocks for name, blocks in found.items()} == expected
    for block in model.blocks:
        block.__class__ = Checkpointed
    assert find_blocks(model, example=tokens()) == expected


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = Letters()
    with pytest.raises(ValueError, match=r"'e\.weight' is on the meta device.*whole weights"):
        find_blocks(model, example=tokens())


def test_without_an_example_the_refusal_names_it():
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "qkvo"})  # that nobody can call
    said = r"(?s)does not say how many heads.*overrides=.*Or pass example=batch"
    with pytest.raises(ValueError, match=said):
        find_blocks(model)


class Liar(nn.Module):
    """Says two heads, and has three; calls the gate `up_proj`."""

    class SelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads = 2
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
                nn.Linear(D, D, bias=False) for _ in range(4)
            )

        def forward(self, x):
            q, k, v = (
                m(x).unflatten(-1, (H, -1)).transpose(1, 2)
                for m in (self.q_proj, self.k_proj, self.v_proj)
            )
            y = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.o_proj(y.transpose(1, 2).flatten(2))

    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = (nn.Linear(D, 8, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(8, D, bias=False)

        def forward(self, x):
            return self.down_proj(self.up_proj(x).sigmoid() * self.gate_proj(x))

    def __init__(self):
        super().__init__()
        self.attention, self.mlp = self.SelfAttention(), self.FeedForward()

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


def test_where_names_and_pass_disagree_both_are_told_and_overrides_settle_it():
    model, x = Liar(), torch.randn(2, 5, D)
    with pytest.warns(UserWarning, match="say another thing") as warned:
        taken = find_blocks(model, example=x)
    (told,) = (str(warning.message) for warning in warned)
    assert "'attention.q_proj.weight' of shape (12, 12)" in told
    assert (
        "by its name: Blocks(roles=('query',), layer=None, split=Split(dim=0, sizes=(12,), " in told
    )
    readings = {}
    for line in told.splitlines():
        if line.startswith("  '"):
            name = line.split("'")[1]
        elif "in the pass: " in line:
            readings[name] = eval(
                line.partition("in the pass: ")[2], {"Blocks": Blocks, "Split": Split}
            )
    assert len(readings) == 6
    blocks = find_blocks(model, example=x, overrides=readings)
    assert blocks == taken
    assert blocks["attention.o_proj.weight"] == Blocks(("output",), None, Split(1, (D,), (H,)))
    assert blocks["mlp.up_proj.weight"].roles == ("mlp_gate",)
    assert blocks["mlp.gate_proj.weight"].roles == ("mlp_in",)


def test_groups_of_a_model_that_names_do_not_explain_train_it():
    model, ids = research_model("letters"), tokens()
    optimizer = BlockAdamW(param_groups(model, example=ids), lr=1e-2)
    roles = {group["role"] for group in optimizer.param_groups}
    assert {"query", "key", "value", "output", "head", "position"} <= roles
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="both blocks and example"):
        param_groups(model, find_blocks(model, example=ids), example=ids)


def test_one_block_is_no_disagreement_with_one_block():
    weight = torch.zeros(4, 4)
    said, seen = Layout(("value",), None), Layout(("value",), Split(0, (4,), (1,)))
    both = reconcile({weight: said}, {weight: seen}, {}, {weight: "v"}, ())
    assert both == ({weight: said}, [])


def test_names_decide_where_a_weight_makes_both_queries_and_keys():
    weight, split = torch.zeros(4, 4), Split(0, (4,), (2,))
    said, seen = Layout(("key",), split), Layout(("query",), split)
    shared = {weight: {"query", "key"}}
    both = reconcile({weight: said}, {weight: seen}, shared, {weight: "k"}, ())
    assert both == ({weight: said}, [])
    with pytest.warns(UserWarning, match="say another thing"):
        warn_of_disagreements(reconcile({weight: said}, {weight: seen}, {}, {weight: "k"}, ())[1])
