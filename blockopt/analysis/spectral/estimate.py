"""Estimates from random probes: a number, its standard error, and the products that it took."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor


class Estimate(NamedTuple):
    """A number, its standard error, and how many products `A @ v` it took.

    The standard error is 0 if the number is exact, and infinite if it comes from one probe.
    """

    value: float
    standard_error: float
    num_products: int


def standard_error(values: Tensor) -> float:
    """Return the standard error of the mean of the values, infinity for a single one."""
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.inf


def from_probes(values: Tensor, exact: bool) -> Estimate:
    """Return the mean over random probes, or the exact sum over all unit vectors.

    Example:
        >>> import torch
        >>> from_probes(torch.tensor([1.0, 2.0, 3.0]), exact=True)
        Estimate(value=6.0, standard_error=0.0, num_products=3)
    """
    if exact:
        return Estimate(float(values.sum()), 0.0, len(values))
    return Estimate(float(values.mean()), standard_error(values), len(values))


def total(estimates: list[Estimate]) -> Estimate:
    """Return the sum of independent estimates.

    Example:
        >>> total([Estimate(1.0, 3.0, 10), Estimate(2.0, 4.0, 10)])
        Estimate(value=3.0, standard_error=5.0, num_products=20)
    """
    values, errors, products = zip(*estimates)
    return Estimate(sum(values), math.hypot(*errors), sum(products))


def root(squared: Estimate) -> Estimate:
    """Return the square root, with its standard error to first order."""
    value = math.sqrt(max(squared.value, 0.0))
    error = squared.standard_error / (2 * value) if value > 0 else 0.0
    return Estimate(value, error, squared.num_products)
