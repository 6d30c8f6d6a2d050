"""How norms grow with the scale σ of the data: power laws, measured on any model."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from blockopt.checks import check_count
from blockopt.tables import aligned

Label = TypeVar("Label", bound=Hashable)
Measure = Callable[[float, int], Mapping[Label, Tensor | float]]


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


@dataclass(frozen=True)
class Growth(Generic[Label]):
    """Norms at several scales, and the exponents with which they grow; printed, a table of them.

    Attributes:
        scales: (S,) the scales σ, ascending.
        norms: `{label: (R, S) norms of R repeats}`. A label is a string, or a `BlockPart`.
    """

    scales: Tensor
    norms: dict[Label, Tensor]

    def mean(self) -> dict[Label, Tensor]:
        """Return `{label: (S,) mean over the repeats}`."""
        return {label: values.mean(0) for label, values in self.norms.items()}

    def standard_error(self) -> dict[Label, Tensor]:
        """Return `{label: (S,) standard error of that mean}`, NaN for one repeat."""
        nan = torch.full_like(self.scales, math.nan)
        return {
            label: values.std(0) / math.sqrt(len(values)) if len(values) > 1 else nan
            for label, values in self.norms.items()
        }

    def exponents(self, low: float = 0.0, high: float = math.inf) -> dict[Label, Exponent]:
        """Return the exponent of each label over `low <= σ < high`, by `fit_exponent`.

        Labels with a norm of zero are left out. The paper calls σ < 1 the practical range.
        """
        chosen = self._range(low, high)
        return {
            label: fit_exponent(self.scales[chosen], values[:, chosen])
            for label, values in self.norms.items()
            if bool((values[:, chosen] > 0).all())
        }

    def local_slopes(self) -> dict[Label, Tensor]:
        """Return `{label: (S - 1,) slopes of the means}`, constant where a power law holds."""
        steps = self.scales.log().diff()
        return {label: values.log().diff() / steps for label, values in self.mean().items()}

    def differences(
        self, predicted: Mapping[Label, float], low: float = 0.0, high: float = math.inf
    ) -> dict[Label, float]:
        """Return the measured minus the predicted exponent of each label that has both."""
        found = self.exponents(low, high)
        return {k: e.value - predicted[k] for k, e in found.items() if k in predicted}

    def table(
        self,
        predicted: Mapping[Label, float] | None = None,
        low: float = 0.0,
        high: float = math.inf,
    ) -> str:
        """Return one line per label: norms at both ends, exponent, error and predicted exponent."""
        found, means, chosen = self.exponents(low, high), self.mean(), self._range(low, high)
        ends = self.scales[chosen][[0, -1]].tolist()
        rows = [["label", *(f"σ={end:g}" for end in ends), "exponent", "error"]]
        if predicted:
            rows[0].append("predicted")
        for label, values in means.items():
            row = [str(label), *(f"{value:.3g}" for value in values[chosen][[0, -1]].tolist())]
            exponent = found.get(label)
            row += ["-", "-"]
            if exponent is not None:
                row[-2:] = f"{exponent.value:.3f}", f"{exponent.standard_error:.2g}"
            if predicted:
                row.append(f"{predicted[label]:g}" if label in predicted else "-")
            rows.append(row)
        return aligned(rows)

    def __str__(self) -> str:
        return self.table()

    def _range(self, low: float, high: float) -> Tensor:
        chosen = (self.scales >= low) & (self.scales < high)
        if int(chosen.sum()) < 2:
            raise ValueError(
                f"Invalid range {low} <= σ < {high}. Must hold at least two of the scales "
                f"{self.scales.tolist()}."
            )
        return chosen


def growth(
    measure: Measure[Label], scales: Sequence[float] | Tensor, *, repeats: int = 1
) -> Growth[Label]:
    """Measure norms at each scale, several times.

    Args:
        measure: `measure(σ, seed)` returns `{label: norm}`, with all random numbers drawn from the
            seed.
        scales: The scales σ to measure at.
        repeats: How often to measure, with the seeds 0 to `repeats - 1`.

    Raises:
        ValueError: If there is nothing to measure, or the labels change.

    Example:
        >>> found = growth(lambda sigma, seed: {"value": 2 * sigma**2}, [0.1, 1.0])
        >>> print(found.table({"value": 2}))
        label  σ=0.1  σ=1  exponent  error  predicted
        value   0.02    2     2.000    nan          2
    """
    check_count("repeats", repeats)
    ordered = torch.as_tensor(scales, dtype=torch.float64).unique()
    if len(ordered) < 2 or not bool((ordered > 0).all()):
        raise ValueError(
            f"Invalid scales={ordered.tolist()}. Must be at least two different ones, all positive."
        )
    found = [
        [{k: float(v) for k, v in measure(sigma, seed).items()} for sigma in ordered.tolist()]
        for seed in range(repeats)
    ]
    labels = found[0][0].keys()
    for entry in (entry for row in found for entry in row):
        if entry.keys() != labels:
            wrong = sorted(str(label) for label in entry.keys() ^ labels)[:3]
            raise ValueError(
                f"Invalid measure: {wrong} are labels at some scales or seeds only. They must "
                "always be the same."
            )
        wrong = sorted(str(label) for label, norm in entry.items() if not math.isfinite(norm))[:3]
        if wrong:
            raise ValueError(
                f"Invalid measure: the norms of {wrong} are not finite at some scale. Use smaller "
                "scales."
            )
    norms = {
        label: torch.tensor([[entry[label] for entry in row] for row in found], dtype=torch.float64)
        for label in labels
    }
    return Growth(ordered, norms)
