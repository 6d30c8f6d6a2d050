"""Learning rate schedules as pure functions of the step, so that there is nothing to save.

Each returns the factor of the peak learning rate in step `step` (from 0) of `steps`. All warm up
linearly, `(step + 1) / warmup` in step `step`, and reach 1 at `step = warmup` at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from blockopt.checks import check_choice

SCHEDULES = ("cosine", "linear", "wsd", "constant")


def cosine(step: int, steps: int, *, warmup: int = 0, final: float = 0.0) -> float:
    """Follow half a cosine from 1 after the warm-up to `final` at the end.

    Example:
        >>> [round(cosine(step, 4), 3) for step in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
    """
    return _decayed(
        step, steps, warmup, lambda t: final + (1 - final) * (1 + math.cos(math.pi * t)) / 2
    )


def linear(step: int, steps: int, *, warmup: int = 0, final: float = 0.0) -> float:
    """Follow a line from 1 after the warm-up to `final` at the end.

    Example:
        >>> [linear(step, 6, warmup=2) for step in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return _decayed(step, steps, warmup, lambda t: 1 - (1 - final) * t)


def wsd(step: int, steps: int, *, warmup: int = 0, final: float = 0.0, decay: float = 0.2) -> float:
    """Warm up, stay at 1, decay: a line to `final` over the last part `decay` of the steps.

    Example:
        >>> [round(wsd(step, 10, decay=0.4), 2) for step in range(11)]
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if not 0 < decay <= 1:
        raise ValueError(f"Invalid decay={decay}. Must be in (0, 1], a part of the steps.")
    start = max(warmup, steps - max(1, round(decay * steps)))
    return _decayed(step, steps, warmup, lambda t: 1 - (1 - final) * t, start)


def constant(step: int, steps: int, *, warmup: int = 0) -> float:
    """Stay at 1 after the warm-up, for optimizers that average instead (schedulefree).

    Example:
        >>> [constant(step, 4, warmup=2) for step in range(4)]
        [0.5, 1.0, 1.0, 1.0]
    """
    return _decayed(step, steps, warmup, lambda t: 1.0)


def schedule(
    name: str, step: int, steps: int, *, warmup: int = 0, final: float = 0.0, decay: float = 0.2
) -> float:
    """Return the factor of the schedule of this name.

    Args:
        name: "cosine", "linear", "wsd" or "constant".
        step: Number of the step, from 0.
        steps: Length of the whole run.
        warmup: Steps of linear warm-up.
        final: Factor at the end, except for "constant".
        decay: Part of the steps in which "wsd" decays.

    Raises:
        ValueError: If the name is unknown or a number is out of range.

    Example:
        >>> schedule("linear", 5, 10)
        0.5
    """
    if name == "cosine":
        return cosine(step, steps, warmup=warmup, final=final)
    if name == "linear":
        return linear(step, steps, warmup=warmup, final=final)
    if name == "wsd":
        return wsd(step, steps, warmup=warmup, final=final, decay=decay)
    check_choice("schedule", name, SCHEDULES)
    return constant(step, steps, warmup=warmup)


def _decayed(
    step: int, steps: int, warmup: int, factor: Callable[[float], float], start: int | None = None
) -> float:
    """Return the warm-up, or `factor` of the time, which runs from 0 at `start` to 1 at the end."""
    if not 0 <= warmup < max(steps, 1):
        raise ValueError(
            f"Invalid warmup={warmup} of {steps} steps. Must be >= 0 and less than steps."
        )
    if step < 0:
        raise ValueError(f"Invalid step={step}. Must be >= 0.")
    if step < warmup:
        return (step + 1) / warmup
    start = warmup if start is None else start
    return factor(min(max((step - start) / max(steps - start, 1), 0.0), 1.0))
