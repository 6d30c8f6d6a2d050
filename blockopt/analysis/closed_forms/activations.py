"""Activation functions with their first two derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from blockopt.checks import check_choice

Activation = Literal["identity", "relu", "gelu", "gelu_tanh", "silu"]


def activation_derivatives(z: Tensor, activation: Activation) -> tuple[Tensor, Tensor, Tensor]:
    """Return act(z), act'(z) and act''(z); the last is 0 for ReLU, which is right except at 0.

    Example:
        >>> activation_derivatives(torch.tensor([0.0]), "silu")
        (tensor([0.]), tensor([0.5000]), tensor([0.5000]))
    """
    check_choice("activation", activation, ACTIVATIONS)
    return ACTIVATIONS[activation](z)


def _identity(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return z, torch.ones_like(z), torch.zeros_like(z)


def _relu(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return z.relu(), (z > 0).to(z), torch.zeros_like(z)


def _gelu(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    distribution = 0.5 * torch.erfc(-z / math.sqrt(2))  # erfc keeps the digits of the lower tail
    density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
    return z * distribution, distribution + z * density, density * (2 - z.square())


def _gelu_tanh(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    root, cubic = math.sqrt(2 / math.pi), 0.044715
    t = (root * (z + cubic * z**3)).tanh()
    slope, bend = root * (1 + 3 * cubic * z.square()), 6 * root * cubic * z
    s = 1 - t.square()
    first = 0.5 * (1 + t) + 0.5 * z * s * slope
    second = s * slope + 0.5 * z * s * (bend - 2 * t * slope.square())
    return 0.5 * z * (1 + t), first, second


def _silu(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = z.sigmoid()
    return z * s, s * (1 + z * (1 - s)), s * (1 - s) * (2 + z * (1 - 2 * s))


ACTIVATIONS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "identity": _identity,
    "relu": _relu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}
