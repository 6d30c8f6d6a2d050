"""Orthogonalization: its coefficients, its singular values, and the Gram matrix's way to them."""

import math

import pytest
import torch

from blockopt.optim import newton_schulz, symmetric_products
from blockopt.optim.newton_schulz import COEFFICIENTS, orthogonalize
from tests.helpers.reference_optimizers import newton_schulz as reference

MARGIN = 1.03


def test_coefficients_have_the_smallest_error_on_their_intervals():
    """By Chebyshev's theorem: the error takes its largest value four times, with changing sign.

    Backwards from the band of the last step: what a step takes is what the one before leaves.
    """
    low, high = 0.7, 1.2
    for bound, a, b, c in reversed(COEFFICIENTS):
        roots = [(-3 * b + sign * math.sqrt(9 * b * b - 20 * a * c)) / (10 * c) for sign in (-1, 1)]
        turns = [math.sqrt(root) for root in roots]
        lowest, highest = 0.0, turns[0]  # where p, which rises up to its first turn, becomes `low`
        for _ in range(60):
            middle = (lowest + highest) / 2
            value = a * middle + b * middle**3 + c * middle**5
            lowest, highest = (lowest, middle) if value > low else (middle, highest)
        points = [lowest, *turns, MARGIN * bound]
        errors = [a * x + b * x**3 + c * x**5 for x in points]
        assert points == sorted(points)
        assert errors == pytest.approx([low, high, low, high], abs=2e-5)
        low, high = MARGIN * lowest, bound


@pytest.mark.parametrize("shape", [(24, 24), (24, 30), (16, 64), (64, 16)])
@pytest.mark.parametrize("iterations", [1, 3, 4, 5, 8])
def test_gram_iteration_equals_the_plain_one(shape, iterations, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(3, *shape, dtype=torch.float64)
    ours = orthogonalize(x.clone(), iterations)
    monkeypatch.setattr(newton_schulz, "LONG", math.inf)
    torch.testing.assert_close(ours, orthogonalize(x.clone(), iterations), rtol=1e-11, atol=1e-12)
    if iterations == 4:
        slow = torch.stack([reference(matrix) for matrix in x])
        torch.testing.assert_close(ours, slow, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", [(24, 24), (20, 64), (64, 20)])
def test_one_triangle_of_a_symmetric_product_is_enough(shape, monkeypatch):
    """Strips of 7 rows, of which the last is shorter, against products of whole matrices."""
    torch.manual_seed(0)
    x = torch.randn(2, *shape, dtype=torch.float64)
    whole = orthogonalize(x.clone(), 4)
    monkeypatch.setattr(symmetric_products, "STRIP", 7)
    torch.testing.assert_close(orthogonalize(x.clone(), 4), whole, rtol=1e-11, atol=1e-12)
    gram = x @ x.mT
    product = symmetric_products.symmetric_product(x, x.mT, plus=gram, beta=2.0, alpha=-0.5)
    torch.testing.assert_close(product, 1.5 * gram)


def with_spectrum(rows, columns, values):
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(columns, rows, dtype=torch.float64))
    return left, right.mT, left @ torch.diag(values) @ right.mT


SPECTRA = {
    "flat": torch.ones(96, dtype=torch.float64),
    "decay to the smallest that four steps reach": torch.logspace(
        0, math.log10(3.1e-3), 96
    ).double(),
    "one large": torch.cat([torch.ones(1), torch.full((95,), 5e-3)]).double(),
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("columns", [96, 384])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_singular_values_end_in_the_band(name, columns, dtype):
    left, right, matrix = with_spectrum(96, columns, SPECTRA[name])
    found = orthogonalize((1e-3 * matrix).to(dtype)[None], 4)[0].double()
    values = torch.linalg.svdvals(found)
    if dtype == torch.bfloat16:  # whose rounding of the input alone moves the smallest ones
        assert 0.5 < values.min() < values.max() < 1.23
        return
    assert 0.6999 < values.min() < values.max() < 1.2001
    along = torch.einsum("ij,ik,kj->j", left, found, right.mT)
    torch.testing.assert_close(along.sort().values, values.sort().values, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("slope", [0.3, 0.5, 0.75, 1.0])
def test_four_steps_reach_what_five_of_jordan_do(slope):
    """Singular values as those of momenta, a power of their number: all end in the band of both."""
    values = torch.arange(1, 97, dtype=torch.float64).pow(-slope)
    matrix = with_spectrum(96, 96, values)[2]
    ours = torch.linalg.svdvals(orthogonalize(matrix[None], 4)[0])
    theirs = values / values.norm()
    for _ in range(5):
        theirs = 3.4445 * theirs - 4.7750 * theirs**3 + 2.0315 * theirs**5
    assert theirs.min() > 0.67
    assert ours.min() > 0.6999
    assert 0.95 < ours.square().mean().sqrt() / theirs.square().mean().sqrt() < 1.15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zeros_and_tiny_matrices_stay_finite(dtype):
    x = torch.zeros(3, 8, 20, dtype=dtype)
    x[1] = 1e-30
    x[2] = torch.randn(8, 20)
    found = orthogonalize(x, 4)
    assert (found[0] == 0).all()
    assert found.isfinite().all()
    assert found[1].abs().max() < 1e-3 < found[2].abs().max()
