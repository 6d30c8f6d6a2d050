"""Errors raised while curvature is measured that may be gone the next time.

`BlockLR` keeps its scales and goes on after one of these, and after a lack of memory. Everything
else is a mistake in code and is raised at once.
"""


class TransientError(Exception):
    """Something that the next batch may well cure."""


class NoLossError(TransientError, TypeError):
    """A loss closure returned something that is not a loss."""


class NonFiniteError(TransientError, FloatingPointError):
    """A loss or a curvature is not finite."""


class NotPositiveError(TransientError, ValueError):
    """No group of blocks has a positive curvature, as may happen where the loss is not convex."""
