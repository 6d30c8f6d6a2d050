"""A step on an accelerator waits for nothing, can be recorded, and tells of bad gradients later.

The accelerator is a stand-in that computes on the CPU and raises when the host asks for a number.
"""

import math

import pytest
import torch

import blockopt
from blockopt.blocks import Split, to_plain
from tests.helpers.accelerator import (
    Accelerator,
    Graph,
    OnAccelerator,
    on_accelerator,
    waiting_allowed,
)
from tests.helpers.optimizers import OPTIMIZERS, random_gradients, random_scales, tiny_gpt


class Event:
    """An event of the device; what was copied before it is there when it is waited for."""

    waited = 0

    def __init__(self, device):
        pass

    def record(self):
        pass

    def synchronize(self):
        Event.waited += 1


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    monkeypatch.setattr("blockopt.optim.fused.FUSED_DEVICES", ("cpu", "meta"))
    monkeypatch.setattr("torch.Event", Event)
    with Accelerator():
        yield


@pytest.fixture(params=OPTIMIZERS)
def make(request):
    return OPTIMIZERS[request.param]


@pytest.fixture(params=[True, False], ids=["fused", "elementary"])
def fused(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr("blockopt.optim.fused.FUSED_DEVICES", ("cpu",))


def give_gradients(model, seed, bad=None):
    gradients = random_gradients(tiny_gpt(dtype=torch.float64), seed)
    if bad is not None:
        gradients["h.1.attn.c_attn.weight"][-1, -1] = bad
    for name, p in model.named_parameters():
        moved = isinstance(p, OnAccelerator)
        if p.grad is None:
            p.grad = OnAccelerator(gradients[name].clone()) if moved else gradients[name].clone()
        else:
            values(p.grad).copy_(gradients[name])


def values(x):
    return (x.values if isinstance(x, OnAccelerator) else x).detach()


def everything(model, optimizer):
    states = [optimizer.state[p] for p in model.parameters()]
    kept = [values(p).clone() for p in model.parameters()]
    return kept + [values(t).clone() for state in states for t in state.values()]


def make_pair(make, **options):
    plain, moved = tiny_gpt(dtype=torch.float64), on_accelerator(tiny_gpt(dtype=torch.float64))
    a, b = (make(blockopt.param_groups(m), **options) for m in (plain, moved))
    scales = random_scales(a)
    a.set_block_scales(scales)
    with waiting_allowed():
        b.set_block_scales(scales)
    return (plain, a), (moved, b)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("shortest", [1, 1 << 15])  # scales of rows, and entry by entry
def test_steps_wait_for_nothing_and_equal_those_of_the_cpu(make, shortest, monkeypatch):
    monkeypatch.setattr("blockopt.optim.scale_runs.SHORTEST", shortest)
    (plain, a), (moved, b) = make_pair(make)
    for step in range(3):
        give_gradients(plain, step)
        give_gradients(moved, step)
        a.step()
        b.step()
    for x, y in zip(plain.parameters(), moved.parameters()):
        torch.testing.assert_close(values(y), values(x), rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("fused")
def test_a_recorded_step_replays_with_other_gradients_scales_and_rates(make):
    """As in a CUDA graph; a bad gradient then changes nothing and is counted."""
    (plain, a), (moved, b) = make_pair(make, nonfinite="skip")
    rate = OnAccelerator(torch.tensor(a.defaults["lr"], dtype=torch.float64))
    graph = Graph()
    for group in b.param_groups:
        group["lr"] = rate
    for step in range(5):
        if step == 3:
            scales = random_scales(a, seed=step)
            a.set_block_scales(scales)
            with waiting_allowed():
                b.set_block_scales(scales)
            for group in a.param_groups:
                group["lr"] *= 0.5
            values(rate).mul_(0.5)
        give_gradients(plain, step)
        give_gradients(moved, step)
        a.step()
        if step == 0:  # makes the state
            b.step()
        elif step == 1:
            with graph.recording():
                b.step()
        else:
            graph.replay()
    for x, y in zip(plain.parameters(), moved.parameters()):
        torch.testing.assert_close(values(y), values(x), rtol=1e-10, atol=1e-12)
    before = everything(moved, b)
    give_gradients(moved, 5, math.nan)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(before, everything(moved, b)))
    with waiting_allowed(), pytest.warns(UserWarning, match="refused step number 1"):
        assert b.nonfinite_steps == 1


def test_uneven_blocks_are_measured_on_the_device():
    uneven = to_plain(blockopt.Blocks(("query", "key"), split=Split(0, (8, 4), (1, 1))))
    weights = [torch.ones(12, 6), OnAccelerator(torch.ones(12, 6))]
    for weight in weights:
        group = {"params": [("weight", weight.requires_grad_())], "blocks": [uneven]}
        optimizer = blockopt.BlockAdamW([group], second_moment="block")
        gradient = torch.arange(72.0).view(12, 6)
        weight.grad = gradient if weight is weights[0] else OnAccelerator(gradient)
        optimizer.step()
    torch.testing.assert_close(*map(values, weights))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_gradient_changes_nothing_and_raises_one_step_later(make, bad):
    _, (model, optimizer) = make_pair(make)
    give_gradients(model, 0)
    optimizer.step()
    before = everything(model, optimizer)
    give_gradients(model, 1, bad)
    optimizer.step()  # nobody knows yet
    give_gradients(model, 2)
    with waiting_allowed(), pytest.raises(FloatingPointError, match=r"h\.1\.attn\.c_attn\.weight"):
        optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(before, everything(model, optimizer)))
    optimizer.step()
    with waiting_allowed():
        assert optimizer.nonfinite_steps == 1
    assert not torch.equal(before[0], everything(model, optimizer)[0])


