"""The curvature estimators that are measured: all that `BlockLR` knows, and parts of `analytic`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from blockopt.curvature import ESTIMATORS, Request, analytic

Curvature = Mapping[str, Tensor]


def _analytic(request: Request, part: Any) -> Curvature:
    model, losses, blocks = request.model, request.losses, request.blocks
    probes = {"num_probes": request.num_probes, "generator": request.generator}
    return analytic(model, losses, blocks=blocks, part=part, known=request.known, **probes)


MEASURED: dict[str, Callable[[Request], Curvature]] = {
    **{name: e.measure for name, e in ESTIMATORS.items() if not e.needs_slopes},
    **{f"analytic, {part}": partial(_analytic, part=part) for part in ("full", "functional")},
}
