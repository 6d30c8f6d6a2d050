"""What the plots share: axes, the colours of roles, and symmetric log scales."""

from __future__ import annotations

import importlib
import math
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def matplotlib_module(name: str) -> Any:
    """Import a module of matplotlib.

    Raises:
        ImportError: If it is missing.
    """
    try:
        return importlib.import_module(f"matplotlib.{name}")
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'blockopt[recipes]'.") from error


def new_figure(size: tuple[float, float]) -> Figure:
    """Return a figure that no global list of figures holds."""
    figure: Figure = matplotlib_module("figure").Figure(figsize=size, layout="constrained")
    return figure


def new_axis(ax: Axes | None, size: tuple[float, float]) -> Any:
    """Return the axis, or that of a new figure."""
    return new_figure(size).subplots() if ax is None else ax


def finished(ax: Axes, title: str, x: str, y: str, fontsize: int = 8) -> Axes:
    """Give the axis its labels, title and legend."""
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=fontsize)
    return ax


def eigenvalue_line(
    ax: Any, number: int, label: object, values: Tensor, x: Tensor, y: Tensor
) -> None:
    """Draw the line of one set of eigenvalues, with its ends in the legend."""
    name = f"{label}: {float(values.min()):.2g} to {float(values.max()):.2g}"
    look = {"color": role_color(label, number), "linestyle": LINE_STYLES[number % 4]}
    ax.plot(x.tolist(), y.tolist(), linewidth=1.3, label=name, **look)


def symmetric_log_scale(ax: Any, which: str, threshold: float, largest: float) -> None:
    """Set such a scale, with at most two ticks on each side of zero: by default they overlap."""
    lowest = math.ceil(math.log10(threshold)) + 1
    highest = math.floor(math.log10(max(largest, 100 * threshold)))
    powers = range(highest, lowest - 1, -max(1, math.ceil((highest - lowest + 1) / 2)))
    ticks = [0.0, *(sign * 10.0**power for power in powers for sign in (-1, 1))]
    getattr(ax, f"set_{which}scale")("symlog", linthresh=threshold)
    axis = getattr(ax, f"{which}axis")
    axis.set_ticks(ticks)
    axis.set_minor_locator(matplotlib_module("ticker").NullLocator())


def numbers(values: Tensor) -> Tensor:
    """Return the values in float64 on the CPU."""
    return torch.as_tensor(values).detach().to("cpu", torch.float64)


def largest_magnitude(values: Mapping[Label, Tensor]) -> float:
    """Return the largest absolute value of all."""
    return max(float(v.abs().max()) for v in values.values())


def linear_range(values: Mapping[Label, Tensor]) -> float:
    """Return where a symmetric log scale ends to be linear: at 10⁻⁴ of the largest value."""
    return 1e-4 * (largest_magnitude(values) or 1.0)
