"""The optimizers, and checkpoints that go from one to another."""

from blockopt.optim.adamw import BlockAdamW
from blockopt.optim.base import BLOCK_LR, BlockOptimizer
from blockopt.optim.muon import BlockMuon
from blockopt.optim.regroup import regroup_state_dict, unwrapped_name
from blockopt.optim.sgd import BlockSGD

__all__ = [
    "BLOCK_LR",
    "BlockAdamW",
    "BlockMuon",
    "BlockOptimizer",
    "BlockSGD",
    "regroup_state_dict",
    "unwrapped_name",
]
