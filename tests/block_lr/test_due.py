"""When BlockLR refreshes: which optimizer steps count."""

import math

import pytest
import torch

import blockopt
from blockopt.block_lr import BlockLR
from tests.helpers.block_lr import attached, take_step
from tests.helpers.optimizers import tiny_gpt, token_loss

pytestmark = pytest.mark.filterwarnings("ignore:No block had a positive curvature")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every": 1}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"every": 3}, [1, 4, 7]),
        ({"every": 3, "warmup": 2}, [3, 6]),
        ({"every": 2, "warmup": 3}, [4, 6, 8]),
        ({"every": 100}, [1]),
        ({"every": 1, "warmup": 8}, []),
    ],
)
def test_refreshes_follow_the_steps_that_are_due(options, expected):
    model, optimizer, block_lr = attached(**options)
    called = []
    for number in range(1, 9):
        take_step(model, optimizer, number)
        for _ in range(2):  # a second call after the same step does nothing
            block_lr.step(
                lambda number=number: called.append(number) or token_loss(model, 10 + number)
            )
    assert called == expected
    assert [refresh.step for refresh in block_lr.history] == expected
    assert block_lr.num_steps == 8


def test_a_refresh_that_became_due_between_two_calls_is_made_up_for():
    model, optimizer, block_lr = attached(every=3)
    for number in range(1, 9):
        take_step(model, optimizer, number)
        if number in (2, 3, 6, 8):
            block_lr.step(lambda: token_loss(model))
    assert [refresh.step for refresh in block_lr.history] == [2, 6, 8]


def test_nothing_happens_without_an_optimizer_step():
    model, optimizer, block_lr = attached(every=1)
    for micro_batch in range(6):
        token_loss(model, micro_batch).backward()
        if micro_batch % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        block_lr.step(lambda: token_loss(model))
    assert block_lr.num_steps == 2
    assert len(block_lr.history) == 2


def autocast_loss(model, seed):
    with torch.autocast("cpu", torch.bfloat16):
        return token_loss(model, seed)


@pytest.mark.parametrize("optimizer_name", ["block", "torch", "fused"])
def test_steps_that_a_grad_scaler_leaves_out_do_not_count(optimizer_name):
    model = tiny_gpt()
    optimizer = {
        "block": lambda: blockopt.BlockAdamW(blockopt.param_groups(model), lr=1e-2),
        "torch": lambda: torch.optim.AdamW(blockopt.param_groups(model), lr=1e-2, foreach=True),
        "fused": lambda: torch.optim.AdamW(blockopt.param_groups(model), lr=1e-2, fused=True),
    }[optimizer_name]()
    block_lr = BlockLR(optimizer, model, every=2, curvature="secant")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(6):
        optimizer.zero_grad()
        scaler.scale(autocast_loss(model, number)).backward()
        if number in (0, 3):
            model.wpe.weight.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        block_lr.step(lambda: autocast_loss(model, 9))
    assert block_lr.num_steps == 4
    assert [refresh.step for refresh in block_lr.history] == [1, 3]
    assert block_lr.failures == 0


@pytest.mark.filterwarnings("ignore:Non-finite gradient")
@pytest.mark.parametrize("curvature", ["gauss_newton", "secant"])
def test_steps_that_the_optimizer_refuses_do_not_count(curvature):
    model = tiny_gpt()
    optimizer = blockopt.BlockAdamW(blockopt.param_groups(model), lr=1e-2, nonfinite="skip")
    block_lr = BlockLR(optimizer, model, curvature=curvature, every=1)
    for number in range(4):
        optimizer.zero_grad()
        (token_loss(model, number) * (math.inf if number in (1, 2) else 1)).backward()
        optimizer.step()
        block_lr.step(lambda: token_loss(model, 9))
    assert optimizer.nonfinite_steps == 2
    assert block_lr.num_steps == 2
    assert [refresh.step for refresh in block_lr.history] == [1, 2]


def test_a_step_that_raises_does_not_count():
    model, optimizer, block_lr = attached(every=1)
    token_loss(model).backward()
    model.wpe.weight.grad[0, 0] = math.nan
    with pytest.raises(FloatingPointError):
        optimizer.step()
    block_lr.step(lambda: token_loss(model))
    assert block_lr.num_steps == 0
    take_step(model, optimizer)
    assert block_lr.num_steps == 1
