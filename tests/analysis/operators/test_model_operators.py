"""Products of the three operators against torch.func, curvlinops and explicit Jacobians.

Judges are `jvp` or `jacfwd` of `torch.func.grad`: `torch.func.hessian`, and with it curvlinops'
Hessian, differentiate a `jacrev`, which gives wrong second derivatives of `layer_norm` in its
weight and input (seen with torch 2.13).
"""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockopt import find_blocks
from blockopt.analysis.operators.model_operators import (
    FunctionalOperator,
    GaussNewtonOperator,
    HessianOperator,
)
from blockopt.blocks import ROLES, BlockGroup
from tests.helpers.dense_hessians import Net, build, hessian, language_loss
from tests.helpers.models import FAMILIES, block_index, loss_of
from tests.helpers.optimizers import tiny_gpt, token_loss

with warnings.catch_warnings():
    # torch.jit warns, in a library that curvlinops imports
    warnings.simplefilter("ignore", DeprecationWarning)

# torch.func.jvp uses it
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
OPERATORS = (HessianOperator, GaussNewtonOperator, FunctionalOperator)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def assert_near(found, expected, tolerance=1e-9):
    assert found.shape == expected.shape
    assert float(expected.norm()) > 0
    assert float((found - expected).norm() / expected.norm()) < tolerance


class Wrapped(nn.Module):
    """A module whose forward is the closure, so that `functional_call` can swap parameters."""

    def __init__(self, model, closure):
        super().__init__()
        self.model, self.closure = model, closure

    def forward(self):
        return self.closure()


def functional_loss(model, closure):
    wrapped = Wrapped(model, closure)
    return lambda parameters: functional_call(
        wrapped, {f"model.{name}": p for name, p in parameters.items()}, ()
    )


def hessian_product(model, closure, tangents, forward=True):
    """{name: H v} by forward over reverse, or reverse over reverse where that is missing."""
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    gradient = grad(functional_loss(model, closure))
    with sdpa_kernel(SDPBackend.MATH):
        if forward:
            return jvp(gradient, (parameters,), (tangents,))[1]
        return grad(lambda at: sum((g * tangents[name]).sum() for name, g in gradient(at).items()))(
            parameters
        )


