"""Checks of what is given: each raises `ValueError` with the value and what it must be."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise `ValueError` unless the value is one of those allowed."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(
            f"Invalid {name}={value!r}. Must be one of {', '.join(map(repr, allowed))}."
        )


def check_count(name: str, value: object, smallest: int = 1) -> None:
    """Raise `ValueError` unless the value is an integer of at least `smallest`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
        raise ValueError(f"Invalid {name}={value!r}. Must be an integer >= {smallest}.")


def check_range(name: str, value: float | Tensor, high: float = math.inf) -> None:
    """Raise `ValueError` unless 0 <= value < high."""
    if isinstance(value, Tensor) and value.ndim != 0:
        raise ValueError(
            f"Invalid {name} of shape {tuple(value.shape)}. A tensor must have no dimensions: "
            "torch.tensor(1e-3)."
        )
    if not 0.0 <= float(value) < high:
        bound = "finite and >= 0" if high == math.inf else f"in [0, {high})"
        raise ValueError(f"Invalid {name}={float(value)}. Must be {bound}.")


def check_is_model(function: str, model: object) -> None:
    """Check that a function was given a module, not its parameters.

    Example:
        >>> check_is_model("param_groups", nn.Linear(2, 2).parameters())
        Traceback (most recent call last):
            ...
        TypeError: param_groups takes the model, not a generator: param_groups(model).
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(f"{function} takes the model, not a {kind}: {function}(model).")
