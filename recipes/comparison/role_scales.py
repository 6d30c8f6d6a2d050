"""How the final loss depends on the learning rates of blocks: runs, means over seeds, a picture.

A run is that of an arm with all scales 1, except for one group of blocks whose learning rate is
multiplied: a few roles, a few roles of one layer, or the rows of the embedding for some tokens. The
difference to the run without it, with the same seed, is what block learning rates can hope for at
best: the ground truth that a curvature would have to predict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from recipes.comparison.fixed_scales import QUARTERS
from recipes.comparison.paired_statistics import estimate
from recipes.comparison.run_config import RunConfig
from recipes.comparison.studies import TEST_SEED, Study

ROLE_GROUPS = {
    "embedding": ("embedding",),
    "position": ("position",),
    "query, key": ("query", "key"),
    "value": ("value",),
    "output": ("output",),
    "mlp_in": ("mlp_in",),
    "mlp_out": ("mlp_out",),
    "vectors": ("norm", "bias"),
}
IN_LAYERS = {
    "query, key": ("query", "key"),
    "value, output": ("value", "output"),
    "MLP": ("mlp_in", "mlp_out"),
}
TOKENS = {f"{quarter} tokens": (f"embedding.{quarter}",) for quarter in QUARTERS}
KINDS = ("role", "layer", "token")
MULTIPLIERS = (0.5, 2.0, 4.0)
OPTIMIZERS = {"block-muon": 1e-2, "block-adamw": 3e-3, "block-sgd": 0.3}  # and learning rates


Groups = Mapping[str, tuple[str, ...]]  # {title: names of `fixed_scales`}


def groups_by(kind: str, layers: int) -> Groups:
    """Return the groups of blocks to multiply, by one of `KINDS`.

    Example:
        >>> list(groups_by("layer", 2))[::3]
        ['query, key 0', 'query, key 1']
    """
    if kind == "layer":
        return {
            f"{title} {layer}": tuple(f"{role}.{layer}" for role in roles)
            for layer in range(layers)
            for title, roles in IN_LAYERS.items()
        }
    return TOKENS if kind == "token" else ROLE_GROUPS


@dataclass(frozen=True)
class Case:
    """One multiplier of one group of blocks; None and 1 for the run without."""

    optimizer: str
    group: str | None = None
    multiplier: float = 1.0


def cases(optimizer: str, groups: Groups = ROLE_GROUPS) -> list[Case]:
    """Return the run without multipliers, and those of every group."""
    return [Case(optimizer), *(Case(optimizer, group, m) for group in groups for m in MULTIPLIERS)]


def config(study: Study, case: Case, lr: float, seed: int, groups: Groups) -> RunConfig:
    """Return the run of a case."""
    values = {"lr": lr, "weight_decay": 1e-3 if case.optimizer == "block-sgd" else 0.1}
    names = () if case.group is None else groups[case.group]
    values |= {f"{name}_scale": case.multiplier for name in names}
    return study.config(case.optimizer, values, TEST_SEED + seed, study.steps, "test")


def differences(
    finals: Mapping[tuple[Case, int], float],
    optimizer: str,
    seeds: int,
    groups: Groups = ROLE_GROUPS,
) -> list[dict[str, Any]]:
    """Return the change of the loss by each multiplier: mean and 95 % interval over the seeds.

    Args:
        finals: The final loss of each case and seed.
        optimizer: Of the runs.
        seeds: How many seeds each case has.
        groups: What was multiplied.

    Example:
        >>> finals = {(case, 0): 3.0 for case in cases("block-sgd")}
        >>> finals[Case("block-sgd", "value", 2.0), 0] = 2.5
        >>> [row["mean"] for row in differences(finals, "block-sgd", 1) if row["group"] == "value"]
        [0.0, -0.5, 0.0]
    """
    rows = []
    for case in cases(optimizer, groups)[1:]:
        base = Case(optimizer)
        found = [finals[case, seed] - finals[base, seed] for seed in range(seeds)]
        mean = estimate(found) if all(map(math.isfinite, found)) else None
        low, high = (math.nan, math.nan) if mean is None else mean[2:4]
        row = {"optimizer": optimizer, "group": case.group, "multiplier": case.multiplier}
        row |= {"mean": math.inf if mean is None else mean.mean, "low": low, "high": high}
        rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], title: str) -> Figure:
    """Draw the change of the loss over the multiplier, one panel per optimizer."""
    optimizers = list(dict.fromkeys(row["optimizer"] for row in rows))
    groups = list(dict.fromkeys(row["group"] for row in rows))
    figure = Figure(figsize=(4.2 * len(optimizers) + 1.6, 4.2), layout="constrained")
    panels = figure.subplots(1, len(optimizers), squeeze=False)[0]
    colors = dict(zip(groups, colormaps["tab20" if len(groups) > 10 else "tab10"].colors))
    for axes, optimizer in zip(panels, optimizers):
        for group in groups:
            own = [r for r in rows if (r["optimizer"], r["group"]) == (optimizer, group)]
            points = sorted([(r["multiplier"], r["mean"], r["low"], r["high"]) for r in own])
            points = sorted([*points, (1.0, 0.0, 0.0, 0.0)])
            points = [point for point in points if math.isfinite(point[1])]
            x, y = [p[0] for p in points], [p[1] for p in points]
            axes.plot(x, y, marker="o", markersize=3, color=colors[group], label=group)
            for where, _, low, high in points:
                if math.isfinite(low):
                    axes.plot([where, where], [low, high], color=colors[group], alpha=0.5)
        axes.axhline(0, color="#777777", linewidth=0.8)
        axes.set_xscale("log", base=2)
        ticks = sorted({1.0, *MULTIPLIERS})
        axes.set_xticks(ticks, [f"×{tick:g}" for tick in ticks])
        axes.set_title(optimizer, fontsize=10)
        axes.set_xlabel("multiplier of the learning rate")
    panels[0].set_ylabel("change of the final loss, nats")
    panels[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.suptitle(title, fontsize=11)
    return figure
