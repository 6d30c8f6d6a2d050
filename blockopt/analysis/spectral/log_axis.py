"""Distributions of eigenvalues as curves: on a symmetric log axis, and smoothed."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def symmetric_log(values: Tensor, threshold: float) -> Tensor:
    """Return `sign(x) · log10(1 + |x| / threshold)`, linear near 0 and logarithmic beyond.

    Example:
        >>> symmetric_log(torch.tensor([-18.0, 0.0, 198.0]), threshold=2.0)
        tensor([-1.,  0.,  2.])
    """
    if not threshold > 0:
        raise ValueError(
            f"Invalid threshold={threshold}. Must be > 0: the magnitude below which eigenvalues "
            "count as small."
        )
    return values.sign() * torch.log10(1 + values.abs() / threshold)


def smoothed(nodes: Tensor, weights: Tensor, grid: Tensor, width: float) -> Tensor:
    """Return `Σ weights · N(grid; nodes, width²)`: each node as a normal density."""
    if not width > 0:
        raise ValueError(
            f"Invalid width={width}. Must be > 0: a hundredth of the range of the grid is a "
            "good start."
        )
    distance = (grid.to(nodes)[..., None] - nodes) / width
    peaks = torch.exp(-0.5 * distance.square()) @ weights
    return peaks / (width * math.sqrt(2 * math.pi))
