"""The optimizers that are compared, called arms, with the targets we set for ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch.optim import Optimizer

from benchmarks.lib.problem import Problem, take_apart
from blockopt import BlockAdamW, BlockMuon, BlockSGD, find_blocks
from blockopt.blocks import Level, block_groups

LR = 1e-4


@dataclass(frozen=True)
class Arm:
    """One optimizer of the comparison.

    Attributes:
        name: Its name in the tables.
        build: Makes it for a problem.
        suite: Which arms it is timed with. The arms of "muon" get the hidden matrices alone, and
            fewer rounds.
        targets: `{name of a reference arm: largest acceptable ratio of step times}`.
        ours: Whether it belongs to blockopt.
        state_target: The largest acceptable state, in bytes per parameter.
    """

    name: str
    build: Callable[[Problem], Optimizer]
    suite: Literal["main", "muon", "memory only"] = "main"
    targets: tuple[tuple[str, float], ...] = ()
    ours: bool = False
    state_target: float | None = None


def adam_mini(problem: Problem) -> Optimizer:
    """Build Adam-mini as its README says.

    It finds its blocks by name, and does not know `c_attn` and `attn.c_proj`. Its own GPT-2 example
    therefore keeps query, key, value and output as `wq`, `wk`, `wv`, `wo`, and so does this for
    `nn.Linear`. Under `Conv1D` the query is not contiguous, which Adam-mini refuses: there it gets
    the model's own names and treats `c_attn` as one block.
    """
    from adam_mini import Adam_mini

    named = dict(problem.model.named_parameters())
    if problem.layout == "linear":
        known = {"query": "wq", "key": "wk", "value": "wv", "output": "wo"}
        for name, blocks in find_blocks(problem.model).items():
            if name.endswith(("attn.c_attn.weight", "attn.c_proj.weight")):
                module = name.removesuffix(".weight").rpartition(".")[0]
                sections = take_apart(name, named.pop(name), blocks.roles, blocks.split)
                for role, (_, section) in zip(blocks.roles, sections):
                    named[f"{module}.{known[role]}.weight"] = section
    sizes = {"dim": problem.config.width, "n_heads": problem.config.heads}
    return Adam_mini(named.items(), **ADAMW, weight_decay=0.1, verbose=False, **sizes)


def scaled(
    problem: Problem, optimizer: BlockAdamW | BlockSGD, attention: Level, others: Level
) -> Optimizer:
    """Set the scale of each group of blocks to a random number in [0.5, 2].

    Args:
        problem: What the optimizer is for.
        optimizer: Whose scales are set.
        attention: Which blocks of the matrices of attention share a scale.
        others: The same for all other parameters.
    """
    generator = torch.Generator().manual_seed(0)
    found = find_blocks(problem.model)
    heads = {name for name, blocks in found.items() if set(blocks.roles) <= ATTENTION}
    for chosen, by in ((heads, attention), (found.keys() - heads, others)):
        some = {name: blocks for name, blocks in found.items() if name in chosen}
        labels, numbers = block_groups(some, by)
        values = 0.5 + 1.5 * torch.rand(len(labels), generator=generator)
        optimizer.set_block_scales({name: values[number] for name, number in numbers.items()})
    return optimizer


def block_adamw(problem: Problem, nonfinite: str = "raise") -> BlockAdamW:
    """Build `BlockAdamW`, with all scales 1."""
    return BlockAdamW(problem.groups(), **ADAMW, nonfinite=nonfinite)


def block_sgd(problem: Problem) -> BlockSGD:
    """Build `BlockSGD`, with all scales 1."""
    return BlockSGD(problem.groups(weight_decay=0.0), **MOMENTUM)


ADAMW = {"lr": LR, "betas": (0.9, 0.95)}
MOMENTUM = {"lr": LR, "momentum": 0.9}
FOREACH, FUSED, MINI = "AdamW foreach", "AdamW fused", "Adam-mini"
SGD, MUON = "SGD foreach", "torch Muon"
ATTENTION = {"query", "key", "value", "output"}
# What shares a scale, in attention and elsewhere, and the largest acceptable ratio to fused AdamW,
# with gradients checked and with nonfinite="ignore". By head, scales change with every row of
# an embedding and every neuron.
VARIANTS: dict[str, tuple[tuple[Level, Level] | None, float, float]] = {
    "BlockAdamW": (None, 1.3, 1.02),
    "BlockAdamW, by role": (("role", "role"), 1.35, 1.05),
    "BlockAdamW, attention by head": (("head", "tensor"), 1.5, 1.25),
    "BlockAdamW, by head": (("head", "head"), 1.5, 1.25),
}
SGD_TARGETS = ((SGD, 1.1), (MINI, 0.3))


def variants(
    name: str, by: tuple[Level, Level] | None, checked: float, ignoring: float
) -> Iterator[Arm]:
    """Yield an arm that checks gradients, and one that does not."""

    def build(problem: Problem, nonfinite: str) -> Optimizer:
        optimizer = block_adamw(problem, nonfinite)
        return optimizer if by is None else scaled(problem, optimizer, *by)

    others = ((FOREACH, 1.0), (MINI, 0.3))
    yield Arm(
        name, partial(build, nonfinite="raise"), targets=((FUSED, checked), *others), ours=True
    )
    unchecked = partial(build, nonfinite="ignore")
    yield Arm(f"{name}, unchecked", unchecked, targets=((FUSED, ignoring),), ours=True)


ARMS = (
    Arm(FOREACH, lambda p: torch.optim.AdamW(p.groups(), **ADAMW, foreach=True)),
    Arm(FUSED, lambda p: torch.optim.AdamW(p.groups(), **ADAMW, fused=True)),
    Arm(SGD, lambda p: torch.optim.SGD(p.groups(weight_decay=0.0), **MOMENTUM, foreach=True)),
    Arm(MINI, adam_mini),
    *(arm for name, options in VARIANTS.items() for arm in variants(name, *options)),
    Arm(
        "BlockAdamW block",
        lambda p: BlockAdamW(p.groups(), **ADAMW, second_moment="block"),
        targets=((FUSED, 1.2), (MINI, 0.3)),
        ours=True,
        state_target=4.1,
    ),
    Arm("BlockSGD", block_sgd, targets=SGD_TARGETS, ours=True),
    Arm(
        "BlockSGD, by role",
        lambda p: scaled(p, block_sgd(p), "role", "role"),
        targets=SGD_TARGETS,
        ours=True,
    ),
    Arm(
        MUON,
        lambda p: torch.optim.Muon(p.matrices(), lr=LR, adjust_lr_fn="match_rms_adamw"),
        suite="muon",
    ),
    Arm(
        "BlockMuon",
        lambda p: BlockMuon(p.matrix_groups(), lr=LR),
        suite="muon",
        targets=((MUON, 0.6),),
        ours=True,
    ),
    Arm(
        "BlockMuon, all parameters",
        lambda p: BlockMuon(p.groups(), lr=LR),
        suite="memory only",
        ours=True,
    ),
)
