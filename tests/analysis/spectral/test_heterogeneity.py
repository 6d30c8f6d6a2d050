"""Spread of norms, Jensen-Shannon distances against scipy, and shares of negative curvature."""

import math

import numpy as np
import pytest
import torch

from blockopt.analysis.spectral.density import SpectralDensity, spectral_density
from blockopt.analysis.spectral.heterogeneity import (
    jensen_shannon,
    negative_share,
    norm_spread,
)
from tests.helpers.matrices import AttentionHessian, normal, with_spectrum


def test_norm_spread():
    norms = dict(zip("abcde", np.exp(np.arange(5.0) ** 1.3).tolist()))
    found = norm_spread(norms)
    values = np.array(list(norms.values()))
    assert found.num_blocks == 5
    assert (found.smallest, found.largest) == (values.min(), values.max())
    assert found.ratio == pytest.approx(values.max() / values.min(), rel=1e-14)
    assert found.log10_deviation == pytest.approx(np.log10(values).std(), rel=1e-12)
    assert found.geometric_mean == pytest.approx(np.exp(np.log(values).mean()), rel=1e-12)
    scaled = norm_spread({label: 1e6 * value for label, value in norms.items()})
    assert scaled.log10_deviation == pytest.approx(found.log10_deviation)
    assert norm_spread({"a": torch.tensor(3.0)})[4:] == (1.0, 0.0)


def test_norm_spread_of_zeros():
    assert norm_spread({"a": 0.0, "b": 2.0}) == (2, 0, 2, 0, math.inf, math.inf)
    assert norm_spread({"a": 0.0, "b": 0.0}) == (2, 0, 0, 0, 1, 0)


def test_norm_errors():
    with pytest.raises(ValueError, match=r"Invalid norms=\{\}. Must name at least one block"):
        norm_spread({})
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(
            ValueError, match=rf"Invalid norm {bad} of 'b'. Must be finite and >= 0"
        ):
            norm_spread({"a": 1.0, "b": bad})


def test_closed_form_of_well_separated_atoms():
    """Half of the eigenvalues are shared: D = H(3/4, 1/4) - 1/2 bits, with H the entropy."""
    found = jensen_shannon({"a": torch.zeros(6), "b": torch.tensor([0.0, 1.0, 0.0, 1.0])})
    entropy = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25))
    assert float(found.matrix[0, 1]) == pytest.approx(math.sqrt(entropy - 0.5), abs=1e-6)
    assert found.mean == pytest.approx(float(found.matrix[0, 1]), abs=1e-15)


@pytest.mark.parametrize("axis", ["linear", "symmetric log"])
def test_equals_scipy_on_smoothed_densities(axis):
    """An independent fine grid, with densities rather than the mass of bins."""
    from scipy import stats
    from scipy.spatial import distance

    spectra = {"a": normal(50), "b": 0.3 * normal(80, seed=1) + 0.5, "c": 1e-3 * normal(30, seed=2)}
    options = {"axis": axis, "threshold": 1e-4} if axis != "linear" else {}
    found = jensen_shannon(spectra, num_bins=2000, **options)
    values = {name: v.numpy() for name, v in spectra.items()}
    if axis != "linear":
        values = {name: np.sign(v) * np.log10(1 + np.abs(v) / 1e-4) for name, v in values.items()}
    low, high = min(v.min() for v in values.values()), max(v.max() for v in values.values())
    width = 0.01 * (high - low)
    grid = np.linspace(low - 6 * width, high + 6 * width, 20001)
    densities = [stats.norm.pdf(grid[:, None], loc=v, scale=width).mean(1) for v in values.values()]
    # scipy gives inf for denormal ones
    densities = [np.where(density < 1e-30, 0, density) for density in densities]
    for i in range(3):
        for j in range(3):
            expected = distance.jensenshannon(densities[i], densities[j], base=2)
            assert float(found.matrix[i, j]) == pytest.approx(expected, abs=2e-4)
    assert found.mean == pytest.approx(float(found.matrix.sum()) / 6)
    assert found.labels == ("a", "b", "c")


def test_a_distance():
    spectra = {str(seed): (seed + 1) * normal(40, seed=seed) for seed in range(5)}
    matrix = jensen_shannon(spectra).matrix
    assert torch.equal(matrix, matrix.T)
    assert not matrix.diagonal().any()
    assert bool((matrix >= 0).all())
    assert bool((matrix <= 1).all())
    # Triangle inequality
    assert bool((matrix[:, :, None] <= matrix[:, None, :] + matrix.T[None, :, :] + 1e-12).all())


@pytest.mark.parametrize("axis", ["linear", "symmetric log"])
def test_the_unit_and_order_of_eigenvalues_do_not_matter(axis):
    spectra = {"a": normal(40), "b": 0.1 * normal(40, seed=1)}
    found = jensen_shannon(spectra, axis=axis).mean
    scaled = {name: 1e-7 * values.flip(0) for name, values in spectra.items()}
    assert jensen_shannon(scaled, axis=axis).mean == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize("axis", ["linear", "symmetric log"])
def test_rounding_does_not_matter(axis):
    """Zeros of either sign: a histogram with an edge at 0 would see nothing in common."""
    outliers = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    spectra = {
        "a": torch.cat([outliers, torch.full((50,), 1e-16)]),
        "b": torch.cat([outliers, torch.full((50,), -1e-16)]),
    }
    assert jensen_shannon(spectra, axis=axis).mean < 1e-7
    assert jensen_shannon({"a": torch.zeros(3), "b": torch.zeros(5)}, axis=axis).mean < 1e-7
    assert (
        jensen_shannon({"a": torch.full((3,), 2.0), "b": torch.full((5,), 2.0)}, axis=axis).mean
        < 1e-7
    )


