"""How much the blocks of a Hessian differ: norms, spectra, and shares of negative curvature."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from blockopt.analysis.plots.heatmaps import distance_heatmap
from blockopt.analysis.results import Result, figure_of
from blockopt.analysis.spectral.density import SpectralDensity
from blockopt.checks import check_choice, check_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Label = TypeVar("Label", bound=Hashable)
Spectrum = Tensor | SpectralDensity  # all eigenvalues, or a distribution of them
Axis = Literal["linear", "symmetric log"]
MARGIN = 5.0  # widths beyond the outermost eigenvalues on the common axis; leaves out 3e-7 of mass


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


@dataclass(frozen=True)
class JensenShannon(Result):
    """Distances between the spectra of `labels[i]` and `labels[j]`, and the mean over all pairs."""

    labels: tuple[Hashable, ...]
    matrix: Tensor
    mean: float

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per pair of blocks."""
        pairs = itertools.combinations(range(len(self.labels)), 2)
        return [
            {
                "block": str(self.labels[a]),
                "other": str(self.labels[b]),
                "distance": float(self.matrix[a, b]),
            }
            for a, b in pairs
        ]

    def plot(self, *, title: str = "Jensen-Shannon distance between spectra") -> Figure:
        """Draw the distances of all pairs (needs matplotlib)."""
        return figure_of(distance_heatmap(self.labels, self.matrix, title=title))


class NegativeShare(NamedTuple):
    """The share of eigenvalues that are negative, and their share of `Σ |λ|`."""

    of_count: float
    of_mass: float


def norm_spread(norms: Mapping[Label, float]) -> Spread:
    """Return how far the norms of blocks are apart.

    Example:
        >>> norm_spread({"query": 0.01, "key": 0.1, "value": 1.0}).ratio
        100.0
    """
    if not norms:
        raise ValueError("Invalid norms={}. Must name at least one block.")
    for label, norm in norms.items():
        if not 0 <= float(norm) < math.inf:
            raise ValueError(f"Invalid norm {float(norm)} of '{label}'. Must be finite and >= 0.")
    values = torch.tensor([float(norm) for norm in norms.values()], dtype=torch.float64)
    low, high = float(values.min()), float(values.max())
    if low == 0:
        ratio, deviation = (1.0, 0.0) if high == 0 else (math.inf, math.inf)
        return Spread(len(values), low, high, 0.0, ratio, deviation)
    logs = values.log10()
    deviation = float(logs.std(correction=0))
    return Spread(len(values), low, high, 10 ** float(logs.mean()), high / low, deviation)


def jensen_shannon(
    spectra: Mapping[Label, Spectrum],
    *,
    axis: Axis = "linear",
    threshold: float | None = None,
    width: float = 0.01,
    num_bins: int = 500,
) -> JensenShannon:
    """Return the Jensen-Shannon distances between the eigenvalues of each pair of blocks.

    `JS(P, Q) = sqrt((KL(P | M) + KL(Q | M)) / 2)` with `M = (P + Q) / 2` and logarithms to base 2:
    0 for equal spectra, 1 for spectra far apart. Zhang et al., "Why Transformers need Adam" (2024),
    measure by the mean over pairs how heterogeneous the blocks of a model are. Their published code
    does not include it, so these choices are ours: one axis for all blocks, from the smallest to
    the largest eigenvalue of any; each eigenvalue widened to a normal density of `width` times the
    length of the axis, so that rounding at the edge of a bin does not matter; and the exact mass in
    each of `num_bins` equal bins, which reach 5 widths beyond the ends.

    On a linear axis the flat part of every block falls into the bins around 0, and outliers decide.
    A symmetric log axis tells apart flat blocks that differ by orders of magnitude.

    Args:
        spectra: `{label: all eigenvalues, or a SpectralDensity}` of at least two blocks.
        axis: "linear" or "symmetric log", see `symmetric_log`.
        threshold: Where the symmetric log stops being linear; by default 1e-6 of the largest
            magnitude of any eigenvalue.
        width: The width of an eigenvalue as a share of the axis. Larger ones lower the distances.
        num_bins: The number of bins; beyond 5 / width they change the distance by less than 1e-3.

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
        given = [str(label) for label in spectra]
        raise ValueError(f"Invalid spectra of {given}. Must be of at least two blocks.")
    check_choice("axis", axis, get_args(Axis))
    if not 0 < width < math.inf:
        raise ValueError(f"Invalid width={width}. Must be > 0 and finite.")
    if threshold is not None and axis == "linear":
        raise ValueError(
            f"Invalid threshold={threshold} with axis='linear'. Must be None, or take "
            "axis='symmetric log'."
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
    margin = MARGIN * deviation
    edges = torch.linspace(low - margin, high + margin, num_bins + 1, dtype=torch.float64)
    masses = [_mass_in_bins(density, edges, deviation) for density in densities.values()]
    P = torch.stack(masses)  # (blocks, bins)
    matrix = torch.stack([_distances(row, P) for row in P])
    matrix = (matrix + matrix.T) / 2  # equal but for rounding
    matrix.fill_diagonal_(0)
    pairs = len(P) * (len(P) - 1)
    return JensenShannon(tuple(spectra), matrix, float(matrix.sum()) / pairs)


def negative_share(spectrum: Spectrum, *, tolerance: float = 1e-9) -> NegativeShare:
    """Return how much of the curvature is negative: the share of eigenvalues, and of `Σ |λ|`.

    From a SpectralDensity, the share of eigenvalues is no finer than the weight of a node near 0,
    so take many steps.

    Args:
        spectrum: All eigenvalues, or a SpectralDensity.
        tolerance: Eigenvalues above `-tolerance · max |λ|` count as 0: rounding makes half of the
            zeros of a singular matrix negative. Use about 1e-5 for one computed in float32.

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


def _distribution(label: Hashable, spectrum: Spectrum) -> SpectralDensity:
    if isinstance(spectrum, SpectralDensity):
        if not torch.isfinite(spectrum.nodes).all():
            raise ValueError(f"Invalid spectrum '{label}': it has nodes that are not finite.")
        return spectrum
    shape = tuple(spectrum.shape)
    if len(shape) != 1 or shape[0] == 0 or not torch.isfinite(spectrum).all():
        wrong = len(shape) != 1 or shape[0] == 0
        given = f"shape {shape}" if wrong else "values that are not finite"
        raise ValueError(
            f"Invalid spectrum '{label}' of {given}. Must be a vector of finite eigenvalues, or a "
            "SpectralDensity."
        )
    return SpectralDensity.of_eigenvalues(spectrum)


def _mass_in_bins(density: SpectralDensity, edges: Tensor, deviation: float) -> Tensor:
    below = torch.zeros_like(edges)
    # In pieces, which bounds the memory
    for nodes, weights in zip(density.nodes.split(4096), density.weights.split(4096)):
        below += torch.special.ndtr((edges[:, None] - nodes) / deviation) @ weights
    mass: Tensor = below.diff().clamp(min=0)
    return mass / mass.sum()


def _distances(p: Tensor, Q: Tensor) -> Tensor:
    """Return the Jensen-Shannon distance of `p` (bins,) to each row of `Q`."""
    # Not 0: both may be, and so may half of a denormal number.
    M = ((p + Q) / 2).clamp(min=1e-300)
    terms = torch.special.xlogy(p, p / M) + torch.special.xlogy(Q, Q / M)
    divergence: Tensor = terms.sum(1) / (2 * math.log(2))
    return divergence.clamp(0, 1).sqrt()
