"""Derivatives by the input, all tokens at once, and by embeddings equal autograd in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import jacrev

from blockopt.analysis import TransformerBlockHessian, lookup_rows
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from tests.analysis.closed_forms.test_llama_attention import CASES, Case
from tests.analysis.closed_forms.test_transformer_block import CASES as BLOCKS
from tests.analysis.closed_forms.test_transformer_block import make_loss
from tests.helpers.attention_reference import assert_close, draw, flat, hessian, sizes_of, unflat
from tests.helpers.transformer_block import D, L, close, forward, make_weights
from tests.helpers.transformer_block import draw as draw_tokens


@pytest.mark.parametrize(
    "name",
    ["grouped, linear", "rotary", "normalized keys, biased", "all at once, other sizes"],
)
def test_attention_by_its_input(name):
    case = Case(**CASES[name])
    closed, X, slices = case.closed_form(), case.X, sizes_of(case.weights)

    def attend(X, weights):
        case.X = X
        return case.attend(weights)

    def of(vector):  # X first, the weights after it
        x, rest = vector[: X.numel()].view(X.shape), vector[X.numel() :]
        return attend(x, unflat(rest, case.weights))

    start = torch.cat([X.flatten(), flat(case.weights)])
    g = closed.gradient_of_output
    jacobian = jacrev(of)(start)[..., : X.numel()].reshape(-1, X.numel())
    full = hessian(lambda v: case.loss(of(v)))(start)
    functional = hessian(lambda v: (g * of(v)).sum())(start)
    assert_close(closed.attention.input_jacobian(), jacobian)
    exact = {"full": full, "functional": functional, "outer": full - functional}
    for part, whole in exact.items():
        rows = whole[: X.numel()]
        assert_close(closed.block("input", "input", part), rows[:, : X.numel()])
        for role in closed.roles:
            wanted = rows[:, X.numel() :][:, slices[role]]
            assert_close(closed.block("input", role, part), wanted)
            assert_close(closed.block(role, "input", part), wanted.mT)


@pytest.mark.parametrize("case", BLOCKS)
def test_transformer_block_by_its_input(case):
    shape, options, kind, batch = BLOCKS[case]
    X, w, loss = draw_tokens(*batch, L, D), make_weights(**shape), make_loss(kind, batch)
    ours = TransformerBlockHessian(X, w, loss, **options)
    params = {"input": X} | {role: w[role] for role in ours.roles}

    def run(params):
        weights = {role: p for role, p in params.items() if role != "input"}
        return forward(params["input"], weights, **{"norm": "layer"} | options)

    second = jacrev(jacrev(lambda p: loss.value(run(p))))(params)["input"]
    close(ours.jacobian("input"), jacrev(run)(params)["input"].reshape(X.numel(), -1))
    for role, exact in second.items():
        wanted = exact.reshape(X.numel(), -1)
        close(ours.block("input", role), wanted)
        close(ours.block(role, "input"), wanted.mT)
        parts = [ours.block("input", role, part) for part in ("outer", "functional")]
        close(sum(parts), wanted)


def test_embeddings_and_positions():
    """Blocks of both tables, and between them and a weight, with tokens that repeat."""
    X, weights, target = draw(L=5, d=3, dk=2, heads=2, dv=2, d_out=3, batch=2)
    ids = torch.tensor([[1, 0, 1, 5, 3], [1, 1, 0, 2, 5]])
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    places = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    X = table[ids] + places
    closed = SelfAttentionHessian(X, *list(weights.values())[:3], target, W_U=weights["output"])

    def loss(table, places, query):
        from tests.helpers.attention_reference import attend

        return F.mse_loss(attend(table[ids] + places, weights | {"query": query}), target)

    given = (table, places, weights["query"])
    exact = jacrev(jacrev(loss, (0, 1, 2)), (0, 1, 2))(*given)
    positions = torch.arange(5).expand(2, 5)
    sizes = [t.numel() for t in given]
    by_input = closed.block("input", "input")
    by_table = lookup_rows(by_input, ids, 7)
    assert_close(lookup_rows(by_table.mT, ids, 7), exact[0][0].reshape(sizes[0], -1))
    by_both = lookup_rows(by_table.mT, positions, 5).mT
    assert_close(by_both, exact[0][1].reshape(sizes[0], -1))
    by_query = lookup_rows(closed.block("input", "query"), ids, 7)
    assert_close(by_query, exact[0][2].reshape(sizes[0], -1))
    with pytest.raises(ValueError, match="Must have rows for the 10 tokens of ids"):
        lookup_rows(by_input[:-1], ids, 7)


def test_errors():
    X, weights, target = draw(single=True)
    single = SelfAttentionHessian(
        X, weights["query_key"], None, weights["value"], target, parametrization="single"
    )
    with pytest.raises(ValueError, match="Derivatives by the input need W_Q and W_K"):
        single.block("input", "value")
    X, weights, target = draw()
    closed = SelfAttentionHessian(X, *weights.values(), target)
    with pytest.raises(ValueError, match="Invalid part='score_outer'"):
        closed.block("query", "input", "score_outer")
    with pytest.raises(ValueError, match="Invalid role='output'"):
        closed.block("input", "output")