@pytest.mark.parametrize(
    "family",
    ["gpt2", "llama", "gpt_neox", "attention", "phi3", "bert", "nanogpt", "cnn", "lora-gpt2"],
)
def test_families(family):
    model = FAMILIES[family]().double()
    closure = partial(loss_of, family, model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The loss is of torch.float32")
        H, G, R = (cls(model, closure, blocks=find_blocks(model, per_row=())) for cls in OPERATORS)
    assert H.dtype == torch.float64
    assert H.names == tuple(name for name, p in model.named_parameters() if p.requires_grad)
    v = normal(H.shape[0], 2)
    products = H @ v
    model.eval()
    for column in range(2):
        expected = hessian_product(
            model, closure, H.to_dict(v[:, column]), forward=family != "attention"
        )
        # transformers casts logits to float32 for the loss
        assert_near(products[:, column], H.to_vector(expected), 1e-5)
        assert_near(H @ v[:, column], products[:, column], 1e-5)
    assert_near(G @ v + R @ v, products, 1e-5)
    heads = [g for g in H.blocks() if g.head == 1 and str(g).endswith("head 1")]
    assert heads or family in ("cnn", "lora-gpt2")
    group = heads[-1] if heads else list(H.blocks())[-1]
    part, entries = H.block(group), H.entries(group)
    inside = torch.zeros_like(v)
    inside[entries] = v[entries]
    assert_near(part @ v[entries], (H @ inside)[entries], 1e-5)


def test_labels_of_a_model():
    model = tiny_gpt(dtype=torch.float64)
    H = HessianOperator(
        model, lambda: token_loss(model), blocks=find_blocks(model, per_row=("mlp_out",))
    )
    blocks = H.blocks()
    assert sum(part.shape[0] for part in blocks.values()) == H.shape[0]
    assert [str(group) for group in blocks][:7] == [
        "wte.weight embedding",
        "wpe.weight position",
        "h.0.ln_1.weight norm",
        "h.0.ln_1.bias norm",
        "h.0.attn.c_attn.weight query head 0",
        "h.0.attn.c_attn.weight query head 1",
        "h.0.attn.c_attn.weight key head 0",
    ]
    assert BlockGroup("mlp_out", 1, "h.1.mlp.c_proj.weight", 15) in blocks
    assert len({tuple(H.entries(group).tolist()) for group in blocks}) == len(blocks)
    head = blocks[BlockGroup("query", 0, "h.0.attn.c_attn.weight", 1)]
    assert head.names == ("h.0.attn.c_attn.weight",)
    assert repr(head) == "HessianOperator(128 x 128, h.0.attn.c_attn.weight, block 1, batches: 1)"
    embedding = blocks[BlockGroup("embedding", None, "wte.weight")]
    assert repr(embedding) == "HessianOperator(304 x 304, wte.weight, batches: 1)"
    assert repr(H).startswith(f"HessianOperator({H.shape[0]:,} x {H.shape[0]:,}, 28 parameters")
    gpt2 = FAMILIES["gpt2"]()  # Conv1D: units are columns
    columns = HessianOperator(gpt2, partial(loss_of, "gpt2", gpt2)).blocks()
    assert BlockGroup("mlp_in", 0, "transformer.h.0.mlp.c_fc.weight", 63) in columns
    assert BlockGroup("embedding", None, "transformer.wte.weight", 19) in columns


@pytest.mark.parametrize("by", ["role", "layer", "tensor", "head"])
def test_blocks_of_every_level_cover_the_vector_once_and_are_submatrices(by):
    model = build(groups=1, layers=2)
    H = HessianOperator(model, language_loss(model))
    whole = H @ torch.eye(H.shape[0], dtype=H.dtype)
    parts = H.blocks(by)
    entries = {group: H.entries(part) for group, part in parts.items()}
    assert torch.equal(torch.cat(list(entries.values())).sort().values, torch.arange(H.shape[0]))
    if by == "layer":
        order = [(-1 if g.layer is None else g.layer, ROLES.index(g.role)) for g in parts]
        assert order == sorted(order)
    for group, part in parts.items():
        where = entries[group]
        found = part @ torch.eye(part.shape[0], dtype=H.dtype)
        expected = whole[where][:, where]
        atol = 1e-12 * float(whole.abs().max())
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=atol)
        v = normal(part.shape[0])
        assert torch.equal(part.to_vector(part.to_dict(v)), v)
        for inner, smaller in part.blocks().items():
            assert inner.role == group.role
            torch.testing.assert_close(where[part.entries(smaller)], H.entries(inner))


@pytest.mark.parametrize("cls", OPERATORS)
def test_blocks_are_submatrices(cls):
    model = build(groups=1, layers=2)
    A = cls(model, language_loss(model))
    whole = A @ torch.eye(A.shape[0], dtype=A.dtype)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    blocks = find_blocks(model)
    starts = dict(
        zip(
            shapes,
            torch.tensor([0, *[torch.Size(s).numel() for s in shapes.values()]]).cumsum(0).tolist(),
        )
    )
    for group, part in A.blocks().items():
        name = group.parameter
        assert part.names == (name,)
        index = [other for other in A.blocks() if other.parameter == name].index(group)
        where = (
            starts[name]
            + (block_index(shapes[name], blocks[name].split) == index).flatten().nonzero().flatten()
        )
        torch.testing.assert_close(A.entries(group), where)
        torch.testing.assert_close(A.entries(name, index), where)
        expected = whole[where][:, where]
        found = part @ torch.eye(part.shape[0], dtype=A.dtype)
        torch.testing.assert_close(
            found, expected, rtol=1e-10, atol=1e-12 * float(whole.abs().max())
        )
    some = A.restrict(["layers.1.q_proj.weight", "embedding.weight"])
    assert some.names == ("embedding.weight", "layers.1.q_proj.weight")  # in the order of the model
    where = torch.cat([A.entries(name) for name in some.names])
    named = cls(model, language_loss(model), names=reversed(some.names))
    assert named.names == some.names
    for part in (some, named):
        assert_near(part @ torch.eye(len(where), dtype=A.dtype), whole[where][:, where])


def test_hessian_equals_row_by_row():
    model = build(Net, layers=2, top=nn.LayerNorm(6))
    closure = language_loss(model)
    H = HessianOperator(model, closure)
    _, expected = hessian(model, closure)
    assert_near(H @ torch.eye(H.shape[0], dtype=H.dtype), expected, 1e-12)


