"""What an update does to the loss, by block and by order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockopt.analysis.plots.axes import finished, new_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def loss_difference_bars(
    difference: Any,
    *,
    title: str = "Loss difference along an update",
    ax: Axes | None = None,
) -> Axes:
    """Draw what an update does to the loss, block by block and jointly, by order and measured.

    Args:
        difference: The `LossDifference` that `loss_difference` returned.
        title: The title of the axis.
        ax: Where to draw; a new figure by default.
    """
    found, labels = difference, [*map(str, difference.labels), "jointly"]
    columns = (
        ("first order", found.group_first_order, found.first_order, "#56B4E9", "//"),
        ("second order", found.group_second_order, found.second_order, "#E69F00", ".."),
        ("actual", found.group_actual, found.actual, "#000000", ""),
    )
    ax = new_axis(ax, (1.5 + 0.75 * len(labels), 3.6))
    for number, (name, alone, jointly, color, hatch) in enumerate(columns):
        places = [place + 0.27 * (number - 1) for place in range(len(labels))]
        look: dict[str, Any] = {"color": color, "hatch": hatch, "edgecolor": "white"}
        ax.bar(places, [*alone.tolist(), jointly], 0.25, label=name, linewidth=0.4, **look)
    ax.axhline(0, color="black", linewidth=0.6)
    ax.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
    return finished(ax, title, "", "difference of the loss")
