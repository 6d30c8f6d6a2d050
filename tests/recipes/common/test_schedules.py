"""Schedules: against torch's own, at their corners, and what they refuse."""

import doctest
import itertools
import math

import pytest
import torch

from recipes.common import schedules
from recipes.common.schedules import SCHEDULES, schedule


def of_torch(make, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = make(optimizer), []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_doctests():
    assert doctest.testmod(schedules).failed == 0


def test_cosine_equals_torch():
    expected = of_torch(
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.1), 20
    )
    assert [schedule("cosine", step, 20, final=0.1) for step in range(20)] == pytest.approx(
        expected
    )


def test_linear_equals_torch():
    expected = of_torch(lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.25, 20), 20)
    assert [schedule("linear", step, 20, final=0.25) for step in range(20)] == pytest.approx(
        expected
    )


def test_wsd_is_flat_then_a_line():
    factors = [schedule("wsd", step, 100, warmup=10, decay=0.3) for step in range(100)]
    assert factors[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])
    assert set(factors[10:71]) == {1.0}
    assert factors[70:] == pytest.approx([1 - n / 30 for n in range(30)])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (2, 1), (50, 0), (50, 7), (50, 49)])
def test_all_rise_to_one_and_never_rise_again(name, steps, warmup):
    factors = [schedule(name, step, steps, warmup=warmup) for step in range(steps)]
    assert factors[:warmup] == pytest.approx([(n + 1) / warmup for n in range(warmup)])
    after = factors[max(warmup - 1, 0) :]
    assert after[0] == 1
    assert all(a >= b > 0 for a, b in itertools.pairwise(after))
    assert max(factors) == 1
    assert schedule(name, steps, steps, warmup=warmup) == pytest.approx(
        1 if name == "constant" else 0, abs=1e-15
    )


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_final_is_reached(name):
    assert schedule(name, 30, 30, warmup=3, final=0.1) == pytest.approx(0.1)
    assert schedule(name, 300, 30, warmup=3, final=0.1) == pytest.approx(
        0.1
    )  # and stays, beyond the end


def test_a_schedule_has_no_state():
    forward = [schedule("cosine", step, 9, warmup=2) for step in range(9)]
    assert [schedule("cosine", step, 9, warmup=2) for step in reversed(range(9))] == forward[::-1]
    assert all(math.isfinite(factor) for factor in forward)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "step"}, "Invalid schedule='step'"),
        ({"warmup": 10}, "warmup=10 of 10"),
        ({"warmup": -1}, "warmup=-1"),
        ({"step": -1}, "step=-1"),
        ({"name": "wsd", "decay": 0.0}, "decay=0.0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        schedule(**{"name": "linear", "step": 0, "steps": 10, **options})
