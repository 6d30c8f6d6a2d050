"""Noise in the measurements: what reaches the scales, by formula and on a small GPT."""

import pytest
import torch

import blockopt
from blockopt.block_lr import BlockLR
from blockopt.block_lr.smoothing import Smoothing
from tests.helpers.optimizers import TINY, tiny_gpt


def test_without_noise_the_mean_goes_to_the_measurement():
    smoothing = Smoothing(beta=0.9)
    for count in range(1, 40):
        smoothing.add({"w": torch.tensor([0.7, -2.0])})
        expected = (1 - 0.9**count) * torch.tensor([0.7, -2.0], dtype=torch.float64)
        torch.testing.assert_close(smoothing.logs()["w"], expected)


def test_a_beta_of_zero_takes_each_measurement_as_it_is():
    smoothing = Smoothing(beta=0.0)
    for value in (0.3, -0.8, 0.0):
        smoothing.add({"w": torch.tensor([value])})
        assert smoothing.logs()["w"].item() == pytest.approx(value)


@pytest.mark.parametrize(("count", "signal"), [(2, 0.0), (12, 0.0), (60, 0.0), (60, 1.0)])
def test_the_mean_is_shrunk_by_its_variance(count, signal):
    """The variance from the definition: weights, their mean, and the spread around it."""
    beta, smoothing = 0.9, Smoothing(beta=0.9)
    x = signal + torch.randn(count, 50, generator=torch.Generator().manual_seed(0)).double()
    for row in x:
        smoothing.add({"w": row})
    weights = (1 - beta) * beta ** torch.arange(count - 1, -1, -1).double()
    share = weights / weights.sum()
    mean = share @ x
    spread = share @ (x - mean).square() / (1 - share.square().sum())  # unbiased
    variance = spread * share.square().sum()
    expected = weights.sum() * mean * mean.square() / (mean.square() + variance)
    torch.testing.assert_close(smoothing.logs()["w"], expected)
    kept = smoothing.logs()["w"].square().mean() / (weights.sum() * mean).square().mean()
    assert kept < 0.7 if signal == 0.0 else kept > 0.85


def test_a_state_goes_on_alike():
    first, second = Smoothing(0.8), Smoothing(0.8)
    first.add({"w": torch.tensor([1.0, -1.0])})
    second.load_state_dict(first.state_dict())
    for smoothing in (first, second):
        smoothing.add({"w": torch.tensor([0.5, 2.0]), "late": torch.tensor([1.0])})
    assert all(torch.equal(first.logs()[name], second.logs()[name]) for name in ("w", "late"))


@pytest.mark.parametrize(
    ("build", "options"),
    [(blockopt.BlockAdamW, {}), (blockopt.BlockMuon, {}), (blockopt.BlockSGD, {"beta": 0.9})],
)
def test_the_first_refresh_depends_little_on_its_batch(build, options):
    """Same weights, 20 batches: the logarithm of every role's scale spreads by less than 0.2.

    By default BlockLR believes more of a measurement for SGD: there it spreads by 0.5.
    """
    found = []
    for seed in range(20):
        model, generator = tiny_gpt(), torch.Generator().manual_seed(seed)
        optimizer = build(blockopt.param_groups(model), lr=1e-2)
        block_lr = BlockLR(optimizer, model, **options)
        draws = [torch.randint(TINY.vocab_size, (8, 9), generator=generator) for _ in range(2)]
        batches = [tokens.square() % TINY.vocab_size for tokens in draws]
        model(batches[0][:, :-1], batches[0][:, 1:]).backward()
        optimizer.step()
        block_lr.step(lambda model=model, b=batches[1]: model(b[:, :-1], b[:, 1:]))
        scale = block_lr.history[0].scale
        found.append({group.role: scale[group] for group in scale})
    logs = torch.tensor([list(scales.values()) for scales in found]).log()
    assert logs.std(dim=0).max() < 0.2
    assert logs.abs().max() > 0.02
