"""What is compared: each arm is an optimizer, where its block scales come from, and the space that it is tuned over.

Tuned are the learning rate, what an arm adds to it, and weight decay, in this order. All else is
fixed, alike where it means the same: betas (0.9, 0.95) for everything of Adam's kind and (0.95,
0.95) for SOAP, momentum 0.9 for SGD and 0.95 for Muon, clipping at norm 1, decay of matrices only.
Scales by curvature are refreshed about 20 times a run, one a role (`BlockLR(by="role")`). A control
takes power and decay from the arm that it controls, as tuned, and tunes its learning rate alone:
the spread of the scales is the same, and only their places differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import blockopt
from recipes.common.optimizers import build_optimizer
from recipes.comparison.controls import SHUFFLE_SEED, ShuffledBlockLR, controlled
from recipes.comparison.tuning import Axis

REFRESHES = 20
ADAM_LR, SGD_LR, MUON_LR = Axis("lr", 3e-3), Axis("lr", 0.3), Axis("lr", 1e-2)
DECAY, SGD_DECAY = Axis("weight_decay", 0.1, late=True), Axis("weight_decay", 1e-3, late=True)
POWER = Axis("power", -0.5)
KNOWN_AS = {
    "block-sgd": ": SGD with decoupled decay",
    "block-adamw": ": AdamW itself, but for rounding",
    "block-muon": ": Muon, with queries, keys and values as matrices of their own",
}


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: Short, for tables and `--arms`.
        about: One line for the report.
        optimizer: A name that `build_optimizer` knows.
        space: What is tuned, learning rate first. Axes that end in "_ratio" multiply the learning
            rate of a kind of parameter.
        scales: Where the block scales come from: None, "ratios" (the published ones), or a
            curvature of `BlockLR`.
        control: None, "shuffled" or "inverted".
        base: Of a control, the arm whose tuned values it takes, all but the learning rate.
        ours: Whether the optimizer is blockopt's.
    """

    name: str
    about: str
    optimizer: str
    space: tuple[Axis, ...]
    scales: str | None = None
    control: str | None = None
    base: str | None = None
    ours: bool = False

    def recipe(self) -> dict[str, Any]:
        """All of it that decides how a run goes, besides the tuned values."""
        return {
            "optimizer": self.optimizer,
            "scales": self.scales,
            "control": self.control,
            "refreshes": REFRESHES,
        }

    @property
    def names(self) -> list[str]:
        """Of all hyperparameters that a run needs, tuned or taken from the base."""
        taken = () if self.base is None else ARMS[self.base].space
        return list(dict.fromkeys(axis.name for axis in (*self.space, *taken)))


