"""What is compared: an optimizer, where its block scales come from, and what is tuned.

Most arms tune the learning rate, what they add to it, and weight decay, in this order. Shipped arms
tune the learning rate only: weight decay is where others start (0.1; for SGD 0.001), and `BlockLR`
has its defaults, as in the snippet of the README. Everything else is fixed, and equal where it
means the same: betas (0.9, 0.95) for everything like Adam and (0.95, 0.95) for SOAP, momentum 0.9
for SGD and BlockMuon and 0.95 for torch's Muon (their defaults), clipping at norm 1, weight decay
on matrices only. Arms that are not shipped refresh their scales about 20 times per run, one scale
per role (`BlockLR(by="role")`).

A control takes power and decay from the arm that it controls, as tuned, and tunes its learning rate
only: the scales are spread as far, and only their places differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import blockopt
from recipes.common.optimizers import build_optimizer, usual_lr
from recipes.common.training import Training
from recipes.comparison.controls import SHUFFLE_SEED, ShuffledBlockLR, controlled
from recipes.comparison.fixed_scales import fixed_scales
from recipes.comparison.tuning import Axis

REFRESHES = 20
ADAM_LR, SGD_LR, MUON_LR = (Axis("lr", usual_lr(name)) for name in ("adamw", "sgd", "muon"))
BLOCK_SGD_LR = Axis("lr", usual_lr("block-sgd"))
DECAY, SGD_DECAY = Axis("weight_decay", 0.1, late=True), Axis("weight_decay", 1e-3, late=True)
POWER = Axis("power", -0.5)
RATIOS = (Axis("embedding_ratio", 1.0), Axis("vector_ratio", 1.0))


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: Short name for tables and `--arms`.
        title: Plain name for pictures.
        about: One line for the report.
        optimizer: A name that `build_optimizer` knows.
        space: What is tuned, learning rate first. Axes that end in "_ratio" multiply the learning
            rate of a kind of parameter.
        scales: Where the block scales come from: None, "ratios" (the published ones), or a
            curvature of `BlockLR`.
        control: None, "shuffled" or "inverted".
        base: The arm that a control takes its other tuned values from.
        ours: Whether the optimizer is blockopt's.
        shipped_decay: Weight decay of an arm that is as shipped but for its learning rate; None for
            an arm that tunes it.
    """

    name: str
    title: str
    about: str
    optimizer: str
    space: tuple[Axis, ...]
    scales: str | None = None
    control: str | None = None
    base: str | None = None
    ours: bool = False
    shipped_decay: float | None = None

    def recipe(self) -> dict[str, Any]:
        """Return what decides a run besides the name and the tuned values; part of its key."""
        names = ("optimizer", "scales", "control")
        return {name: getattr(self, name) for name in names} | {"refreshes": REFRESHES}

    @property
    def shipped(self) -> bool:
        """Whether everything but the learning rate is as shipped."""
        return self.shipped_decay is not None

    @property
    def names(self) -> list[str]:
        """The hyperparameters that a run needs, tuned or taken from the base."""
        taken = () if self.base is None else ARMS[self.base].space
        return list(dict.fromkeys(axis.name for axis in (*self.space, *taken)))


def _others() -> Iterator[Arm]:
    adam = (ADAM_LR, DECAY)
    yield Arm("sgd", "SGD", "SGD with momentum 0.9", "sgd", (SGD_LR, SGD_DECAY))
    yield Arm("adamw", "AdamW", "AdamW with one learning rate", "adamw", adam)
    about = "AdamW with free learning rates for embeddings, 1-D parameters and matrices"
    space = (ADAM_LR, *RATIOS, DECAY)
    yield Arm("adamw-groups", "AdamW, 3 learning rates", about, "adamw", space)
    about = "AdamW with the fixed ratios of Wang et al. (sharpness disparity), without their method"
    title = "AdamW, published ratios"
    yield Arm("adamw-ratios", title, about, "block-adamw", adam, scales="ratios")
    about = "Adam-mini, values by head as in the fused matrix"
    yield Arm("adam-mini", "Adam-mini", about, "adam-mini", adam)
    about = "torch.optim.Muon on matrices, fused ones as a whole; AdamW on the rest"
    yield Arm("muon", "Muon", about, "muon", (MUON_LR, DECAY))
    about = "torch.optim.Muon with free learning rates for embeddings and for 1-D parameters"
    space = (MUON_LR, *RATIOS, DECAY)
    yield Arm("muon-groups", "Muon, 3 learning rates", about, "muon", space)
    yield Arm("soap", "SOAP", "SOAP: Adam in the eigenbasis of Shampoo", "soap", adam)


