"""Hessian-aware, block-wise optimizers for transformers."""

from blockopt import curvature
from blockopt.attention import capture_attention
from blockopt.block_lr import BlockLR
from blockopt.blocks import Blocks, Split, find_blocks, param_groups
from blockopt.describe import describe
from blockopt.optim import BlockAdamW, BlockMuon, BlockSGD
from blockopt.scaling import block_scales, sharpness_disparity, uniform
from blockopt.split import block_sum, expand

__version__ = "0.1.0"

__all__ = [
    "BlockAdamW",
    "BlockLR",
    "BlockMuon",
    "BlockSGD",
    "Blocks",
    "Split",
    "block_scales",
    "block_sum",
    "capture_attention",
    "curvature",
    "describe",
    "expand",
    "find_blocks",
    "param_groups",
    "sharpness_disparity",
    "uniform",
]