def test_first_step_may_be_bad(make):
    _, (model, optimizer) = make_pair(make, nonfinite="skip")
    before = everything(model, optimizer)
    give_gradients(model, 0, math.nan)
    optimizer.step()
    give_gradients(model, 1)
    with waiting_allowed(), pytest.warns(UserWarning, match="Non-finite gradient in 1 of"):
        assert optimizer.nonfinite_steps == 1
    assert all(torch.equal(x, y) for x, y in zip(before, everything(model, optimizer)))


def test_skipped_step_is_as_if_it_had_not_been(make):
    _, (clean, a) = make_pair(make)
    _, (model, b) = make_pair(make, nonfinite="skip")
    for step in range(3):
        give_gradients(clean, step)
        a.step()
        give_gradients(model, step)
        b.step()
        give_gradients(model, 7, math.inf)
        b.step()
        if step == 0:
            with waiting_allowed(), pytest.warns(UserWarning, match="refused step number 1"):
                b.refused_until_last_step()
    with waiting_allowed():
        assert b.nonfinite_steps == 3
    for x, y in zip(everything(clean, a), everything(model, b)):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def test_saving_tells_a_bad_gradient_once():
    _, (model, optimizer) = make_pair(OPTIMIZERS["adamw"])
    give_gradients(model, 0, math.nan)
    optimizer.step()
    with waiting_allowed(), pytest.raises(FloatingPointError, match="No weight and no state"):
        optimizer.state_dict()
    assert optimizer.state_dict()["state"]


def test_saving_tells_of_a_bad_gradient_in_any_replay():
    """No host code runs in a replay, so nothing else would tell."""
    _, (model, optimizer) = make_pair(OPTIMIZERS["adamw"])
    graph = Graph()
    give_gradients(model, 0)
    optimizer.step()
    with graph.recording():
        optimizer.step()
    for step, bad in enumerate((math.nan, None)):
        give_gradients(model, step, bad)
        graph.replay()
    with waiting_allowed():
        with pytest.raises(FloatingPointError, match="in a replay of the CUDA graph before"):
            optimizer.state_dict()
        assert optimizer.state_dict()["state"]
        assert optimizer.nonfinite_steps == 1


def test_the_next_step_waits_for_the_flag_alone():
    _, (model, optimizer) = make_pair(OPTIMIZERS["adamw"])
    Event.waited = 0
    for step in range(3):
        give_gradients(model, step)
        optimizer.step()
    assert Event.waited == 2


def test_ignored_gradients_are_neither_read_nor_waited_for():
    _, (model, optimizer) = make_pair(OPTIMIZERS["adamw"], nonfinite="ignore")
    Event.waited = 0
    for step in range(3):
        give_gradients(model, step, math.nan)
        optimizer.step()
    assert Event.waited == 0
    with waiting_allowed():
        assert optimizer.nonfinite_steps == 0
        assert torch.isnan(values(model.h[1].attn.c_attn.weight)[-1, -1])
