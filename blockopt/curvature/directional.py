"""Curvature along the optimizer's last update, which is where training actually goes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks, block_numel, checked_blocks
from blockopt.measure.along_update import Method, along_update
from blockopt.measure.closures import Curvature, Losses

NEGLIGIBLE = 1e-12  # mean squares of updates below this share of the largest are rounding


def directional(
    model: nn.Module,
    losses: Losses,
    update: Mapping[str, Tensor],
    *,
    blocks: Mapping[str, Blocks] | None = None,
    method: Method = "exact",
) -> Curvature:
    """Return the curvature of each block along the update, `(H u)_b · u_b / (u_b · u_b)`.

    It may be negative, and it includes the effect of the other blocks' updates. It is zero for
    blocks that have not moved beyond rounding. `along_update` explains the arguments and returns
    numerator and denominator.

    Example:
        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> update = {"weight": torch.tensor([[1.0, 0.0]])}
        >>> directional(model, lambda: model(x).square().sum(), update)
        {'weight': tensor([18.])}
    """
    blocks = checked_blocks(model, blocks)
    along = along_update(model, losses, update, blocks=blocks, method=method)
    moved = {
        name: square / block_numel(tuple(update[name].shape), blocks[name].split).to(square)
        for name, square in along.square.items()
        if name in update
    }
    # Softmax does not see a bias of the keys, whose updates are rounding: so is any ratio of them.
    smallest = NEGLIGIBLE * max(float(squares.max()) for squares in moved.values())
    curvature = {name: torch.zeros_like(row) for name, row in along.row_sum.items()}
    for name, squares in moved.items():
        ratio = along.row_sum[name] / along.square[name]
        curvature[name] = torch.where(squares > smallest, ratio, curvature[name])
    return curvature
