"""The constants of the rule from curvature to scales, in one place for all that default to them."""

from __future__ import annotations

import torch

from blockopt.optim import BlockSGD

CURVATURE = "newton"
EVERY = 150  # optimizer steps from one refresh to the next, which takes as long as two or so
POWER = -0.5  # of the curvature
BOUNDS = (0.1, 10.0)  # of a scale
BETA = 0.9  # the weight of the past in the smoothed scales, of which 1 is the first
FADE = None  # optimizer steps after which all scales are 1 again; None for never
# A step of SGD is as long as the gradient, so its scales divide by all of the curvature, which
# differs by orders of magnitude. Steps like those of Adam and Muon are of one size already.
SGD_POWER = -1.0
SGD_BOUNDS = (1e-3, 1e3)


def power_and_bounds(optimizer: torch.optim.Optimizer) -> tuple[float, tuple[float, float]]:
    """The power of the curvature and the bounds of the scales for an optimizer.

    Example:
        >>> power_and_bounds(torch.optim.SGD([torch.zeros(1)]))
        (-1.0, (0.001, 1000.0))
    """
    if isinstance(optimizer, (BlockSGD, torch.optim.SGD)):
        return SGD_POWER, SGD_BOUNDS
    return POWER, BOUNDS
