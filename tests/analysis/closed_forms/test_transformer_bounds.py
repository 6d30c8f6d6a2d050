"""The bounds hold, their constants are sharp, and a printed one fails for peaked attention."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import jacrev

from blockopt.analysis.closed_forms.normalization import Normalization
from blockopt.analysis.closed_forms.output_loss import SquaredError
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from blockopt.analysis.closed_forms.transformer_block import TransformerBlockHessian
from blockopt.analysis.closed_forms.transformer_bounds import (
    ATTENTION,
    BLOCK,
    Bound,
    _Attention,
    _derivative_norms,
    _Sum,
    attention_bounds,
    bound_table,
    transformer_bounds,
)

L, D, DK, M = 4, 3, 2, 5
NORMS = ("trilinear", "unfolded")


def draw(seed, peaked=1.0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    shapes = {
        "query": (D, DK),
        "key": (D, DK),
        "value": (D, D),
        "mlp_in": (D, M),
        "mlp_out": (M, D),
    }
    weights = {role: normal(*shape) for role, shape in shapes.items()}
    weights["query"] *= peaked
    return normal(L, D), weights, normal(L, D)


def of_attention(weights):
    return {role: weights[role] for role in ATTENTION}


def size(matrix):
    return float(torch.linalg.matrix_norm(matrix, ord=2))


@pytest.mark.parametrize("part", ["outer", "functional", "full"])
@pytest.mark.parametrize("peaked", [0.1, 1.0, 10.0])
def test_bounds_hold(part, peaked):
    mask = torch.ones(L, L).tril().bool()
    for seed in range(8):
        X, weights, target = draw(seed, peaked)
        chosen = mask if seed % 2 else None
        found = {}
        for second in NORMS:
            options = {"part": part, "second": second, "mask": chosen}
            found[second] = transformer_bounds(X, weights, target, **options)
            found[second] += attention_bounds(X, of_attention(weights), target, **options)
            assert len(found[second]) == 15 + 6
            for entry in found[second]:
                assert entry.true <= entry.bound * (1 + 1e-12), entry
        for sharp, loose in zip(*found.values()):
            assert sharp.bound <= loose.bound * (1 + 1e-12)


def test_true_norms_and_the_whole():
    X, weights, target = draw(0)
    options = {"arrangement": "post", "activation": "relu", "epsilon": 0.0}
    hessian = TransformerBlockHessian(X, weights, SquaredError(target), **options)
    bounds = transformer_bounds(X, weights, target)
    assert [(entry.row, entry.column) for entry in bounds] == list(
        itertools.combinations_with_replacement(BLOCK, 2)
    )
    for entry in bounds:
        assert entry.true == pytest.approx(size(hessian.block(entry.row, entry.column)))
    assert size(hessian.dense()) <= 5 * max(entry.bound for entry in bounds)


def test_printed_bound_fails_for_peaked_attention_and_ours_is_attained():
    """Two of 100 tokens are seen, half each: |H_o(Q,Q)| = 10⁻²."""
    length = 100
    X = torch.zeros(length, 2).double()
    X[:2] = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    weights = {
        "query": torch.diag(torch.tensor([60.0, 0.0])),
        "key": torch.eye(2),
        "value": torch.eye(2),
    }
    weights = {role: W.double() for role, W in weights.items()}
    entry = attention_bounds(X, weights, torch.zeros(length, 2).double(), part="outer")[0]
    assert (entry.row, entry.column) == ("query", "query")
    assert entry.true == pytest.approx(1e-2, rel=1e-9)
    w_k, w_v, x = (size(matrix) for matrix in (weights["key"], weights["value"], X))
    printed = 2 / (length**3 * 2 * 2) * w_k**2 * w_v**2 * x**6
    assert printed == pytest.approx(4e-6)
    assert entry.true > 1000 * printed
    assert entry.looseness == pytest.approx(1, rel=1e-9)


def test_printed_bound_holds_for_uniform_attention():
    """With W_Q = 0 all weights are 1/L, and so is the norm of a row's derivative."""
    X, weights, target = draw(0)
    weights["query"] = torch.zeros_like(weights["query"])
    hessian = SelfAttentionHessian(X, weights["query"], weights["key"], weights["value"], Y=target)
    w_k, w_v, x = (size(matrix) for matrix in (weights["key"], weights["value"], X))
    assert (
        size(hessian.block("query", "query", "outer"))
        <= 2 / (L**3 * D * DK) * w_k**2 * w_v**2 * x**6
    )


