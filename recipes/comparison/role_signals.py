"""Which signals predict how the learning rate of each role should change.

The truth is that of `role_scales.py`: the final loss with the learning rate of a group of roles
halved, minus that with it doubled. It is positive where longer steps would have paid. A signal is
measured in a run whose scales are all 1, and large where it asks for longer steps. Whether it
predicts the truth is Spearman's rank correlation over the groups of roles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from scipy.stats import spearmanr
from torch import Tensor

import blockopt
from blockopt.blocks import Blocks, expand, per_block
from blockopt.curvature import ESTIMATORS
from recipes.common.gpt2 import GPT2
from recipes.common.training import Training, token_loss
from recipes.comparison.arms import ARMS, build
from recipes.comparison.role_scales import ROLE_GROUPS
from recipes.comparison.run_config import RunConfig
from recipes.comparison.run_loop import CLIP, scheduled, training_batches

REFRESHES = 6  # of a signal in a run
PATHS = ("straightness", "relative step")
SIGNALS = (*(f"1 / {name}" for name in ESTIMATORS), *PATHS)


class Correlation(NamedTuple):
    """Spearman's rank correlation, with the ends of its 95 % interval (Bonett and Wright)."""

    value: float
    low: float
    high: float


def correlation(signal: Sequence[float], truth: Sequence[float]) -> Correlation:
    """Return how well one sequence orders the other.

    Example:
        >>> found = correlation([1.0, 2.0, 3.0, 5.0, 4.0], [1.0, 4.0, 9.0, 16.0, 25.0])
        >>> round(found.value, 3)
        0.9
    """
    equal = len(set(signal)) == 1 or len(set(truth)) == 1
    value = 0.0 if equal else float(spearmanr(signal, truth).statistic)
    if len(signal) < 4:
        return Correlation(value, -1.0, 1.0)
    middle = math.atanh(max(-0.999999, min(0.999999, value)))
    half = 1.96 * math.sqrt((1 + value**2 / 2) / (len(signal) - 3))
    return Correlation(value, math.tanh(middle - half), math.tanh(middle + half))


def truth(rows: Sequence[Mapping[str, object]], optimizer: str) -> dict[str, float]:
    """Return the loss at half the learning rate minus that at twice, for each group of roles."""
    means = {(r["group"], r["multiplier"]): r["mean"] for r in rows if r["optimizer"] == optimizer}
    return {
        roles: float(means[roles, 0.5]) - float(means[roles, 2.0])  # type: ignore[arg-type]
        for roles in ROLE_GROUPS
        if all(math.isfinite(float(means[roles, m])) for m in (0.5, 2.0))  # type: ignore[arg-type]
    }


def measured(config: RunConfig, signal: str) -> dict[str, float]:
    """Train with all scales 1, and return a signal of `SIGNALS` for each group of roles."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    training = build(
        ARMS[config.arm],
        GPT2(config.model),
        dict(config.values),
        steps=config.steps,
        seed=config.seed,
    )
    if signal in PATHS:
        return _from_path(training, config, signal)
    every = max(1, config.steps // REFRESHES)
    options = {"curvature": signal.removeprefix("1 / "), "every": every, "power": 0.0}
    training.block_lr = blockopt.BlockLR(training.optimizer, training.model, **options)
    for _ in _steps(training, config):
        pass
    roles = [
        {group.role: value for group, value in refresh.curvature.items()}
        for refresh in training.block_lr.history
    ]
    means = {}
    for name, members in ROLE_GROUPS.items():
        found = [refresh[role] for refresh in roles for role in members if refresh.get(role, 0) > 0]
        if found:  # of a curvature that is nowhere positive nothing can be said
            means[name] = -fmean(map(math.log, found))
    return means


def _from_path(training: Training, config: RunConfig, signal: str) -> dict[str, float]:
    """How straight the path of the weights was, or how long steps were beside the weights."""
    blocks = blockopt.find_blocks(training.model)
    start = last = _copies(training)
    steps, sizes = dict.fromkeys(ROLE_GROUPS, 0.0), dict.fromkeys(ROLE_GROUPS, 0.0)
    for _ in _steps(training, config):
        now = _copies(training)
        for name, step in _norms(_differences(now, last), blocks).items():
            steps[name] += step
        for name, size in _norms(now, blocks).items():
            sizes[name] += size
        last = now
    if signal == "relative step":  # a role that moves little beside its size asks for more
        return {name: -math.log(steps[name] / sizes[name]) for name in ROLE_GROUPS}
    whole = _norms(_differences(last, start), blocks)
    return {name: math.log(whole[name] / steps[name]) for name in ROLE_GROUPS}


def _steps(training: Training, config: RunConfig) -> Iterator[int]:
    """Train as `run_loop.py` does."""
    batches, set_rates = training_batches(config), scheduled(training.optimizer, config)
    for step in range(config.steps):
        set_rates(step)
        token_loss(training.model, *batches[step]).backward()
        training.clip(CLIP)
        training.step([batches[step]])
        yield step


def _copies(training: Training) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in training.model.named_parameters()}


def _differences(now: Mapping[str, Tensor], then: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value - then[name] for name, value in now.items()}


def _norms(tensors: Mapping[str, Tensor], blocks: Mapping[str, Blocks]) -> dict[str, float]:
    """The norm of all entries of each group of roles."""
    squares = dict.fromkeys(ROLE_GROUPS, 0.0)
    for name, tensor in tensors.items():
        for group, members in ROLE_GROUPS.items():
            belongs = [float(role in members) for role in blocks[name].roles]
            if any(belongs):
                mask = expand(per_block(belongs, blocks[name]), blocks[name].split, tensor.ndim)
                squares[group] += float((tensor.square() * mask).sum())
    return {group: math.sqrt(square) for group, square in squares.items()}
