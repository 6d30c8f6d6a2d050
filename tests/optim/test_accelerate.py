"""`accelerator.prepare` round-trips the state before the first step, and wraps the optimizer."""

import copy

import pytest
from accelerate import Accelerator

import blockopt
from tests.helpers.optimizers import (
    OPTIMIZERS,
    assert_same_weights,
    random_scales,
    tiny_gpt,
    token_loss,
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_prepared_optimizer_equals_plain(name, tmp_path):
    plain, prepared = tiny_gpt(), tiny_gpt()
    a, b = (
        OPTIMIZERS[name](blockopt.param_groups(plain)),
        OPTIMIZERS[name](blockopt.param_groups(prepared)),
    )
    a.set_block_scales(random_scales(a))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(prepared, b)
    b.set_block_scales(random_scales(b))

    def steps(which):
        for step in which:
            with accelerator.accumulate(model):
                accelerator.backward(token_loss(model, seed=step))
                optimizer.step()
                optimizer.zero_grad()

    steps(range(4))
    accelerator.save_state(tmp_path)
    steps(range(4, 6))
    trained = copy.deepcopy(accelerator.unwrap_model(model))
    accelerator.load_state(tmp_path)
    steps(range(4, 6))
    assert_same_weights(trained, accelerator.unwrap_model(model))
    for step in range(3):
        a.zero_grad()
        for micro in range(2):
            (token_loss(plain, seed=2 * step + micro) / 2).backward()
        a.step()
    assert_same_weights(plain, trained, rtol=1e-5, atol=1e-6)
