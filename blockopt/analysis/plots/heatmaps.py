"""Heat maps: entries of a Hessian, shares and distances of blocks, numbers by layer and head."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockopt.analysis.plots.axes import Label, matplotlib_module, new_axis, numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PIXELS = 800  # a side of a heat map


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
    values = numbers(matrix).abs()
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
    ax = new_axis(ax, (6.4, 5.4))
    image = ax.imshow(
        values.clamp(min=low).numpy(),
        norm=matplotlib_module("colors").LogNorm(low, high),
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
    shown = {(a + b) / 2: label for (a, b), (label, size) in ends if size >= 0.02 * n}
    bar = ax.figure.colorbar(image, ax=ax, shrink=0.8)
    pixels = "|entry|" if step == 1 else f"root mean square of {step} x {step} entries"
    bar.set_label(pixels, fontsize=8)
    return _named(ax, shown, title)


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
    values = _of_pairs(labels, matrix)
    if not float(values.sum()) > 0:
        raise ValueError(f"Invalid matrix of sum {float(values.sum()):g}. Must be positive.")
    shares = 100 * values / values.sum()
    ax = new_axis(ax, (1.6 + 0.7 * len(labels), 1.2 + 0.6 * len(labels)))
    norm = matplotlib_module("colors").LogNorm(1e-3, 100)
    image = ax.imshow(shares.clamp(min=1e-3).numpy(), norm=norm, cmap="cividis")
    ax.figure.colorbar(image, ax=ax, shrink=0.8).set_label("share, %", fontsize=8)
    for row, column in torch.cartesian_prod(*2 * [torch.arange(len(labels))]).tolist():
        share = float(shares[row, column])
        digits = ".0f" if share >= 9.5 or share == 0 else ".1f" if share >= 0.1 else ".0e"
        color = "black" if share > 0.5 else "white"
        where: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
        ax.text(column, row, f"{share:{digits}}", color=color, **where)
    return _named(ax, dict(enumerate(labels)), title)


def distance_heatmap(
    labels: Sequence[object],
    matrix: Tensor,
    *,
    title: str = "Jensen-Shannon distance between spectra",
    ax: Axes | None = None,
) -> Axes:
    """Draw the distance of each pair of blocks, from 0 to 1.

    Args:
        labels: The labels of the blocks.
        matrix: (blocks, blocks) distances, such as `JensenShannon.matrix`.
        title: The title of the axis.
        ax: Where to draw; a new figure by default.
    """
    values = _of_pairs(labels, matrix)
    ax = new_axis(ax, (2.4 + 0.3 * len(labels), 1.8 + 0.3 * len(labels)))
    image = ax.imshow(values.numpy(), vmin=0, vmax=1, cmap="viridis")
    ax.figure.colorbar(image, ax=ax, shrink=0.8).set_label("distance", fontsize=8)
    return _named(ax, dict(enumerate(labels)), title, rotation=60, fontsize=6)


def head_heatmap(
    values: Mapping[Label, float],
    *,
    limits: tuple[float, float] | None = None,
    title: str = "Curvature by layer and head",
    ax: Axes | None = None,
) -> Axes:
    """Draw a positive number of each head: a row per layer, a column per head, log colours.

    Args:
        values: `{label: number}`; each label has a `layer` and a `head`, as `BlockGroup` does.
            Heads that are missing, zero or negative are left white.
        limits: The ends of the colour scale; by default the smallest and largest positive number.
        title: The title of the axis.
        ax: Where to draw; a new figure by default.

    Raises:
        ValueError: If a label has no layer or head, or no number is positive.

    Example:
        >>> from blockopt.blocks import BlockGroup
        >>> heads = {BlockGroup("query", 0, "w", head): 10.0**head for head in range(4)}
        >>> head_heatmap(heads).get_xlabel()
        'head'
    """
    places = {(getattr(k, "layer", None), getattr(k, "head", None)): v for k, v in values.items()}
    positive = [value for value in places.values() if value > 0]
    if not positive or any(None in place for place in places):
        raise ValueError(
            "Invalid values: must be labelled by layer and head, and some must be positive."
        )
    layers = sorted({layer for layer, _ in places if layer is not None})
    heads = 1 + max(head for _, head in places if head is not None)
    grid = torch.full((len(layers), heads), math.nan, dtype=torch.float64)
    for (layer, head), value in places.items():
        if value > 0:
            grid[layers.index(layer), head] = value  # type: ignore[arg-type, index]
    low, high = limits or (min(positive), max(positive))
    ax = new_axis(ax, (1.8 + 0.32 * heads, 1.3 + 0.3 * len(layers)))
    norm = matplotlib_module("colors").LogNorm(low, max(high, 1.01 * low))
    image = ax.imshow(grid.numpy(), norm=norm, cmap="viridis", aspect="auto")
    ax.figure.colorbar(image, ax=ax)
    step = max(1, heads // 8)
    ax.set_xticks(range(0, heads, step), [str(head) for head in range(0, heads, step)], fontsize=8)
    ax.set_yticks(range(len(layers)), [str(layer) for layer in layers], fontsize=8)
    ax.set_xlabel("head", fontsize=8)
    ax.set_ylabel("layer", fontsize=8)
    ax.set_title(title, fontsize=10)
    return ax


def _of_pairs(labels: Sequence[object], matrix: Tensor) -> Tensor:
    values = numbers(matrix)
    if values.shape != (len(labels), len(labels)):
        raise ValueError(
            f"Invalid {len(labels)} labels and a matrix of shape {tuple(values.shape)}. Must be "
            "one row and one column per label."
        )
    return values


def _named(
    ax: Any, labels: Mapping[float, object], title: str, rotation: int = 45, fontsize: int = 8
) -> Axes:
    """Write the title, and labels at places of both axes."""
    places, names = list(labels), [str(label) for label in labels.values()]
    ax.set_xticks(places, names, rotation=rotation, ha="right", fontsize=fontsize)
    ax.set_yticks(places, names, fontsize=fontsize)
    ax.set_title(title, fontsize=10)
    named: Axes = ax
    return named
