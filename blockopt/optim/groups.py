"""What a group knows about its parameters: names, blocks, and the shapes it was made with.

Engines such as DeepSpeed's ZeRO replace the parameters of an optimizer by flat pieces. Such a piece
holds parts of many parameters and tells nothing about them. What treats all entries alike goes on:
AdamW and SGD with all scales 1. What needs blocks or matrices is refused.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from blockopt.blocks import Blocks, from_plain

WHOLE = Blocks(("other",))
Shapes = list[tuple[int, ...]]


def blocks_of(group: dict[str, Any]) -> list[Blocks]:
    """The blocks of a group's parameters; without any, each parameter is one block.

    So is each flat piece that an engine has put in their place.
    """
    if group["blocks"] is None or len(group["blocks"]) != len(group["params"]):
        return [WHOLE] * len(group["params"])
    return [from_plain(plain) for plain in group["blocks"]]


def names_of(group: dict[str, Any]) -> list[str]:
    """The names of a group's parameters; without any, their shapes, for messages."""
    names: list[str] = group.get("param_names") or []
    if len(names) == len(group["params"]):
        return names
    return [f"parameter of shape {tuple(p.shape)}" for p in group["params"]]


def shapes_of(group: dict[str, Any]) -> Shapes:
    """The shapes of a group's parameters, those of sharded ones being whole."""
    return [tuple(parameter.shape) for parameter in group["params"]]


def refuse_flattened(group: dict[str, Any], shapes: Shapes, what: str) -> None:
    """Raise `ValueError` if the parameters are no longer those that the group was made with.

    Args:
        group: The group as it is now.
        shapes: Those of its parameters when it was added.
        what: What needs them.
    """
    found = shapes_of(group)
    if found == shapes:
        return
    now, then = (
        f"{len(some)} of shapes {', '.join(map(str, some[:3]))}{', …' if len(some) > 3 else ''}"
        for some in (found, shapes)
    )
    raise ValueError(
        f"{what} needs the parameters that the optimizer was built with ({then}), but something "
        f"has replaced them ({now}). DeepSpeed's ZeRO and FSDP1 flatten parameters; use FSDP2 "
        "(torch.distributed.fsdp.fully_shard), which keeps their shapes, or BlockAdamW or BlockSGD "
        "without block scales and with second_moment='coordinate'."
    )


def check_blocks(group: dict[str, Any]) -> None:
    """Raise `ValueError` if the blocks of a group are not those of its parameters."""
    if not group["params"] or not group["blocks"]:
        return
    divided = (
        "What divides groups among ranks, as ZeroRedundancyOptimizer does, needs those of "
        'param_groups(model, by="parameter").'
    )
    if len(group["blocks"]) != len(group["params"]):
        raise ValueError(
            f"Invalid blocks: {len(group['blocks'])} for {len(group['params'])} parameters. Must "
            f"be one each. {divided}"
        )
    for parameter, blocks in zip(group["params"], blocks_of(group)):
        try:
            blocks.check(tuple(parameter.shape))
        except ValueError as error:
            raise ValueError(
                f"{error} If FSDP1 or DeepSpeed has flattened the parameters since, use FSDP2 "
                f"(torch.distributed.fsdp.fully_shard), which keeps their shapes. {divided}"
            ) from None


def check_supported(parameter: Tensor) -> None:
    """Raise `ValueError` for a parameter that is not real and floating."""
    if not parameter.is_floating_point():
        raise ValueError(
            f"Invalid parameter of dtype {parameter.dtype}. Must be real and floating; split a "
            "complex one in two."
        )


def check_learning_rate(lr: float | Tensor) -> None:
    """Raise `ValueError` if a schedule has set a learning rate that would ruin the weights.

    A tensor is not looked at: that would stall a GPU.
    """
    if not isinstance(lr, Tensor) and not 0.0 <= lr < math.inf:
        raise ValueError(f"Invalid lr={lr}. Must be finite and >= 0.")
