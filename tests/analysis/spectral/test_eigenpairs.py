"""Extreme eigenpairs against dense eigenvalues and scipy's ARPACK."""

import pytest
import torch

from blockopt.analysis.spectral.eigenpairs import top_eigenpairs
from tests.helpers.matrices import (
    SPECTRA,
    AttentionHessian,
    Products,
    normal,
    random_symmetric,
    with_spectrum,
)

KEYS = {"largest magnitude": torch.abs, "largest": torch.clone, "smallest": torch.neg}


def check(A, values, k, which, *, tolerance=1e-6, dtype=torch.float64):
    """The k best of `values`, orthonormal vectors, and residuals as promised."""
    operator = Products(A.to(dtype))
    found = top_eigenpairs(operator, k, which=which, tolerance=tolerance)
    key, limit = KEYS[which], tolerance * float(values.abs().max())
    best = key(values).sort(descending=True).values[:k]  # ±λ tie by magnitude
    torch.testing.assert_close(key(found.values), best, rtol=0, atol=2 * limit + 1e-13)
    torch.testing.assert_close(
        found.vectors.T @ found.vectors, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-12
    )
    residuals = (A @ found.vectors - found.vectors * found.values).norm(dim=0)
    rounding = 1e-13 if dtype == torch.float64 else 1e-6 * float(values.abs().max())
    assert bool((residuals <= 1.5 * limit + rounding).all())
    assert bool((residuals <= found.residuals + limit + rounding).all())
    assert found.num_products == operator.count
    return found


@pytest.mark.parametrize("which", KEYS)
@pytest.mark.parametrize("k", [1, 4, 60])
@pytest.mark.parametrize("name", SPECTRA)
def test_small(name, k, which):
    """With room for a basis of the whole space."""
    found = check(with_spectrum(SPECTRA[name]), SPECTRA[name], k, which)
    assert found.num_products <= 60
    assert repr(found).startswith(f"Eigenpairs(values=[{float(found.values[0]):.4g}")
    assert "tensor" not in repr(found)  # vectors are not for reading


LARGE = {
    "bulk": normal(400),
    "repeated outlier": torch.cat([torch.full((8,), 5.0, dtype=torch.float64), 0.1 * normal(392)]),
    "pairs": torch.cat(
        [torch.tensor([3.0] * 4 + [-3.0] * 4, dtype=torch.float64), 0.1 * normal(392)]
    ),
    "near": torch.cat([1 + 1e-4 * torch.arange(8, dtype=torch.float64), 0.1 * normal(392)]),
    "two values": torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(200),
    "low rank": torch.cat(
        [torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64), torch.zeros(397, dtype=torch.float64)]
    ),
    "zero": torch.zeros(400, dtype=torch.float64),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("which", KEYS)
@pytest.mark.parametrize("k", [1, 5, 10])
@pytest.mark.parametrize("name", LARGE)
def test_with_thick_restarts(name, k, which, dtype):
    found = check(with_spectrum(LARGE[name]), LARGE[name], k, which, dtype=dtype)
    assert found.num_products < 200


def test_copies_are_found_before_rounding_brings_them():
    """At this tolerance a Krylov space is done in a few steps, with one copy of each value."""
    values = torch.cat(
        [
            torch.tensor([10.0, 10.0, 10.0, 9.0, 8.0, 7.0, 6.0], dtype=torch.float64),
            0.1 * normal(393),
        ]
    )
    found = check(with_spectrum(values), values, 4, "largest", tolerance=1e-3)
    assert found.values.round(decimals=3).tolist() == [10, 10, 10, 9]


def test_a_copy_close_to_the_others_is_found():
    """It takes more than a few products to rise above them."""
    bulk = torch.linspace(0, 1, 397, dtype=torch.float64)
    values = torch.cat([torch.tensor([10.0, 1.01, 1.01], dtype=torch.float64), bulk])
    A = with_spectrum(values)
    for seed in range(8):
        found = top_eigenpairs(
            A, 3, which="largest", tolerance=1e-5, generator=torch.Generator().manual_seed(seed)
        )
        assert found.values.round(decimals=3).tolist() == [10, 1.01, 1.01]


