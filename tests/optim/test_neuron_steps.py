"""Neurons of an MLP take steps of the same size, however their matrices are stored."""

import pytest
import torch
from torch import nn

import blockopt
from blockopt.blocks import Blocks, Split, to_plain

IN = Blocks(("mlp_in",), split=Split(0, (24,), (24,)))
SHAPES = {"mlp_in": (24, 6), "mlp_out": (6, 24)}


@pytest.fixture
def undamped(monkeypatch):
    """Inputs are not damped, so that nothing but neurons differs from plain Muon."""
    monkeypatch.setattr("blockopt.optim.nystrom.DAMPING", 1e12)


def optimizer_of(parameter, blocks, **options):
    group = {"params": [("w", parameter)], "blocks": [to_plain(blocks)]}
    return blockopt.BlockMuon([group], lr=0.1, weight_decay=0.0, **options)


def gradients(shape, neurons, number):
    """Random ones, of which the second half of the neurons get a hundredth."""
    generator = torch.Generator().manual_seed(0)
    size = torch.ones(24, dtype=torch.float64)
    size[12:] = 0.01
    size = size[:, None] if neurons == 0 else size
    return [torch.randn(shape, dtype=torch.float64, generator=generator) * size] * number


def moved(role, transposed=False, steps=60, **options):
    """By how much each neuron moves in the last of several steps, root mean square over lr."""
    shape, neurons = SHAPES[role], 0 if role == "mlp_in" else 1
    split = Split(1 if transposed else 0, (shape[0],), (shape[0],))
    start = torch.zeros(shape, dtype=torch.float64)
    parameter = nn.Parameter(start.T.clone() if transposed else start)
    optimizer = optimizer_of(parameter, Blocks((role,), split=split), **options)
    for gradient in gradients(shape, neurons, steps):
        before = parameter.detach().clone()
        parameter.grad = gradient.T.clone() if transposed else gradient.clone()
        optimizer.step()
    change = (parameter.detach() - before) / 0.1
    return (change.T if transposed else change).square().mean(dim=1 - neurons).sqrt()


@pytest.mark.usefixtures("undamped")
@pytest.mark.parametrize("role", SHAPES)
def test_every_neuron_moves_as_far_as_the_others(role):
    uneven = moved(role, precondition=False)
    assert uneven[12:].mean() < 0.1 * uneven[:12].mean()
    even = moved(role)
    # Those whose steps were below a tenth of the mean grow by ten at most.
    sizes = uneven / uneven.square().mean().sqrt()
    expected = sizes / sizes.clamp(min=0.1)
    torch.testing.assert_close(even / even.max(), expected / expected.max(), rtol=1e-6, atol=1e-6)
    usual = {"mlp_in": 2, "mlp_out": 1}[role] * (0.04 * 128 / 24) ** 0.5  # that of plain Muon
    assert 0.75 * usual < even[:12].mean() < 1.25 * usual


@pytest.mark.parametrize("role", SHAPES)
def test_storage_does_not_matter(role):
    torch.testing.assert_close(moved(role, transposed=True), moved(role), rtol=1e-12, atol=1e-12)


def test_attention_is_left_alone():
    parameter = nn.Parameter(torch.ones(24, 6))
    blocks = Blocks(("query",), split=Split(0, (24,), (2,)))
    optimizer = optimizer_of(parameter, blocks)
    parameter.grad = torch.randn(24, 6)
    optimizer.step()
    assert "neuron_squares" not in optimizer.state[parameter]


def test_a_neuron_without_a_gradient_stays():
    parameter = nn.Parameter(torch.ones(24, 6))
    optimizer = optimizer_of(parameter, IN)
    for seed in range(3):
        parameter.grad = torch.randn(24, 6, generator=torch.Generator().manual_seed(seed))
        parameter.grad[5] = 0
        optimizer.step()
    assert torch.equal(parameter[5].detach(), torch.ones(6))
    assert parameter.isfinite().all()


def test_a_checkpoint_without_sizes_of_neurons_gets_new_ones():
    """As those of `torch.optim.Muon` are."""
    old, new = nn.Parameter(torch.ones(24, 6)), nn.Parameter(torch.ones(24, 6))
    before = torch.optim.Muon([old], lr=0.1, momentum=0.9, weight_decay=0.0)
    old.grad = torch.randn(24, 6)
    before.step()
    optimizer = optimizer_of(new, IN, second_moment="coordinate")
    optimizer.load_state_dict(before.state_dict())
    state = optimizer.state[new]
    assert torch.equal(state["momentum_buffer"], before.state[old]["momentum_buffer"])
    assert torch.equal(state["neuron_squares"], torch.zeros(24))
    new.grad = torch.randn(24, 6)
    optimizer.step()
    assert (state["neuron_squares"] > 0).all()
