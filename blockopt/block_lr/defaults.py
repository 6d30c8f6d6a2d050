"""The constants of the rule from curvature to scales, in one place for all that default to them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from blockopt.optim import BlockSGD

CURVATURE = "newton"


class Rule(NamedTuple):
    """How scales follow the curvature.

    Attributes:
        every: Optimizer steps from one refresh to the next, which takes as long as two or so.
        power: The power of the curvature.
        bounds: The smallest and the largest scale.
        beta: The weight of the past in the smoothed scales, of which 1 is the first.
        rows: Whether the rows of tables differ, by how often their tokens stand in the text.
    """

    every: int = 150
    power: float = -0.5
    bounds: tuple[float, float] = (0.1, 10.0)
    beta: float = 0.9
    rows: bool = False


# Steps like those of Adam and Muon are of one size already. A step of SGD is as long as the
# gradient, so its scales divide by all of the curvature, which differs by orders of magnitude, and
# to find them late costs more than their noise.
USUAL, FOR_SGD = Rule(), Rule(every=75, power=-1.0, bounds=(1e-3, 1e3), beta=0.5, rows=True)


def rule_for(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the constants for an optimizer.

    Example:
        >>> rule_for(torch.optim.SGD([torch.zeros(1)])).power
        -1.0
    """
    if isinstance(optimizer, torch.optim.SGD):
        return FOR_SGD._replace(rows=False)  # it has one learning rate for each tensor
    return FOR_SGD if isinstance(optimizer, BlockSGD) else USUAL
