"""Whether all gradients are finite, on all ranks, from one number per gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from blockopt.distributed import largest_over_ranks, local


def gradient_norms(gradients: list[Tensor]) -> list[Tensor]:
    """A number per gradient that is finite only if all squares of its local part are.

    It is the squared norm where a dot product, which reads memory faster than a norm, can serve,
    and the norm elsewhere, in float32 or better.
    """
    if not gradients:
        return []
    parts = [local(gradient) for gradient in gradients]
    if not torch.compiler.is_compiling() and all(_takes_a_dot_product(part) for part in parts):
        return [torch.dot(flat, flat) for flat in (part.view(-1) for part in parts)]
    dtypes = [torch.promote_types(part.dtype, torch.float32) for part in parts]
    if len(set(dtypes)) == 1:
        return list(torch._foreach_norm(parts, 2.0, dtype=dtypes[0]))
    return [torch.linalg.vector_norm(part, dtype=dtype) for part, dtype in zip(parts, dtypes)]


def _takes_a_dot_product(tensor: Tensor) -> bool:
    wide = tensor.dtype in (torch.float32, torch.float64)
    return wide and tensor.device.type == "cpu" and tensor.is_contiguous()


def all_finite(parameters: list[Tensor], magnitudes: list[Tensor], everywhere: bool) -> bool:
    """Whether the magnitudes are finite on all ranks that must decide alike.

    These are the ranks that share sharded parameters, and with `everywhere` all of them: replicas
    (DDP) of which one would step and another would not are no replicas any more.

    This waits for the device. It is the only place of a step that does.

    Args:
        parameters: Of the optimizer, with or without a gradient: every rank asks the others in the
            same order, even one that has no gradient.
        magnitudes: Of the gradients.
        everywhere: Whether all ranks decide alike; all must ask then.
    """
    if not parameters:
        return True
    by_device: dict[torch.device, list[Tensor]] = {}
    for magnitude in magnitudes:
        by_device.setdefault(magnitude.device, []).append(magnitude.reshape(-1))
    flags = [(~torch.isfinite(torch.cat(some))).any().float() for some in by_device.values()]
    flag = flags[0] if flags else torch.zeros((), device=parameters[0].device)
    for other in flags[1:]:
        flag = torch.maximum(flag, other.to(flag.device))
    return not bool(largest_over_ranks(flag, parameters, everywhere))
