"""How well the curvature estimators order the blocks of a small GPT."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.lib.estimators import MEASURED, Curvature
from benchmarks.lib.exact_curvature import Matrix, Point, exact_curvature, pooled
from blockopt.blocks import Level, block_groups
from blockopt.curvature import Request
from blockopt.curvature.power_law import EXPONENTS

LEVELS: tuple[Level, ...] = get_args(Level)
ROUNDING = 1e-12  # of the largest value: less is an exact zero, such as the bias of the keys
PROBES = (1, 16)


@dataclass(frozen=True)
class Judged:
    """How an estimator is judged.

    Attributes:
        name: Its name in `MEASURED`.
        own: The matrix whose curvature it estimates.
        samples: Whether it draws samples. The order of tensors has a target for those that do.
        relative: Whether its values are known only up to a constant.
        roles: The roles that it is judged on; all by default.
        levels: The groups of blocks that are compared. Those of the largest eigenvalue do not add
            up, so that it is measured for each tensor and compared there.
    """

    name: str
    own: Matrix
    samples: bool = False
    relative: bool = False
    roles: Collection[str] | None = None
    levels: tuple[Level, ...] = LEVELS


JUDGED = (
    Judged("analytic", "GN", samples=True),
    Judged("gauss_newton", "GN", samples=True),
    Judged("analytic, full", "H", samples=True),
    Judged("hutchinson", "H", samples=True),
    Judged("gradient", "GN", relative=True),
    Judged("power_law", "H", relative=True),
    Judged("power_law", "H", relative=True, roles=EXPONENTS),
    Judged("directional", "H"),
    Judged("secant", "H"),
    Judged("top_eigenvalue", "λ_max", levels=("tensor",)),
)


def judge(point: Point, seeds: int, advance: Callable[[str], None]) -> dict[str, Any]:
    """Return how every estimator compares with the exact curvature, and the values of all tensors.

    Args:
        point: Where to measure.
        seeds: How many seeds each estimator that samples gets.
        advance: Called after each unit of work, `amount_of_work` times.
    """
    exact = exact_curvature(point, advance)
    functional = measure("analytic, functional", point)
    # The limits of what estimators of the Gauss-Newton matrix and of both parts can reach.
    limits = {
        "GN": exact["GN"],
        "GN + functional": {name: value + functional[name] for name, value in exact["GN"].items()},
    }
    about = {"probes": None, "of": "H", "default": False}
    rows = [
        {"name": name, **about, **compare([limit], exact["H"], point)}
        for name, limit in limits.items()
    ]
    values = {name: pooled(found, point, "tensor").tolist() for name, found in exact.items()}
    for judged in JUDGED:
        name = judged.name if judged.roles is None else f"{judged.name}, matrices"
        for probes in PROBES if judged.samples else (None,):
            tries = range(seeds if judged.samples else 1)
            by = judged.levels[0]
            estimates = [measure(judged.name, point, probes or 1, seed, by) for seed in tries]
            about = {"name": name, "probes": probes, "default": probes == 1}
            for of in dict.fromkeys([judged.own, "H"]):
                compared = compare(estimates, exact[of], point, judged)
                rows.append({**about, "of": of, **compared})
            if probes in (None, 1):
                values[name] = pooled(estimates[0], point, "tensor").tolist()
    groups, _ = block_groups(point.blocks, "tensor")
    tensors = [{"name": str(group), "role": group.role} for group in groups]
    return {"loss": point.loss().item(), "rows": rows, "tensors": tensors, "values": values}


def measure(
    name: str, point: Point, num_probes: int = 1, seed: int = 0, by: Level = "role"
) -> Curvature:
    """Return the mean curvature of each block, as an estimator finds it."""
    ones = {name: torch.ones(blocks.num_blocks) for name, blocks in point.blocks.items()}
    request = Request(
        model=point.model,
        blocks=point.blocks,
        losses=point.loss,
        update=point.update,
        slopes={},
        scales=ones,
        by=by,
        num_probes=num_probes,
        generator=torch.Generator().manual_seed(seed),
        known={},
    )
    point.loss().backward()  # "gradient" reads the gradients
    found = MEASURED[name](request)
    point.model.zero_grad()
    return found


def compare(
    estimates: Sequence[Curvature], exact: Curvature, point: Point, judged: Judged | None = None
) -> dict[str, Any]:
    """Return rank correlations at each level, and ratios to the exact values over tensors."""
    roles = None if judged is None else judged.roles
    levels = {}
    for by in LEVELS if judged is None else judged.levels:
        truth = pooled(exact, point, by, roles)
        found = [rank_correlation(pooled(e, point, by, roles), truth) for e in estimates]
        levels[by] = {"mean": sum(found) / len(found), "min": min(found)}
    truth = pooled(exact, point, "tensor", roles)
    usable = truth > ROUNDING * truth.max()
    ratios = torch.cat([(pooled(e, point, "tensor", roles) / truth)[usable] for e in estimates])
    low, middle, high = ratios.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=ratios.dtype)).tolist()
    unit = middle if judged is not None and judged.relative else 1.0
    ratio = {"median": middle / unit, "low": low / unit, "high": high / unit}
    return {"rank": levels, "ratio": ratio}


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's rank correlation."""
    return torch.corrcoef(torch.stack([ranks(x), ranks(y)]))[0, 1].item()


def ranks(values: Tensor) -> Tensor:
    """Return ranks from 0, where ties get their mean. Values that are zero but for rounding tie."""
    rounded = values.where(values.abs() > ROUNDING * values.abs().max(), 0.0)
    _, places, counts = torch.unique(rounded, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts + 1) / 2).double()[places]
