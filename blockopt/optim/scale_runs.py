"""Stretches of rows that share a block scale, so that torch's fused kernels can take scaled steps.

Scales by role are a handful of numbers. The rows of a parameter that share one are a contiguous
view, and all views of one scale go into one call of the kernel, with `lr * scale`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

from torch import Tensor

from blockopt.blocks import Blocks, expand
from blockopt.distributed import local, local_part

# Entries per stretch, below which views cost more than they save; a few of them never do.
SHORTEST, FEW = 1 << 15, 4


class ScaleRun(NamedTuple):
    """Rows `start` to `start + length` of the local part of a parameter, and their scale."""

    start: int
    length: int
    scale: float


def scale_runs(scale: Tensor, blocks: Blocks, parameter: Tensor) -> list[ScaleRun] | None:
    """Return the stretches of one scale, or None if they are not rows or too short to pay.

    This waits for the device, so call it when scales are set and not in every step.
    """
    part = local(parameter)
    scale = scale.cpu()
    values = scale.tolist()
    if len(set(values)) == 1:
        return [ScaleRun(0, part.shape[0] if part.ndim else 1, values[0])]
    if blocks.split is None or blocks.split.dim != 0:
        return None
    rows = local_part(expand(scale, blocks.split, parameter.ndim), parameter).flatten()
    if len(rows) == 0:  # a parameter with fewer rows than ranks
        return []
    starts = [0, *((rows[1:] != rows[:-1]).nonzero().flatten() + 1).tolist()]
    if len(starts) > FEW and part.numel() < SHORTEST * len(starts):
        return None
    ends = [*starts[1:], len(rows)]
    pairs = zip(starts, ends, rows[starts].tolist())
    return [ScaleRun(start, end - start, value) for start, end, value in pairs]


def by_scale(
    runs: Iterable[list[ScaleRun] | None], columns: Sequence[Sequence[Tensor]]
) -> tuple[dict[float, list[list[Tensor]]], list[int]]:
    """Return `{scale: columns}` with a view for each stretch, and the rows that have none.

    Args:
        runs: The stretches of each parameter.
        columns: Tensors of the shape of each parameter's local part.
    """
    found: dict[float, list[list[Tensor]]] = {}
    others = []
    for number, (stretches, row) in enumerate(zip(runs, zip(*columns))):
        if stretches is None:
            others.append(number)
            continue
        lengths = [run.length for run in stretches]
        cut = [t.split(lengths) if len(lengths) > 1 and t.ndim else repeat(t) for t in row]
        for run, *views in zip(stretches, *cut):
            lists = found.get(run.scale)
            if lists is None:
                lists = found[run.scale] = [[] for _ in row]
            for some, view in zip(lists, views):
                some.append(view)
    return found, others
