"""Where a run broke: the blocks of a model whose gradients or weights are not finite, by name and role."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from blockopt import block_sum, find_blocks
from blockopt.blocks import Blocks

SHOWN = 8


def nonfinite_blocks(model: nn.Module, *, gradients: bool = True) -> dict[str, str]:
    """The parameters with entries that are not finite, and which of their blocks these are in.

    Under FSDP2 all ranks must call it.

    Args:
        model: Any model that `find_blocks` knows, not wrapped.
        gradients: Look at the gradients, or at the weights.

    Example:
        >>> model = nn.TransformerEncoderLayer(4, 2, 8)
        >>> model.self_attn.in_proj_weight.grad = torch.zeros(12, 4)
        >>> model.self_attn.in_proj_weight.grad[9, 0] = torch.inf  # rows 8 and 9: the first head of the value
        >>> nonfinite_blocks(model)
        {'self_attn.in_proj_weight': 'value 0'}
    """
    blocks = find_blocks(model)
    found = {}
    for name, parameter in model.named_parameters():
        values = parameter.grad if gradients else parameter.detach()
        if values is None:
            continue
        bad = ~torch.isfinite(_whole(values))
        if bool(bad.any()):
            entry = blocks.get(name, Blocks(("other",)))
            found[name] = _labels(entry, (block_sum(bad.float(), entry.split) > 0).tolist())
    return found


def _labels(entry: Blocks, bad: list[bool]) -> str:
    """Such as query 0, query 3; or how many if they are many."""
    seen: Counter[str] = Counter()
    labels = []
    for role, is_bad in zip(entry.block_roles, bad):
        if is_bad:
            labels.append(f"{role} {seen[role]}" if entry.num_blocks > 1 else role)
        seen[role] += 1
    if len(labels) <= SHOWN:
        return ", ".join(labels)
    counts = Counter(role for role, is_bad in zip(entry.block_roles, bad) if is_bad)
    return ", ".join(
        f"{number} of {seen[role]} blocks of {role}" for role, number in counts.items()
    )


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def describe_nonfinite(model: nn.Module, step: int, loss: float | None, checkpoint: str) -> str:
    """What to tell when a loss, gradients or weights are not finite.

    Args:
        model: Not wrapped, with the gradients of the step if it has not been taken.
        step: Number of the step, from 1.
        loss: Its loss, or None if the step was taken and the weights are not finite since.
        checkpoint: The last good one, or that there is none.
    """
    weights, gradients = (nonfinite_blocks(model, gradients=kind) for kind in (False, True))
    if loss is None:
        lines = [
            f"Step {step}: {len(weights)} weights are not finite after it. No checkpoint was written."
        ]
    else:
        lines = [
            f"Step {step}: the loss is {loss} and {len(gradients)} gradients are not finite. The step was not taken."
        ]
    for what, found in (("weight", weights), ("gradient", gradients)):
        lines += [f"  {what} {name}: {where}" for name, where in list(found.items())[:SHOWN]]
        lines += [f"  … and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
    lines += [f"The last good checkpoint: {checkpoint}."]
    lines += [
        "Going on from it would break again: start in another --output with a lower --lr, longer --warmup or smaller --clip."
    ]
    return "\n".join(lines)
