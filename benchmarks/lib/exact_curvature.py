"""Exact curvature of every block of a small GPT, entry by entry, and how well the estimators find it.

Nothing here comes from `blockopt.curvature` but the estimators that are judged. Autograd
differentiates the loss twice for the Hessian; the Gauss-Newton matrix is made of the Jacobian of
the logits and the closed form of cross-entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockopt import find_blocks
from blockopt.blocks import Blocks
from blockopt.blocks.groups import Level, block_groups
from blockopt.blocks.split import block_numel, block_sum
from blockopt.curvature import analytic, directional, gauss_newton, gradient, hutchinson, power_law
from blockopt.curvature.power_law import EXPONENTS
from recipes.common.gpt2 import GPT2, GPT2Config
from recipes.data.token_data import Batches, load_data

Curvature = Mapping[str, Tensor]
LEVELS: tuple[Level, ...] = get_args(Level)
SMALL = GPT2Config(vocab_size=64, context=32, width=16, depth=3, heads=2)
TINY = GPT2Config(vocab_size=8, context=8, width=4, depth=2, heads=2)
LR = 3e-3
CHUNK = 32  # unit vectors at a time; their activations should stay in the cache
ROUNDING = (
    1e-12  # of the largest value: what is below is an exact zero, such as the bias of the keys
)
MANY = 16


@dataclass(frozen=True)
class Point:
    """A model at one time of its training, and what is known there.

    Attributes:
        name: When.
        model: The model, in float64.
        tokens: The batch on which curvature is measured, (B, T).
        targets: Its next tokens.
        update: The change of each parameter in the AdamW step nearest to it.
    """

    name: str
    model: nn.Module
    tokens: Tensor
    targets: Tensor
    update: dict[str, Tensor]

    def loss(self) -> Tensor:
        """The mean cross-entropy of the batch."""
        return self.model(self.tokens, self.targets)

    @property
    def blocks(self) -> dict[str, Blocks]:
        """The model's blocks."""
        return find_blocks(self.model)


def characters(vocabulary: int) -> Tensor:
    """The source of the standard library as ranks of its bytes by frequency; the last one stands for all rarer bytes."""
    data = load_data("stdlib", tokenizer="bytes").train.long()
    order = torch.bincount(data, minlength=256).argsort(descending=True)
    ranks = torch.empty_like(order).scatter_(0, order, torch.arange(256))
    return ranks.clamp(max=vocabulary - 1)[data]


def points(config: GPT2Config, steps: int, size: int = 8, batch_size: int = 32) -> Iterator[Point]:
    """The model at initialisation and after some AdamW steps; the second is the same model, trained on.

    Args:
        config: Sizes of the model.
        steps: How many steps.
        size: Sequences on which curvature is measured.
        batch_size: Sequences a training step.
    """
    torch.manual_seed(0)
    data = characters(config.vocab_size)
    measured = Batches(data, batch_size=size, context=config.context, seed=1)[0]
    training = Batches(data, batch_size=batch_size, context=config.context, seed=0)
    model = GPT2(config).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)

    def step(number: int) -> dict[str, Tensor]:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        model(*training[number]).backward()
        optimizer.step()
        return {name: p.detach() - before[name] for name, p in model.named_parameters()}

    initial = {name: value.clone() for name, value in model.state_dict().items()}
    first = step(0)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(initial)
    # The secant goes from the weights back by the update. Backwards along minus the first step is
    # where that step leads.
    yield Point(
        "at initialisation", model, *measured, {name: -change for name, change in first.items()}
    )
    model.load_state_dict(trained)
    last = first
    for number in range(1, steps):
        last = step(number)
    optimizer.zero_grad()
    yield Point(f"after {steps} steps", model, *measured, last)


def hessian_diagonal(point: Point, advance: Callable[[str], None]) -> dict[str, Tensor]:
    """The diagonal of the Hessian: for each entry of each parameter one row of its block, by autograd of the gradient."""
    parameters = dict(point.model.named_parameters())
    diagonal = {}
    with sdpa_kernel(SDPBackend.MATH):
        gradients = torch.autograd.grad(point.loss(), list(parameters.values()), create_graph=True)
        for (name, p), g in zip(parameters.items(), gradients):
            entries = []
            for places in torch.arange(p.numel()).split(CHUNK):
                units = torch.zeros(len(places), p.numel(), dtype=p.dtype).scatter_(
                    1, places.unsqueeze(1), 1.0
                )
                (rows,) = torch.autograd.grad(
                    g, p, units.view(-1, *p.shape), retain_graph=True, is_grads_batched=True
                )
                entries.append(rows.flatten(1).gather(1, places.unsqueeze(1)).flatten())
                advance("Hessian")
            diagonal[name] = torch.cat(entries).view_as(p)
    return diagonal


