"""Factored blocks equal dense ones: trace, diagonal, Frobenius norm and products."""

import pytest
import torch

from blockopt.analysis.closed_forms import key_matrices
from blockopt.analysis.closed_forms.kronecker_sum import KroneckerSum, Matrices
from blockopt.analysis.spectral.eigenpairs import top_eigenpairs
from tests.analysis.closed_forms.test_self_attention import CAUSAL, SHAPES, make
from tests.helpers.attention_reference import assert_close, draw


@pytest.mark.parametrize("part", ["outer", "functional", "full"])
@pytest.mark.parametrize("cross_entropy", [False, True], ids=["squared error", "cross-entropy"])
@pytest.mark.parametrize("activation", ["softmax", "linear"])
@pytest.mark.parametrize("shape", SHAPES)
def test_factored_equals_dense(shape, activation, cross_entropy, part):
    X, weights, target = draw(**SHAPES[shape])
    hessian, _ = make(X, weights, target, cross_entropy, activation=activation)
    generator = torch.Generator().manual_seed(0)
    for role in hessian.roles:
        for head in range(hessian.num_heads):
            exact = hessian.block(role, role, part, heads=(head, head))
            block = hessian.factored(role, head, part)
            assert block.shape == exact.shape
            assert block.dtype == exact.dtype
            assert_close(block.trace(), exact.trace())
            assert_close(block.diagonal(), exact.diagonal())
            assert_close(block.squared_frobenius(), exact.square().sum())
            assert_close(block.frobenius() ** 2, exact.square().sum())
            v = torch.randn(len(exact), 3, generator=generator, dtype=exact.dtype)
            assert_close(block @ v, exact @ v)
            assert_close(block @ v[:, 0], exact @ v[:, 0])


@pytest.mark.parametrize("which", ["largest magnitude", "largest", "smallest"])
def test_top_eigenvalues_without_the_matrix(which):
    X, weights, target = draw(L=6, d=5, dk=3, heads=2, dv=4, d_out=5)
    hessian, _ = make(X, weights, target, True)
    for role in hessian.roles:
        exact = torch.linalg.eigvalsh(hessian.block(role, role, heads=(1, 1)))
        order = {"largest magnitude": -exact.abs(), "largest": -exact, "smallest": exact}[
            which
        ].argsort()
        found = top_eigenpairs(hessian.factored(role, 1), 3, which=which).values
        assert_close(found, exact[order[:3]], 1e-5)


def test_layer_of_gpt2_small():
    """A dense block would need terabytes and is refused; the factored one is small."""
    X, weights, target = draw(L=8, d=768, dk=64, dv=64, heads=12, d_out=768)
    hessian, _ = make(
        X.float(), {role: 0.05 * w.float() for role, w in weights.items()}, target.float(), False
    )
    with pytest.raises(
        ValueError, match=r"needs 1,296\.01 GiB.*SelfAttentionHessian\(\.\.\.\)\.factored"
    ):
        hessian.block("query", "query")
    with pytest.raises(ValueError, match="GiB"):
        hessian.dense()
    block = hessian.factored("query", 3)
    assert block.shape == (768 * 64, 768 * 64)
    assert_close(block.trace(), block.diagonal().sum(), 1e-4)


def test_key_blocks_in_many_slices(monkeypatch):
    """A few bytes at a time: all slices of the inner products are there, once."""
    X, weights, target = draw(L=4, d=5, dk=3, batch=2, dv=3, d_out=4)
    hessian, _ = make(X, weights, target, True, mask=CAUSAL)
    exact = hessian.block("key", "key").square().sum()
    assert_close(hessian.factored("key").squared_frobenius(), exact)
    for size in (1, 200, 700):
        monkeypatch.setattr(key_matrices, "CHUNK_BYTES", size)
        assert_close(hessian.factored("key").squared_frobenius(), exact)


def test_positions_without_a_matrix():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    E = torch.randn(5, 3, 3, generator=generator, dtype=torch.float64)
    E = (E + E.mT) * torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])[:, None, None]
    exact = sum(torch.kron(torch.outer(a, a), e) for a, e in zip(vectors, E))
    assert_close(KroneckerSum(vectors, Matrices(E), True).squared_frobenius(), exact.square().sum())
    assert float(KroneckerSum(vectors, Matrices(0 * E), True).squared_frobenius()) == 0


def test_vectors_of_a_wrong_shape():
    block = KroneckerSum(torch.ones(1, 2), Matrices(torch.ones(1, 3, 3)), True)
    with pytest.raises(
        ValueError, match=r"Invalid vector of shape \(5,\)\. Must be \(6,\) or \(6, k\)"
    ):
        block @ torch.ones(5)
