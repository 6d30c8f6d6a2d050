"""Plots of Hessians: heat maps, histograms, growth, spectra, block masses and loss differences.

Each function takes plain numbers and an optional matplotlib axis, and returns the axis;
`axis.figure.savefig(...)` writes it. Nothing global is changed, and matplotlib (`pip install
'blockopt[recipes]'`) is imported when a plot is made. A role has the same colour in all of them,
from Okabe and Ito's palette, which colour-blind readers tell apart; lines also differ in style.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.growth import Growth
from blockopt.analysis.spectral.density import SpectralDensity
from blockopt.analysis.taylor import LossDifference

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "query": "#0072B2",
    "key": "#E69F00",
    "value": "#D55E00",
    "output": "#009E73",
    "mlp_in": "#56B4E9",
    "mlp_out": "#CC79A7",
}
OTHER_COLORS = (
    "#000000",
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#CC79A7",
    "#56B4E9",
    "#777777",
)
PART_STYLES = {"outer": ("--", "s"), "functional": (":", "^"), "full": ("-", "o")}
MAX_PIXELS = 800  # a side of a heat map


def role_color(label: str, number: int = 0) -> str:
    """The colour of the role that a label names, or the colour `number` of the others.

    Example:
        >>> role_color("outer query query") == role_color("query"), role_color("depth 2", 1)
        (True, '#0072B2')
    """
    found = [role for role in COLORS if role in label]
    return COLORS[found[0]] if found else OTHER_COLORS[number % len(OTHER_COLORS)]


def hessian_heatmap(
    matrix: Tensor,
    sizes: Mapping[str, int],
    *,
    limits: tuple[float, float] | None = None,
    title: str = "Hessian: absolute entries",
    ax: Axes | None = None,
) -> Axes:
    """The absolute entries of a matrix on a logarithmic colour scale, with lines between blocks and their names.

    Of matrices larger than 800 a side, a pixel shows the root mean square of several entries.

    Args:
        matrix: (n, n).
        sizes: `{label: number of rows}` of the blocks, in order; they sum to n.
        limits: Smallest and largest absolute entry of the colour scale; by default the largest
            entry and 10⁻⁶ of it, or the smallest that is not zero if that is larger.
        title: Of the axis.
        ax: Where to draw; a new figure by default.

    Raises:
        ValueError: If the sizes do not fit, or no entry is finite and other than zero.
    """
    n = sum(sizes.values())
    if matrix.shape != (n, n):
        raise ValueError(
            f"Invalid matrix of shape {tuple(matrix.shape)} for blocks of sizes {dict(sizes)}. Must be ({n}, {n})."
        )
    values = _numbers(matrix).abs()
    if not bool(torch.isfinite(values).all()) or not float(values.max()) > 0:
        raise ValueError(
            "Invalid matrix: must be finite, and have an entry other than 0 to be drawn on a logarithmic scale."
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
    norm = _matplotlib("colors").LogNorm(low, high)
    image = ax.imshow(
        values.clamp(min=low).numpy(),
        norm=norm,
        cmap="viridis",
        extent=(0, n, n, 0),
        interpolation="nearest",
        aspect="equal",
    )
    edges = torch.tensor([0, *sizes.values()]).cumsum(0).tolist()
    for edge in edges[1:-1]:
        ax.axhline(edge, color="white", linewidth=0.6)
        ax.axvline(edge, color="white", linewidth=0.6)
    places = [(start + end) / 2 for start, end in itertools.pairwise(edges)]
    shown = [
        (p, label) for p, (label, size) in zip(places, sizes.items()) if size >= 0.02 * n
    ]  # names must not overlap
    ax.set_xticks(
        [p for p, _ in shown], [label for _, label in shown], rotation=45, ha="right", fontsize=8
    )
    ax.set_yticks([p for p, _ in shown], [label for _, label in shown], fontsize=8)
    ax.set_title(title, fontsize=10)
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.8)
    bar.set_label(
        "|entry|" if step == 1 else f"root mean square of {step} x {step} entries", fontsize=8
    )
    return ax


def entry_histograms(
    entries: Mapping[str, Tensor],
    *,
    bins: int = 60,
    decades: float = 10.0,
    title: str = "Absolute entries of Hessian blocks",
    ax: Axes | None = None,
) -> Axes:
    """Histograms of absolute entries on a common logarithmic axis, with a line at each median.

    Args:
        entries: `{label: entries of a block}`, of any shape. Zeros have no place on the axis: the
            legend tells their share.
        bins: Of equal width in the logarithm.
        decades: How far below the largest entry the axis goes; what is smaller is counted in the
            first bin.
        title: Of the axis.
        ax: Where to draw; a new figure by default.
    """
    values = {label: _numbers(block).abs().flatten() for label, block in entries.items()}
    largest = max((float(v.max()) for v in values.values() if v.numel()), default=0.0)
    if not largest > 0 or not math.isfinite(largest):
        raise ValueError("Invalid entries: must be finite, and some must be other than 0.")
    smallest = min(float(v[v > 0].min()) for v in values.values() if bool((v > 0).any()))
    low = max(math.log10(smallest), math.log10(largest) - decades)
    edges = torch.logspace(
        min(low, math.log10(largest) - 0.1), math.log10(largest), bins + 1, dtype=torch.float64
    )
    ax = _axis(ax, (6.4, 3.6))
    for number, (label, v) in enumerate(values.items()):
        present = v[v > 0].clamp(min=float(edges[0]))
        zeros = 1 - len(present) / max(1, len(v))
        median = float(present.median()) if len(present) else math.nan
        name = f"{label}: median {median:.1e}" + (f", {zeros:.0%} zero" if zeros > 0.005 else "")
        color = role_color(label, number)
        style = ("-", "--", ":", "-.")[
            sum(role_color(other, n) == color for n, other in enumerate(list(values)[:number])) % 4
        ]
        density = torch.ones_like(present) / max(1, len(present))
        options: dict[str, Any] = {
            "bins": edges.tolist(),
            "weights": density.tolist(),
            "color": color,
            "linestyle": style,
        }
        ax.hist(
            present.tolist(), histtype="stepfilled", alpha=0.18, **{**options, "linestyle": "-"}
        )
        ax.hist(present.tolist(), histtype="step", linewidth=1.4, label=name, **options)
        ax.axvline(median, color=color, linewidth=0.9, linestyle=style)
    ax.set_xscale("log")
    ax.set_xlabel("|entry|")
    ax.set_ylabel("share of entries")
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=8)
    return ax


def growth_lines(
    scales: Sequence[float] | Tensor,
    norms: Mapping[str, Tensor],
    predicted: Mapping[str, float] | None = None,
    *,
    low: float = 0.0,
    high: float = 1.0,
    logarithmic: bool = True,
    title: str = "Frobenius norms of Hessian blocks",
    ax: Axes | None = None,
) -> Axes:
    """Norms against the scale σ, with the fitted exponent in the legend, and a grey dashed line of the predicted one.

    Args:
        scales: (S,).
        norms: `{label: (S,), or (R, S) of R repeats}`; of repeats, the mean is drawn with its
            standard error. Labels with a zero or what is not finite are left out.
        predicted: `{label: exponent}`.
        low: Where the range of the fit begins.
        high: Where it ends; a dotted line is drawn there.
        logarithmic: Log-log, or both axes linear.
        title: Of the axis.
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
        style, marker = next((s for part, s in PART_STYLES.items() if part in label), ("-", "o"))
        color, found = role_color(label, number), exponents[label]
        spread = f" ± {found.standard_error:.2f}" if len(drawn[label]) > 1 else ""
        ax.errorbar(
            x.tolist(),
            mean.tolist(),
            errors[label].nan_to_num(0.0).tolist(),
            color=color,
            linestyle=style,
            marker=marker,
            markersize=3,
            linewidth=1.2,
            capsize=2,
            label=f"{label}: σ^{found.value:.2f}{spread}"
            + (f", predicted {predicted[label]:g}" if label in predicted else ""),
        )
        if label in predicted:
            exponent = predicted[label]
            level = (mean[inside].log() - exponent * x[inside].log()).mean()
            line = (level + exponent * x.log()).exp()
            ax.plot(
                x.tolist(),
                line.tolist(),
                color="#777777",
                linestyle=(0, (5, 3)),
                linewidth=0.8,
                zorder=1,
            )
    if logarithmic:
        ax.set_xscale("log")
        ax.set_yscale("log")
        lowest, top = (
            getattr(torch.stack(list(means.values())), name)() for name in ("min", "max")
        )
        ax.set_ylim(float(lowest) / 5, float(top) * 5)
    if float(x[0]) < high < float(x[-1]):
        ax.axvline(high, color="black", linestyle=":", linewidth=0.9)
    ax.set_xlabel("σ, scale of the data")
    ax.set_ylabel("Frobenius norm")
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=7)
    return ax