def cumulant(a):
    """∂²softmax as (L, L, L): E[zzz] of z = e_j - a."""
    z = torch.eye(len(a)).double() - a
    return torch.einsum("j,ja,jb,jc->abc", a, z, z, z)


def test_constants_of_the_softmax():
    even = torch.tensor([0.5, 0.5, 0.0]).double()
    assert size(even.diag() - even.outer(even)) == pytest.approx(0.5)
    p = (1 - 1 / math.sqrt(3)) / 2
    extreme, w = (
        torch.tensor([p, 1 - p, 0.0]).double(),
        torch.tensor([1.0, -1.0, 0.0]).double() / math.sqrt(2),
    )
    value = torch.einsum("abc,a,b,c->", cumulant(extreme), w, w, w)
    assert float(value.abs()) == pytest.approx(math.sqrt(6) / 9)
    generator = torch.Generator().manual_seed(0)
    for length in (2, 3, 5, 20):
        for sharpness in (0.3, 1.0, 3.0):
            scores = sharpness * torch.randn(length, generator=generator).double()
            a = scores.softmax(0)
            second = jacrev(jacrev(lambda t: t.softmax(0)))(scores)
            assert torch.allclose(second, cumulant(a), atol=1e-12)
            assert size(a.diag() - a.outer(a)) <= 0.5
            assert size(second.reshape(-1, length)) <= math.sqrt(3) / 2
            u, v, w = F.normalize(torch.randn(3, 500, length, generator=generator).double(), dim=-1)
            assert torch.einsum("abc,na,nb,nc->n", second, u, v, w).abs().max() <= math.sqrt(6) / 9


def attend(X, w):
    return ((X @ w["query"]) @ (X @ w["key"]).T / DK**0.5).softmax(-1) @ X @ w["value"]


def summed(X, w):
    R = X + attend(X, w)
    centred = R - R.mean(-1, keepdim=True)
    Y = centred / centred.square().mean(-1, keepdim=True).sqrt()
    return (Y @ w["mlp_in"]).relu() @ w["mlp_out"] + Y


def unfolded(function, w, row, column):
    """∂²function/∂row∂column, (outputs · n_row, n_column), and its largest contraction."""
    second = jacrev(jacrev(lambda p: function(w | p)))({role: w[role] for role in (row, column)})[
        row
    ][column]
    return second.reshape(-1, w[row].numel(), w[column].numel())


@pytest.mark.parametrize("peaked", [0.1, 1.0, 5.0])
def test_bounds_of_the_pieces_hold(peaked):
    """|G_k|, |Φ_kl|, |B_i| and |ξ_ij| by autograd, in both norms and both orders of unfolding."""
    X, w, _ = draw(1, peaked)
    pieces = {}
    norm = Normalization(X + attend(X, w), epsilon=0.0)
    for second in NORMS:
        attention = _Attention(X, w, second)
        block = _Sum(attention, w["mlp_in"], w["mlp_out"], *_derivative_norms(norm, second), second)
        pieces[second] = ((attention, attend, ATTENTION), (block, summed, BLOCK))
    gradients = torch.randn(50, L * D, generator=torch.Generator().manual_seed(3)).double()
    for (sharp, function, roles), (loose, _, _) in zip(*pieces.values()):
        for role in roles:
            jacobian = jacrev(lambda p: function(X, w | {role: p}))(w[role])  # noqa: B023
            assert size(jacobian.reshape(L * D, -1)) <= sharp.first[role]
        for row, column in itertools.combinations_with_replacement(roles, 2):
            tensor = unfolded(lambda p: function(X, p), w, row, column)  # noqa: B023
            orders = size(tensor.flatten(0, 1)), size(tensor.mT.flatten(0, 1))
            # The loss needs the smaller of the two orders alone; between the two MLP weights it is
            # rows of W_1.
            order = orders[0] if (row, column) == ("mlp_in", "mlp_out") else min(orders)
            assert order <= loose.second(row, column) * (1 + 1e-12) + 1e-12
            slices = torch.einsum("go,oab->gab", F.normalize(gradients, dim=-1), tensor)
            largest = float(torch.linalg.matrix_norm(slices, ord=2).max())
            assert largest <= sharp.second(row, column) * (1 + 1e-12) + 1e-12


