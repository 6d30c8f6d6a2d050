"""Refreshes that have failed: counted, told once, and an error if they do not end."""

from __future__ import annotations

import warnings

from blockopt.errors import NotPositiveError

ALLOWED_IN_A_ROW = 2


class FailedRefreshes:
    """The count of failed refreshes of a `BlockLR`, which keeps its scales meanwhile.

    Args:
        count: How many there have been.
        in_a_row: How many since the last success, without those that found no positive curvature.
    """

    def __init__(self, count: int = 0, in_a_row: int = 0) -> None:
        self.count, self.in_a_row = count, in_a_row
        self._not_positive_in_a_row = 0

    def end(self) -> None:
        """Note a success."""
        self.in_a_row = self._not_positive_in_a_row = 0

    def note(self, error: Exception, num_steps: int) -> None:
        """Count a failure; warn the first time it matters, and raise if it does not end.

        Raises:
            RuntimeError: If this is the third in a row.
        """
        self.count += 1
        if isinstance(error, NotPositiveError):
            self._not_positive_in_a_row += 1
            if self._not_positive_in_a_row == 2:  # one is common at the start, and says nothing
                warnings.warn(
                    f"No block had a positive curvature at the last two refreshes (step "
                    f"{num_steps}), so the block learning rates stay as they are. If that goes "
                    "on, measure on a larger batch, or pass curvature='gauss_newton', which is "
                    "never negative.",
                    stacklevel=4,
                )
            return
        self.in_a_row += 1
        cause = f"{type(error).__name__}: {error}".rstrip(".") + "."
        if self.in_a_row > ALLOWED_IN_A_ROW:
            raise RuntimeError(
                f"{self.in_a_row} refreshes of the block learning rates in a row have failed, the "
                f"last after step {num_steps}. {cause}"
            ) from error
        if self.count == 1:
            warnings.warn(
                f"The refresh of the block learning rates after step {num_steps} has failed, and "
                f"they stay as they are. {cause} Later failures are counted in "
                f"block_lr.failures without a warning; {ALLOWED_IN_A_ROW + 1} in a row raise.",
                stacklevel=4,
            )
