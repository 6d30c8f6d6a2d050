"""Exact curvature of every block of a small GPT, entry by entry, at two points of its training.

Nothing here uses the estimators. Autograd differentiates the loss twice for the Hessian; the
Gauss-Newton matrix comes from the Jacobian of the logits and the closed form of cross-entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.lib.estimators import Curvature
from blockopt import block_sum, find_blocks
from blockopt.blocks import Blocks, Level, block_groups, block_numel, expand, sum_groups
from recipes.common.gpt2 import GPT2, GPT2Config
from recipes.data.token_data import Batches, load_data

Matrix = Literal["GN", "H", "λ_max"]
SMALL = GPT2Config(vocab_size=64, context=32, width=16, depth=3, heads=2)
TINY = GPT2Config(vocab_size=8, context=8, width=4, depth=1, heads=2)
LR = 3e-3
SEQUENCES = 8  # on which curvature is measured
CHUNK = 32  # unit vectors at a time; their activations should stay in the cache


@dataclass(frozen=True)
class Point:
    """A model at one point of its training.

    Attributes:
        name: When this is.
        model: The model, in float64.
        tokens: The batch on which curvature is measured, (B, T).
        targets: Its next tokens.
        update: The change of each parameter in the nearest AdamW step.
    """

    name: str
    model: nn.Module
    tokens: Tensor
    targets: Tensor
    update: dict[str, Tensor]

    def loss(self) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        return self.model(self.tokens, self.targets)

    @cached_property
    def blocks(self) -> dict[str, Blocks]:
        """The model's blocks."""
        return find_blocks(self.model)


def characters(vocabulary: int) -> Tensor:
    """Return the source of the standard library, each byte as its rank by frequency.

    The last rank stands for all rarer bytes.
    """
    data = load_data("stdlib", tokenizer="bytes").train.long()
    order = torch.bincount(data, minlength=256).argsort(descending=True)
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(256))
    return ranks.clamp(max=vocabulary - 1)[data]


def points(config: GPT2Config, steps: int) -> Iterator[Point]:
    """Yield a model at initialisation, and the same model trained for some AdamW steps.

    Args:
        config: Sizes of the model.
        steps: Number of training steps, of 32 sequences each.
    """
    torch.manual_seed(0)
    data = characters(config.vocab_size)
    measured = Batches(data, batch_size=SEQUENCES, context=config.context, seed=1)[0]
    training = Batches(data, batch_size=32, context=config.context, seed=0)
    model = GPT2(config).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)

    def step(number: int) -> dict[str, Tensor]:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        model(*training[number]).backward()
        optimizer.step()
        return {name: p.detach() - before[name] for name, p in model.named_parameters()}

    initial = {name: value.clone() for name, value in model.state_dict().items()}
    update = step(0)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(initial)
    # The secant looks from the weights back along the update. Here the first step is still ahead.
    backwards = {name: -change for name, change in update.items()}
    yield Point("at initialisation", model, *measured, backwards)
    model.load_state_dict(trained)
    for number in range(1, steps):
        update = step(number)
    optimizer.zero_grad()
    yield Point(f"after {steps} steps", model, *measured, update)


def exact_curvature(point: Point, advance: Callable[[str], None]) -> dict[Matrix, Curvature]:
    """Return the mean diagonal entry of each block, of the Gauss-Newton matrix and the Hessian.

    "λ_max" has the largest eigenvalue of the Hessian of the block's tensor: of all entries of one
    role in one parameter.

    Args:
        point: Where to measure.
        advance: Called `amount_of_work` times.
    """
    largest: Curvature
    with sdpa_kernel(SDPBackend.MATH):
        diagonals: dict[Matrix, Curvature] = {"GN": gauss_newton_diagonal(point, advance)}
        diagonals["H"], largest = hessian_of_tensors(point, advance)
    found: dict[Matrix, Curvature] = {
        matrix: {
            name: block_sum(diagonal[name], b.split)
            / block_numel(tuple(diagonal[name].shape), b.split)
            for name, b in point.blocks.items()
        }
        for matrix, diagonal in diagonals.items()
    }
    return found | {"λ_max": largest}


