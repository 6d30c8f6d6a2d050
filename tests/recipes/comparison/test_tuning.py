"""Tuning: every arm spends exactly its budget, and grids extend until the best lies inside."""

import math

import pytest

from recipes.comparison.arms import ARMS
from recipes.comparison.tuning import Axis, tune


def searched(loss, axes, budget):
    search = tune(axes, budget)
    points = next(search)
    while True:
        try:
            points = search.send([loss(**point) for point in points])
        except StopIteration as stop:
            return stop.value


@pytest.mark.parametrize("budget", [1, 2, 5, 6, 12, 25])
def test_every_arm_spends_exactly_its_budget(budget):
    for arm in ARMS.values():
        best = {axis.name: axis.start * 3 for axis in arm.space}

        def loss(best=best, **values):
            return sum(math.log(values[name] / best[name]) ** 2 for name in values)

        tuned = searched(loss, arm.space, budget)
        points = [tuple(trial.values.items()) for trial in tuned.trials]
        assert len(points) == len(set(points)) == budget
        assert tuned.loss == min(trial.loss for trial in tuned.trials)


def test_the_grid_extends_until_the_best_lies_inside():
    tuned = searched(lambda lr: abs(math.log(lr / 40)), [Axis("lr", 1e-3)], 14)
    assert tuned.best["lr"] == pytest.approx(40, rel=0.5)  # five factors of 4 from the start
    assert tuned.edges == ()
    cut = searched(lambda lr: abs(math.log(lr / 40)), [Axis("lr", 1e-3)], 5)
    assert cut.edges == ("lr",)
    assert cut.best["lr"] == max(trial.values["lr"] for trial in cut.trials)
    down = searched(lambda lr: abs(math.log(lr / 1e-6)), [Axis("lr", 1e-3)], 14)
    assert down.best["lr"] == pytest.approx(1e-6, rel=0.5)


def test_the_grid_refines_to_a_root_of_two():
    tuned = searched(lambda lr: math.log(lr / 0.0042) ** 2, [Axis("lr", 1e-3)], 10)
    assert abs(math.log(tuned.best["lr"] / 0.0042)) < math.log(2) / 4 + 1e-9


def test_other_axes_are_tuned_and_those_that_were_not_are_named():
    def loss(lr, power):
        return math.log(lr / 2e-3) ** 2 + math.log(-power / 0.1) ** 2

    axes = [Axis("lr", 1e-3), Axis("power", -0.5)]
    tuned = searched(loss, axes, 20)
    assert -0.16 < tuned.best["power"] < -0.06
    assert tuned.untried == ()
    assert searched(loss, axes, 3).untried == ("power",)


def test_late_axes_wait_for_the_finer_learning_rate():
    seen = []

    def loss(**values):
        seen.append(values)
        return math.log(values["lr"] / 1e-3) ** 2 + math.log(values["power"] / -0.5) ** 2

    searched(loss, [Axis("lr", 1e-3), Axis("power", -0.5), Axis("decay", 0.1, late=True)], 9)
    changed = [
        "".join(name[0] for name in values if values[name] != seen[0][name]) for values in seen
    ]
    assert changed == ["", "l", "l", "p", "p", "l", "l", "d", "d"]
    assert seen[5]["lr"] == pytest.approx(5e-4)


def test_near_the_best_there_are_no_factors_of_four():
    search = tune([Axis("lr", 1e-3)], 3, near=True)
    seen = [*next(search), *search.send([2.0])]
    assert [values["lr"] for values in seen] == [1e-3, 5e-4, 2e-3]


def test_diverged_trials_send_the_search_down():
    tuned = searched(lambda lr: math.inf if lr > 1e-5 else 1.0 + lr, [Axis("lr", 1.0)], 14)
    assert tuned.best["lr"] <= 1e-5
    assert searched(lambda lr: math.nan, [Axis("lr", 1.0)], 5).loss == math.inf


def test_no_axis_and_no_budget_are_refused():
    for axes, budget in (([], 3), ([Axis("lr", 1.0)], 0)):
        with pytest.raises(ValueError, match="at least one axis and one trial"):
            next(tune(axes, budget))