def test_tied_frozen_and_unused_parameters():
    model = tiny_gpt(dtype=torch.float64)
    model.unused = nn.Parameter(normal(3))
    model.h[0].requires_grad_(False)
    closure = partial(token_loss, model)
    H, G, R = (cls(model, closure) for cls in OPERATORS)
    assert "wte.weight" in H.names
    assert "lm_head.weight" not in H.names  # tied
    assert not any(name.startswith("h.0.") for name in H.names)
    v = normal(H.shape[0])
    assert_near(H @ v, H.to_vector(hessian_product(model, closure, H.to_dict(v))))
    for A in (H, G, R):
        assert not (A @ v)[H.entries("unused")].any()
        assert not (A.block("unused") @ normal(3, 2)).any()
    with pytest.raises(
        ValueError, match=r"'lm_head.weight' is none of the trainable.*first of its names"
    ):
        HessianOperator(model, closure, names=["lm_head.weight"])
    with pytest.raises(ValueError, match=r"'h.0.ln_1.weight' is none of the trainable"):
        HessianOperator(model, closure, names=["h.0.ln_1.weight"])
    model.unused.requires_grad_(False)
    with pytest.raises(ValueError, match=r"'unused' is no longer trainable. Make a new operator"):
        H @ v


def test_loss_linear_in_the_parameters_has_no_curvature():
    model = nn.Linear(3, 1)
    H = HessianOperator(model, lambda: model(torch.ones(2, 3)).mean())
    assert not (H @ torch.ones(4)).any()
    assert not (H @ torch.ones(4, 5)).any()


def test_dtypes():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).double())
    x = normal(3, 2, dtype=torch.float32)

    def closure():
        return model[1](model[0](x).tanh().double()).square().mean()

    H = HessianOperator(model, closure)
    assert H.dtype == torch.float64
    assert {p.dtype for p in H.to_dict(torch.ones(9, dtype=torch.float64)).values()} == {
        torch.float32,
        torch.float64,
    }
    v = normal(9)
    double = copy.deepcopy(model).double()
    D = HessianOperator(double, lambda: double[1](double[0](x.double()).tanh()).square().mean())
    assert_near(H @ v, D @ v, 1e-5)
    half = copy.deepcopy(model).bfloat16()
    B = HessianOperator(half, lambda: half(x.bfloat16()).square().mean())
    assert (B @ v.bfloat16()).dtype == torch.bfloat16


def test_round_trip_of_vectors():
    model = build()
    H = HessianOperator(model, language_loss(model))
    v = normal(H.shape[0])
    values = H.to_dict(v)
    assert [tuple(x.shape) for x in values.values()] == [tuple(p.shape) for p in model.parameters()]
    assert torch.equal(H.to_vector(values), v)
    head = H.block("layers.0.q_proj.weight", 1)
    inside = head.to_dict(v[: head.shape[0]])["layers.0.q_proj.weight"]
    assert not inside[:4].any()
    assert torch.equal(inside[4:].flatten(), v[: head.shape[0]])
    assert torch.equal(
        head.to_vector({**values, "layers.0.q_proj.weight": inside}), v[: head.shape[0]]
    )


def test_replaced_parameters_are_found():
    model = build()
    H = HessianOperator(model, language_loss(model))
    other = build(spread=0.3)
    model.load_state_dict(other.state_dict(), assign=True)
    v = normal(H.shape[0])
    assert_near(H @ v, HessianOperator(other, language_loss(other)) @ v, 1e-14)


def test_no_warning_from_products():
    model = FAMILIES["gpt_neox"]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cls in OPERATORS:
            A = cls(model, partial(loss_of, "gpt_neox", model))
            assert (A @ torch.ones(A.shape[0], 2)).isfinite().all()
            assert A._at_once > 1


def test_layer_norm_against_differences_of_gradients():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    x, y = normal(5, 3), torch.tensor([0, 1, 1, 0, 1])
    H = HessianOperator(model, lambda: F.cross_entropy(model(x), y))
    v, start, step = normal(H.shape[0]), H.to_vector(dict(model.named_parameters())), 1e-5

    def gradient(at):
        return H.to_vector(
            grad(lambda p: F.cross_entropy(functional_call(model, p, (x,)), y))(H.to_dict(at))
        )

    assert_near(H @ v, (gradient(start + step * v) - gradient(start - step * v)) / (2 * step), 1e-7)
