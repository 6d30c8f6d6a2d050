"""Losses, gradients and weights that are not finite stop a run, which says where they are."""

import doctest
import math

import pytest
import torch

from recipes import train
from recipes.common.checkpoints import Checkpoints
from recipes.common.gpt2 import GPT2, GPT2Config
from recipes.common.optimizers import build_optimizer
from recipes.training import nonfinite
from recipes.training.nonfinite import nonfinite_blocks
from tests.helpers.training import flags, losses_of, read_log, run


def broken(patch, step, name, index):
    """From a step on, the gradient of one entry is not a number."""
    backward = train.Run.backward
    count = iter(range(1, 99))

    def spoiled(self, micro_batches):
        loss = backward(self, micro_batches)
        if next(count) >= step:
            dict(self.model.named_parameters())[name].grad[index] = math.nan
        return loss

    patch.setattr(train.Run, "backward", spoiled)


@pytest.mark.parametrize("optimizer", ["block-adamw", "adamw"])
def test_not_a_number_stops_the_run_and_says_where(optimizer, tmp_path, cache, monkeypatch):
    broken(
        monkeypatch, 6, "h.1.attn.c_attn.weight", (16 + 8, 3)
    )  # row 24: the second head of the key
    arguments = flags(tmp_path, cache, f"--steps 9 --checkpoint-every 2 --optimizer {optimizer}")
    with pytest.raises(FloatingPointError) as caught:
        run(arguments)
    message = str(caught.value)
    assert "Step 6" in message
    assert "1 gradients are not finite" in message
    assert "gradient h.1.attn.c_attn.weight: key 1\n" in message
    assert f"{tmp_path / 'checkpoints' / 'step-00000004.pt'}, of step 4" in message
    lines = read_log(tmp_path / "log.jsonl")
    assert lines[-1]["kind"] == "nonfinite"
    assert lines[-1]["step"] == 6
    assert "start in another --output with a lower --lr" in message
    monkeypatch.undo()
    resumed = run([*arguments, "--resume"])
    assert list(losses_of(resumed)) == list(range(1, 10))


def test_a_loss_that_is_no_number_names_the_weights(tmp_path, cache, monkeypatch):
    make = train.make_run

    def spoiled(*arguments):
        run = make(*arguments)
        with torch.no_grad():
            run.model.h[0].mlp.c_fc.weight[5, 0] = math.inf
        return run

    monkeypatch.setattr(train, "make_run", spoiled)
    with pytest.raises(
        FloatingPointError,
        match=r"(?s)Step 1: the loss is nan.*weight h\.0\.mlp\.c_fc\.weight: mlp_in 5\n.*none was",
    ):
        run(flags(tmp_path, cache, "--steps", 3))


def test_weights_that_are_no_numbers_are_not_kept(tmp_path, cache, monkeypatch):
    """A step may break the weights while its loss and gradients are fine."""
    step = train.Run.step
    count = iter(range(1, 99))

    def spoiled(self, *arguments):
        step(self, *arguments)
        if next(count) == 4:
            with torch.no_grad():
                self.model.ln_f.weight[3] = math.nan

    monkeypatch.setattr(train.Run, "step", spoiled)
    with pytest.raises(
        FloatingPointError,
        match=r"(?s)Step 4: 1 weights.*weight ln_f\.weight: norm\n.*step-00000002\.pt, of step 2",
    ):
        run(flags(tmp_path, cache, "--steps", 8, "--checkpoint-every", 2, "--eval-batches", 0))
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2]


def test_doctests():
    assert doctest.testmod(nonfinite).failed == 0


def test_many_blocks_are_counted():
    model = GPT2(GPT2Config(12, 5, 16, 2, 2))
    model.wte.weight.grad = torch.full_like(model.wte.weight, math.nan)
    model.ln_f.bias.grad = torch.full_like(model.ln_f.bias, math.inf)
    model.h[0].ln_1.weight.grad = torch.zeros(16)
    groups = build_optimizer("adamw", model, 1e-3).param_groups
    assert nonfinite_blocks(model, groups) == {
        "wte.weight": "12 of 12 blocks of embedding",
        "ln_f.bias": "norm",
    }