def _ours() -> Iterator[Arm]:
    bases = {
        "block-sgd": ("BlockSGD", BLOCK_SGD_LR, SGD_DECAY, ": SGD with decoupled decay"),
        "block-adamw": ("BlockAdamW", ADAM_LR, DECAY, ": AdamW itself, except for rounding"),
        "block-adamw-block": (
            "BlockAdamW by block",
            ADAM_LR,
            DECAY,
            ": one second moment per block; columns of the embedding whitened",
        ),
        "block-adamw-whitened": (
            "BlockAdamW, whitened",
            ADAM_LR,
            DECAY,
            ": columns of the embedding whitened",
        ),
        "block-muon": (
            "BlockMuon",
            MUON_LR,
            DECAY,
            ": preconditioned Muon, query, key and value apart; columns of the embedding whitened",
        ),
    }
    curvatures = {
        "analytic": ("BlockLR (analytic)", "analytic Gauss-Newton curvature"),
        "newton": ("BlockLR", "estimated curvature over slope"),
    }
    for base, (title, lr, decay, known_as) in bases.items():
        yield Arm(base, title, f"{title}, all scales 1{known_as}", base, (lr, decay), ours=True)
        for scales, (plus, measured) in curvatures.items():
            about = f"{title}, scales from {measured}"
            names = (f"{base}+{scales}", f"{title} + {plus}")
            yield Arm(*names, about, base, (lr, POWER, decay), scales=scales, ours=True)


def _controls(bases: Mapping[str, Arm]) -> Iterator[Arm]:
    for name in ("block-adamw+newton", "block-adamw+analytic", "adamw-ratios"):
        base = bases[name]
        for control in ("shuffled", "inverted"):
            yield Arm(
                f"{name}-{control}",
                f"{base.title}, {control}",
                f"Control: {name} with its scales {control}",
                "block-adamw",
                (ADAM_LR,),
                scales=base.scales,
                control=control,
                base=name,
            )


def _shipped(bases: Mapping[str, Arm]) -> Iterator[Arm]:
    names = ("adamw", "muon", "block-adamw-block", "block-adamw+newton", "block-adamw-whitened")
    names += ("block-adamw-whitened+newton", "block-muon", "block-muon+newton", "block-sgd+newton")
    for base in (bases[name] for name in names):
        decay = next(axis.start for axis in base.space if axis.name == "weight_decay")
        yield Arm(
            f"shipped-{base.name}",
            base.title,
            f"{base.title} as shipped, weight decay {decay:g}",
            base.optimizer,
            base.space[:1],
            scales=base.scales,
            ours=base.ours,
            shipped_decay=decay,
        )


def _arms() -> dict[str, Arm]:
    arms = {arm.name: arm for arm in (*_others(), *_ours())}
    return arms | {arm.name: arm for arm in (*_controls(arms), *_shipped(arms))}


ARMS = _arms()


def build(
    arm: Arm,
    model: nn.Module,
    values: Mapping[str, float],
    *,
    steps: int,
    seed: int,
    tokens: Tensor | None = None,
) -> Training:
    """Return the model with the optimizer of an arm, and its `BlockLR` if it has one.

    Args:
        arm: What to train with.
        model: What to train.
        values: One value for each of the arm's hyperparameters; and for arms of blockopt, under
            `NAME_scale`, multipliers of the learning rate of what `fixed_scales.py` calls NAME.
        steps: Length of the run, over which refreshes are spread.
        seed: For the samples that curvature draws.
        tokens: The text to train on, which multipliers of rows of the embedding are told by.

    Raises:
        ValueError: If a value is missing or unknown.
    """
    scales = {n.removesuffix("_scale"): v for n, v in values.items() if n.endswith("_scale")}
    given = sorted(name for name in values if not name.endswith("_scale"))
    if given != sorted(arm.names):
        raise ValueError(
            f"Invalid hyperparameters {given} of {arm.name}. Must be {sorted(arm.names)}."
        )
    decay = values["weight_decay"] if arm.shipped_decay is None else arm.shipped_decay
    optimizer = build_optimizer(arm.optimizer, model, values["lr"], weight_decay=decay)
    _scale_groups(optimizer, model, values)
    if scales:
        optimizer.set_block_scales(fixed_scales(model, scales, tokens))
    if arm.scales is None:
        return Training(model, optimizer, None)
    if arm.scales == "ratios":
        scales = blockopt.sharpness_disparity(model)
        if arm.control is not None:
            scales = controlled(scales, model, arm.control, SHUFFLE_SEED)
        optimizer.set_block_scales(scales)
        return Training(model, optimizer, None)
    if arm.shipped:
        return Training(model, optimizer, blockopt.BlockLR(optimizer, model))
    kind = ShuffledBlockLR if arm.control == "shuffled" else blockopt.BlockLR
    power = -values["power"] if arm.control == "inverted" else values["power"]
    every = max(1, steps // REFRESHES)
    options = {"curvature": arm.scales, "every": every, "power": power, "seed": seed}
    return Training(model, optimizer, kind(optimizer, model, **options))


def _scale_groups(
    optimizer: torch.optim.Optimizer, model: nn.Module, values: Mapping[str, float]
) -> None:
    """Multiply the learning rate of each group by the ratio of its kind of parameter, if any."""
    ratios = {n.removesuffix("_ratio"): v for n, v in values.items() if n.endswith("_ratio")}
    if not ratios:
        return
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for group in optimizer.param_groups:
        kinds = {
            "embedding" if id(p) in embeddings else "vector" if p.ndim < 2 else "matrix"
            for p in group["params"]
        }
        if len(kinds) != 1:
            name = type(optimizer).__name__
            raise ValueError(f"A group of {name} mixes {sorted(kinds)}, each with its own lr.")
        group["lr"] *= ratios.get(kinds.pop(), 1.0)