def sorted_eigenvalues(
    eigenvalues: Mapping[str, Tensor],
    *,
    threshold: float | None = None,
    title: str = "Eigenvalues",
    ax: Axes | None = None,
) -> Axes:
    """All eigenvalues in descending order, on an axis that is linear about zero and logarithmic beyond.

    Args:
        eigenvalues: `{label: (n,)}`.
        threshold: Where the linear range ends; by default 10⁻⁴ of the largest absolute eigenvalue.
        title: Of the axis.
        ax: Where to draw; a new figure by default.
    """
    values = {
        label: _numbers(v).flatten().sort(descending=True).values
        for label, v in eigenvalues.items()
    }
    ax = _axis(ax, (6.0, 3.8))
    for number, (label, v) in enumerate(values.items()):
        places = torch.linspace(0, 1, len(v)).tolist()
        name = f"{label}: {float(v[-1]):.2g} to {float(v[0]):.2g}"
        style = ("-", "--", ":", "-.")[number % 4]
        ax.plot(
            places,
            v.tolist(),
            color=role_color(label, number),
            linestyle=style,
            linewidth=1.3,
            label=name,
        )
    _symmetric_log(
        ax, "y", threshold or _threshold(values), max(float(v.abs().max()) for v in values.values())
    )
    ax.axhline(0, color="black", linewidth=0.6)
    ax.set_xlabel("rank, as a share of all eigenvalues")
    ax.set_ylabel("eigenvalue (symmetric log)")
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=8)
    return ax


