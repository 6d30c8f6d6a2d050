"""One figure of curvature over training: roles, spectra, and each head."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from blockopt.analysis.plots.axes import (
    matplotlib_module,
    new_figure,
    role_color,
    symmetric_log_scale,
)
from blockopt.analysis.plots.distributions import density_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, Any]


def _largest(block: Record) -> float | None:
    """The largest eigenvalue, or the outermost node of the spectrum, which Lanczos finds first."""
    if block.get("top_1") is not None:
        return abs(float(block["top_1"]))
    return max(map(abs, block["nodes"])) if block["nodes"] else None


QUANTITIES = {
    "mean curvature |trace| / size": lambda b: abs(b["trace"]) / b["dimension"],
    "largest |eigenvalue|": _largest,
    "negative share of Σ|λ|": lambda b: b["negative_of_mass"],
    "norm of the weights": lambda b: b["weight_norm"],
}
HEAD_ROLES = ("query", "key", "value", "output")


def curvature_over_training(records: Sequence[Record]) -> Figure:
    """Draw what `HessianRecorder` kept.

    Above: the median of the blocks of each role over the steps, with the range of all of them. In
    the middle: the spectra of query, key, value and output heads, pooled, from early (dark) to late
    (bright). Below: the mean curvature of each head, over its value at the first step.

    Args:
        records: `HessianRecorder.records`, at least one.

    Raises:
        ValueError: If there are none.
    """
    if not records:
        raise ValueError("Nothing was recorded. Call recorder.step(n) with one of its steps first.")
    present = {b["role"] for b in records[0]["blocks"] if b["head"] is not None}
    roles = [role for role in HEAD_ROLES if role in present]
    rows = 1 + 2 * bool(roles)
    figure = new_figure((15, 0.6 + 3.3 * rows))
    axes = figure.subplots(rows, 4, squeeze=False)
    for ax, (name, of) in zip(axes[0], QUANTITIES.items()):
        _by_role(ax, records, name, of)
    axes[0][0].legend(fontsize=7)
    for column, role in enumerate(HEAD_ROLES):
        if roles and role in roles:
            _spectra(axes[1][column], records, role)
            _heads(axes[2][column], records, role)
        elif roles:
            axes[1][column].remove()
            axes[2][column].remove()
    first, last = records[0], records[-1]
    losses = f"loss {first['loss']:.2f} to {last['loss']:.2f}"
    figure.suptitle(f"Curvature from step {first['step']} to {last['step']}, {losses}", fontsize=12)
    return figure


def _by_role(ax: Any, records: Sequence[Record], name: str, of: Any) -> None:
    steps = [record["step"] for record in records]
    seen = dict.fromkeys(b["role"] for b in records[0]["blocks"] if b["dimension"] > 1)
    positive = []
    for number, role in enumerate(role for role in seen if role != "bias"):
        values = [
            [v for b in record["blocks"] if b["role"] == role and (v := of(b)) is not None]
            for record in records
        ]
        if not all(values):
            continue
        color = role_color(role, number)
        middle = [median(found) for found in values]
        ends = [min(found) for found in values], [max(found) for found in values]
        positive += [value for value in (*middle, *ends[0]) if value > 0]
        ax.fill_between(steps, *ends, color=color, alpha=0.15, linewidth=0)
        ax.plot(steps, middle, color=color, marker="o", markersize=3, label=role)
    if positive and "share" not in name:
        ax.set_yscale("log")
    _step_axis(ax, steps)
    ax.set_xlabel("step", fontsize=8)
    ax.set_title(name, fontsize=9)


def _spectra(ax: Any, records: Sequence[Record], role: str) -> None:
    colors, threshold = _colors(len(records)), _threshold(records, role)
    largest = threshold
    for color, record in zip(colors, records):
        blocks = [b for b in record["blocks"] if b["role"] == role and b["nodes"] is not None]
        if not blocks:
            continue
        nodes = torch.tensor([x for b in blocks for x in b["nodes"]], dtype=torch.float64)
        weights = torch.tensor([x for b in blocks for x in b["weights"]], dtype=torch.float64)
        eigenvalues, density = density_curve(nodes, weights / len(blocks), threshold, 0.1)
        largest = max(largest, float(eigenvalues.abs().max()))
        label = f"step {record['step']}" if record in (records[0], records[-1]) else None
        ax.plot(eigenvalues.tolist(), density.tolist(), color=color, linewidth=1.1, label=label)
    symmetric_log_scale(ax, "x", threshold, largest)
    ax.tick_params(axis="x", labelsize=7)
    ax.set_yscale("log")
    ax.set_ylim(bottom=1e-4)
    ax.set_title(f"{role}: spectrum of all heads", fontsize=9)
    ax.set_xlabel("eigenvalue (symmetric log)", fontsize=8)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=7)


def _heads(ax: Any, records: Sequence[Record], role: str) -> None:
    """A row per head, layer by layer; a column per step."""
    heads: dict[tuple[int, int], list[float]] = {}
    for record in records:
        chosen: dict[tuple[int, int], Record] = {}
        for b in record["blocks"]:
            if b["role"] == role and b["head"] is not None:
                chosen.setdefault((b["layer"] or 0, b["head"]), b)
        for place, b in chosen.items():
            heads.setdefault(place, []).append(max(abs(b["trace"]) / b["dimension"], 1e-300))
    grid = torch.tensor([heads[place] for place in sorted(heads)], dtype=torch.float64)
    ratios = (grid / grid[:, :1]).log10()
    far = max(0.1, float(ratios.abs().max()))
    image = ax.imshow(ratios.numpy(), cmap="PuOr_r", vmin=-far, vmax=far, aspect="auto")
    ax.figure.colorbar(image, ax=ax).set_label("powers of ten", fontsize=7)
    steps = [str(record["step"]) for record in records]
    every = max(1, len(steps) // 6)
    ax.set_xticks(range(0, len(steps), every), steps[::every], fontsize=7)
    layers = [layer for layer, _ in sorted(heads)]
    starts = [place for place, layer in enumerate(layers) if place == layers.index(layer)]
    ax.set_yticks(starts, [f"layer {layers[start]}" for start in starts], fontsize=7)
    for start in starts[1:]:
        ax.axhline(start - 0.5, color="white", linewidth=0.8)
    ax.set_xlabel("step", fontsize=8)
    ax.set_title(f"{role}: mean curvature of each head, over step {steps[0]}", fontsize=9)


def _colors(number: int) -> list[Any]:
    palette = matplotlib_module("cm").viridis
    return [palette(0.9 * place / max(1, number - 1)) for place in range(number)]


def _threshold(records: Sequence[Record], role: str) -> float:
    nodes = [
        abs(x) for r in records for b in r["blocks"] if b["role"] == role for x in b["nodes"] or ()
    ]
    return 1e-4 * (max(nodes, default=0.0) or 1.0)


def _step_axis(ax: Any, steps: list[int]) -> None:
    """A symmetric log axis if the steps are chosen by factors."""
    if len(steps) > 3 and steps[-1] > 20 * max(1, steps[1]):
        first = max(1, steps[1])
        ax.set_xscale("symlog", linthresh=first)
        ax.set_xlim(-0.2 * first, 1.1 * steps[-1])
