"""Learning rate schedules as one pure function of the step, so that there is nothing to save."""

from __future__ import annotations

import math

from blockopt.checks import check_choice

SCHEDULES = ("cosine", "linear", "wsd", "constant")


def schedule(
    name: str, step: int, steps: int, *, warmup: int = 0, final: float = 0.0, decay: float = 0.2
) -> float:
    """Return the factor of the peak learning rate in a step.

    All schedules warm up linearly, `(step + 1) / warmup`, and reach 1 at `step = warmup` at the
    latest. Then "cosine" and "linear" go down to `final` at the end; "wsd" stays at 1 and goes down
    in a line over the last part of the steps; "constant" stays at 1, for optimizers that average
    instead (schedulefree).

    Args:
        name: "cosine", "linear", "wsd" or "constant".
        step: Number of the step, from 0.
        steps: Length of the whole run.
        warmup: Steps of linear warm-up.
        final: Factor at the end, except for "constant".
        decay: Part of the steps in which "wsd" goes down.

    Raises:
        ValueError: If the name is unknown or a number is out of range.

    Example:
        >>> [schedule("linear", step, 6, warmup=2) for step in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
        >>> [round(schedule("cosine", step, 4), 3) for step in range(5)]
        [1.0, 0.854, 0.5, 0.146, 0.0]
        >>> [round(schedule("wsd", step, 10, decay=0.4), 2) for step in range(11)]
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    check_choice("schedule", name, SCHEDULES)
    if name == "wsd" and not 0 < decay <= 1:
        raise ValueError(f"Invalid decay={decay}. Must be in (0, 1], a part of the steps.")
    if not 0 <= warmup < max(steps, 1):
        raise ValueError(
            f"Invalid warmup={warmup} of {steps} steps. Must be >= 0 and less than steps."
        )
    if step < 0:
        raise ValueError(f"Invalid step={step}. Must be >= 0.")
    if step < warmup:
        return (step + 1) / warmup
    start = max(warmup, steps - max(1, round(decay * steps))) if name == "wsd" else warmup
    time = min(max((step - start) / max(steps - start, 1), 0.0), 1.0)  # from 0 to 1
    if name == "constant":
        return 1.0
    if name == "cosine":
        return final + (1 - final) * (1 + math.cos(math.pi * time)) / 2
    return 1 - (1 - final) * time