@pytest.mark.parametrize(
    ("which", "code"), [("largest magnitude", "LM"), ("largest", "LA"), ("smallest", "SA")]
)
def test_equals_arpack(which, code):
    from scipy.sparse import linalg

    A = random_symmetric(300)
    found = top_eigenpairs(A, 6, which=which, tolerance=1e-10)
    values, vectors = linalg.eigsh(A.numpy(), k=6, which=code)
    order = KEYS[which](torch.as_tensor(values)).argsort(descending=True)
    torch.testing.assert_close(found.values, torch.as_tensor(values)[order], rtol=1e-9, atol=0)
    overlap = (found.vectors * torch.as_tensor(vectors)[:, order]).sum(0).abs()
    torch.testing.assert_close(overlap, torch.ones(6, dtype=torch.float64), rtol=1e-9, atol=0)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4, 1e-8])
def test_tolerance_is_kept_and_saves_products(tolerance):
    A = random_symmetric(300)
    found = check(A, torch.linalg.eigvalsh(A), 1, "largest", tolerance=tolerance)
    assert (
        found.num_products
        < check(A, torch.linalg.eigvalsh(A), 1, "largest", tolerance=tolerance / 100).num_products
    )


def test_hessian_of_attention():
    H = AttentionHessian()
    exact = torch.linalg.eigvalsh(H.dense())
    assert float(exact[0]) < -1e-3  # a saddle
    torch.testing.assert_close(
        top_eigenpairs(H, 3, which="largest", tolerance=1e-9).values, exact.flip(0)[:3]
    )
    torch.testing.assert_close(
        top_eigenpairs(H, 3, which="smallest", tolerance=1e-9).values, exact[:3]
    )


def test_same_seed_same_result():
    A = random_symmetric(250)
    first, second = (
        top_eigenpairs(A, 2),
        top_eigenpairs(A, 2, generator=torch.Generator().manual_seed(0)),
    )
    other = top_eigenpairs(A, 2, generator=torch.Generator().manual_seed(1))
    assert torch.equal(first.vectors, second.vectors)
    assert not torch.equal(first.vectors, other.vectors)


def test_too_few_steps_warn_with_the_residual():
    A = random_symmetric(300)
    with pytest.warns(
        UserWarning,
        match=r"not finished after max_steps=8: a residual is .* must be <= .* Raise max_steps",
    ) as caught:
        found = top_eigenpairs(A, 2, max_steps=8)
    residual = (A @ found.vectors - found.vectors * found.values).norm(dim=0)
    torch.testing.assert_close(residual, found.residuals)
    assert f"{float(residual.max()):.1e}" in str(caught[0].message)
    assert found.num_products == 8
    B = with_spectrum(LARGE["repeated outlier"])
    with pytest.warns(
        UserWarning, match="max_steps=20: repeated eigenvalues are not ruled out yet"
    ):
        found = top_eigenpairs(B, 2, max_steps=20)


@pytest.mark.parametrize("steps", range(5, 60))
def test_stopped_anywhere_the_pairs_fit_together(steps):
    """Also just after the basis shrank."""
    A = with_spectrum(LARGE["bulk"])
    with pytest.warns(UserWarning, match="not finished"):
        found = top_eigenpairs(A, 3, max_steps=steps, tolerance=1e-12)
    torch.testing.assert_close(
        found.vectors.T @ found.vectors, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(
        (found.vectors * (A @ found.vectors)).sum(0), found.values, rtol=0, atol=1e-12
    )
    residual = (A @ found.vectors - found.vectors * found.values).norm(dim=0)
    torch.testing.assert_close(residual, found.residuals, rtol=1e-6, atol=1e-11)


def test_errors():
    A = torch.eye(4)
    for bad in (0, 5, 1.0):
        with pytest.raises(ValueError, match=f"Invalid k={bad}. Must be an integer from 1 to 4"):
            top_eigenpairs(A, bad)
    with pytest.raises(
        ValueError,
        match=r"Invalid which='LM'. Must be one of 'largest magnitude', 'largest', 'smallest'",
    ):
        top_eigenpairs(A, which="LM")
    with pytest.raises(ValueError, match=r"Invalid tolerance=0. Must be > 0"):
        top_eigenpairs(A, tolerance=0)
    with pytest.raises(ValueError, match=r"Invalid max_steps=1. Must be an integer >= 2"):
        top_eigenpairs(A, 2, max_steps=1)
    with pytest.raises(FloatingPointError, match="not finite"):
        top_eigenpairs(A * torch.nan)
