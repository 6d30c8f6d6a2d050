"""Figures of a whole model: its heads by layer, the norms of its blocks, and their spectra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockopt.analysis.block_report import BlockReport
from blockopt.analysis.plots.axes import new_figure, role_color
from blockopt.analysis.plots.distributions import spectral_densities
from blockopt.analysis.plots.heatmaps import block_mass_heatmap, head_heatmap
from blockopt.analysis.spectral.block_mass import BlockMass
from blockopt.analysis.spectral.density import SpectralDensity
from blockopt.blocks import BlockGroup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_IN_A_PLOT = 13  # blocks; more of them are pooled by role
MOST_LABELS = 80  # norms with a name of their own
HEAD_ROLES = ("query", "key", "value", "output")


def heads_figure(blocks: Mapping[BlockGroup, BlockReport], *, title: str = "") -> Figure:
    """Draw the mean curvature, and the top eigenvalue if known, of each head, by layer and role.

    All maps of a row have one colour scale, so that roles can be compared.
    """
    heads = {
        role: {
            group: block
            for group, block in blocks.items()
            # Of weight and bias, the weight, which is found first and is far larger
            if group.role == role and group.head is not None and group.layer is not None
        }
        for role in HEAD_ROLES
    }
    heads = {role: _of_weights(found) for role, found in heads.items() if found}
    quantities = {
        "mean curvature |trace| / size": lambda b: abs(b.trace.value) / b.dimension,
        "largest |eigenvalue|": lambda b: float(b.top[0].abs()) if len(b.top) else 0.0,
    }
    rows = {}
    for name, of in quantities.items():
        values = {r: {g: of(b) for g, b in found.items()} for r, found in heads.items()}
        positive = [v for found in values.values() for v in found.values() if v > 0]
        if positive:
            rows[name] = (values, (min(positive), max(positive)))
    layers = len({group.layer for found in heads.values() for group in found})
    most = max(len(found) for found in heads.values()) / max(1, layers)
    size = (1.0 + len(heads) * (2.0 + 0.16 * most), 0.6 + len(rows) * (1.2 + 0.2 * layers))
    figure = new_figure(size)
    axes = figure.subplots(len(rows), len(heads), squeeze=False)
    for line, (name, (values, limits)) in zip(axes, rows.items()):
        for ax, (role, found) in zip(line, values.items()):
            head_heatmap(found, limits=limits, title=f"{role}: {name}", ax=ax)
            ax.title.set_fontsize(8)
    figure.suptitle(title, fontsize=11)
    return figure


def _of_weights(found: dict[BlockGroup, BlockReport]) -> dict[BlockGroup, BlockReport]:
    """Return the largest block of each head: its weight, not its bias."""
    best: dict[tuple[int | None, int | None], BlockGroup] = {}
    for group, block in found.items():
        place = (group.layer, group.head)
        if place not in best or found[best[place]].dimension < block.dimension:
            best[place] = group
    return {group: found[group] for group in best.values()}


def spectra_figure(
    blocks: Mapping[BlockGroup, BlockReport],
    labels: Mapping[BlockGroup, BlockGroup],
    whole: BlockReport | None,
    *,
    title: str = "",
) -> Figure:
    """Draw the spectra of all blocks and of the whole, one below the other.

    Args:
        blocks: The blocks, some of them with spectra. More than 13 are pooled by role.
        labels: What to call each.
        whole: The matrix of all of them, if it was measured.
        title: What they are spectra of.
    """
    spectra = pooled_spectra(blocks, labels, whole)
    largest = max(float(spectrum.nodes.abs().max()) for spectrum in spectra.values())
    exact = all(block.exact for block in blocks.values())
    threshold = (1e-6 if exact else 1e-4) * (largest or 1.0)
    size = (8, 1.4 + 0.85 * len(spectra))
    figure = new_figure(size)
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
    figure.suptitle(f"Spectra of {title}", fontsize=10)
    return figure


def blocks_figure(
    blocks: Mapping[BlockGroup, BlockReport],
    labels: Mapping[BlockGroup, BlockGroup],
    mass: BlockMass | None,
    *,
    title: str = "",
) -> Figure:
    """Draw the norm of each block and, if it is known, the share of each pair in the whole.

    Args:
        blocks: The blocks.
        labels: What to call each.
        mass: The shares; more than 13 blocks are pooled by role.
        title: What to write above.
    """
    largest = max(block.frobenius.value for block in blocks.values())
    # What is smaller is rounding, as the biases of keys, which softmax does not see.
    norms = {g: b.frobenius for g, b in blocks.items() if b.frobenius.value > 1e-14 * largest}
    if mass is not None and float(mass.matrix.sum()) > 0:
        groups, shares = pooled_mass(mass, labels)
    else:
        groups, shares = [], torch.zeros(0, 0)
    named = len(norms) <= MOST_LABELS
    height = max(2 + 0.6 * len(shares), 1 + 0.16 * len(norms) if named else 6.0)
    size = (6.5 + 0.8 * len(shares), height)
    figure = new_figure(size)
    left, *right = figure.subplots(
        1,
        2 if groups else 1,
        squeeze=False,
        width_ratios=(4.5, 1.6 + 0.7 * len(groups))[: 1 + bool(groups)],
    )[0]
    roles = sorted({group.role for group in norms}, key=lambda r: [g.role for g in norms].index(r))
    for number, (group, norm) in enumerate(norms.items()):
        place = number if named else roles.index(group.role)
        color, error = role_color(group, 7), [norm.standard_error]
        left.errorbar(
            [norm.value], [place], xerr=error, color=color, marker="o", markersize=5, capsize=2
        )
    if named:
        names = [str(labels[group]) for group in norms]
        left.set_yticks(range(len(norms)), names, fontsize=8 if len(norms) <= 40 else 6)
    else:
        left.set_yticks(range(len(roles)), roles, fontsize=8)
    left.set_xscale("log")
    left.grid(axis="x", alpha=0.4)
    left.invert_yaxis()
    what = "Frobenius norms of blocks" if named else f"Frobenius norms of {len(norms):,} blocks"
    if len(norms) < len(blocks):
        what += f"\n({len(blocks) - len(norms):,} more are zero up to rounding)"
    left.set_title(what, fontsize=10)
    if groups:
        block_mass_heatmap(groups, shares, ax=right[0])
    figure.suptitle(title, fontsize=10)
    return figure


def pooled_spectra(
    blocks: Mapping[BlockGroup, BlockReport],
    labels: Mapping[BlockGroup, BlockGroup],
    whole: BlockReport | None,
) -> dict[BlockGroup | str, SpectralDensity]:
    """Return the spectra by label, with those of a role joined if there are too many, and "whole".

    A joined spectrum has all eigenvalues of its blocks, weighted by their numbers.
    """
    members: dict[BlockGroup | str, list[tuple[SpectralDensity, int]]] = {}
    pooled = _pooled(labels)
    everything: list[tuple[BlockGroup | str, BlockReport]] = [
        (pooled[group], block) for group, block in blocks.items()
    ]
    if whole is not None:
        everything.append(("whole", whole))
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


def pooled_mass(
    mass: BlockMass, labels: Mapping[BlockGroup, BlockGroup]
) -> tuple[list[BlockGroup], Tensor]:
    """Return labels, and the squared norms (labels, labels), summed where blocks are pooled."""
    pooled = _pooled(labels)
    of_blocks = [pooled[group] for group in mass.labels]  # type: ignore[index]
    found = list(dict.fromkeys(of_blocks))
    rows = torch.tensor([found.index(label) for label in of_blocks])
    member = torch.nn.functional.one_hot(rows, len(found)).to(mass.matrix)
    return found, member.T @ mass.matrix @ member


def _pooled(labels: Mapping[BlockGroup, BlockGroup]) -> dict[BlockGroup, BlockGroup]:
    """The label of each block, or its role if there are too many for a plot."""
    if len(labels) > MOST_IN_A_PLOT:
        return {group: BlockGroup(group.role) for group in labels}
    return dict(labels)
