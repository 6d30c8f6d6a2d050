"""Plots of Hessians: heat maps, histograms, growth, spectra, block masses and loss differences.

Each function takes numbers by label, a `title` and an optional matplotlib axis `ax`, by default
that of a new figure, and returns the axis; `axis.figure.savefig(...)` writes it. Nothing global is
changed, and matplotlib (`pip install 'blockopt[recipes]'`) is imported when a plot is made. A label
is a string, or an object with a `role` such as `BlockGroup`. A role has the same colour in all
plots, from Okabe and Ito's palette for colour-blind readers; lines also differ in style.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.growth import Growth
from blockopt.analysis.spectral.density import SpectralDensity
from blockopt.analysis.taylor import LossDifference

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Label = TypeVar("Label", bound=Hashable)
COLORS = {
    "query": "#0072B2",
    "key": "#E69F00",
    "value": "#D55E00",
    "output": "#009E73",
    "mlp_in": "#56B4E9",
    "mlp_out": "#CC79A7",
}
OTHER_COLORS = (
    *("#000000", "#0072B2", "#D55E00", "#009E73"),
    *("#E69F00", "#CC79A7", "#56B4E9", "#777777"),
)
LINE_STYLES = ("-", "--", ":", "-.")
PART_STYLES = {"outer": ("--", "s"), "functional": (":", "^"), "full": ("-", "o")}
MAX_PIXELS = 800  # a side of a heat map


def role_color(label: object, number: int = 0) -> str:
    """Return the colour of the role of a label, or that of the given number if it has none.

    Example:
        >>> from blockopt.blocks import BlockGroup
        >>> group = BlockGroup("value", 0, "query_key_value.weight")
        >>> role_color(group) == role_color("value"), role_color("the query, moved", 1)
        (True, '#0072B2')
    """
    role = label if isinstance(label, str) else getattr(label, "role", "")
    return COLORS.get(role, OTHER_COLORS[number % len(OTHER_COLORS)])


def hessian_heatmap(
    matrix: Tensor,
    sizes: Mapping[Label, int],
    *,
    limits: tuple[float, float] | None = None,
    title: str = "Hessian: absolute entries",
    ax: Axes | None = None,
) -> Axes:
    """Draw the absolute entries of a matrix on a logarithmic colour scale, with its blocks.

    In matrices of more than 800 rows, a pixel shows the root mean square of several entries.

    Args:
        matrix: (n, n).
        sizes: `{label: number of rows}` of the blocks, in order; they sum to n.
        limits: The smallest and largest absolute entry of the colour scale; by default the largest
            entry and 10⁻⁶ of it, or the smallest that is not zero if that is larger.
        title: The title of the axis.
        ax: Where to draw; a new figure by default.

    Raises:
        ValueError: If the sizes do not fit, or the matrix is zero or not finite.
    """
    n = sum(sizes.values())
    if matrix.shape != (n, n):
        blocks = {str(label): size for label, size in sizes.items()}
        raise ValueError(
            f"Invalid matrix of shape {tuple(matrix.shape)} for blocks of sizes {blocks}. Must be "
            f"({n}, {n})."
        )
    values = _numbers(matrix).abs()
    if not bool(torch.isfinite(values).all()) or not float(values.max()) > 0:
        raise ValueError(
            "Invalid matrix: must be finite, and have an entry other than 0 to be drawn on a "
            "logarithmic scale."
        )
    step = math.ceil(n / MAX_PIXELS)
    if step > 1:
        square = torch.nn.functional.avg_pool2d(
            values.square()[None, None], step, ceil_mode=True, count_include_pad=False
        )
        values = square[0, 0].sqrt()
    largest = float(values.max())
    smallest = max(float(values[values > 0].min()), 1e-6 * largest)
    low, high = limits if limits is not None else (min(smallest, largest / 10), largest)
    ax = _axis(ax, (6.4, 5.4))
    image = ax.imshow(
        values.clamp(min=low).numpy(),
        norm=_matplotlib("colors").LogNorm(low, high),
        cmap="viridis",
        extent=(0, n, n, 0),
        interpolation="nearest",
        aspect="equal",
    )
    edges = torch.tensor([0, *sizes.values()]).cumsum(0).tolist()
    for edge in edges[1:-1]:
        ax.axhline(edge, color="white", linewidth=0.6)
        ax.axvline(edge, color="white", linewidth=0.6)
    # The names of small blocks would overlap.
    ends = zip(itertools.pairwise(edges), sizes.items())
    shown = {(a + b) / 2: str(label) for (a, b), (label, size) in ends if size >= 0.02 * n}
    ax.set_xticks(list(shown), list(shown.values()), rotation=45, ha="right", fontsize=8)
    ax.set_yticks(list(shown), list(shown.values()), fontsize=8)
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.8)
    pixels = "|entry|" if step == 1 else f"root mean square of {step} x {step} entries"
    bar.set_label(pixels, fontsize=8)
    ax.set_title(title, fontsize=10)
    return ax


def entry_histograms(
    entries: Mapping[Label, Tensor],
    *,
    bins: int = 60,
    decades: float = 10.0,
    title: str = "Absolute entries of Hessian blocks",
    ax: Axes | None = None,
) -> Axes:
    """Draw histograms of absolute entries on one logarithmic axis, with a line at each median.

    Args:
        entries: `{label: entries of a block}`, of any shape. Zeros have no place on the axis; the
            legend gives their share.
        bins: The number of bins, of equal width in the logarithm.
        decades: How far below the largest entry the axis goes; what is smaller is counted in the
            first bin.
        title: The title of the axis.
        ax: Where to draw; a new figure by default.
    """
    values = {label: _numbers(block).abs().flatten() for label, block in entries.items()}
    largest = max((float(v.max()) for v in values.values() if v.numel()), default=0.0)
    if not largest > 0 or not math.isfinite(largest):
        raise ValueError("Invalid entries: must be finite, and some must be other than 0.")
    high = math.log10(largest)
    smallest = min(float(v[v > 0].min()) for v in values.values() if bool((v > 0).any()))
    low = min(max(math.log10(smallest), high - decades), high - 0.1)
    edges = torch.logspace(low, high, bins + 1, dtype=torch.float64)
    ax = _axis(ax, (6.4, 3.6))
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
        options: dict[str, Any] = {
            "bins": edges.tolist(),
            "weights": weights.tolist(),
            "color": color,
        }
        ax.hist(present.tolist(), histtype="stepfilled", alpha=0.18, linestyle="-", **options)
        ax.hist(
            present.tolist(), histtype="step", linewidth=1.4, linestyle=style, label=name, **options
        )
        ax.axvline(median, color=color, linewidth=0.9, linestyle=style)
    ax.set_xscale("log")
    return _finished(ax, title, "|entry|", "share of entries")


def growth_lines(
    scales: Sequence[float] | Tensor,
    norms: Mapping[Label, Tensor],
    predicted: Mapping[Label, float] | None = None,
    *,
    low: float = 0.0,
    high: float = 1.0,
    logarithmic: bool = True,
    title: str = "Frobenius norms of Hessian blocks",
    ax: Axes | None = None,
) -> Axes:
    """Draw norms against the scale σ, with fitted exponents, and a dashed line per predicted one.

    Args:
        scales: (S,).
        norms: `{label: (S,), or (R, S) for R repeats}`, which are drawn as their mean with its
            standard error. Labels with a zero or a number that is not finite are left out. The
            `part` of a label, if it has one, chooses the line style.
        predicted: `{label: exponent}`.
        low: Where the range of the fit begins.
        high: Where it ends; a dotted line is drawn there.
        logarithmic: Whether both axes are logarithmic, rather than linear.
        title: The title of the axis.
        ax: Where to draw; a new figure by default.
    """
    x = torch.as_tensor(scales, dtype=torch.float64).cpu()
    repeats = {label: _numbers(values).reshape(-1, len(x)) for label, values in norms.items()}
    drawn = {k: v for k, v in repeats.items() if bool((torch.isfinite(v) & (v > 0)).all())}
    data = Growth(x, drawn)
    means, errors, exponents = data.mean(), data.standard_error(), data.exponents(low, high)
    inside, predicted = (x >= low) & (x < high), predicted or {}
    ax = _axis(ax, (5.6, 4.2))
    for number, (label, mean) in enumerate(means.items()):
        style, marker = PART_STYLES.get(getattr(label, "part", ""), ("-", "o"))
        found = exponents[label]
        name = f"{label}: σ^{found.value:.2f}"
        if len(drawn[label]) > 1:
            name += f" ± {found.standard_error:.2f}"
        if label in predicted:
            exponent = predicted[label]
            name += f", predicted {exponent:g}"
            level = (mean[inside].log() - exponent * x[inside].log()).mean()
            line = (level + exponent * x.log()).exp().tolist()
            dashes = (0, (5, 3))
            ax.plot(x.tolist(), line, color="#777777", linestyle=dashes, linewidth=0.8, zorder=1)
        ax.errorbar(
            x.tolist(),
            mean.tolist(),
            errors[label].nan_to_num(0.0).tolist(),
            color=role_color(label, number),
            linestyle=style,
            marker=marker,
            markersize=3,
            linewidth=1.2,
            capsize=2,
            label=name,
        )
    if logarithmic:
        ax.set_xscale("log")
        ax.set_yscale("log")
        every = torch.stack(list(means.values()))
        ax.set_ylim(float(every.min()) / 5, float(every.max()) * 5)
    if float(x[0]) < high < float(x[-1]):
        ax.axvline(high, color="black", linestyle=":", linewidth=0.9)
    return _finished(ax, title, "σ, scale of the data", "Frobenius norm", fontsize=7)


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
    values = {label: _numbers(v).flatten().sort().values for label, v in eigenvalues.items()}
    ax = _axis(ax, (6.0, 3.8))
    for number, (label, v) in enumerate(values.items()):
        _line(ax, number, label, v, torch.linspace(0, 1, len(v)), v.flip(0))
    _symmetric_log(ax, "y", threshold or _threshold(values), _largest(values))
    ax.axhline(0, color="black", linewidth=0.6)
    return _finished(ax, title, "rank, as a share of all eigenvalues", "eigenvalue (symmetric log)")


def spectral_densities(
    spectra: Mapping[Label, Tensor | SpectralDensity],
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
    found = {
        label: s if isinstance(s, SpectralDensity) else SpectralDensity.of_eigenvalues(s)
        for label, s in spectra.items()
    }
    threshold = threshold or _threshold({label: s.nodes for label, s in found.items()})
    moved = {label: s.on_log_axis(threshold) for label, s in found.items()}
    low = min(float(s.nodes.min()) for s in moved.values()) - 4 * width
    high = max(float(s.nodes.max()) for s in moved.values()) + 4 * width
    grid = torch.linspace(low, high, 1000, dtype=torch.float64)
    eigenvalues = grid.sign() * threshold * (10 ** grid.abs() - 1)
    ax = _axis(ax, (6.0, 3.8))
    for number, (label, s) in enumerate(moved.items()):
        density = s.density(grid, width).clamp(min=1e-5)
        _line(ax, number, label, found[label].nodes, eigenvalues, density)
    _symmetric_log(ax, "x", threshold, float(eigenvalues.abs().max()))
    ax.set_yscale("log")
    ax.set_ylim(bottom=1e-4)
    return _finished(ax, title, "eigenvalue (symmetric log)", "density per decade")


def block_mass_heatmap(
    labels: Sequence[object],
    matrix: Tensor,
    *,
    title: str = "Share of the squared Frobenius norm, %",
    ax: Axes | None = None,
) -> Axes:
    """Draw the share of each pair of blocks in the squared Frobenius norm of the Hessian.

    Args:
        labels: The labels of the blocks.
        matrix: (blocks, blocks) squared norms of any scale, such as `BlockMass.matrix`.
        title: The title of the axis.
        ax: Where to draw; a new figure by default.
    """
    values = _numbers(matrix)
    if values.shape != (len(labels), len(labels)) or not float(values.sum()) > 0:
        raise ValueError(
            f"Invalid {len(labels)} labels, a matrix of shape {tuple(values.shape)} and sum "
            f"{float(values.sum()):g}. Must be one row and one column per label, with a positive "
            "sum."
        )
    shares = 100 * values / values.sum()
    ax = _axis(ax, (1.6 + 0.7 * len(labels), 1.2 + 0.6 * len(labels)))
    norm = _matplotlib("colors").LogNorm(1e-3, 100)
    ax.imshow(shares.clamp(min=1e-3).numpy(), norm=norm, cmap="cividis")
    for row, column in torch.cartesian_prod(*2 * [torch.arange(len(labels))]).tolist():
        share = float(shares[row, column])
        digits = ".0f" if share >= 9.5 or share == 0 else ".1f" if share >= 0.1 else ".0e"
        color = "black" if share > 0.5 else "white"
        where: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
        ax.text(column, row, f"{share:{digits}}", color=color, **where)
    names = [str(label) for label in labels]
    ax.set_xticks(range(len(labels)), names, rotation=45, ha="right", fontsize=8)
    ax.set_yticks(range(len(labels)), names, fontsize=8)
    ax.set_title(title, fontsize=10)
    return ax


def loss_difference_bars(
    difference: LossDifference,
    *,
    title: str = "Loss difference along an update",
    ax: Axes | None = None,
) -> Axes:
    """Draw what an update does to the loss, block by block and jointly, by order and measured.

    Args:
        difference: What `loss_difference` returned.
        title: The title of the axis.
        ax: Where to draw; a new figure by default.
    """
    found, labels = difference, [*map(str, difference.labels), "jointly"]
    columns = (
        ("first order", found.group_first_order, found.first_order, "#56B4E9", "//"),
        ("second order", found.group_second_order, found.second_order, "#E69F00", ".."),
        ("actual", found.group_actual, found.actual, "#000000", ""),
    )
    ax = _axis(ax, (1.5 + 0.75 * len(labels), 3.6))
    for number, (name, alone, jointly, color, hatch) in enumerate(columns):
        places = [place + 0.27 * (number - 1) for place in range(len(labels))]
        look: dict[str, Any] = {
            "color": color,
            "hatch": hatch,
            "edgecolor": "white",
            "linewidth": 0.4,
        }
        ax.bar(places, [*alone.tolist(), jointly], 0.25, label=name, **look)
    ax.axhline(0, color="black", linewidth=0.6)
    ax.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
    return _finished(ax, title, "", "difference of the loss")


def _matplotlib(name: str) -> Any:
    """Import a module of matplotlib.

    Raises:
        ImportError: If it is missing.
    """
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'blockopt[recipes]'.") from error


def _axis(ax: Axes | None, size: tuple[float, float]) -> Any:
    """Return the axis, or that of a new figure, which no global list of figures holds."""
    if ax is not None:
        return ax
    return _matplotlib("figure").Figure(figsize=size, layout="constrained").subplots()


def _finished(ax: Axes, title: str, x: str, y: str, fontsize: int = 8) -> Axes:
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=fontsize)
    return ax


def _line(ax: Any, number: int, label: object, values: Tensor, x: Tensor, y: Tensor) -> None:
    """Draw the line of one set of eigenvalues, with its ends in the legend."""
    name = f"{label}: {float(values.min()):.2g} to {float(values.max()):.2g}"
    look = {"color": role_color(label, number), "linestyle": LINE_STYLES[number % 4]}
    ax.plot(x.tolist(), y.tolist(), linewidth=1.3, label=name, **look)


def _symmetric_log(ax: Any, which: str, threshold: float, largest: float) -> None:
    """Set such a scale, with at most two ticks on each side of zero: by default they overlap."""
    lowest = math.ceil(math.log10(threshold)) + 1
    highest = math.floor(math.log10(max(largest, 100 * threshold)))
    powers = range(highest, lowest - 1, -max(1, math.ceil((highest - lowest + 1) / 2)))
    ticks = [0.0, *(sign * 10.0**power for power in powers for sign in (-1, 1))]
    getattr(ax, f"set_{which}scale")("symlog", linthresh=threshold)
    axis = getattr(ax, f"{which}axis")
    axis.set_ticks(ticks)
    axis.set_minor_locator(_matplotlib("ticker").NullLocator())


def _numbers(values: Tensor) -> Tensor:
    return torch.as_tensor(values).detach().to("cpu", torch.float64)


def _largest(values: Mapping[Label, Tensor]) -> float:
    return max(float(v.abs().max()) for v in values.values())


def _threshold(values: Mapping[Label, Tensor]) -> float:
    return 1e-4 * (_largest(values) or 1.0)
