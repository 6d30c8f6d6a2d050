"""Dominant inputs are damped as the inverse of their second moment would damp them."""

import pytest
import torch
from torch import nn

import blockopt
from blockopt.blocks import Blocks, Split, to_plain
from blockopt.optim.entry import Entry
from blockopt.optim.input_directions import Damped, damp_inputs, maps_of, new_input_state
from blockopt.optim.nystrom import DAMPING

DENSE = torch.float64
CASES = {
    "query": (Blocks(("query",), split=Split(0, (20,), (2,))), False),
    "output": (Blocks(("output",), split=Split(1, (30,), (3,))), False),
    "mlp_in of a Conv1D": (Blocks(("mlp_in",), split=Split(1, (20,), (20,))), True),
    "output of a Conv1D": (Blocks(("output",), split=Split(0, (30,), (3,))), True),
    "unsplit": (Blocks(("mlp_out",)), False),
}


def random(*shape, seed=0):
    return torch.randn(shape, dtype=DENSE, generator=torch.Generator().manual_seed(seed))


def low_rank(seed, rank=3):
    """A gradient of 20 outputs and 30 inputs that sees three directions of its inputs only."""
    return random(20, rank, seed=seed) @ random(rank, 30, seed=99)


def damped(blocks, gradients, direction, beta=0.9):
    state = new_input_state(direction, blocks)
    for gradient in gradients:
        found = direction.clone()
        entry = Entry("w", direction, gradient, blocks, state)
        damp_inputs([Damped(entry, gradient, found, 1 - beta, None)])
    return found


@pytest.mark.parametrize("case", CASES)
def test_equals_the_inverse_of_the_second_moment_if_few_directions_matter(case):
    blocks, input_first = CASES[case]
    gradients, direction = [low_rank(seed) for seed in range(3)], random(20, 30, seed=5)
    stored = [x.T.contiguous() if input_first else x for x in (*gradients, direction)]
    found = damped(blocks, stored[:-1], stored[-1])
    found = found.T if input_first else found
    moment = sum(0.1 * 0.9 ** (2 - i) * g.T @ g for i, g in enumerate(gradients))
    moment /= moment.trace()
    floor = DAMPING / 30 * torch.eye(30, dtype=DENSE)
    expected = direction @ torch.linalg.inv(moment + floor) * (DAMPING / 30)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)  # the ridge is 1e-4
    assert (found - direction).norm() > 0.1 * direction.norm()


def test_a_dominant_direction_is_damped_and_the_others_stay():
    mean = random(30, seed=7)
    gradients = [random(20, 1, seed=s) * mean * 10 + random(20, 30, seed=s + 50) for s in range(30)]
    direction = random(20, 30, seed=5)
    found = damped(CASES["query"][0], gradients, direction)
    along = mean / mean.norm()
    assert (found @ along).norm() < 0.02 * (direction @ along).norm()
    others = direction - torch.outer(direction @ along, along)
    rest = found - torch.outer(found @ along, along)
    assert (rest - others).norm() < 0.4 * others.norm()


@pytest.mark.parametrize(
    "split",
    [
        Split(0, (4, 2), (1, 1), repeat=3),
        Split(0, (12, 6), (2, 1)),
        Split(0, (6, 6, 6), (1, 1, 1)),
        Split(1, (6, 6, 6), (1, 1, 1)),
    ],
    ids=["interleaved", "unequal", "equal", "of a Conv1D"],
)
def test_fused_maps_are_damped_one_by_one(split):
    roles = ("query", "key", "value")[: len(split.sizes)]
    gradients, direction = [random(18, 30, seed=s) for s in range(3)], random(18, 30, seed=5)
    stored = [x.T.contiguous() if split.dim == 1 else x for x in (*gradients, direction)]
    found = damped(Blocks(roles, split=split), stored[:-1], stored[-1])
    found = found.T if split.dim == 1 else found
    rows = torch.arange(18).view(split.repeat, -1).split(split.sizes, dim=1)
    for role, own in zip(roles, (some.flatten() for some in rows)):
        alone = Blocks((role,), split=Split(0, (len(own),), (1,)))
        expected = damped(alone, [g[own] for g in gradients], direction[own])
        torch.testing.assert_close(found[own], expected, rtol=1e-12, atol=1e-12)


def test_stacked_maps_are_damped_one_by_one():
    stacked = Blocks(("mlp_gate", "mlp_in"), split=Split(1, (6, 6), (6, 6), stack=3))
    gradients, direction = [random(3, 12, 30, seed=s) for s in range(3)], random(3, 12, 30, seed=5)
    found = damped(stacked, gradients, direction)
    alone = stacked._replace(split=Split(0, (6, 6), (6, 6)))
    for i in range(3):
        expected = damped(alone, [g[i] for g in gradients], direction[i])
        torch.testing.assert_close(found[i], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("unit", [1e-15, 1e12])
def test_the_unit_of_the_gradient_does_not_matter(unit):
    gradients, direction = [random(20, 30, seed=s).float() for s in range(3)], random(20, 30)
    blocks, direction = CASES["query"][0], direction.float()
    expected = damped(blocks, gradients, direction)
    found = damped(blocks, [g * unit for g in gradients], direction)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_nothing_is_damped_without_a_gradient():
    direction = random(20, 30)
    found = damped(CASES["query"][0], [torch.zeros(20, 30, dtype=DENSE)], direction)
    torch.testing.assert_close(found, direction)


def test_where_inputs_are():
    assert maps_of(Blocks(("query",), split=Split(1, (4,), (2,)))) == (None, 1, 0)
    assert maps_of(Blocks(("mlp_out",), split=Split(2, (4,), (4,), stack=3))) == (0, 2, 1)


def test_a_1x1_convolution():
    blocks = Blocks(("query",), split=Split(0, (20,), (2,)))
    start, gradient = random(20, 30), random(20, 30, seed=1)

    def step(shape):
        parameter = nn.Parameter(start.view(shape).clone())
        group = {"params": [("w", parameter)], "blocks": [to_plain(blocks)]}
        optimizer = blockopt.BlockMuon([group], lr=0.1)
        parameter.grad = gradient.view(shape).clone()
        optimizer.step()
        return parameter.detach().view(20, 30)

    torch.testing.assert_close(step((20, 30, 1, 1)), step((20, 30)), rtol=1e-12, atol=1e-12)


def test_a_sketch_without_a_cholesky_factor_damps_nothing():
    """As rounding may leave it: then a step is that of plain Muon, not one of NaN."""
    blocks, direction = CASES["query"][0], random(20, 30)
    state = new_input_state(direction, blocks)
    state["input_trace"].fill_(1.0)
    state["input_sketch"].copy_(-state["input_probes"])  # C = -1
    found, gradient = direction.clone(), torch.zeros_like(direction)
    entry = Entry("w", direction, gradient, blocks, state)
    damp_inputs([Damped(entry, gradient, found, 0.1, None)])
    torch.testing.assert_close(found, direction)
