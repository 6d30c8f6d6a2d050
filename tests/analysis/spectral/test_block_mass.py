"""The mass of pairs of blocks against the dense matrix, over all probes, and with honest errors."""

import math

import pytest
import torch
from torch import nn

from blockopt.analysis.operators.dense import dense
from blockopt.analysis.operators.model_operators import HessianOperator
from blockopt.analysis.spectral.block_mass import block_mass
from blockopt.blocks import BlockGroup
from tests.helpers.matrices import AttentionHessian, Products, all_signs, random_symmetric

PARTS = {"a": torch.tensor([4, 1, 0]), "b": torch.tensor([2, 6]), "c": torch.tensor([3, 5, 7])}


def exact(A, parts):
    return torch.stack(
        [torch.stack([A[a][:, b].square().sum() for b in parts.values()]) for a in parts.values()]
    )


def share(matrix):
    return 1 - float(matrix.trace() / matrix.sum())


def test_dense():
    A = random_symmetric(8)
    found = block_mass(A, PARTS)
    torch.testing.assert_close(found.matrix, exact(A, PARTS))
    assert not found.standard_error.any()
    assert found.off_diagonal == (pytest.approx(share(exact(A, PARTS))), 0, 0)
    assert found.labels == ("a", "b", "c")
    torch.testing.assert_close(found.shares(), found.matrix / A.square().sum())


def test_enough_probes_are_exact():
    A = Products(random_symmetric(8))
    for chunk in (1, 2, 10):
        found = block_mass(A, PARTS, num_probes=3, chunk=chunk)
        torch.testing.assert_close(found.matrix, exact(A.matrix, PARTS))
        assert not found.standard_error.any()
        assert found.off_diagonal == (pytest.approx(share(exact(A.matrix, PARTS))), 0, 8)
    assert A.count == 3 * 8


def test_mean_over_all_probes(monkeypatch):
    """Blocks a and c sampled, b exact: the mean over every pair of sign vectors is exact."""
    A, signs = Products(random_symmetric(8)), all_signs(3)
    mean = torch.zeros(3, 3, dtype=torch.float64)
    for first in signs:
        for second in signs:
            draws = iter([first, first, second, second])
            monkeypatch.setattr(
                "blockopt.analysis.spectral.products.random_signs",
                lambda *_, draws=draws: next(draws),
            )
            found = block_mass(A, PARTS, num_probes=2)
            assert torch.equal(found.matrix, found.matrix.T)
            mean += found.matrix / 64
    torch.testing.assert_close(mean, exact(A.matrix, PARTS))


def test_what_is_known_exactly_is_used():
    """Block b has no more entries than probes: its pairs with others come without noise."""
    A = Products(random_symmetric(8))
    found = block_mass(A, PARTS, num_probes=2)
    assert found.off_diagonal.num_products == 6
    torch.testing.assert_close(found.matrix[1], exact(A.matrix, PARTS)[1])
    torch.testing.assert_close(found.matrix[:, 1], exact(A.matrix, PARTS)[:, 1])
    assert found.standard_error[1].tolist() == [0, 0, 0]
    assert bool((found.standard_error[[0, 2], [2, 2]] > 0).all())


def test_one_probe_has_no_error_to_tell():
    found = block_mass(Products(random_symmetric(8)), PARTS, num_probes=1)
    assert found.standard_error.unique().tolist() == [math.inf]
    assert found.off_diagonal.standard_error == math.inf


def test_errors_are_honest():
    A = random_symmetric(60)
    A[:20, :20] *= 3
    A[40:, 40:] *= 2
    parts = {"a": torch.arange(20), "b": torch.arange(20, 40), "c": torch.arange(40, 60)}
    truth = exact(A, parts)
    scores, pairs = [], []
    for seed in range(200):
        found = block_mass(
            Products(A), parts, num_probes=15, generator=torch.Generator().manual_seed(seed)
        )
        scores.append((found.off_diagonal.value - share(truth)) / found.off_diagonal.standard_error)
        pairs.append((found.matrix - truth) / found.standard_error)
    scores, pairs = torch.tensor(scores), torch.stack(pairs)
    assert 0.85 < float(scores.square().mean().sqrt()) < 1.25
    assert 0.85 < float(pairs.square().mean().sqrt()) < 1.25
    assert float(pairs.square().mean(0).sqrt().max()) < 1.4


def test_block_diagonal_and_zero():
    A = torch.block_diag(torch.ones(20, 20), 5 * torch.ones(20, 20))
    parts = {"a": torch.arange(20), "b": torch.arange(20, 40)}
    for operator in (A, Products(A)):
        assert block_mass(operator, parts).off_diagonal[:2] == (0, 0)
        found = block_mass(operator * 0 if operator is A else Products(A * 0), parts)
        assert not found.matrix.any()
        assert not found.shares().any()
        assert found.off_diagonal[:2] == (0, 0)