def test_axes_see_different_things():
    """Only the symmetric log tells apart two flat blocks beside a sharp one."""
    spectra = {
        "flat": 1e-5 * normal(50),
        "flatter": 1e-7 * normal(50, seed=1),
        "sharp": normal(50, seed=2),
    }
    linear, log = (
        jensen_shannon(spectra).matrix,
        jensen_shannon(spectra, axis="symmetric log", threshold=1e-8).matrix,
    )
    assert float(linear[0, 1]) < 1e-3
    assert float(log[0, 1]) > 0.5
    assert float(log[0, 2]) > 0.9


def test_densities_and_eigenvalues_together():
    """The spectrum by quadrature is close to the true one, and far from another."""
    values = torch.cat([normal(200), 6 + 0.1 * normal(50)])
    density = spectral_density(with_spectrum(values), num_steps=40, num_probes=20)
    found = jensen_shannon({"exact": values, "quadrature": density, "other": -values}, width=0.03)
    assert float(found.matrix[0, 1]) < 0.1
    assert float(found.matrix[0, 2]) > 0.4
    # More than one piece of the sum over eigenvalues
    many = jensen_shannon({"a": values, "b": values.repeat(40)})
    assert many.mean < 1e-7


def test_jensen_shannon_errors():
    two = {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(
        ValueError, match=r"Invalid spectra of \['a'\]. Must be of at least two blocks"
    ):
        jensen_shannon({"a": torch.ones(2)})
    with pytest.raises(
        ValueError, match=r"Invalid axis='log'. Must be one of 'linear', 'symmetric log'"
    ):
        jensen_shannon(two, axis="log")
    with pytest.raises(
        ValueError,
        match=r"Invalid threshold=1 with axis='linear'. Must be None, or take axis='symmetric log'",
    ):
        jensen_shannon(two, threshold=1)
    with pytest.raises(ValueError, match=r"Invalid threshold=0. Must be > 0"):
        jensen_shannon(two, axis="symmetric log", threshold=0)
    for bad in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=rf"Invalid width={bad}. Must be > 0 and finite"):
            jensen_shannon(two, width=bad)
    with pytest.raises(ValueError, match=r"Invalid num_bins=1. Must be an integer >= 2"):
        jensen_shannon(two, num_bins=1)
    for bad, given in (
        (torch.ones(2, 2), r"shape \(2, 2\)"),
        (torch.ones(0), r"shape \(0,\)"),
        (torch.tensor([math.nan]), "values"),
    ):
        with pytest.raises(
            ValueError,
            match=rf"Invalid spectrum 'b' of {given}.* Must be a vector of finite eigenvalues",
        ):
            jensen_shannon({"a": torch.ones(2), "b": bad})


def test_negative_share():
    values = normal(1000)
    found = negative_share(values)
    assert found.of_count == pytest.approx(float((values < 0).double().mean()))
    assert found.of_mass == pytest.approx(float(-values[values < 0].sum() / values.abs().sum()))
    assert negative_share(values.abs()) == (0, 0)
    assert negative_share(-values.abs()) == (pytest.approx(1), pytest.approx(1))
    assert negative_share(torch.zeros(4)) == (0, 0)


def test_negative_share_of_a_singular_matrix():
    """Half of its zeros come out negative, which says nothing."""
    A = with_spectrum(torch.cat([torch.ones(5), torch.zeros(95)]))
    values = torch.linalg.eigvalsh(A)
    assert float((values < 0).double().mean()) > 0.2
    assert negative_share(values).of_count == 0
    assert negative_share(values, tolerance=0).of_count > 0.2


def test_negative_share_of_quadrature():
    """A diagonal matrix has no noise; tr A and tr |A| give the mass."""
    values = torch.tensor([-3.0, -1.0, 2.0, 4.0, 4.0])
    found = negative_share(spectral_density(torch.diag(values)))
    assert found == (pytest.approx(0.4), pytest.approx(4 / 14))
    weighted = SpectralDensity(torch.tensor([-1.0, 1.0]), torch.tensor([0.9, 0.1]))
    assert negative_share(weighted) == (pytest.approx(0.9), pytest.approx(0.9))


def test_hessian_of_attention():
    """Each block of one matrix has its own spectrum; queries are far flatter than the head."""
    H = AttentionHessian()
    dense = H.dense()
    blocks = {name: dense[part][:, part] for name, part in H.parts.items()}
    spectra = {name: torch.linalg.eigvalsh(block) for name, block in blocks.items()}
    spread = norm_spread({name: block.norm() for name, block in blocks.items()})
    assert spread.ratio > 10
    assert spread.smallest == pytest.approx(min(float(block.norm()) for block in blocks.values()))
    assert 0 < jensen_shannon(spectra).mean < jensen_shannon(spectra, axis="symmetric log").mean < 1
    assert negative_share(spectra["query.weight"]).of_count > 0
    assert negative_share(spectra["head.weight"]) == (0, 0)  # the loss is convex in the last layer


def test_negative_share_errors():
    for bad in (-1.0, 1.0, math.nan):
        with pytest.raises(ValueError, match=rf"Invalid tolerance={bad}. Must be in \[0, 1\)"):
            negative_share(torch.ones(2), tolerance=bad)
    with pytest.raises(ValueError, match=r"Invalid spectrum 'spectrum' of shape \(\)"):
        negative_share(torch.tensor(1.0))
