"""A loop on accelerate: what it saves and loads with `save_state` is all that a run needs."""

import pytest
import torch
from accelerate import Accelerator

import blockopt
from tests.helpers.killed import killed_in_step
from tests.helpers.optimizers import OF_MODEL, assert_same_run, tiny_gpt, token_loss

STEPS, SAVE_EVERY = 8, 3


def train(kind, folder, *, resume=False):
    accelerator, model, start = Accelerator(cpu=True), tiny_gpt(), 0
    optimizer = OF_MODEL[kind](model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    block_lr = blockopt.BlockLR(optimizer, model, every=2)
    if resume:
        accelerator.load_state(folder)
        start = 3
    for step in range(start, STEPS):
        if step and step % SAVE_EVERY == 0:
            accelerator.save_state(folder)
        accelerator.backward(token_loss(model, seed=step))
        optimizer.step()
        schedule.step()
        block_lr.step(lambda step=step: token_loss(model, seed=step))
        optimizer.zero_grad()
    return accelerator.unwrap_model(model), block_lr


@pytest.mark.parametrize("kind", OF_MODEL)
@pytest.mark.filterwarnings("ignore:No block had a positive curvature")
def test_a_killed_loop_resumes_with_the_same_bits(kind, tmp_path):
    whole = train(kind, tmp_path / "whole")
    killed_in_step(6, lambda: train(kind, tmp_path / "killed"))
    assert_same_run(train(kind, tmp_path / "killed", resume=True), whole)
