"""One parameter of a step, and what the steps of all optimizers do with several of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockopt.blocks import Blocks, expand
from blockopt.distributed import is_sharded, local_part, placed_like
from blockopt.optim.finite_gradients import gradient_norms, share_kept
from blockopt.optim.scale_runs import ScaleRun


class Entry(NamedTuple):
    """One parameter of a step: itself, its gradient, its blocks, its state, its scales.

    `runs` are the stretches of rows that share a scale, or None if the scales are not of this form
    or not looked at in this step.
    """

    name: str
    parameter: Tensor
    gradient: Tensor
    blocks: Blocks
    state: dict[str, Any]
    runs: list[ScaleRun] | None = None


Work = list[tuple[dict[str, Any], list[Entry]]]  # the groups of a step, with what they update


def by_device(entries: list[Entry]) -> Iterable[list[Entry]]:
    """The entries, divided by device."""
    found: dict[torch.device, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.parameter.device, []).append(entry)
    return found.values()


def placed(work: Work) -> Work:
    """The same with gradients in the layouts of their parameters, for which ranks may exchange."""
    return [(group, [_placed(entry) for entry in entries]) for group, entries in work]


def _placed(entry: Entry) -> Entry:
    if not is_sharded(entry.parameter) and not is_sharded(entry.gradient):
        return entry
    return entry._replace(gradient=placed_like(entry.gradient, entry.parameter))


def norms_to_check(entries: list[Entry], group: dict[str, Any]) -> list[Tensor]:
    """Norms of the gradients, for the check that they are finite; none for `nonfinite="ignore"`."""
    if group["nonfinite"] == "ignore":
        return []
    return gradient_norms([entry.gradient for entry in entries])


def spread(entries: Sequence[Entry], values: list[Tensor]) -> list[Tensor]:
    """Spread one value per block to tensors that broadcast against the parameters' local parts."""
    spread_values = []
    for entry, value in zip(entries, values):
        parameter = entry.parameter
        wide = value.to(torch.promote_types(value.dtype, parameter.dtype))
        spread_values.append(
            local_part(expand(wide, entry.blocks.split, parameter.ndim), parameter)
        )
    return spread_values


def decay(parameters: list[Tensor], group: dict[str, Any], found_inf: Tensor | None = None) -> None:
    """Decoupled weight decay: by the schedule's learning rate, whatever the block's scale.

    There is none where `found_inf` is 1.
    """
    if group["weight_decay"] == 0:
        return
    amount = group["lr"] * group["weight_decay"]
    if found_inf is not None:
        amount = amount * share_kept(found_inf, parameters[0].dtype)
    torch._foreach_mul_(parameters, 1 - amount)


def subtract_and_decay(
    parameters: list[Tensor],
    updates: list[Tensor],
    group: dict[str, Any],
    found_inf: Tensor | None = None,
) -> None:
    """`p ← (1 − lr · weight_decay) p − update`, on a CPU in one pass of torch's kernel for SGD."""
    if parameters[0].device.type != "cpu":
        decay(parameters, group, found_inf)
        torch._foreach_sub_(parameters, updates)
        return
    torch._fused_sgd_(
        parameters,
        updates,
        [],
        weight_decay=float(group["lr"]) * group["weight_decay"],
        momentum=0.0,
        lr=1.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        found_inf=found_inf,
    )
