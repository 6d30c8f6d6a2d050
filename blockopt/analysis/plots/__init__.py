"""Plots of Hessians: heat maps, histograms, growth, spectra, block masses and loss differences.

Each function takes numbers by label, a `title` and an optional matplotlib axis `ax`, by default
that of a new figure, and returns the axis; `axis.figure.savefig(...)` writes it. Nothing global is
changed, and matplotlib (`pip install 'blockopt[recipes]'`) is imported when a plot is made. A label
is a string, or an object with a `role` such as `BlockGroup`. A role has the same colour in all
plots, from Okabe and Ito's palette for colour-blind readers; lines also differ in style.
"""

from blockopt.analysis.plots.axes import COLORS, OTHER_COLORS, role_color
from blockopt.analysis.plots.distributions import (
    entry_histograms,
    sorted_eigenvalues,
    spectral_densities,
)
from blockopt.analysis.plots.growth import growth_lines
from blockopt.analysis.plots.heatmaps import (
    MAX_PIXELS,
    block_mass_heatmap,
    distance_heatmap,
    head_heatmap,
    hessian_heatmap,
)
from blockopt.analysis.plots.loss_differences import loss_difference_bars

__all__ = [
    "COLORS",
    "MAX_PIXELS",
    "OTHER_COLORS",
    "block_mass_heatmap",
    "distance_heatmap",
    "entry_histograms",
    "growth_lines",
    "head_heatmap",
    "hessian_heatmap",
    "loss_difference_bars",
    "role_color",
    "sorted_eigenvalues",
    "spectral_densities",
]
