"""Slopes from the gradients of training: unbiased on a noisy quadratic, right on a small GPT."""

import copy

import pytest
import torch
from torch import nn

import blockopt
from blockopt.block_lr import BlockLR
from blockopt.blocks import Blocks, block_groups, sum_groups
from blockopt.curvature import SlopesAlongUpdates, along_update, successive_gradients
from blockopt.curvature.successive_gradients import LAGS
from tests.helpers.optimizers import TINY, tiny_gpt

BLOCKS = {"a": Blocks(("norm",)), "b": Blocks(("bias",))}


class Quadratic(nn.Module):
    """`w · H w / 2` of two blocks that are coupled, with gradients that have noise."""

    def __init__(self, noise):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        root = torch.randn(6, 8, generator=generator).double()
        self.hessian = root @ root.T / 8
        start = torch.randn(6, generator=generator).double()
        self.a, self.b = nn.Parameter(start[:4].clone()), nn.Parameter(start[4:].clone())
        self.noise, self.generator = noise, generator

    def set_gradients(self):
        w = torch.cat([self.a, self.b]).detach()
        drawn = torch.randn(6, generator=self.generator).double()
        self.a.grad, self.b.grad = (self.hessian @ w + self.noise * drawn).split([4, 2])
        return self.hessian @ w


