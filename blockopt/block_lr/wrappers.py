"""The optimizer inside of what `accelerate` and others put around it."""

from __future__ import annotations

from typing import Any

import torch


def unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside of what `accelerate` and others put around it.

    Raises:
        TypeError: If it is not a `torch.optim.Optimizer`.
    """
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(
        optimizer, "_optimizer_step_post_hooks"
    ):
        raise TypeError(
            f"Invalid optimizer of type {type(optimizer).__name__}. Must be a "
            "torch.optim.Optimizer, for its hooks."
        )
    return optimizer
