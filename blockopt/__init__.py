"""Hessian-aware, block-wise optimizers for transformers."""

from blockopt import curvature
from blockopt.block_lr import BlockLR
from blockopt.block_lr.scales import block_scales, sharpness_disparity, uniform
from blockopt.blocks import Blocks, Split, find_blocks, param_groups
from blockopt.blocks.describe import describe
from blockopt.blocks.split import block_sum, expand
from blockopt.measure.attention_capture import capture_attention
from blockopt.optim import BlockAdamW, BlockMuon, BlockSGD

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
