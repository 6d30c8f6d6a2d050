"""Hessian-aware, block-wise optimizers for transformers."""

from blockopt import curvature
from blockopt.block_lr import BlockLR, block_scales, sharpness_disparity, uniform
from blockopt.blocks import Blocks, Split, block_sum, describe, expand, find_blocks, param_groups
from blockopt.measure.attention_capture import capture_attention
from blockopt.optim import BlockAdamW, BlockMuon, BlockSGD, regroup_state_dict

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 (grouped by what they are for)
    # the blocks of a model
    "find_blocks",
    "param_groups",
    "describe",
    "Blocks",
    "Split",
    "block_sum",
    "expand",
    # optimizers
    "BlockAdamW",
    "BlockMuon",
    "BlockSGD",
    "regroup_state_dict",
    # a learning rate for every block
    "BlockLR",
    "block_scales",
    "uniform",
    "sharpness_disparity",
    # what is measured
    "curvature",
    "capture_attention",
]
