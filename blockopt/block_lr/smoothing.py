"""From noisy measurements of the scales to those that are applied: smoothed and shrunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Smoothing:
    r"""Running means of the logarithms of the scales, which are drawn towards 0, a scale of 1.

    With :math:`x` the logarithm of a measured scale, :math:`m \leftarrow \beta m + (1 - \beta) x`
    begins at 0: a single measurement, which may be mostly noise, moves a scale by a share of
    :math:`1 - \beta` only. From the second on, the spread of the measurements tells their noise. If
    :math:`\mu` is their weighted mean and :math:`\sigma^2` its variance, the mean is multiplied by
    :math:`\mu^2 / (\mu^2 + \sigma^2)`: what cannot be told from 0 stays near it.

    Args:
        beta: The weight of the past, in [0, 1); 0 takes each measurement as it is.

    Example:
        >>> smoothing = Smoothing(beta=0.5)
        >>> smoothing.add({"w": torch.tensor([1.0, 1.0])})
        >>> smoothing.logs()["w"]
        tensor([0.5000, 0.5000], dtype=torch.float64)
        >>> smoothing.add({"w": torch.tensor([1.0, -1.0])})  # the second block is all noise
        >>> smoothing.logs()["w"]
        tensor([ 0.7500, -0.0227], dtype=torch.float64)
    """

    def __init__(self, beta: float) -> None:
        self._beta = beta
        self._mean: dict[str, Tensor] = {}
        self._square: dict[str, Tensor] = {}
        self._count: dict[str, int] = {}

    def add(self, logs: Mapping[str, Tensor]) -> None:
        """Take in the logarithms of measured scales, `{parameter name: one per block}`."""
        for name, new in logs.items():
            new, zero = new.double(), torch.zeros(len(new), dtype=torch.float64)
            mean, square = self._mean.get(name, zero), self._square.get(name, zero)
            self._mean[name] = self._beta * mean + (1 - self._beta) * new
            self._square[name] = self._beta * square + (1 - self._beta) * new.square()
            self._count[name] = self._count.get(name, 0) + 1

    def logs(self) -> dict[str, Tensor]:
        """The smoothed and shrunk logarithms."""
        return {name: mean * self._trust(name) for name, mean in self._mean.items()}

    def _trust(self, name: str) -> Tensor:
        """`mean² / (mean² + variance of the mean)`, 1 where there is no telling yet."""
        beta, count = self._beta, self._count[name]
        total = 1 - beta**count  # the weights of all measurements
        squares = (1 - beta) / (1 + beta) * (1 - beta ** (2 * count))  # the sum of their squares
        number = total**2 / squares  # of equally weighted measurements with the same noise
        mean = self._mean[name] / total
        if number - 1 < 1e-9:
            return torch.ones_like(mean)
        spread = (self._square[name] / total - mean.square()).clamp(min=0)
        signal = mean.square()
        return torch.where(signal > 0, signal / (signal + spread / (number - 1)), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and tensors by parameter name."""
        return {
            name: [self._count[name], self._mean[name].clone(), self._square[name].clone()]
            for name in self._mean
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._count = {name: entry[0] for name, entry in state.items()}
        self._mean = {name: entry[1].clone() for name, entry in state.items()}
        self._square = {name: entry[2].clone() for name, entry in state.items()}