def amount_of_work(config: GPT2Config) -> int:
    """Return how often `exact_curvature` calls `advance`."""
    sizes = [p.numel() for p in GPT2(config).parameters()]
    return sum(-(-number // CHUNK) for number in sizes) + SEQUENCES * config.context


def hessian_of_tensors(
    point: Point, advance: Callable[[str], None]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the diagonal of the Hessian, and the largest eigenvalue of each block's tensor.

    Both are from one row per entry, by autograd of the gradient.
    """
    parameters = dict(point.model.named_parameters())
    _, numbers = block_groups(point.blocks, "tensor")
    diagonal, largest = {}, {}
    gradients = torch.autograd.grad(point.loss(), list(parameters.values()), create_graph=True)
    for (name, p), g in zip(parameters.items(), gradients):
        matrix = torch.empty(p.numel(), p.numel(), dtype=p.dtype)
        for places in torch.arange(p.numel()).unsqueeze(1).split(CHUNK):
            units = torch.zeros(len(places), p.numel(), dtype=p.dtype).scatter_(1, places, 1.0)
            (rows,) = torch.autograd.grad(
                g, p, units.view(-1, *p.shape), retain_graph=True, is_grads_batched=True
            )
            matrix[places.flatten()] = rows.flatten(1)
            advance("Hessian")
        diagonal[name] = matrix.diagonal().view_as(p)
        owner = expand(numbers[name], point.blocks[name].split, p.ndim).expand_as(p).flatten()
        largest[name] = torch.empty(len(numbers[name]), dtype=p.dtype)
        for group in numbers[name].unique():
            own = matrix[owner == group][:, owner == group]
            largest[name][numbers[name] == group] = torch.linalg.eigvalsh(own)[-1]
    return diagonal, largest


def gauss_newton_diagonal(point: Point, advance: Callable[[str], None]) -> dict[str, Tensor]:
    """Return the diagonal of `Jᵀ Λ J`.

    Each position contributes the variance of the Jacobian's rows over the predicted classes.
    """
    parameters = dict(point.model.named_parameters())
    sizes = [p.numel() for p in parameters.values()]
    total = torch.zeros(sum(sizes), dtype=torch.float64)
    for sequence in point.tokens:
        for row in point.model(sequence.unsqueeze(0)).squeeze(0):
            units, p = torch.eye(len(row), dtype=row.dtype), row.detach().softmax(0)
            parts = torch.autograd.grad(
                row, list(parameters.values()), units, retain_graph=True, is_grads_batched=True
            )
            jacobian = torch.cat([part.flatten(1) for part in parts], dim=1)  # (classes, entries)
            total += p @ (jacobian - p @ jacobian).square() / point.tokens.numel()
            advance("Gauss-Newton")
    parts = total.split(sizes)
    return {name: part.view_as(p) for (name, p), part in zip(parameters.items(), parts)}


def pooled(
    curvature: Curvature, point: Point, by: Level, roles: Collection[str] | None = None
) -> Tensor:
    """Return the mean curvature of each group of blocks, as `block_scales` pools it.

    Args:
        curvature: Mean curvature of each block.
        point: Where it was measured.
        by: Which blocks make a group.
        roles: Which blocks to take; all by default.
    """
    groups, numbers = block_groups(point.blocks, by)
    numel = {}
    for name, p in point.model.named_parameters():
        blocks = point.blocks[name]
        taken = [roles is None or role in roles for role in blocks.block_roles]
        numel[name] = block_numel(tuple(p.shape), blocks.split) * torch.tensor(taken).double()
    traces = {name: curvature[name].detach() * count for name, count in numel.items()}
    entries = sum_groups(numel, numbers, len(groups))
    return (sum_groups(traces, numbers, len(groups)) / entries)[entries > 0]
