"""Stochastic rounding of the momentum."""

import pytest
import torch

import blockopt
from blockopt.optim._rounding import round_to_bfloat16, rounding_noise
from tests.helpers.optimizers import random_gradients, set_gradients, tiny_gpt

STEPS = 4000


def roundings(x, steps=STEPS):
    rounded = []
    for step in range(steps):
        (rows,), (columns,) = rounding_noise([x], step)
        rounded.append(round_to_bfloat16(x, rows, columns))
    return torch.stack(rounded)


def test_rounds_to_a_neighbour_without_bias():
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    rounded = roundings(x).double()
    lower = (x.view(torch.int32) & -0x10000).view(torch.float32).double()
    upper = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).double()
    assert bool(((rounded == lower) | (rounded == upper)).all())
    spread = (upper - lower).abs()
    z = (
        (rounded.mean(dim=0) - x.double()) / (spread / 2) * STEPS**0.5
    )  # at most 1 standard deviation each
    assert z.abs().max() < 4
    assert ((rounded - x).abs() / x.abs()).max() < 2**-7


def test_errors_of_different_entries_do_not_correlate():
    x = torch.full((6, 5), 1.0 + 2.0**-8)  # half-way between two bfloat16 numbers
    up = (roundings(x) > 1.0).double().flatten(1)
    correlation = torch.corrcoef(up.T) - torch.eye(30)
    assert correlation.abs().max() < 5 / STEPS**0.5


def test_exact_numbers_stay():
    x = torch.tensor([[0.0, 1.0, -2.5, 0.15625]])
    assert torch.equal(roundings(x, steps=50).float(), x.expand(50, 1, 4))


def test_noise_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    roundings(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)), steps=2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("steps", [200])
def test_momentum_in_bfloat16_follows_a_gradient_below_its_spacing(steps):
    """Rounding to nearest would lose a gradient of 1e-3 of the momentum for ever; stochastic rounding does not."""
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    groups = [{"params": [("w", weight)], "blocks": [(("other",), None, None)]}]
    optimizer = blockopt.BlockAdamW(
        groups, betas=(0.999, 0.999), second_moment="block", momentum_dtype=torch.bfloat16
    )
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    momentum = optimizer.state[weight]["exp_avg"].double()
    assert momentum.mean().item() == pytest.approx(1 - 0.999**steps, rel=5e-3)


def test_momentum_stays_close_to_float32():
    exact, rounded = tiny_gpt(), tiny_gpt()
    a = blockopt.BlockAdamW(blockopt.param_groups(exact), second_moment="block")
    b = blockopt.BlockAdamW(
        blockopt.param_groups(rounded), second_moment="block", momentum_dtype=torch.bfloat16
    )
    for step in range(20):
        for model, optimizer in ((exact, a), (rounded, b)):
            set_gradients(model, random_gradients(model, step))
            optimizer.step()
    for x, y in zip(exact.parameters(), rounded.parameters()):
        error = b.state[y]["exp_avg"].float() - a.state[x]["exp_avg"]
        assert error.norm() < 2**-7 * a.state[x]["exp_avg"].norm()
