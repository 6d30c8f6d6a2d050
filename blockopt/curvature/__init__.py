"""Curvature of the blocks, one estimator per file, and the table of what each of them needs.

Each estimator returns `{parameter name: mean curvature of each block}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks, Level
from blockopt.curvature.analytic import analytic
from blockopt.curvature.directional import directional
from blockopt.curvature.gauss_newton import gauss_newton
from blockopt.curvature.gradient import gradient
from blockopt.curvature.hutchinson import hutchinson
from blockopt.curvature.newton import newton
from blockopt.curvature.power_law import power_law
from blockopt.curvature.successive_gradients import SlopesAlongUpdates, successive_gradients
from blockopt.curvature.top_eigenvalue import top_eigenvalue
from blockopt.measure.along_update import AlongUpdate, along_update
from blockopt.measure.closures import Curvature, Losses


class Request(NamedTuple):
    """All that an estimator may be given; each takes what it needs.

    Attributes:
        model: The model.
        blocks: Its blocks.
        losses: Loss closures, empty for estimators that need none.
        update: The last change of each parameter, empty for estimators that need none.
        slopes: Slopes along updates at the points that followed, empty for estimators that need
            none.
        scales: The multipliers that the update was made with.
        by: Which blocks share a scale.
        num_probes: Samples per batch.
        generator: Draws the samples.
        known: What an estimator keeps from one refresh to the next, with the same loss function.
    """

    model: nn.Module
    blocks: Mapping[str, Blocks]
    losses: Losses
    update: Mapping[str, Tensor]
    slopes: Mapping[str, list[float]]
    scales: Mapping[str, Tensor]
    by: Level
    num_probes: int
    generator: torch.Generator
    known: dict[Any, Any]


class Estimator(NamedTuple):
    """How to measure curvature by name, and what that takes.

    Attributes:
        measure: Makes the estimate.
        gradients: What it costs per batch, in gradient evaluations, rounded up.
        needs_loss: Whether it runs the model on a batch.
        needs_update: Whether it looks along the optimizer's last update.
        works_sharded: Whether it can measure FSDP2 and tensor-parallel models.
        needs_slopes: Whether it needs slopes that are collected while the optimizer steps.
    """

    measure: Callable[[Request], Curvature]
    gradients: int
    needs_loss: bool = True
    needs_update: bool = False
    works_sharded: bool = False
    needs_slopes: bool = False


ESTIMATORS = {
    "newton": Estimator(
        lambda r: newton(r.model, r.losses, r.update, blocks=r.blocks, scales=r.scales, by=r.by),
        gradients=2,
        needs_update=True,
        works_sharded=True,
    ),
    "secant": Estimator(
        lambda r: directional(r.model, r.losses, r.update, blocks=r.blocks, method="secant"),
        gradients=2,
        needs_update=True,
        works_sharded=True,
    ),
    "directional": Estimator(
        lambda r: directional(r.model, r.losses, r.update, blocks=r.blocks, method="exact"),
        gradients=4,
        needs_update=True,
    ),
    "gauss_newton": Estimator(
        lambda r: gauss_newton(
            r.model, r.losses, blocks=r.blocks, num_probes=r.num_probes, generator=r.generator
        ),
        gradients=1,
        works_sharded=True,
    ),
    "analytic": Estimator(
        lambda r: analytic(
            r.model,
            r.losses,
            blocks=r.blocks,
            num_probes=r.num_probes,
            generator=r.generator,
            known=r.known,
        ),
        gradients=2,
    ),
    "hutchinson": Estimator(
        lambda r: hutchinson(
            r.model, r.losses, blocks=r.blocks, num_probes=r.num_probes, generator=r.generator
        ),
        gradients=4,
    ),
    "top_eigenvalue": Estimator(
        lambda r: top_eigenvalue(
            r.model, r.losses, blocks=r.blocks, by=r.by, generator=r.generator
        ),
        gradients=180,
    ),
    "successive_gradients": Estimator(
        lambda r: successive_gradients(r.slopes, r.blocks, scales=r.scales, by=r.by),
        gradients=0,
        needs_loss=False,
        works_sharded=True,
        needs_slopes=True,
    ),
    "gradient": Estimator(
        lambda r: gradient(r.model, blocks=r.blocks),
        gradients=0,
        needs_loss=False,
        works_sharded=True,
    ),
    "power_law": Estimator(
        lambda r: power_law(r.model, blocks=r.blocks),
        gradients=0,
        needs_loss=False,
        works_sharded=True,
    ),
}

__all__ = [
    "ESTIMATORS",
    "AlongUpdate",
    "Estimator",
    "Request",
    "SlopesAlongUpdates",
    "along_update",
    "analytic",
    "directional",
    "gauss_newton",
    "gradient",
    "hutchinson",
    "newton",
    "power_law",
    "successive_gradients",
    "top_eigenvalue",
]
