"""How the final loss depends on the learning rate of each role: runs, means over seeds, a picture.

A run is that of an arm with all scales 1, except for one group of roles whose learning rate is
multiplied. The difference to the run without it, with the same seed, is what block learning rates
can hope for at best: the ground truth that a curvature would have to predict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

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
MULTIPLIERS = (0.5, 2.0, 4.0)
OPTIMIZERS = {"block-muon": 1e-2, "block-adamw": 3e-3, "block-sgd": 0.3}  # and learning rates


@dataclass(frozen=True)
class Case:
    """One multiplier of one group of roles; None and 1 for the run without."""

    optimizer: str
    roles: str | None = None
    multiplier: float = 1.0


def cases(optimizer: str) -> list[Case]:
    """Return the run without multipliers, and those of every group of roles."""
    changed = [Case(optimizer, roles, m) for roles in ROLE_GROUPS for m in MULTIPLIERS]
    return [Case(optimizer), *changed]


def config(study: Study, case: Case, lr: float, seed: int) -> RunConfig:
    """Return the run of a case."""
    values = {"lr": lr, "weight_decay": 1e-3 if case.optimizer == "block-sgd" else 0.1}
    roles = () if case.roles is None else ROLE_GROUPS[case.roles]
    values |= {f"{role}_scale": case.multiplier for role in roles}
    return study.config(case.optimizer, values, TEST_SEED + seed, study.steps, "test")


def differences(
    finals: Mapping[tuple[Case, int], float], optimizer: str, seeds: int
) -> list[dict[str, Any]]:
    """Return the change of the loss by each multiplier: mean and 95 % interval over the seeds.

    Args:
        finals: The final loss of each case and seed.
        optimizer: Of the runs.
        seeds: How many seeds each case has.

    Example:
        >>> finals = {(case, 0): 3.0 for case in cases("block-sgd")}
        >>> finals[Case("block-sgd", "value", 2.0), 0] = 2.5
        >>> [row["mean"] for row in differences(finals, "block-sgd", 1) if row["roles"] == "value"]
        [0.0, -0.5, 0.0]
    """
    rows = []
    for case in cases(optimizer)[1:]:
        base = Case(optimizer)
        found = [finals[case, seed] - finals[base, seed] for seed in range(seeds)]
        mean = estimate(found) if all(map(math.isfinite, found)) else None
        low, high = (math.nan, math.nan) if mean is None else mean[2:4]
        row = {"optimizer": optimizer, "roles": case.roles, "multiplier": case.multiplier}
        row |= {"mean": math.inf if mean is None else mean.mean, "low": low, "high": high}
        rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], title: str) -> Figure:
    """Draw the change of the loss over the multiplier, one panel per optimizer."""
    optimizers = list(dict.fromkeys(row["optimizer"] for row in rows))
    figure = Figure(figsize=(4.2 * len(optimizers) + 1.6, 4.2), layout="constrained")
    panels = figure.subplots(1, len(optimizers), squeeze=False)[0]
    colors = dict(zip(ROLE_GROUPS, colormaps["tab10"].colors))
    for axes, optimizer in zip(panels, optimizers):
        for roles in ROLE_GROUPS:
            own = [r for r in rows if (r["optimizer"], r["roles"]) == (optimizer, roles)]
            points = sorted([(r["multiplier"], r["mean"], r["low"], r["high"]) for r in own])
            points = sorted([*points, (1.0, 0.0, 0.0, 0.0)])
            points = [point for point in points if math.isfinite(point[1])]
            x, y = [p[0] for p in points], [p[1] for p in points]
            axes.plot(x, y, marker="o", markersize=3, color=colors[roles], label=roles)
            for where, _, low, high in points:
                if math.isfinite(low):
                    axes.plot([where, where], [low, high], color=colors[roles], alpha=0.5)
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
