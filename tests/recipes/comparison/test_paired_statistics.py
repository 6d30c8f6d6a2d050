"""Means, paired differences and steps to a target, against scipy and by hand."""

import math
import random

import pytest
import scipy.stats

from recipes.comparison.paired_statistics import (
    estimate,
    holm_levels,
    mean_crossing,
    p_value,
    paired_difference,
    steps_to_target,
    verdict,
    verdicts,
)


def test_estimate_agrees_with_scipy():
    values = [2.1, 2.4, 1.9, 2.2, 2.05]
    got = estimate(values).at(0.9)
    error = scipy.stats.sem(values)
    low, high = scipy.stats.t.interval(0.9, 4, loc=sum(values) / 5, scale=error)
    assert got == pytest.approx((sum(values) / 5, error, low, high, 5))


def test_paired_difference_agrees_with_scipy_and_not_with_the_unpaired_one():
    ours, theirs = {1: 2.0, 2: 3.1, 3: 4.05, 4: 1.0}, {3: 4.15, 2: 3.2, 1: 2.12, 4: 1.09}
    got = paired_difference(ours, theirs)
    test = scipy.stats.ttest_rel([ours[s] for s in (1, 2, 3, 4)], [theirs[s] for s in (1, 2, 3, 4)])
    interval = test.confidence_interval()
    assert (got.low, got.high) == pytest.approx((interval.low, interval.high))
    assert verdict(got) == "better"
    assert got.mean / got.error == pytest.approx(test.statistic)
    assert scipy.stats.ttest_ind(list(ours.values()), list(theirs.values())).pvalue > 0.5


def test_one_seed_has_no_interval_and_no_verdict():
    got = estimate([2.0])
    assert got.mean == 2.0
    assert math.isnan(got.low)
    assert verdict(got) == "unclear"


def test_verdicts():
    assert verdict(estimate([0.1, 0.11, 0.12])) == "worse"
    assert verdict(estimate([-0.1, 0.2, 0.0])) == "unclear"
    assert verdict(paired_difference({1: math.inf, 2: 2.0}, {1: 2.0, 2: 2.0})) == "diverged"
    assert verdict(paired_difference({1: 1.0, 2: 2.0}, {1: math.inf, 2: 2.0})) == "unclear"


def test_p_values_are_those_of_scipy():
    generator = random.Random(0)
    for count in (2, 3, 5, 9):
        values = [generator.gauss(0.3, 1) for _ in range(count)]
        assert p_value(estimate(values)) == pytest.approx(
            scipy.stats.ttest_1samp(values, 0).pvalue, rel=1e-9
        )
    assert (
        p_value(estimate([1.0]))
        == p_value(estimate([math.inf, 1.0]))
        == p_value(estimate([0.0, 0.0]))
        == 1
    )
    assert p_value(estimate([1.0, 1.0])) == 0


def test_holm_is_between_no_correction_and_bonferroni():
    def rejected(p_values):
        return [name for name, level in holm_levels(p_values).items() if p_values[name] <= level]

    assert rejected({"a": 0.01, "b": 0.02, "c": 0.04}) == ["a", "b", "c"]
    assert holm_levels({"a": 0.01, "b": 0.02, "c": 0.04})["a"] == pytest.approx(0.05 / 3)
    assert rejected({"a": 0.02, "b": 0.02, "c": 0.02}) == []
    assert rejected({"a": 0.001, "b": 0.03, "c": 0.04}) == ["a"]  # "c" alone would pass at 0.05
    assert holm_levels({}) == {}


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_called_better_whose_corrected_interval_touches_zero(seed):
    draw = random.Random(seed)
    differences = {
        name: estimate([draw.gauss(-0.7, 1) for _ in range(5)]) for name in ("a", "b", "c", "d")
    }
    levels = holm_levels({name: p_value(value) for name, value in differences.items()})
    for name, said in verdicts(differences).items():
        corrected = differences[name].at(1 - levels[name])
        assert (
            (said == "better")
            == (corrected.high < 0)
            == (p_value(differences[name]) <= levels[name] and corrected.mean < 0)
        )
        assert corrected.low <= differences[name].low
        assert corrected.high >= differences[name].high


def test_a_steps_to_target_is_linear_in_the_logarithm():
    losses = {100: 4.0, 200: 3.0, 800: 1.0}  # slopes 1 a doubling
    assert steps_to_target(losses, 3.5).steps == pytest.approx(100 * 2**0.5)
    assert steps_to_target(losses, 2.0).steps == pytest.approx(400)
    assert steps_to_target(losses, 3.0) == (200, "at")


def test_targets_outside_of_the_lengths_are_said_so():
    losses = {100: 4.0, 200: 3.0}
    assert steps_to_target(losses, 2.0) == (200, "after")
    assert steps_to_target(losses, 5.0) == (100, "before")
    assert steps_to_target({100: math.inf, 200: 3.0}, 3.5) == (
        200,
        "before",
    )  # the shorter run diverged: a bound
    assert steps_to_target({100: math.inf, 200: math.inf}, 3.5) == (200, "after")


def test_the_first_crossing_counts_when_longer_runs_get_worse():
    assert steps_to_target({100: 4.0, 200: 2.0, 400: 5.0}, 3.0).steps == pytest.approx(100 * 2**0.5)


def test_mean_crossing_is_geometric_and_keeps_bounds():
    reached = [steps_to_target({100: 4.0, 400: 2.0}, target) for target in (4.0, 2.0)]
    mean, kind = mean_crossing(reached)
    assert math.exp(mean.mean) == pytest.approx(200)
    assert kind == "at"
    never = steps_to_target({100: 4.0, 400: 2.0}, 1.0)
    assert mean_crossing([*reached, never])[1] == "after"
    assert mean_crossing([never, steps_to_target({100: 1.0}, 2.0)])[1] == "mixed"


def test_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="same"):
        paired_difference({1: 1.0}, {2: 1.0})
    with pytest.raises(ValueError, match="at least one"):
        estimate([])
    with pytest.raises(ValueError, match="at least one"):
        steps_to_target({}, 1.0)
