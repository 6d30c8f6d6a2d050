"""Errors raised while curvature is measured that may be gone the next time.

`BlockLR` keeps its scales and goes on after one of these, and after a lack of memory. Everything
else is a mistake in code and is raised at once.
"""


class TransientError(Exception):
    """Something that the next batch may well cure."""


class NoLossError(TransientError, TypeError):
    """A loss closure returned None, or did not call the model."""


class NonFiniteError(TransientError, FloatingPointError):
    """A loss or a curvature is not finite."""


class NotPositiveError(TransientError, ValueError):
    """No group of blocks has a positive curvature, as may happen where the loss is not convex."""


class OtherRankError(TransientError, RuntimeError):
    """Another rank has failed in a way that may pass, and this one stops with it."""


class LostRankError(RuntimeError):
    """A rank has failed where the others wait for it, so that they cannot go on together."""


def may_pass(error: Exception) -> bool:
    """Whether the next attempt may well succeed; a mistake in code will not pass."""
    if isinstance(error, LostRankError):
        return False
    if isinstance(error, (TransientError, MemoryError)):
        return True
    signs = ("out of memory", "can't allocate memory")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
