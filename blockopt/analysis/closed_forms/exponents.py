"""The exponent of a power law, fitted in a log-log plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Exponent(NamedTuple):
    """A power law `norm = e^intercept · σ^value`.

    Attributes:
        value: The exponent, the slope in the log-log plot.
        standard_error: The standard error of the exponent; NaN for one series of two scales.
        intercept: The logarithm of the norm at σ = 1.
    """

    value: float
    standard_error: float
    intercept: float


def fit_exponent(scales: Sequence[float] | Tensor, norms: Sequence[float] | Tensor) -> Exponent:
    """Fit the exponent with which norms grow: a line through `(log σ, log mean norm)`.

    Repeats are averaged before the logarithm, as in the paper. The standard error is then that of a
    jackknife over the repeats, which holds although the scales of one repeat share their random
    numbers; for a single series it is that of a regression with independent errors. The first says
    how far other draws would move the slope, the second how far the points are from a line. Neither
    says that the law itself holds.

    Args:
        scales: (S,) at least two different ones, positive.
        norms: (S,), or (R, S) for R repeats, positive.

    Raises:
        ValueError: If the shapes do not fit, or a number is not positive and finite.

    Example:
        >>> fit_exponent([1.0, 2.0, 4.0], [3.0, 12.0, 48.0]).value
        2.0
    """
    scales, norms = (
        torch.as_tensor(t, dtype=torch.float64).detach().cpu() for t in (scales, norms)
    )
    vectors = scales.ndim == 1 and norms.ndim in (1, 2)
    if not vectors or norms.shape[-1] != len(scales) or not norms.numel():
        given = f"{tuple(scales.shape)}, {tuple(norms.shape)}"
        raise ValueError(
            f"Invalid scales, norms of shapes {given}. Must be (scales,), and (scales,) or "
            "(repeats, scales)."
        )
    for what, values in (("scales", scales), ("norms", norms)):
        wrong = values[~(values > 0) | values.isinf()]
        if len(wrong):
            given = str(wrong[:3].tolist())
            raise ValueError(f"Invalid {what}: {given}. Must be positive and finite.")
    if len(scales.unique()) < 2:
        raise ValueError(f"Invalid scales={scales.tolist()}. Must be at least two different ones.")
    x = scales.log()
    centred = x - x.mean()
    weights = centred / centred.square().sum()  # their product with log norms is the slope
    repeats = norms.reshape(-1, len(x))
    y = repeats.mean(0).log()
    slope = torch.dot(weights, y)
    intercept = y.mean() - slope * x.mean()
    number = len(repeats)
    if number > 1:
        without_one = ((repeats.sum(0) - repeats) / (number - 1)).log() @ weights
        error = math.sqrt((number - 1) * float(without_one.var(correction=0)))
    elif len(x) > 2:
        variance = (y - intercept - slope * x).square().sum() / (len(x) - 2)
        error = float((variance * weights.square().sum()).sqrt())
    else:
        error = math.nan
    return Exponent(float(slope), error, float(intercept))