def spectral_densities(
    spectra: Mapping[str, Tensor | SpectralDensity],
    *,
    threshold: float | None = None,
    width: float = 0.08,
    title: str = "Spectral density",
    ax: Axes | None = None,
) -> Axes:
    """Smoothed densities of eigenvalues, on an axis that is linear about zero and logarithmic beyond.

    Args:
        spectra: `{label: (n,) eigenvalues, or what spectral_density returned}`.
        threshold: Where the linear range ends; by default 10⁻⁴ of the largest absolute eigenvalue.
        width: Of the smoothing, in decades.
        title: Of the axis.
        ax: Where to draw; a new figure by default.
    """
    found = {
        label: s
        if isinstance(s, SpectralDensity)
        else SpectralDensity(v := _numbers(s).sort().values, torch.full_like(v, 1 / len(v)))
        for label, s in spectra.items()
    }
    threshold = threshold or _threshold({label: s.nodes for label, s in found.items()})
    ax = _axis(ax, (6.0, 3.8))
    moved = {label: s.on_log_axis(threshold) for label, s in found.items()}
    low, high = (
        pick(float(getattr(s.nodes, name)()) for s in moved.values())
        for pick, name in ((min, "min"), (max, "max"))
    )
    grid = torch.linspace(low - 4 * width, high + 4 * width, 1000, dtype=torch.float64)
    ticks = grid.sign() * threshold * (10 ** grid.abs() - 1)
    for number, (label, s) in enumerate(moved.items()):
        name = f"{label}: {float(found[label].nodes.min()):.2g} to {float(found[label].nodes.max()):.2g}"
        density = s.density(grid, width).clamp(min=1e-5)
        style = ("-", "--", ":", "-.")[number % 4]
        ax.plot(
            ticks.tolist(),
            density.tolist(),
            color=role_color(label, number),
            linestyle=style,
            linewidth=1.3,
            label=name,
        )
    _symmetric_log(ax, "x", threshold, float(ticks.abs().max()))
    ax.set_yscale("log")
    ax.set_ylim(bottom=1e-4)
    ax.set_xlabel("eigenvalue (symmetric log)")
    ax.set_ylabel("density per decade")
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=8)
    return ax


