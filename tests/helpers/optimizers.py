"""Small models, gradients and optimizers that the tests of the optimizers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import blockopt
from recipes.common.gpt2 import GPT2, GPT2Config

TINY = GPT2Config(vocab_size=19, context=8, width=16, depth=2, heads=2)

OPTIMIZERS: dict[str, Callable[..., blockopt.optim.BlockOptimizer]] = {
    "adamw": lambda groups, **k: blockopt.BlockAdamW(groups, **{"lr": 1e-2, **k}),
    "adamw-block": lambda groups, **k: blockopt.BlockAdamW(
        groups, **{"lr": 1e-2, **k}, second_moment="block"
    ),
    "adamw-whitened": lambda groups, **k: blockopt.BlockAdamW(
        groups, **{"lr": 1e-2, **k}, second_moment="whitened"
    ),
    "sgd": lambda groups, **k: blockopt.BlockSGD(
        groups, **{"lr": 1e-1, **k}, momentum=0.9, nesterov=True
    ),
    "sgd-plain": lambda groups, **k: blockopt.BlockSGD(groups, **{"lr": 1e-1, **k}),
    "muon": lambda groups, **k: blockopt.BlockMuon(groups, **{"lr": 1e-2, **k}),
    "muon-block": lambda groups, **k: blockopt.BlockMuon(
        groups, **{"lr": 1e-2, **k}, second_moment="block"
    ),
}

# The same for training loops, and an optimizer of torch on groups of one block.
OF_MODEL: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: blockopt.BlockAdamW(blockopt.param_groups(model), lr=1e-2),
    "sgd": lambda model: blockopt.BlockSGD(blockopt.param_groups(model), lr=1e-1, momentum=0.9),
    "muon": lambda model: blockopt.BlockMuon(blockopt.param_groups(model), lr=1e-2),
    "torch": lambda model: torch.optim.AdamW(blockopt.param_groups(model, by="parameter"), lr=1e-2),
}


def assert_same_run(one: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> None:
    """Two runs, each a model and its `BlockLR`, ended with the same bits and measured the same."""
    parameters = dict(other[0].named_parameters())
    assert all(torch.equal(p, parameters[name]) for name, p in one[0].named_parameters())
    assert one[1].history == other[1].history
    assert len(one[1].history) + one[1].failures > 2
    scales = torch.cat([x.flatten() for x in one[1].last_scales.as_dict().values()])
    assert scales.max() > 1.005 > 0.995 > scales.min()


def tiny_gpt(seed: int = 0, dtype: torch.dtype = torch.float32) -> GPT2:
    torch.manual_seed(seed)
    return GPT2(TINY).to(dtype)


def token_loss(model: nn.Module, seed: int = 0) -> Tensor:
    tokens = torch.randint(
        TINY.vocab_size, (3, TINY.context + 1), generator=torch.Generator().manual_seed(seed)
    )
    return model(tokens[:, :-1], tokens[:, 1:])


def random_gradients(model: nn.Module, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        for n, p in model.named_parameters()
    }


def set_gradients(model: nn.Module, gradients: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone()


def random_scales(optimizer: blockopt.optim.BlockOptimizer, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.rand(s.shape, generator=generator) * 2 + 0.1
        for n, s in optimizer.block_scales().items()
    }


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = token_loss(model, seed=step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_weights(a: nn.Module, b: nn.Module, rtol: float = 0.0, atol: float = 0.0) -> None:
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(
            x, y, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
