"""A figure of how well Kronecker products match Gauss-Newton blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from blockopt.analysis.kronecker.fit import KroneckerFit
from blockopt.analysis.plots.axes import new_figure, role_color
from blockopt.blocks import BlockGroup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKS = {"KFAC": ("o", -0.22), "EKFAC": ("s", 0.0), "nearest product": ("|", 0.22)}


def kronecker_figure(blocks: Mapping[BlockGroup, KroneckerFit], top: int) -> Figure:
    """Draw the errors of all blocks by role, and how far the top eigenspaces agree.

    Args:
        blocks: The fit of each block.
        top: The number of eigenvectors of an overlap.
    """
    roles = list(dict.fromkeys(group.role for group in blocks))
    figure = new_figure((10.5, 1.6 + 0.55 * len(roles)))
    left, right = figure.subplots(1, 2, sharey=True)
    for group, fit in blocks.items():
        errors = {"KFAC": fit.kfac.error, "EKFAC": fit.ekfac.error}
        if fit.nearest is not None:
            errors["nearest product"] = fit.nearest
        overlaps = {"KFAC": fit.kfac.overlap, "EKFAC": fit.ekfac.overlap}
        for ax, values in ((left, errors), (right, overlaps)):
            for name, value in values.items():
                marker, shift = LOOKS[name]
                place, color = roles.index(group.role) + shift, role_color(group, 7)
                ax.plot([value], [place], marker, color=color, markersize=5, alpha=0.7)
    for name, (marker, _) in LOOKS.items():
        left.plot([], [], marker, color="#555555", label=name)
    left.legend(fontsize=8)
    left.set_yticks(range(len(roles)), roles, fontsize=9)
    left.invert_yaxis()
    left.set_xlim(left=0)
    right.set_xlim(0, 1.02)
    left.set_xlabel("‖G - K‖ / ‖G‖")
    right.set_xlabel(f"overlap of the top {top} eigenvectors (1: the same space)")
    left.set_title("Relative error of each block", fontsize=10)
    right.set_title("Share of the top eigenspace of G in that of K", fontsize=10)
    for ax in (left, right):
        ax.grid(axis="x", alpha=0.4)
    return figure