def gauss_newton_diagonal(point: Point, advance: Callable[[str], None]) -> dict[str, Tensor]:
    """The diagonal of `Jᵀ Λ J`: at each position, the variance over the predicted classes of the rows of the Jacobian."""
    parameters = dict(point.model.named_parameters())
    total = torch.zeros(sum(p.numel() for p in parameters.values()), dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        for sequence in point.tokens:
            logits = point.model(sequence.unsqueeze(0)).squeeze(0)
            for row in logits:
                units, p = torch.eye(len(row), dtype=row.dtype), row.detach().softmax(0)
                parts = torch.autograd.grad(
                    row, list(parameters.values()), units, retain_graph=True, is_grads_batched=True
                )
                jacobian = torch.cat(
                    [part.flatten(1) for part in parts], dim=1
                )  # (classes, entries)
                total += p @ (jacobian - p @ jacobian).square() / point.tokens.numel()
                advance("Gauss-Newton")
    sizes = [p.numel() for p in parameters.values()]
    return {
        name: part.view_as(p) for (name, p), part in zip(parameters.items(), total.split(sizes))
    }


def amount_of_work(config: GPT2Config, size: int = 8) -> int:
    """How often `advance` is called for both diagonals of a point."""
    sizes = [p.numel() for p in GPT2(config).parameters()]
    return sum(-(-number // CHUNK) for number in sizes) + size * config.context


def block_means(diagonal: Curvature, blocks: Mapping[str, Blocks]) -> dict[str, Tensor]:
    """The mean of a diagonal over each block."""
    return {
        name: block_sum(diagonal[name], b.split) / block_numel(tuple(diagonal[name].shape), b.split)
        for name, b in blocks.items()
    }


def pooled(
    curvature: Curvature, point: Point, by: Level, roles: Collection[str] | None = None
) -> Tensor:
    """The mean curvature of each group of blocks, as `block_scales` pools it: traces over numbers of entries.

    Args:
        curvature: Mean curvature of each block.
        point: Where it was measured.
        by: What makes a group.
        roles: Which blocks to take, all by default.
    """
    blocks = point.blocks
    shapes = {name: tuple(p.shape) for name, p in point.model.named_parameters()}
    group = torch.cat(list(block_groups(blocks, by)[1].values()))
    numel = torch.cat([block_numel(shapes[name], b.split) for name, b in blocks.items()]).double()
    if roles is not None:
        numel *= torch.tensor([role in roles for b in blocks.values() for role in b.block_roles])
    values = torch.cat([curvature[name].detach().double() for name in blocks])
    entries = torch.bincount(group, numel)
    return (torch.bincount(group, values * numel) / entries)[entries > 0]


@dataclass(frozen=True)
class Estimator:
    """An estimator that is judged.

    Attributes:
        name: Its name in the tables.
        own: The exact quantity that it estimates: the Gauss-Newton matrix or the Hessian.
        run: Measures a point with a number of probes and a generator.
        probes: The numbers of probes to try, the default first; none if it does not sample.
        target: Whether its ranks are to agree with the exact ones at level "tensor".
        relative: Whether it is up to a constant.
        roles: The roles that it is judged on, all by default.
    """

    name: str
    own: Literal["GN", "H"]
    run: Callable[..., Curvature]
    probes: tuple[int, ...] = ()
    target: bool = False
    relative: bool = False
    roles: Collection[str] | None = None


def _gradient(point: Point) -> Curvature:
    point.loss().backward()
    found = gradient(point.model)
    point.model.zero_grad()
    return found


ESTIMATORS = (
    Estimator(
        "analytic outer", "GN", lambda p, **o: analytic(p.model, p.loss, **o), (1, MANY), True
    ),
    Estimator(
        "gauss_newton", "GN", lambda p, **o: gauss_newton(p.model, p.loss, **o), (1, MANY), True
    ),
    Estimator(
        "analytic full",
        "H",
        lambda p, **o: analytic(p.model, p.loss, part="full", **o),
        (1, MANY),
        True,
    ),
    Estimator("hutchinson", "H", lambda p, **o: hutchinson(p.model, p.loss, **o), (1, MANY), True),
    Estimator("gradient", "GN", _gradient, relative=True),
    Estimator("power_law", "H", lambda p: power_law(p.model), relative=True),
    Estimator(
        "power_law, matrices", "H", lambda p: power_law(p.model), relative=True, roles=EXPONENTS
    ),
    Estimator("directional", "H", lambda p: directional(p.model, p.loss, p.update)),
    Estimator("secant", "H", lambda p: directional(p.model, p.loss, p.update, method="secant")),
)


def ranks(values: Tensor) -> Tensor:
    """Ranks from 0, ties at their mean. What is zero but for rounding is a tie."""
    rounded = values.where(values.abs() > ROUNDING * values.abs().max(), 0.0)
    _, places, counts = torch.unique(rounded, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts + 1) / 2).double()[places]


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's rank correlation."""
    return torch.corrcoef(torch.stack([ranks(x), ranks(y)]))[0, 1].item()


def compare(
    estimates: Sequence[Curvature],
    exact: Curvature,
    point: Point,
    estimator: Estimator | None = None,
) -> dict[str, Any]:
    """Rank correlation at each level, mean and smallest over the estimates; and their ratio to the exact, over tensors."""
    roles = None if estimator is None else estimator.roles
    levels = {}
    for by in LEVELS:
        truth = pooled(exact, point, by, roles)
        found = [
            rank_correlation(pooled(estimate, point, by, roles), truth) for estimate in estimates
        ]
        levels[by] = {"mean": sum(found) / len(found), "min": min(found)}
    truth = pooled(exact, point, "tensor", roles)
    usable = truth > ROUNDING * truth.max()
    ratios = torch.cat(
        [(pooled(estimate, point, "tensor", roles) / truth)[usable] for estimate in estimates]
    )
    low, middle, high = ratios.quantile(torch.tensor([0.1, 0.5, 0.9], dtype=ratios.dtype)).tolist()
    unit = middle if estimator is not None and estimator.relative else 1.0
    return {
        "rank": levels,
        "ratio": {"median": middle / unit, "low": low / unit, "high": high / unit},
    }


def judge(point: Point, seeds: int, advance: Callable[[str], None]) -> dict[str, Any]:
    """Both exact diagonals, every estimator against them, and the values of all tensors.

    Args:
        point: Where to measure.
        seeds: How many seeds each sampling estimator gets.
        advance: Called after each unit of work, `amount_of_work` times.
    """
    labels, _ = block_groups(point.blocks, "tensor")
    diagonals = {"GN": gauss_newton_diagonal(point, advance), "H": hessian_diagonal(point, advance)}
    exact = {name: block_means(diagonal, point.blocks) for name, diagonal in diagonals.items()}
    functional = analytic(point.model, point.loss, part="functional")
    with_functional = {name: value + functional[name] for name, value in exact["GN"].items()}
    limits = {
        "GN": exact["GN"],
        "GN + functional": with_functional,
    }  # the best that estimators of them can do
    none = {"probes": None, "of": "H", "default": False}
    rows = [
        {"name": name, **none, **compare([limit], exact["H"], point)}
        for name, limit in limits.items()
    ]
    values = {
        name: pooled(curvature, point, "tensor").tolist() for name, curvature in exact.items()
    }
    for estimator in ESTIMATORS:
        for probes in estimator.probes or (None,):
            if probes is None:
                estimates = [estimator.run(point)]
            else:
                generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
                estimates = [
                    estimator.run(point, num_probes=probes, generator=g) for g in generators
                ]
            default = estimator.target and probes == estimator.probes[0]
            for of in dict.fromkeys([estimator.own, "H"]):
                compared = compare(estimates, exact[of], point, estimator)
                rows.append(
                    {
                        "name": estimator.name,
                        "probes": probes,
                        "of": of,
                        "default": default,
                        **compared,
                    }
                )
            if probes in (None, 1):
                values[estimator.name] = pooled(estimates[0], point, "tensor").tolist()
    return {"loss": point.loss().item(), "rows": rows, "tensors": labels, "values": values}
