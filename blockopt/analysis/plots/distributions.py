"""Distributions: histograms of entries, sorted eigenvalues, and spectral densities."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from blockopt.analysis.plots.axes import (
    LINE_STYLES,
    Label,
    eigenvalue_line,
    finished,
    largest_magnitude,
    linear_range,
    matplotlib_module,
    new_axis,
    numbers,
    role_color,
    symmetric_log_scale,
)
from blockopt.analysis.spectral.log_axis import smoothed, symmetric_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Distribution(Protocol):
    """Eigenvalues with weights that sum to 1, as a `SpectralDensity` has them."""

    @property
    def nodes(self) -> Tensor:
        """The eigenvalues."""

    @property
    def weights(self) -> Tensor:
        """The weight of each."""


def entry_histograms(
    entries: Mapping[Label, Tensor],
    *,
    title: str = "Absolute entries of Hessian blocks",
    ax: Axes | None = None,
) -> Axes:
    """Draw histograms of absolute entries on one logarithmic axis, with a line at each median.

    The axis has 60 bins over at most 10 decades; what is smaller is counted in the first bin.

    Args:
        entries: `{label: entries of a block}`, of any shape. Zeros have no place on the axis; the
            legend gives their share.
        title: The title of the axis.
        ax: Where to draw; a new figure by default.
    """
    values = {label: numbers(block).abs().flatten() for label, block in entries.items()}
    largest = max((float(v.max()) for v in values.values() if v.numel()), default=0.0)
    if not largest > 0 or not math.isfinite(largest):
        raise ValueError("Invalid entries: must be finite, and some must be other than 0.")
    high = math.log10(largest)
    smallest = min(float(v[v > 0].min()) for v in values.values() if bool((v > 0).any()))
    low = min(max(math.log10(smallest), high - 10), high - 0.1)
    edges = torch.logspace(low, high, 61, dtype=torch.float64)
    ax = new_axis(ax, (6.4, 3.6))
    seen: list[str] = []
    for number, (label, v) in enumerate(values.items()):
        present = v[v > 0].clamp(min=float(edges[0]))
        zeros = 1 - len(present) / max(1, len(v))
        median = float(present.median()) if len(present) else math.nan
        name = f"{label}: median {median:.1e}" + (f", {zeros:.0%} zero" if zeros > 0.005 else "")
        color = role_color(label, number)
        style = LINE_STYLES[seen.count(color) % 4]
        seen.append(color)
        weights = torch.ones_like(present) / max(1, len(present))
        options: dict[str, Any] = {"bins": edges.tolist(), "weights": weights.tolist()}
        options |= {"x": present.tolist(), "color": color}
        ax.hist(**options, histtype="stepfilled", alpha=0.18, linestyle="-")
        ax.hist(**options, histtype="step", linewidth=1.4, linestyle=style, label=name)
        ax.axvline(median, color=color, linewidth=0.9, linestyle=style)
    ax.set_xscale("log")
    return finished(ax, title, "|entry|", "share of entries")


def sorted_eigenvalues(
    eigenvalues: Mapping[Label, Tensor],
    *,
    threshold: float | None = None,
    title: str = "Eigenvalues",
    ax: Axes | None = None,
) -> Axes:
    """Draw all eigenvalues in descending order on a symmetric log axis.

    Args:
        eigenvalues: `{label: (n,)}`.
        threshold: Where the linear range ends; by default 10⁻⁴ of the largest absolute eigenvalue.
        title: The title of the axis.
        ax: Where to draw; a new figure by default.
    """
    values = {label: numbers(v).flatten().sort().values for label, v in eigenvalues.items()}
    ax = new_axis(ax, (6.0, 3.8))
    for number, (label, v) in enumerate(values.items()):
        eigenvalue_line(ax, number, label, v, torch.linspace(0, 1, len(v)), v.flip(0))
    symmetric_log_scale(ax, "y", threshold or linear_range(values), largest_magnitude(values))
    ax.axhline(0, color="black", linewidth=0.6)
    return finished(ax, title, "rank, as a share of all eigenvalues", "eigenvalue (symmetric log)")


def spectral_densities(
    spectra: Mapping[Label, Tensor | Distribution],
    *,
    threshold: float | None = None,
    width: float = 0.08,
    title: str = "Spectral density",
    ax: Axes | None = None,
) -> Axes:
    """Draw smoothed densities of eigenvalues on a symmetric log axis.

    Args:
        spectra: `{label: (n,) eigenvalues, or what spectral_density returned}`.
        threshold: Where the linear range ends; by default 10⁻⁴ of the largest absolute eigenvalue.
        width: The width of the smoothing, in decades.
        title: The title of the axis.
        ax: Where to draw; a new figure by default.
    """
    found = {label: _nodes_and_weights(spectrum) for label, spectrum in spectra.items()}
    threshold = threshold or linear_range({label: nodes for label, (nodes, _) in found.items()})
    ax, farthest = new_axis(ax, (6.0, 3.8)), threshold
    for number, (label, (nodes, weights)) in enumerate(found.items()):
        eigenvalues, density = density_curve(nodes, weights, threshold, width)
        eigenvalue_line(ax, number, label, nodes, eigenvalues, density)
        farthest = max(farthest, float(eigenvalues.abs().max()))
    symmetric_log_scale(ax, "x", threshold, farthest)
    ax.set_yscale("log")
    ax.set_ylim(bottom=1e-4)
    return finished(ax, title, "eigenvalue (symmetric log)", "density per decade")


def top_eigenvalues(
    values: Tensor, residuals: Tensor, *, title: str = "Top eigenvalues", ax: Axes | None = None
) -> Axes:
    """Draw the eigenvalues that were found, the best first, with their residuals as error bars."""
    ax = new_axis(ax, (5.0, 3.4))
    ranks, found = list(range(1, len(values) + 1)), numbers(values).tolist()
    errors = numbers(residuals).tolist()
    ax.errorbar(ranks, found, errors, fmt="o", markersize=4, capsize=3, label="± residual")
    ax.axhline(0, color="black", linewidth=0.6)
    ax.xaxis.set_major_locator(matplotlib_module("ticker").MaxNLocator(integer=True))
    return finished(ax, title, "rank", "eigenvalue")


def density_curve(
    nodes: Tensor, weights: Tensor, threshold: float, width: float
) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and their density per decade, smoothed on a symmetric log axis."""
    moved = symmetric_log(nodes, threshold)
    low, high = float(moved.min()) - 4 * width, float(moved.max()) + 4 * width
    grid = torch.linspace(low, high, 1000, dtype=torch.float64)
    eigenvalues = grid.sign() * threshold * (10 ** grid.abs() - 1)
    return eigenvalues, smoothed(moved, weights, grid, width).clamp(min=1e-5)


def _nodes_and_weights(spectrum: Tensor | Distribution) -> tuple[Tensor, Tensor]:
    if isinstance(spectrum, Tensor):
        nodes = numbers(spectrum).flatten()
        return nodes, torch.full_like(nodes, 1 / len(nodes))
    return spectrum.nodes, spectrum.weights
