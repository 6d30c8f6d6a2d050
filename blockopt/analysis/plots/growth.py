"""Norms of Hessian blocks against the scale of the data, with fitted exponents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.exponents import fit_exponent
from blockopt.analysis.plots.axes import Label, finished, new_axis, numbers, role_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PART_STYLES = {"outer": ("--", "s"), "functional": (":", "^"), "full": ("-", "o")}


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
    repeats = {label: numbers(values).reshape(-1, len(x)) for label, values in norms.items()}
    drawn = {k: v for k, v in repeats.items() if bool((torch.isfinite(v) & (v > 0)).all())}
    inside, predicted = (x >= low) & (x < high), predicted or {}
    ax = new_axis(ax, (5.6, 4.2))
    for number, (label, values) in enumerate(drawn.items()):
        style, marker = PART_STYLES.get(getattr(label, "part", ""), ("-", "o"))
        mean, error = values.mean(0), torch.zeros_like(x)
        found = fit_exponent(x[inside], values[:, inside])
        name = f"{label}: σ^{found.value:.2f}"
        if len(values) > 1:
            name += f" ± {found.standard_error:.2f}"
            error = values.std(0) / math.sqrt(len(values))
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
            error.tolist(),
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
        every = torch.stack([values.mean(0) for values in drawn.values()])
        ax.set_ylim(float(every.min()) / 5, float(every.max()) * 5)
    if float(x[0]) < high < float(x[-1]):
        ax.axvline(high, color="black", linestyle=":", linewidth=0.9)
    return finished(ax, title, "σ, scale of the data", "Frobenius norm", fontsize=7)
