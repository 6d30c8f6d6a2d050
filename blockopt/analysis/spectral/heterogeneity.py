"""How much the blocks of a Hessian differ: their norms, their spectra, their share of negative curvature."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from blockopt.analysis.spectral.density import SpectralDensity
from blockopt.analysis.spectral.products import check_count

Spectrum = Tensor | SpectralDensity  # all eigenvalues, or a distribution of them
Axis = Literal["linear", "symmetric log"]
MARGIN = 5.0  # widths that the common axis goes beyond the outermost eigenvalues; leaves out 3e-7 of the mass


class Spread(NamedTuple):
    """How far positive numbers are apart.

    `ratio` is the largest over the smallest, `log10_deviation` the standard deviation of their
    logarithms to base 10 (over all of them, so 0 for one). Both are infinite, and the geometric
    mean is 0, if the smallest is 0.
    """

    num_blocks: int
    smallest: float
    largest: float
    geometric_mean: float
    ratio: float
    log10_deviation: float


class JensenShannon(NamedTuple):
    """Distances between spectra: `matrix[i, j]` between those of `labels[i]` and `labels[j]`, and the mean over all pairs."""

    labels: tuple[str, ...]
    matrix: Tensor
    mean: float


class NegativeShare(NamedTuple):
    """`of_count`: the share of eigenvalues that are negative. `of_mass`: the share of `Σ |λ|` that they make up."""

    of_count: float
    of_mass: float


def norm_spread(norms: Mapping[str, float]) -> Spread:
    """How far the norms of blocks are apart: ratio of extremes, and standard deviation of log10.

    Example:
        >>> norm_spread({"query": 0.01, "key": 0.1, "value": 1.0}).ratio
        100.0
    """
    if not norms:
        raise ValueError("Invalid norms={}. Must name at least one block.")
    for label, norm in norms.items():
        if not 0 <= float(norm) < math.inf:
            raise ValueError(f"Invalid norm {float(norm)} of {label!r}. Must be finite and >= 0.")
    values = torch.tensor([float(norm) for norm in norms.values()], dtype=torch.float64)
    low, high = float(values.min()), float(values.max())
    if low == 0:
        ratio, deviation = (1.0, 0.0) if high == 0 else (math.inf, math.inf)
        return Spread(len(values), low, high, 0.0, ratio, deviation)
    logs = values.log10()
    return Spread(
        len(values), low, high, 10 ** float(logs.mean()), high / low, float(logs.std(correction=0))
    )


def norm_spread_by_group(
    norms: Mapping[str, float], groups: Mapping[str, str]
) -> dict[str, Spread]:
    """The spread of norms within each group of blocks, such as all blocks of a role; the groups in the order of `norms`.

    Args:
        norms: `{label of a block: its norm}`.
        groups: `{label of a block: its group}`, for all of them.

    Example:
        >>> spreads = norm_spread_by_group({"q0": 1.0, "q1": 4.0, "v0": 1.0}, {"q0": "query", "q1": "query", "v0": "value"})
        >>> {role: (spread.geometric_mean, spread.ratio) for role, spread in spreads.items()}
        {'query': (2.0, 4.0), 'value': (1.0, 1.0)}
    """
    if missing := [label for label in norms if label not in groups]:
        raise ValueError(
            f"Invalid groups: lacks {missing[:3]}. Must give the group of every block."
        )
    members: dict[str, dict[str, float]] = {}
    for label, norm in norms.items():
        members.setdefault(groups[label], {})[label] = norm
    return {group: norm_spread(some) for group, some in members.items()}


def jensen_shannon(
    spectra: Mapping[str, Spectrum],
    *,
    axis: Axis = "linear",
    threshold: float | None = None,
    width: float = 0.01,
    num_bins: int = 500,
) -> JensenShannon:
    """Jensen-Shannon distance between the distributions of eigenvalues of each pair of blocks.

    `JS(P, Q) = sqrt((KL(P | M) + KL(Q | M)) / 2)` with `M = (P + Q) / 2` and logarithms to base 2:
    0 for equal spectra, 1 for spectra far apart. By the mean over pairs, Zhang et al., "Why
    Transformers need Adam" (2024), measure how heterogeneous the blocks of a model are. Their
    published code does not have it, so these choices are ours: one axis for all blocks, from the
    smallest to the largest eigenvalue of any; each eigenvalue widened to a normal density of
    `width` times the length of the axis, so that rounding at the edge of a bin does not matter; the
    exact mass of that in each of `num_bins` equal bins, which reach 5 widths beyond the ends.

    On a linear axis the flat part of every block falls into the bins around 0, and outliers decide.
    A symmetric log axis tells apart flat blocks that differ by orders of magnitude.

    Args:
        spectra: `{label: all eigenvalues, or a SpectralDensity}` of at least two blocks.
        axis: "linear" or "symmetric log", see `symmetric_log`.
        threshold: Of the symmetric log; by default 1e-6 of the largest magnitude of any eigenvalue.
        width: Of an eigenvalue, as a share of the axis. Larger ones lower the distances.
        num_bins: Bins; more of them than 5 / width change the distance by less than 1e-3.

    Raises:
        ValueError: If an option or a spectrum is wrong.

    Example:
        >>> found = jensen_shannon({"a": torch.zeros(4), "b": torch.zeros(8), "c": torch.ones(2)})
        >>> found.matrix.round(decimals=6)
        tensor([[0., 0., 1.],
                [0., 0., 1.],
                [1., 1., 0.]], dtype=torch.float64)
        >>> round(found.mean, 6)
        0.666667
    """
    if len(spectra) < 2:
        raise ValueError(f"Invalid spectra of {list(spectra)}. Must be of at least two blocks.")
    if axis not in get_args(Axis):
        raise ValueError(
            f"Invalid axis={axis!r}. Must be one of {', '.join(map(repr, get_args(Axis)))}."
        )
    if not 0 < width < math.inf:
        raise ValueError(f"Invalid width={width}. Must be > 0 and finite.")
    if threshold is not None and axis == "linear":
        raise ValueError(
            f"Invalid threshold={threshold} with axis='linear'. Must be None, or axis='symmetric log'."
        )
    check_count("num_bins", num_bins, smallest=2)
    densities = {label: _distribution(label, spectrum) for label, spectrum in spectra.items()}
    if axis == "symmetric log":
        largest = max(float(density.nodes.abs().max()) for density in densities.values())
        threshold = (1e-6 * largest or 1.0) if threshold is None else threshold
        densities = {label: density.on_log_axis(threshold) for label, density in densities.items()}
    low = min(float(density.nodes[0]) for density in densities.values())
    high = max(float(density.nodes[-1]) for density in densities.values())
    deviation = width * ((high - low) or 1.0)  # all eigenvalues equal: any axis will do
    edges = torch.linspace(
        low - MARGIN * deviation, high + MARGIN * deviation, num_bins + 1, dtype=torch.float64
    )
    P = torch.stack(
        [_mass_in_bins(density, edges, deviation) for density in densities.values()]
    )  # (blocks, bins)
    matrix = torch.stack([_distances(row, P) for row in P])
    matrix = (matrix + matrix.T) / 2  # equal but for rounding
    matrix.fill_diagonal_(0)
    pairs = len(P) * (len(P) - 1)
    return JensenShannon(tuple(spectra), matrix, float(matrix.sum()) / pairs)


def negative_share(spectrum: Spectrum, *, tolerance: float = 1e-9) -> NegativeShare:
    """How much of the curvature is negative: the share of eigenvalues, and of `Σ |λ|`.

    From a SpectralDensity, the share of eigenvalues is no finer than the weight of a node near 0:
    take many steps.

    Args:
        spectrum: All eigenvalues, or a SpectralDensity.
        tolerance: Eigenvalues above `-tolerance · max |λ|` count as 0: rounding makes half of the
            zeros of a singular matrix negative. Take 1e-5 or so for one computed in float32.

    Example:
        >>> negative_share(torch.tensor([-1.0, -1e-20, 0.0, 3.0]))
        NegativeShare(of_count=0.25, of_mass=0.25)
    """
    if not 0 <= tolerance < 1:
        raise ValueError(f"Invalid tolerance={tolerance}. Must be in [0, 1).")
    density = _distribution("spectrum", spectrum)
    magnitudes = density.nodes.abs()
    negative = density.nodes < -tolerance * magnitudes.max()
    total = float(density.weights @ magnitudes)
    mass = float(density.weights[negative] @ magnitudes[negative]) / total if total > 0 else 0.0
    return NegativeShare(float(density.weights[negative].sum()), mass)


def _distribution(label: str, spectrum: Spectrum) -> SpectralDensity:
    if isinstance(spectrum, SpectralDensity):
        if not torch.isfinite(spectrum.nodes).all():
            raise ValueError(f"Invalid spectrum {label!r}: it has nodes that are not finite.")
        return spectrum
    values = spectrum.detach().cpu().double()
    if values.ndim != 1 or len(values) == 0 or not torch.isfinite(values).all():
        given = (
            f"shape {tuple(values.shape)}"
            if values.ndim != 1 or len(values) == 0
            else "values that are not finite"
        )
        raise ValueError(
            f"Invalid spectrum {label!r} of {given}. Must be a vector of finite eigenvalues, or a SpectralDensity."
        )
    return SpectralDensity(values.sort().values, torch.full_like(values, 1 / len(values)))


def _mass_in_bins(density: SpectralDensity, edges: Tensor, deviation: float) -> Tensor:
    below = torch.zeros_like(edges)
    for nodes, weights in zip(
        density.nodes.split(4096), density.weights.split(4096)
    ):  # bounds the memory
        below += torch.special.ndtr((edges[:, None] - nodes) / deviation) @ weights
    mass: Tensor = below.diff().clamp(min=0)
    return mass / mass.sum()


def _distances(p: Tensor, Q: Tensor) -> Tensor:
    """Jensen-Shannon distance of `p` (bins,) to each row of `Q`."""
    M = ((p + Q) / 2).clamp(
        min=1e-300
    )  # not 0: both may be, and so may the half of a denormal number
    terms = torch.special.xlogy(p, p / M) + torch.special.xlogy(Q, Q / M)
    divergence: Tensor = terms.sum(1) / (2 * math.log(2))
    return divergence.clamp(0, 1).sqrt()
