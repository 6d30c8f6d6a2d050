"""Curvature over slope along the last update: one over the step that would have lowered the loss most."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks, Level, block_groups, sum_groups
from blockopt.measure.along_update import Method, along_update
from blockopt.measure.closures import Curvature, Losses, checked_blocks


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
    """Curvature along the update over the slope along it: one over the step that would have lowered the loss most.

    From the weights before the update, the second-order model of a group of blocks is lowest at
    `-g·u / (H u)·u` times the step that was taken. Plain curvature does not know how much there is
    to gain: a block may be flat and have arrived. Both sums are taken over the group before they
    are divided, since those of a single block are noisy, and all blocks of a group get the same
    value. A group that the update does not improve counts as the sharpest one; if none improves,
    all are zero.

    Args:
        model: Any module; with `method="exact"` its parameters must be whole (not FSDP2).
        losses: As for `along_update`. On the batch that made the update, slopes include what was
            gained on that batch alone: it orders the blocks with less noise than a fresh one, which
            in turn has slopes without bias.
        update: `{parameter name: change}`: the weights now minus those before the step.
        blocks: What `find_blocks(model)` returns; found here by default.
        scales: The multipliers that the update was made with, `{parameter name: tensor of
            num_blocks}`, which are divided out so that the result is that of the optimizer's own
            step.
        by: The groups, see `block_scales`.
        method: See `along_update`.

    Returns:
        `{parameter name: curvature over slope of each block's group}`.

    Raises:
        ValueError: If the update does not fit the parameters, or one is sharded and the method
            exact.

    Example:
        Loss `9 w²` at w = 1 after a step of -1/2: three such steps would have reached the minimum.

        >>> model, x = nn.Linear(1, 1, bias=False), torch.tensor([[3.0]])
        >>> _ = nn.init.ones_(model.weight)
        >>> newton(model, lambda: model(x).square().sum(), {"weight": torch.tensor([[-0.5]])})
        {'weight': tensor([0.3333])}
    """
    blocks = checked_blocks(model, blocks)
    along = along_update(model, losses, update, blocks=blocks, method=method)
    labels, groups = block_groups(blocks, by)
    after, row_sum = (
        sum_groups(part, groups, len(labels)) for part in (along.slope, along.row_sum)
    )
    slope = after - row_sum  # before the update
    values = row_sum / -slope
    if scales is not None:
        sizes = {name: torch.ones_like(groups[name], dtype=torch.float64) for name in blocks}
        logs = {name: scales[name].to("cpu", torch.float64).log() for name in blocks}
        values = (
            values
            / (sum_groups(logs, groups, len(labels)) / sum_groups(sizes, groups, len(labels))).exp()
        )
    descends = slope < 0
    values = (
        torch.where(descends, values, values[descends].max())
        if bool(descends.any())
        else torch.zeros_like(values)
    )
    return {name: values[groups[name]].to(along.slope[name]) for name in blocks}
