"""Factored blocks equal dense ones: trace, diagonal, Frobenius norm and products."""

import pytest
import torch

from blockopt.analysis.closed_forms import banded_product, key_inner_products, key_matrices
from blockopt.analysis.closed_forms.attention_head import AttentionHead
from blockopt.analysis.closed_forms.kronecker_sum import KroneckerSum, Matrices
from blockopt.analysis.spectral.eigenpairs import top_eigenpairs
from tests.analysis.closed_forms.test_self_attention import SHAPES, make
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
        assert_close(hessian.factored(role, 1).top_eigenvalue(), exact[-1], 1e-5)


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


MASKS = {
    "all": torch.ones(7, 7, dtype=torch.bool),
    "causal": torch.ones(7, 7, dtype=torch.bool).tril(),
    "window": torch.ones(7, 7, dtype=torch.bool).tril().triu(-2),
    "backward": torch.ones(7, 7, dtype=torch.bool).triu(),
}


@pytest.mark.parametrize("part", ["outer", "functional", "full"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("cross_entropy", [False, True], ids=["squared error", "cross-entropy"])
def test_norms_of_key_blocks(monkeypatch, mask, part, cross_entropy):
    """Both ways to the inner products, in tiles and bands of any size, with any mask."""
    X, weights, target = draw(L=7, d=9, dk=3, batch=3, dv=3, d_out=4)
    hessian, _ = make(X, weights, target, cross_entropy, mask=MASKS[mask])
    exact = hessian.block("key", "key", part).square().sum()
    one = hessian.attention.heads[0]
    ends = one.W_U, one.W_U
    curvature = hessian.loss.curvature(hessian.attention.output, *ends)
    given = (
        curvature if part != "functional" else None,
        hessian.score_gradients[0] if part != "outer" else None,
    )
    queries = one.query.flatten(0, 1)
    weight = one.scale**4 * (queries @ queries.mT).square()
    for size in (1, 3000, 2**20):
        monkeypatch.setattr(key_inner_products, "CHUNK_BYTES", size)
        found = key_inner_products.inner_products_by_tokens(one, *given)
        assert_close((weight * found).sum(), exact)
    for tile, band in ((2, 2), (4, 3), (64, 128)):
        monkeypatch.setattr(key_inner_products, "TILE", tile)
        monkeypatch.setattr(banded_product, "BAND", band)
        found = key_inner_products.inner_products_by_coordinates(one, *given)
        assert_close((weight * found).sum(), exact)
        block = hessian.block("key", "key", part)
        assert_close(hessian.factored("key", 0, part).diagonal(), block.diagonal())
        assert_close(block.square().sum(), exact)


@pytest.mark.parametrize(("L", "d"), [(3, 12), (5, 4)])
def test_the_cheaper_way_is_taken(monkeypatch, L, d):
    X, weights, target = draw(L=L, d=d, dk=2)
    hessian, _ = make(X, weights, target, False)
    other = "coordinates" if d**2 > 6 * L**2 else "tokens"
    monkeypatch.setattr(key_matrices, f"inner_products_by_{other}", None)
    exact = hessian.block("key", "key").square().sum()
    assert_close(hessian.factored("key").squared_frobenius(), exact)


@pytest.mark.parametrize("part", ["outer", "functional", "full"])
def test_a_trace_builds_no_matrices(monkeypatch, part):
    X, weights, target = draw(L=6, d=5, dk=3, batch=2)
    hessian, _ = make(X, weights, target, False)
    exact = hessian.block("key", "key", part).trace()
    monkeypatch.setattr(AttentionHead, "covariance", None)
    assert_close(hessian.factored("key", 0, part).trace(), exact)


def test_attention_sinks_in_float32():
    """One token that nearly all attention falls on, far from the others, costs few digits."""
    X, weights, target = draw(L=12, d=8, dk=4, dv=4, d_out=8)
    X[:, 0] = 300 * X[:, 0].sign()
    mask = torch.zeros(12, 12, dtype=X.dtype)
    mask[:, 0] = 8.0
    mask = mask.masked_fill(~torch.ones(12, 12, dtype=torch.bool).tril(), -torch.inf)
    small = {role: 0.003 * w if role in ("query", "key") else w for role, w in weights.items()}
    exact, _ = make(X, small, target, False, mask=mask)
    rounded = {role: w.float() for role, w in small.items()}
    found, _ = make(X.float(), rounded, target.float(), False, mask=mask.float())
    for role in ("query", "key"):
        assert_close(found.block(role, role).double(), exact.block(role, role), 3e-6)
        wanted = exact.factored(role)
        assert_close(found.factored(role).trace().double(), wanted.trace(), 3e-6)
        assert_close(found.factored(role).frobenius().double(), wanted.frobenius(), 3e-6)


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
