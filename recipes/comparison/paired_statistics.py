"""Means with standard errors, paired differences with intervals, and steps to a target loss."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy.stats import t as student


class Estimate(NamedTuple):
    """A mean over seeds.

    Attributes:
        mean: The mean; infinite if any value is.
        error: Its standard error; NaN for a single value.
        low: Lower end of the confidence interval; NaN for a single value.
        high: Upper end.
        count: How many values.
    """

    mean: float
    error: float
    low: float
    high: float
    count: int

    def at(self, confidence: float) -> Estimate:
        """Return the same mean with the t interval of another confidence."""
        if math.isnan(self.error):
            return self
        half = float(student.ppf(0.5 + confidence / 2, self.count - 1)) * self.error
        return self._replace(low=self.mean - half, high=self.mean + half)


class Crossing(NamedTuple):
    """The number of steps at which a loss is reached.

    Attributes:
        steps: Interpolated between two lengths; the shortest or longest length if it lies outside
            of them.
        kind: "at", "before" (the shortest run that did not diverge is already better) or "after"
            (not even the longest run reaches it).
    """

    steps: float
    kind: str


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean, standard error and 95 % interval; a diverged run makes the mean infinite.

    Example:
        >>> estimate([1.0, 2.0, 3.0]).mean
        2.0
    """
    if not values:
        raise ValueError("Invalid values=[]. Must hold at least one.")
    count = len(values)
    mean = math.fsum(values) / count if all(map(math.isfinite, values)) else math.inf
    if count == 1 or not math.isfinite(mean):
        return Estimate(mean, math.nan, math.nan, math.nan, count)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
    return Estimate(mean, error, mean, mean, count).at(0.95)


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate:
    """Estimate `values - baseline` seed by seed, so that what a seed does to both cancels.

    Args:
        values: `{seed: loss}`.
        baseline: The same for the baseline.

    Raises:
        ValueError: If the seeds differ.

    Example:
        >>> paired_difference({1: 2.0, 2: 3.0}, {1: 1.5, 2: 2.5}).mean
        0.5
    """
    if values.keys() != baseline.keys():
        raise ValueError(
            f"Invalid seeds {sorted(values)} against {sorted(baseline)}. Must be the same."
        )
    if not all(map(math.isfinite, baseline.values())):  # there is nothing to compare with
        return Estimate(math.nan, math.nan, math.nan, math.nan, len(values))
    return estimate([values[seed] - baseline[seed] for seed in values])


def verdict(difference: Estimate) -> str:
    """Return what an interval says: "better", "worse", "unclear" or "diverged".

    Example:
        >>> verdict(estimate([-0.1, -0.11, -0.12]))
        'better'
    """
    if difference.mean == math.inf:
        return "diverged"
    if difference.high < 0:
        return "better"
    return "worse" if difference.low > 0 else "unclear"


def p_value(difference: Estimate) -> float:
    """Return the p value of the two-sided t test that the mean is zero; 1 without an interval.

    Example:
        >>> round(p_value(estimate([0.1, 0.2, 0.3])), 4)
        0.0742
    """
    if not math.isfinite(difference.mean) or math.isnan(difference.error):
        return 1.0
    if difference.error == 0:
        return 1.0 if difference.mean == 0 else 0.0
    return 2 * float(student.sf(abs(difference.mean / difference.error), difference.count - 1))


def holm_levels(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return a level for each test so that all together err with probability 0.05 (Holm 1979).

    Example:
        >>> holm_levels({"a": 0.01, "b": 0.04, "c": 0.03})
        {'a': 0.016666666666666666, 'c': 0.025, 'b': 0.025}
    """
    levels: dict[str, float] = {}
    failed = False
    for done, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if not failed:  # after the first test that does not reject, none does
            current = 0.05 / (len(p_values) - done)
            failed = p > current
        levels[name] = current
    return levels


def verdicts(differences: Mapping[str, Estimate]) -> dict[str, str]:
    """Return what each difference says, with intervals that are corrected for their number.

    Example:
        >>> differences = {"a": estimate([-0.1, -0.2, -0.3]), "b": estimate([-0.1, -0.11, -0.12])}
        >>> verdicts(differences)
        {'b': 'better', 'a': 'unclear'}
    """
    levels = holm_levels({name: p_value(value) for name, value in differences.items()})
    return {name: verdict(differences[name].at(1 - level)) for name, level in levels.items()}


def steps_to_target(losses: Mapping[int, float], target: float) -> Crossing:
    """Return the steps of a whole run, with its own decay to zero, that ends at `target`.

    Between neighbouring lengths the final loss is taken to be linear in the logarithm of the number
    of steps. It is never a point inside a longer run, whose learning rate has not come down yet.

    Args:
        losses: `{steps of a whole run: its final loss}`.
        target: The loss to reach.

    Example:
        >>> steps_to_target({100: 3.0, 400: 1.0}, 2.0)
        Crossing(steps=200.0, kind='at')
        >>> steps_to_target({100: 3.0, 400: 1.0}, 0.5)
        Crossing(steps=400, kind='after')
    """
    if not losses:
        raise ValueError("Invalid losses={}. Must hold the final loss of at least one length.")
    lengths = sorted(losses)
    if losses[lengths[0]] <= target:
        return Crossing(lengths[0], "at" if losses[lengths[0]] == target else "before")
    for short, long in itertools.pairwise(lengths):
        if losses[long] <= target:  # so the shorter one is above
            drop = losses[short] - losses[long]
            if not math.isfinite(drop):  # the shorter run diverged, so only a bound is known
                return Crossing(long, "before")
            return Crossing(short * (long / short) ** ((losses[short] - target) / drop), "at")
    return Crossing(lengths[-1], "after")


def mean_crossing(crossings: Sequence[Crossing]) -> tuple[Estimate, str]:
    """Estimate the logarithm of the steps over seeds, and return its kind, too.

    The kind is "at" only if that of every seed is. Where some seeds do not reach the target, the
    mean is a bound: "after" (at least that many) or "before" (at most), or both, "mixed".
    """
    kinds = {crossing.kind for crossing in crossings} - {"at"}
    kind = kinds.pop() if len(kinds) == 1 else "mixed" if kinds else "at"
    return estimate([math.log(crossing.steps) for crossing in crossings]), kind