def test_first_derivatives_are_attained():
    """X = (1, -1) and uniform attention for the query; all see one token for the value."""
    one, zero = torch.ones(1, 1).double(), torch.zeros(1, 1).double()
    X = torch.tensor([[1.0], [-1.0]]).double()
    weights = {"query": zero, "key": one, "value": one}
    hessian = SelfAttentionHessian(X, zero, one, one, Y=torch.zeros(2, 1).double())
    attention = _Attention(X, weights, "trilinear")
    assert size(hessian.attention.jacobian("query")) == pytest.approx(attention.first["query"])
    X = torch.tensor([[1.0], [0.0]]).double()
    mask = torch.tensor([[True, False], [True, False]])
    hessian = SelfAttentionHessian(X, zero, one, one, Y=torch.zeros(2, 1).double(), mask=mask)
    assert size(hessian.attention.jacobian("value")) == pytest.approx(
        _Attention(X, weights, "trilinear").first["value"]
    )


def test_second_derivative_is_nearly_attained():
    """X = (1, -1), and W_Q where the cumulant is largest: √2 from the bound."""
    p = (1 - 1 / math.sqrt(3)) / 2
    one, X = torch.ones(1, 1).double(), torch.tensor([[1.0], [-1.0]]).double()
    query = 0.5 * math.log((1 - p) / p) * one
    hessian = SelfAttentionHessian(X, query, one, one, Y=torch.zeros(2, 1).double())
    signs = torch.tensor([[1.0], [-1.0]]).double() / math.sqrt(2)  # of the two rows' third moments
    value = float(hessian.attention.functional("query", "query", signs[None]).abs())
    bound = _Attention(X, {"query": query, "key": one, "value": one}, "trilinear").second(
        "query", "query"
    )
    assert value == pytest.approx(bound / math.sqrt(2))


