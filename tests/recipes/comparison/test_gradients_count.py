"""An arm that takes more gradients per step must show its gain in gradients."""

import math
from concurrent.futures import Future
from dataclasses import replace

import pytest

from recipes.comparison.rows import compared
from recipes.comparison.summary import headline, sentences
from tests.recipes.comparison.test_compare import made_up, outcomes_of, study_of


@pytest.mark.parametrize("shown", [False, True])
def test_an_arm_that_takes_more_gradients_must_be_better_in_these_too(shown):
    def submit(config):
        ours = config.arm == "block-adamw+newton"
        future, lower = Future(), (0.05 + 1e-3 * (config.seed % 2)) if ours else 0.0
        run = made_up(config)
        slope = 0.06 if shown else 1.5  # how much loss half as many steps cost
        final = 3 - lower - slope * math.log(config.steps / 100) + 1e-3 * (config.seed % 3)
        future.set_result(replace(run, final=final))
        return future

    study = study_of("adamw", "block-adamw+newton")
    comparison = compared(study, outcomes_of(study, submit), {})
    newton = comparison.row("block-adamw+newton")
    assert newton.verdict == "better"
    assert newton.gradient_evaluations > comparison.baseline.gradient_evaluations
    said = " ".join(sentences(comparison))
    better = newton.evaluations.verdict == "fewer"
    assert ("Better than AdamW: block-adamw+newton" in said) == better
    assert ("not shown for the same gradients" in said) != better
    assert headline(comparison).startswith("block-adamw" if better else "No optimizer is shown")
    assert better == shown
