"""The figures of `blockopt hessian`: the spectra of all blocks, and their norms and masses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockopt.analysis.block_report import BlockReport
from blockopt.analysis.plots import block_mass_heatmap, role_color, spectral_densities
from blockopt.analysis.report import HessianReport
from blockopt.analysis.spectral.density import SpectralDensity
from blockopt.blocks import BlockGroup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_IN_A_PLOT = 13  # blocks; more of them are pooled by role


def write_plots(folder: Path, report: HessianReport, title: str) -> list[Path]:
    """Write spectrum.png, if there are spectra, and blocks.png; return their paths."""
    figures = {
        "spectrum.png": _spectra_figure(report, title),
        "blocks.png": _blocks_figure(report, title),
    }
    paths = []
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=130)
            paths.append(folder / name)
    return paths


def _spectra_figure(report: HessianReport, title: str) -> Figure | None:
    """The spectra of all blocks and of the whole, one below the other; None without spectra."""
    from matplotlib.figure import Figure

    spectra = pooled_spectra(report)
    largest = max((float(spectrum.nodes.abs().max()) for spectrum in spectra.values()), default=0.0)
    if not largest > 0:
        return None
    exact = all(block.exact for block in report.blocks.values())
    threshold = (1e-6 if exact else 1e-4) * largest
    figure = Figure(figsize=(8, 1.4 + 0.85 * len(spectra)), layout="constrained")
    axes = figure.subplots(len(spectra), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (label, spectrum) in zip(axes, spectra.items()):
        spectral_densities({label: spectrum}, threshold=threshold, title="", ax=axis)
        axis.set_xlabel("")
        axis.set_ylabel("")
        axis.axvline(0, color="#999999", linewidth=0.5)
        axis.legend().remove()
        ends = f"{float(spectrum.nodes[0]):.2g} to {float(spectrum.nodes[-1]):.2g}"
        axis.set_title(f"{label}: {ends}", loc="left", fontsize=8, pad=2)
    scale = f"eigenvalue (linear up to {threshold:.0e}, logarithmic beyond)"
    if not exact:
        scale += "\nestimated by Lanczos steps, which cannot resolve eigenvalues near 0"
    axes[-1].set_xlabel(scale, fontsize=9)
    axes[-1].tick_params(axis="x", labelsize=8, rotation=60)
    figure.supylabel("density per decade", fontsize=9)
    figure.suptitle(f"Spectra of {report.matrix} blocks: {title}", fontsize=10)
    return figure


def _blocks_figure(report: HessianReport, title: str) -> Figure:
    """The norm of each block, and the share of each pair in the whole."""
    from matplotlib.figure import Figure

    groups, mass = pooled_mass(report)
    norms = {g: b.frobenius for g, b in report.blocks.items() if b.frobenius.value > 0}
    height = max(2 + 0.6 * len(mass), 1 + 0.16 * len(norms))
    figure = Figure(figsize=(6.5 + 0.7 * len(mass), min(height, 60)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(4.5, 1.2 + 0.7 * len(mass)))
    for place, (group, norm) in enumerate(norms.items()):
        color, error = role_color(group, 7), [norm.standard_error]
        left.errorbar(
            [norm.value], [place], xerr=error, color=color, marker="o", markersize=5, capsize=2
        )
    labels = report.short_labels()
    small = 8 if len(norms) <= 40 else 6
    left.set_yticks(range(len(norms)), [str(labels[group]) for group in norms], fontsize=small)
    left.set_xscale("log")
    left.grid(axis="x", alpha=0.4)
    left.invert_yaxis()
    left.set_title(f"Frobenius norms of {report.matrix} blocks", fontsize=10)
    if float(mass.sum()) > 0:
        block_mass_heatmap(groups, mass, ax=right)
    figure.suptitle(title, fontsize=10)
    return figure


def _pooled(report: HessianReport) -> dict[BlockGroup, BlockGroup]:
    """The short label of each block, or its role if there are too many for a plot."""
    if len(report.blocks) > MOST_IN_A_PLOT:
        return {group: BlockGroup(group.role) for group in report.blocks}
    return report.short_labels()


def pooled_spectra(report: HessianReport) -> dict[BlockGroup | str, SpectralDensity]:
    """Return the spectra of the blocks, put together where they are pooled, and of the whole."""
    members: dict[BlockGroup | str, list[tuple[SpectralDensity, int]]] = {}
    labels = _pooled(report)
    blocks = [(labels[group], block) for group, block in report.blocks.items()]
    everything: list[tuple[BlockGroup | str, BlockReport]] = [*blocks, ("whole", report.whole)]
    for label, block in everything:
        if block.spectrum is not None:
            members.setdefault(label, []).append((block.spectrum, block.dimension))
    found = {}
    for label, some in members.items():
        total = sum(dimension for _, dimension in some)
        nodes, order = torch.cat([spectrum.nodes for spectrum, _ in some]).sort()
        weights = torch.cat([spectrum.weights * (size / total) for spectrum, size in some])
        found[label] = SpectralDensity(nodes, weights[order])
    return found


def pooled_mass(report: HessianReport) -> tuple[list[BlockGroup], Tensor]:
    """Return labels, and the squared norms (labels, labels), summed where blocks are pooled."""
    of_blocks = list(_pooled(report).values())  # in the order of report.mass.labels
    labels = list(dict.fromkeys(of_blocks))
    rows = torch.tensor([labels.index(label) for label in of_blocks])
    member = torch.nn.functional.one_hot(rows, len(labels)).to(report.mass.matrix)
    return labels, member.T @ report.mass.matrix @ member