def _arms() -> dict[str, Arm]:
    ratios = (Axis("embedding_ratio", 1.0), Axis("vector_ratio", 1.0))
    arms = [
        Arm("sgd", "SGD with momentum 0.9", "sgd", (SGD_LR, SGD_DECAY)),
        Arm("adamw", "AdamW with one learning rate", "adamw", (ADAM_LR, DECAY)),
        Arm(
            "adamw-groups",
            "AdamW with free learning rates for embeddings, 1-D parameters and matrices",
            "adamw",
            (ADAM_LR, *ratios, DECAY),
        ),
        Arm(
            "adamw-ratios",
            "AdamW with the fixed ratios of Wang et al. (sharpness disparity), and nothing else of their method",
            "block-adamw",
            (ADAM_LR, DECAY),
            scales="ratios",
        ),
        Arm(
            "adam-mini",
            "Adam-mini, values by head as in the fused matrix",
            "adam-mini",
            (ADAM_LR, DECAY),
        ),
        Arm(
            "muon",
            "torch.optim.Muon on matrices, fused ones as a whole; AdamW on the rest",
            "muon",
            (MUON_LR, DECAY),
        ),
        Arm("soap", "SOAP: Adam in the eigenbasis of Shampoo", "soap", (ADAM_LR, DECAY)),
    ]
    bases = {
        "block-sgd": ("BlockSGD", SGD_LR, SGD_DECAY),
        "block-adamw": ("BlockAdamW", ADAM_LR, DECAY),
        "block-adamw-block": ("BlockAdamW, one second moment a block", ADAM_LR, DECAY),
        "block-muon": ("BlockMuon", MUON_LR, DECAY),
    }
    for base, (title, lr, decay) in bases.items():
        about = f"{title}, all scales 1{KNOWN_AS.get(base, '')}"
        arms.append(Arm(base, about, base, (lr, decay), ours=True))
        for curvature, what in (
            ("analytic", "analytic Gauss-Newton curvature"),
            ("newton", "estimated curvature over slope"),
        ):
            about = f"{title}, scales from {what}"
            arms.append(
                Arm(
                    f"{base}+{curvature}",
                    about,
                    base,
                    (lr, POWER, decay),
                    scales=curvature,
                    ours=True,
                )
            )
    for scales, base in (
        ("newton", "block-adamw+newton"),
        ("analytic", "block-adamw+analytic"),
        ("ratios", "adamw-ratios"),
    ):
        for control in ("shuffled", "inverted"):
            about = f"Control: {base} with its scales {control}"
            arms.append(
                Arm(
                    f"{base}-{control}",
                    about,
                    "block-adamw",
                    (ADAM_LR,),
                    scales=scales,
                    control=control,
                    base=base,
                )
            )
    return {arm.name: arm for arm in arms}


ARMS = _arms()
BASELINE = "adamw"


@dataclass
class Training:
    """An optimizer ready to train with."""

    optimizer: torch.optim.Optimizer
    block_lr: blockopt.BlockLR | None


def build(
    arm: Arm, model: nn.Module, values: Mapping[str, float], *, steps: int, seed: int
) -> Training:
    """The optimizer of an arm, and its `BlockLR` if it has one.

    Args:
        arm: Which one.
        model: What it trains.
        values: One for each axis of the arm's space.
        steps: Of the whole run; refreshes are spread over them.
        seed: Of the probes of the curvature.

    Raises:
        ValueError: If a value is missing or unknown.
    """
    if sorted(values) != sorted(arm.names):
        raise ValueError(
            f"Invalid hyperparameters {sorted(values)} of {arm.name}. Must be {sorted(arm.names)}."
        )
    optimizer = build_optimizer(
        arm.optimizer, model, values["lr"], weight_decay=values["weight_decay"]
    )
    _scale_groups(optimizer, model, values)
    if arm.scales is None:
        return Training(optimizer, None)
    if arm.scales == "ratios":
        scales = blockopt.sharpness_disparity(model)
        scales = (
            scales if arm.control is None else controlled(scales, model, arm.control, SHUFFLE_SEED)
        )
        optimizer.set_block_scales(scales)
        return Training(optimizer, None)
    kind = ShuffledBlockLR if arm.control == "shuffled" else blockopt.BlockLR
    power = -values["power"] if arm.control == "inverted" else values["power"]
    every = max(1, steps // REFRESHES)
    return Training(
        optimizer, kind(optimizer, model, curvature=arm.scales, every=every, power=power, seed=seed)
    )


def _scale_groups(
    optimizer: torch.optim.Optimizer, model: nn.Module, values: Mapping[str, float]
) -> None:
    """Multiply the learning rate of each group by the ratio of its kind of parameter, for arms that have such ratios."""
    ratios = {
        name.removesuffix("_ratio"): value
        for name, value in values.items()
        if name.endswith("_ratio")
    }
    if not ratios:
        return
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    for group in optimizer.param_groups:
        kinds = {
            "embedding" if id(p) in embeddings else "vector" if p.ndim < 2 else "matrix"
            for p in group["params"]
        }
        if len(kinds) != 1:
            raise ValueError(
                f"A group of {type(optimizer).__name__} mixes {sorted(kinds)}, which need one learning rate each."
            )
        group["lr"] *= ratios.get(kinds.pop(), 1.0)