def block_mass_heatmap(
    labels: Sequence[str],
    matrix: Tensor,
    *,
    title: str = "Share of the squared Frobenius norm, %",
    ax: Axes | None = None,
) -> Axes:
    """The share that each pair of blocks has in the squared Frobenius norm of the Hessian, written into a heat map.

    Args:
        labels: Of the blocks.
        matrix: (blocks, blocks), such as `BlockMass.matrix`: squared norms, of any scale.
        title: Of the axis.
        ax: Where to draw; a new figure by default.
    """
    values = _numbers(matrix)
    if values.shape != (len(labels), len(labels)) or not float(values.sum()) > 0:
        given = f"{len(labels)} labels, a matrix of shape {tuple(values.shape)} and sum {float(values.sum()):g}"
        raise ValueError(
            f"Invalid {given}. Must be a row and a column a label, with a positive sum."
        )
    shares = 100 * values / values.sum()
    ax = _axis(ax, (1.6 + 0.7 * len(labels), 1.2 + 0.6 * len(labels)))
    ax.imshow(
        shares.clamp(min=1e-3).numpy(),
        norm=_matplotlib("colors").LogNorm(1e-3, 100),
        cmap="cividis",
    )
    for row, column in torch.cartesian_prod(*2 * [torch.arange(len(labels))]).tolist():
        share = float(shares[row, column])
        text = (
            f"{share:.0f}"
            if share >= 9.5
            else f"{share:.1f}"
            if share >= 0.1
            else f"{share:.0e}"
            if share > 0
            else "0"
        )
        ax.text(
            column,
            row,
            text,
            ha="center",
            va="center",
            fontsize=8,
            color="black" if share > 0.5 else "white",
        )
    ax.set_xticks(range(len(labels)), labels, rotation=45, ha="right", fontsize=8)
    ax.set_yticks(range(len(labels)), labels, fontsize=8)
    ax.set_title(title, fontsize=10)
    return ax


def loss_difference_bars(
    difference: LossDifference,
    *,
    title: str = "Loss difference along an update",
    ax: Axes | None = None,
) -> Axes:
    """What an update does to the loss, block by block and jointly: measured, and by first and second order.

    Args:
        difference: What `loss_difference` returned.
        title: Of the axis.
        ax: Where to draw; a new figure by default.
    """
    labels = [*difference.labels, "jointly"]
    columns = {
        "first order": (
            [*difference.group_first_order.tolist(), difference.first_order],
            "#56B4E9",
            "//",
        ),
        "second order": (
            [*difference.group_second_order.tolist(), difference.second_order],
            "#E69F00",
            "..",
        ),
        "actual": ([*difference.group_actual.tolist(), difference.actual], "#000000", ""),
    }
    ax = _axis(ax, (1.5 + 0.75 * len(labels), 3.6))
    for number, (name, (values, color, hatch)) in enumerate(columns.items()):
        places = [place + 0.27 * (number - 1) for place in range(len(labels))]
        ax.bar(
            places,
            values,
            0.25,
            color=color,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.4,
            label=name,
        )
    ax.axhline(0, color="black", linewidth=0.6)
    ax.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
    ax.set_ylabel("difference of the loss")
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=8)
    return ax


def _matplotlib(name: str) -> Any:
    """A module of matplotlib.

    Raises:
        ImportError: If it is missing.
    """
    try:
        import importlib

        return importlib.import_module(f"matplotlib.{name}")
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'blockopt[recipes]'.") from error


def _axis(ax: Axes | None, size: tuple[float, float]) -> Any:
    """The axis, or that of a new figure, which no global list of figures holds."""
    if ax is not None:
        return ax
    return _matplotlib("figure").Figure(figsize=size, layout="constrained").subplots()


def _symmetric_log(ax: Any, which: str, threshold: float, largest: float) -> None:
    """Such a scale, with at most two ticks on each side of zero: by default they overlap."""
    lowest, highest = (
        math.ceil(math.log10(threshold)) + 1,
        math.floor(math.log10(max(largest, 100 * threshold))),
    )
    powers = range(highest, lowest - 1, -max(1, math.ceil((highest - lowest + 1) / 2)))
    ticks = [0.0, *(sign * 10.0**power for power in powers for sign in (-1, 1))]
    getattr(ax, f"set_{which}scale")("symlog", linthresh=threshold)
    axis = getattr(ax, f"{which}axis")
    axis.set_ticks(ticks)
    axis.set_minor_locator(_matplotlib("ticker").NullLocator())


def _numbers(values: Tensor) -> Tensor:
    return torch.as_tensor(values).detach().to("cpu", torch.float64)


def _threshold(values: Mapping[str, Tensor]) -> float:
    largest = max(float(v.abs().max()) for v in values.values())
    return 1e-4 * largest if largest > 0 else 1e-4
