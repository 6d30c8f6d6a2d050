"""From curvature to learning rates: scales, and `BlockLR`, which keeps them up to date."""

from blockopt.block_lr.block_lr import BlockLR, CurvatureFunction
from blockopt.block_lr.history import History, Refresh, ScaleTable
from blockopt.block_lr.scales import block_scales, sharpness_disparity, uniform

__all__ = [
    "BlockLR",
    "CurvatureFunction",
    "History",
    "Refresh",
    "ScaleTable",
    "block_scales",
    "sharpness_disparity",
    "uniform",
]
