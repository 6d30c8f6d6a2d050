"""Where a run broke: the blocks whose gradients or weights are not finite, by name and role."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from blockopt import block_sum
from blockopt.blocks import Blocks, from_plain
from blockopt.distributed import full
from recipes.common.errors import UserError

SHOWN = 8


class NonFiniteError(UserError, FloatingPointError):
    """A loss, gradients or weights are not finite."""


def nonfinite_blocks(
    model: nn.Module, groups: list[dict[str, Any]], *, gradients: bool = True
) -> dict[str, str]:
    """Return the parameters with entries that are not finite, and the blocks that these are in.

    Under FSDP2 all ranks must call it.

    Args:
        model: Any model, not wrapped.
        groups: The groups of its optimizer, which carry the blocks.
        gradients: Whether to look at the gradients or at the weights.

    Example:
        >>> from blockopt import BlockSGD, param_groups
        >>> model = nn.TransformerEncoderLayer(4, 2, 8)
        >>> model.self_attn.in_proj_weight.grad = torch.zeros(12, 4)
        >>> model.self_attn.in_proj_weight.grad[9, 0] = torch.inf  # in the first head of the value
        >>> optimizer = BlockSGD(param_groups(model), lr=0.1)
        >>> nonfinite_blocks(model, optimizer.param_groups)
        {'self_attn.in_proj_weight': 'value 0'}
    """
    blocks = {
        id(parameter): from_plain(entry)
        for group in groups
        for parameter, entry in zip(group["params"], group.get("blocks", ()))
    }
    found = {}
    for name, parameter in model.named_parameters():
        values = parameter.grad if gradients else parameter.detach()
        if values is None:
            continue
        bad = ~torch.isfinite(full(values))
        if bool(bad.any()):
            entry = blocks.get(id(parameter), Blocks(("other",)))
            found[name] = _labels(entry, (block_sum(bad.float(), entry.split) > 0).tolist())
    return found


def _labels(entry: Blocks, bad: list[bool]) -> str:
    """Return for example "query 0, query 3", or counts if there are many."""
    seen: Counter[str] = Counter()
    labels = []
    for role, is_bad in zip(entry.block_roles, bad):
        if is_bad:
            labels.append(f"{role} {seen[role]}" if entry.num_blocks > 1 else role)
        seen[role] += 1
    if len(labels) <= SHOWN:
        return ", ".join(labels)
    counts = Counter(role for role, is_bad in zip(entry.block_roles, bad) if is_bad)
    return ", ".join(f"{count} of {seen[role]} blocks of {role}" for role, count in counts.items())


def describe_nonfinite(
    model: nn.Module,
    groups: list[dict[str, Any]],
    step: int,
    loss: float | None,
    checkpoint: str,
) -> str:
    """Say where a loss, gradients or weights are not finite, and what to do.

    Args:
        model: The model, not wrapped, with the gradients of the step if it has not been taken.
        groups: The groups of its optimizer.
        step: Number of the step, from 1.
        loss: Its loss; None if the step was taken and has broken the weights.
        checkpoint: The last good one, in words.
    """
    weights, gradients = (nonfinite_blocks(model, groups, gradients=kind) for kind in (False, True))
    if loss is None:
        found = f"{len(weights)} weights are not finite after it. No checkpoint was written."
    else:
        found = f"the loss is {loss} and {len(gradients)} gradients are not finite. "
        found += "The step was not taken."
    lines = [f"Step {step}: {found}"]
    for what, places in (("weight", weights), ("gradient", gradients)):
        lines += [f"  {what} {name}: {where}" for name, where in list(places.items())[:SHOWN]]
        lines += [f"  … and {len(places) - SHOWN} more"] if len(places) > SHOWN else []
    lines += [f"The last good checkpoint: {checkpoint}."]
    lines += ["Going on from it would break again: start in another --output with a lower --lr,"]
    lines += ["a longer --warmup or a smaller --clip."]
    return "\n".join(lines)
