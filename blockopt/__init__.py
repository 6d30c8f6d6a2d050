"""Hessian-aware, block-wise optimizers for transformers."""

from blockopt.blocks import Blocks, Split, find_blocks, param_groups
from blockopt.describe import describe
from blockopt.optim import BlockAdamW, BlockMuon, BlockSGD
from blockopt.split import block_sum, expand

__version__ = "0.1.0"

__all__ = [
    "BlockAdamW",
    "BlockMuon",
    "BlockSGD",
    "Blocks",
    "Split",
    "block_sum",
    "describe",
    "expand",
    "find_blocks",
    "param_groups",
]