def test_formulas_of_the_table():
    """Each entry of the module's table, for norms that can be read off."""

    def diagonal(*entries, rows):
        matrix = torch.zeros(rows, len(entries)).double()
        matrix[range(len(entries)), range(len(entries))] = torch.tensor(entries).double()
        return matrix

    X = diagonal(2.0, 1.0, rows=3)  # L = 3, d = 2, |X| = 2, |X|_F = √5
    w = {
        "query": diagonal(3.0, 1.0, rows=2),
        "key": diagonal(5.0, 1.0, rows=2),
        "value": diagonal(7.0, 1.0, rows=2),
    }
    w |= {"mlp_in": diagonal(11.0, 1.0, rows=2), "mlp_out": diagonal(13.0, 1.0, rows=2)}
    G = {
        "query": 0.5 * 8 * 5 * 7 / math.sqrt(2),
        "key": 0.5 * 8 * 3 * 7 / math.sqrt(2),
        "value": math.sqrt(3) * 2,
    }
    J_Y, h_Y, J_SY, y = 0.3, 0.7, 1 + 11 * 13, math.sqrt(6)
    constants = {
        "trilinear": (math.sqrt(6) / 9, 8.0, 1.0, 13.0),
        "unfolded": (math.sqrt(3) / 2, 4 * math.sqrt(5), math.sqrt(2), None),
    }
    for second, (cumulant_norm, scores, root, into_first) in constants.items():
        attention = _Attention(X, w, second)
        block = _Sum(attention, w["mlp_in"], w["mlp_out"], J_Y, h_Y, second)
        Phi = {
            ("query", "query"): cumulant_norm * 32 * 5**2 * 7 / 2,
            ("key", "key"): cumulant_norm * 32 * 3**2 * 7 / 2,
            ("query", "key"): cumulant_norm * 32 * 3 * 5 * 7 / 2 + 0.5 * scores * 7 / math.sqrt(2),
            ("query", "value"): root * 0.5 * 8 * 5 / math.sqrt(2),
            ("key", "value"): root * 0.5 * 8 * 3 / math.sqrt(2),
            ("value", "value"): 0.0,
        }
        assert attention.first == pytest.approx(G)
        B = {role: J_SY * J_Y * G[role] for role in G} | {"mlp_in": 13 * y, "mlp_out": 11 * y}
        assert block.first == pytest.approx(B)
        for (row, column), value in Phi.items():
            assert attention.second(row, column) == pytest.approx(value)
            assert attention.second(column, row) == pytest.approx(value)
            expected = J_SY * (h_Y * G[row] * G[column] + J_Y * value)
            assert block.second(row, column) == pytest.approx(expected)
        first = min(math.sqrt(13**2 + 1), math.sqrt(3) * 13) if into_first is None else into_first
        for role in ATTENTION:
            assert block.second(role, "mlp_in") == pytest.approx(first * J_Y * G[role])
            assert block.second("mlp_out", role) == pytest.approx(root * 11 * J_Y * G[role])
        assert block.second("mlp_in", "mlp_out") == pytest.approx(y)
        assert block.second("mlp_in", "mlp_in") == 0


def test_assembly_of_the_bounds():
    """c J_Z² |B_i||B_j| and |∂ℓ/∂Z| (J_Z |ξ_ij| + h_Z |B_i||B_j|), from definitions."""
    X, w, target = draw(2)
    norm = Normalization(X + attend(X, w), epsilon=0.0)
    final = Normalization(summed(X, w), epsilon=0.0)
    for second in NORMS:
        J_Y, J_Z = (float(1 / one.sigma.min()) for one in (norm, final))
        factor = 2 / math.sqrt(3 * D) if second == "trilinear" else math.sqrt(2 / D)  # D = 3
        block = _Sum(
            _Attention(X, w, second), w["mlp_in"], w["mlp_out"], J_Y, factor * J_Y**2, second
        )
        gradient = float((2 / (L * D) * (final.output - target)).norm())
        for part in ("outer", "functional", "full"):
            for entry in transformer_bounds(X, w, target, part=part, second=second):
                product = block.first[entry.row] * block.first[entry.column]
                outer = 2 / (L * D) * J_Z**2 * product
                functional = gradient * (
                    J_Z * block.second(entry.row, entry.column) + factor * J_Z**2 * product
                )
                expected = {"outer": outer, "functional": functional, "full": outer + functional}[
                    part
                ]
                assert entry.bound == pytest.approx(expected)


def test_table_and_looseness():
    assert Bound("a", "a", 0.0, 0.0).looseness == 1
    assert Bound("a", "a", 1.0, 0.0).looseness == math.inf
    X, weights, target = draw(0)
    lines = bound_table(transformer_bounds(X, weights, target)).splitlines()
    assert len(lines) == 16
    assert lines[-1].startswith("mlp_out  mlp_out")


def test_errors():
    X, weights, target = draw(0)
    with pytest.raises(ValueError, match="Invalid second='frobenius'"):
        attention_bounds(X, of_attention(weights), target, second="frobenius")
    with pytest.raises(ValueError, match="Invalid part='inner'"):
        transformer_bounds(X, weights, target, part="inner")
    with pytest.raises(ValueError, match="one sequence"):
        attention_bounds(X[None], of_attention(weights), target)
    with pytest.raises(ValueError, match="mlp_gate not covered"):
        transformer_bounds(X, weights | {"mlp_gate": weights["mlp_in"]}, target)
