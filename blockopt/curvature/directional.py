"""Curvature along the optimizer's last update, which is where training actually goes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks
from blockopt.measure.along_update import Method, along_update
from blockopt.measure.closures import Curvature, Losses


def directional(
    model: nn.Module,
    losses: Losses,
    update: Mapping[str, Tensor],
    *,
    blocks: Mapping[str, Blocks] | None = None,
    method: Method = "exact",
) -> Curvature:
    """Return the curvature of each block along the update, `(H u)_b · u_b / (u_b · u_b)`.

    It may be negative, and it includes the effect of the other blocks' updates. `along_update`
    explains the arguments and returns numerator and denominator.

    Example:
        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> update = {"weight": torch.tensor([[1.0, 0.0]])}
        >>> directional(model, lambda: model(x).square().sum(), update)
        {'weight': tensor([18.])}
    """
    along = along_update(model, losses, update, blocks=blocks, method=method)
    return {
        name: row / along.square[name].clamp(min=torch.finfo(row.dtype).tiny)
        for name, row in along.row_sum.items()
    }