def test_indices_in_no_part_are_left_out():
    A = random_symmetric(8)
    parts = {"a": PARTS["a"], "b": PARTS["b"].int()}
    for operator in (A, Products(A)):
        torch.testing.assert_close(block_mass(operator, parts).matrix, exact(A, PARTS)[:2, :2])
    assert block_mass(A, {"a": PARTS["a"]}).off_diagonal.value == 0


def test_same_seed_same_result():
    A = Products(random_symmetric(60))
    parts = {"a": torch.arange(30), "b": torch.arange(30, 60)}
    first, second, other = (
        block_mass(A, parts, generator=generator).matrix
        for generator in (None, torch.Generator().manual_seed(0), torch.Generator().manual_seed(1))
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    torch.testing.assert_close(block_mass(A, parts, chunk=3).matrix, first)


def test_hessian_of_attention():
    H = AttentionHessian()
    truth = exact(H.dense(), H.parts)
    torch.testing.assert_close(block_mass(H, H.parts).matrix, truth)
    found = block_mass(H, H.parts, num_probes=8).off_diagonal
    assert found.num_products == 40
    assert found.standard_error < 0.2
    assert abs(found.value - share(truth)) < 3 * found.standard_error


def test_operator_of_a_model():
    """By head: the labels and entries of a model's operator are what `parts` takes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(
            4, 2, 5, dropout=0.0, batch_first=True, bias=False
        ).double()
        x, y = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    H = HessianOperator(
        model,
        lambda: (model(x) - y).square().mean(),
        names=["self_attn.in_proj_weight", "linear1.weight"],
    )
    parts = {group: H.entries(group) for group in H.blocks()}
    assert BlockGroup("query", parameter="self_attn.in_proj_weight", head=1) in parts
    truth = exact(dense(H), parts)
    found = block_mass(H, parts, num_probes=8)
    torch.testing.assert_close(found.matrix, truth)
    sampled = block_mass(H, parts, num_probes=7)  # only the rows of the MLP are exact
    assert abs(sampled.off_diagonal.value - share(truth)) < 3 * sampled.off_diagonal.standard_error


def test_traces_and_the_norm_come_from_the_same_probes():
    A = random_symmetric(8)
    inside = torch.cat(list(PARTS.values()))
    for operator in (A, Products(A)):
        found = block_mass(operator, PARTS, num_probes=3)
        for part, trace in zip(PARTS.values(), found.traces):
            assert trace.value == pytest.approx(float(A[part][:, part].trace()), rel=1e-10)
            assert trace.standard_error == 0
        assert found.frobenius.value == pytest.approx(float(A[inside][:, inside].norm()), rel=1e-10)
    A = random_symmetric(40)
    sampled = block_mass(Products(A), {"a": torch.arange(30), "b": torch.arange(30, 34)})
    error = abs(sampled.traces[0].value - float(A[:30, :30].trace()))
    assert 0 < error < 4 * sampled.traces[0].standard_error
    assert sampled.traces[1] == (pytest.approx(float(A[30:34, 30:34].trace())), 0, 4)


def test_errors():
    A = torch.eye(8)
    with pytest.raises(ValueError, match=r"Invalid parts=\{\}. Must name at least one block"):
        block_mass(A, {})
    for bad in (
        torch.ones(2),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(1, 1, dtype=torch.int64),
    ):
        with pytest.raises(
            ValueError,
            match=r"Invalid part 'b' of shape .* Must be a vector of at least one index, int64",
        ):
            block_mass(A, {"a": torch.arange(2), "b": bad})
    for bad in (torch.tensor([-1, 3]), torch.tensor([3, 8])):
        with pytest.raises(ValueError, match=r"Invalid part 'b': indices .* Must be in \[0, 8\)"):
            block_mass(A, {"a": torch.arange(2), "b": bad})
    for bad in (torch.tensor([3, 3]), torch.tensor([1, 3])):
        with pytest.raises(
            ValueError, match=r"Invalid part 'b': it shares indices .* Must be disjoint"
        ):
            block_mass(A, {"a": torch.arange(2), "b": bad})
    for name in ("num_probes", "chunk"):
        with pytest.raises(ValueError, match=rf"Invalid {name}=0. Must be an integer >= 1"):
            block_mass(A, PARTS, **{name: 0})
    for bad in (A * torch.nan, Products(A * torch.nan)):
        with pytest.raises(FloatingPointError, match="not finite"):
            block_mass(bad, PARTS)


def test_progress():
    A = Products(random_symmetric(8))
    assert torch.equal(block_mass(A, PARTS, progress=True).matrix, block_mass(A, PARTS).matrix)