def run(model, momentum, windows, lr=0.02):
    """Collected slopes of each window, and the exact slopes at the same points."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    slopes = SlopesAlongUpdates("role")
    parameters = dict(model.named_parameters())
    found, exact, number = [], [], 0
    while len(found) < windows:
        number += 1
        true = model.set_gradients()
        if slopes._update:
            along = {"a": true[:4] @ slopes._update["a"], "b": true[4:] @ slopes._update["b"]}
            exact.append(torch.stack(list(along.values())))
        slopes.before_step(number, lambda: parameters)
        optimizer.step()
        slopes.after_step(lambda: parameters, lambda: BLOCKS)
        if slopes.number:
            found.append(torch.tensor(list(slopes.take().values())).double())
    return torch.stack(found), torch.stack(exact).unflatten(0, (windows, LAGS)).mT


def test_without_noise_the_slopes_are_exact():
    found, exact = run(Quadratic(0.0), momentum=0.9, windows=4)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_noise_slopes_and_their_changes_are_unbiased(momentum):
    found, exact = run(Quadratic(1.0), momentum, windows=1500)
    for error in (found - exact, (found - exact).diff(dim=2)):
        standard_error = error.std(dim=0) / len(error) ** 0.5
        assert (error.mean(dim=0).abs() < 3.5 * standard_error).all()
        # With the batch that made the update a slope is off by -lr * noise² * size: 10 errors.
        assert (0.02 * torch.tensor([4, 2]) > 10 * standard_error[:, 0]).all()


def test_a_path_of_equal_steps_gives_slope_and_curvature_exactly():
    """Along `w + k u` of a quadratic: u · g before the update, and u · H u."""
    model = Quadratic(0.0)
    w, u = torch.randn(6).double(), torch.randn(6).double()
    slopes = torch.stack([(model.hessian @ (w + k * u)) * u for k in range(1, 4)])
    rows = {"norm": slopes[:, :4].sum(1).tolist(), "bias": slopes[:, 4:].sum(1).tolist()}
    found = successive_gradients(rows, BLOCKS)
    before, curved = (model.hessian @ w) * u, (model.hessian @ u) * u
    ratios = torch.stack([-curved[s].sum() / before[s].sum() for s in (slice(4), slice(4, 6))])
    descends = torch.stack([before[:4].sum(), before[4:].sum()]) < 0
    expected = torch.where(descends, ratios, ratios[descends].max() if descends.any() else 0.0)
    torch.testing.assert_close(torch.cat(list(found.values())), expected)


def text_batch(generator, size):
    """Tokens that follow from the one before, with noise: something to learn."""
    tokens = torch.randint(TINY.vocab_size, (size, TINY.context + 1), generator=generator)
    for column in range(1, TINY.context + 1):
        follows = torch.rand(size, generator=generator) < 0.8
        tokens[:, column] = torch.where(
            follows, (3 * tokens[:, column - 1] + 1) % TINY.vocab_size, tokens[:, column]
        )
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_small_gpt_has_the_curvature_that_second_derivatives_tell(kind):
    """30 windows against exact derivatives on large batches along the same updates."""
    torch.manual_seed(0)
    model, generator = tiny_gpt(), torch.Generator().manual_seed(0)
    build = {"adamw": blockopt.BlockAdamW, "muon": blockopt.BlockMuon}[kind]
    # Along longer steps third derivatives count; a small matrix moves far at Muon's usual rate.
    lr = {"adamw": 1e-2, "muon": 3e-3}[kind]
    optimizer = build(blockopt.param_groups(model), lr=lr)
    blocks, slopes = blockopt.find_blocks(model), SlopesAlongUpdates("role")
    labels, groups = block_groups(blocks, "role")
    parameters = dict(model.named_parameters())
    found, exact, number = [], [], 0
    while len(found) < 30:
        number += 1
        optimizer.zero_grad()
        model(*text_batch(generator, 256)).backward()
        slopes.before_step(number, lambda: parameters)
        optimizer.step()
        slopes.after_step(lambda: parameters, lambda: blocks)
        if slopes._update and not slopes._slopes:
            batch = text_batch(generator, 512)
            along = along_update(
                model, lambda b=batch: model(*b), slopes._update, blocks=blocks, method="exact"
            )
            pair = (sum_groups(of, groups, len(labels)) for of in (along.slope, along.row_sum))
            exact.append(torch.stack(list(pair)))
        if slopes.number:
            sums = slopes.take()
            found.append(torch.tensor([sums[str(label)] for label in labels]).double())
    found, exact = torch.stack(found).unbind(dim=2), torch.stack(exact).unbind(dim=1)
    error = found[0] - exact[0]
    standard_error = error.std(dim=0) / len(error) ** 0.5
    assert (error.mean(dim=0).abs() < 3.5 * standard_error).all()
    curvature = (-2 * found[0] + 3 * found[1] - found[2]).sum(dim=1)
    error = curvature - exact[1].sum(dim=1)
    standard_error = error.std() / len(error) ** 0.5
    assert error.mean().abs() < 3 * standard_error
    assert curvature.mean() > 2 * standard_error  # it is curvature, and not its absence


OPTIONS = {"curvature": "successive_gradients", "every": 30, "beta": 0.0}


def train(model, optimizer, block_lr, steps):
    for step in steps:
        optimizer.zero_grad()
        model(*text_batch(torch.Generator().manual_seed(step), 16)).backward()
        optimizer.step()
        block_lr.step()


@pytest.mark.parametrize("save_after", [40, 42, 44])
def test_block_lr_needs_no_closure_and_resumes(save_after):
    runs = []
    for _ in range(2):
        model = tiny_gpt()
        optimizer = blockopt.BlockAdamW(blockopt.param_groups(model), lr=3e-3)
        runs.append((model, optimizer, BlockLR(optimizer, model, **OPTIONS)))
    train(*runs[0], range(save_after + 1))
    weights = {name: value.clone() for name, value in runs[0][0].state_dict().items()}
    saved = copy.deepcopy(runs[0][1].state_dict())
    train(*runs[0], range(save_after + 1, 70))
    runs[1][0].load_state_dict(weights)
    runs[1][1].load_state_dict(saved)
    train(*runs[1], range(save_after + 1, 70))
    assert runs[0][2].history == runs[1][2].history
    assert runs[0][2].history[0].step == 28
    assert len(runs[0][2].history) > 1
    assert all(torch.equal(p, q) for p, q in zip(runs[0][0].parameters(), runs[1][0].parameters()))
    scales = torch.cat(list(runs[0][2].last_scales.as_dict().values()))
    assert scales.max() > 1.05 > 0.95 > scales.min()
