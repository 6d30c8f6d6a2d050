"""The optimizers."""

from blockopt.optim.adamw import BlockAdamW
from blockopt.optim.base import BlockOptimizer
from blockopt.optim.muon import BlockMuon
from blockopt.optim.sgd import BlockSGD

__all__ = ["BlockAdamW", "BlockMuon", "BlockOptimizer", "BlockSGD"]
