"""A loop in the style of nanoGPT: it writes the lr of every group, and saves one dictionary."""

import math

import pytest
import torch

import blockopt
from tests.helpers.killed import killed_in_step
from tests.helpers.optimizers import OF_MODEL, TINY, assert_same_run, tiny_gpt

STEPS, ACCUMULATION, SAVE_EVERY = 8, 2, 3


def get_batch(step, micro):
    generator = torch.Generator().manual_seed(step * ACCUMULATION + micro)
    tokens = torch.randint(TINY.vocab_size, (4, TINY.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def get_lr(step, lr):
    if step < 2:
        return lr * (step + 1) / 2
    return lr * 0.5 * (1 + math.cos(math.pi * (step - 2) / (STEPS - 2)))


def train(kind, path, *, resume=False):
    model, start = tiny_gpt(), 0
    optimizer = OF_MODEL[kind](model)
    lr = optimizer.param_groups[0]["lr"]
    if resume:
        checkpoint = torch.load(path, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["step"]
        assert start == 3
    block_lr = blockopt.BlockLR(optimizer, model, every=2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(start, STEPS):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step, lr)
        if step and step % SAVE_EVERY == 0:
            checkpoint = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(checkpoint, path)
        for micro in range(ACCUMULATION):
            X, Y = get_batch(step, micro)
            scaler.scale(model(X, Y) / ACCUMULATION).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        block_lr.step(lambda X=X, Y=Y: model(X, Y))
        optimizer.zero_grad(set_to_none=True)
    return model, block_lr


@pytest.mark.parametrize("kind", OF_MODEL)
@pytest.mark.filterwarnings("ignore:No block had a positive curvature")
def test_a_killed_loop_resumes_with_the_same_bits(kind, tmp_path):
    whole = train(kind, tmp_path / "whole.pt")
    killed_in_step(6, lambda: train(kind, tmp_path / "killed.pt"))
    assert_same_run(train(kind, tmp_path / "killed.pt", resume=True), whole)
