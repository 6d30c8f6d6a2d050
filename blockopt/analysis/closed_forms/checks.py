"""Checks of what is given to the closed forms: parts, numbers of heads, tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from blockopt.checks import check_choice

Part = Literal["outer", "functional", "full"]


def check_part(part: str) -> None:
    """Raise `ValueError` unless `part` is one of "outer", "functional" and "full"."""
    check_choice("part", part, get_args(Part))


def check_number(name: str, value: object, count: int) -> None:
    """Raise `ValueError` unless the value is an integer from 0 to count - 1."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise ValueError(f"Invalid {name}={value!r}. Must be an integer from 0 to {count - 1}.")


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` unless all are finite, with the floating dtype and device of the first."""
    first, reference = next(iter(tensors.items()))
    if not reference.is_floating_point():
        raise ValueError(
            f"Invalid {first} of {reference.dtype}. Must be of floating point: {first}.double()."
        )
    for name, tensor in tensors.items():
        if tensor.dtype != reference.dtype or tensor.device != reference.device:
            raise ValueError(
                f"Invalid {name} of {tensor.dtype} on {tensor.device}. Must be as {first}, of "
                f"{reference.dtype} on {reference.device}: {name}.to({first})."
            )
        if tensor.numel() == 0:
            raise ValueError(f"Invalid {name} of shape {tuple(tensor.shape)}. Must not be empty.")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"Invalid {name}: it has entries that are not finite. Its Hessian would have them "
                "too."
            )
