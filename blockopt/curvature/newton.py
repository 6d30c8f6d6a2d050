"""Curvature over slope along the last update: one over the step that lowers the loss most."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks, Level, block_groups, checked_blocks, sum_groups
from blockopt.measure.along_update import Method, along_update
from blockopt.measure.closures import Curvature, Losses

NEGLIGIBLE = 1e-7  # slopes that are smaller than this share of the largest are rounding of float32


def newton(
    model: nn.Module,
    losses: Losses,
    update: Mapping[str, Tensor],
    *,
    blocks: Mapping[str, Blocks] | None = None,
    scales: Mapping[str, Tensor] | None = None,
    by: Level = "role",
    method: Method = "secant",
) -> Curvature:
    """Return curvature over slope along the update: one over the step that lowers the loss most.

    From the weights before the update, the second-order model of a group of blocks is lowest at
    `-g·u / (H u)·u` times the step that was taken. Plain curvature does not know how much there is
    to gain: a block may be flat and already at its minimum. Both sums are taken over the group
    before they are divided, since those of a single block are noisy, and all blocks of a group get
    the same value. A group that the update does not improve beyond rounding counts as the sharpest
    one. If no group improves, all values are zero.

    Args:
        model: Any module; with `method="exact"` its parameters must be whole (not FSDP2).
        losses: As for `along_update`. The batch that made the update orders the blocks with less
            noise than a fresh one, but its slopes include what was gained on that batch alone; a
            fresh batch has unbiased slopes.
        update: `{parameter name: change}`, the weights now minus those before the step.
        blocks: What `find_blocks(model)` returns; found here by default.
        scales: The multipliers that the update was made with, `{parameter name: one per block}`.
            They are divided out, so that the result is that of the optimizer's own step.
        by: Which blocks form a group; see `block_scales`.
        method: See `along_update`.

    Returns:
        `{parameter name: curvature over slope of each block's group}`.

    Raises:
        ValueError: If the update does not fit the parameters, or if the method is "exact" and a
            parameter is sharded.

    Example:
        A step of -1/2 led the loss `9 w²` to w = 1. Three such steps would have reached the
        minimum:

        >>> model, x = nn.Linear(1, 1, bias=False), torch.tensor([[3.0]])
        >>> _ = nn.init.ones_(model.weight)
        >>> newton(model, lambda: model(x).square().sum(), {"weight": torch.tensor([[-0.5]])})
        {'weight': tensor([0.3333])}
    """
    blocks = checked_blocks(model, blocks)
    along = along_update(model, losses, update, blocks=blocks, method=method)
    labels, groups = block_groups(blocks, by)
    count = len(labels)
    row_sum = sum_groups(along.row_sum, groups, count)
    slope = sum_groups(along.slope, groups, count) - row_sum  # before the update
    values = curvature_over_slope(row_sum, slope, groups, scales)
    return {name: values[groups[name]].to(along.slope[name]) for name in blocks}


def curvature_over_slope(
    curvature: Tensor,
    slope: Tensor,
    groups: Mapping[str, Tensor],
    scales: Mapping[str, Tensor] | None,
) -> Tensor:
    """Return the ratio of each group of blocks, less its scale; see `newton`.

    Args:
        curvature: `u · H u` of each group.
        slope: `g · u` of each group before the update.
        groups: The group of each block, as `block_groups` returns it.
        scales: The multipliers that the update was made with, or None.
    """
    values = curvature / -slope
    if scales is not None:
        count = len(values)
        sizes = sum_groups({n: torch.ones_like(g) for n, g in groups.items()}, groups, count)
        logs = {name: scales[name].to("cpu", torch.float64).log() for name in groups}
        values = values / (sum_groups(logs, groups, count) / sizes).exp()
    # Softmax does not see a bias of the keys, whose gradient is rounding: so is any ratio from it.
    descends = slope < -NEGLIGIBLE * slope.abs().max()
    sharpest = values[descends].max() if bool(descends.any()) else values.new_zeros(())
    return torch.where(descends, values, sharpest)
