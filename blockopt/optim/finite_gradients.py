"""Whether all gradients are finite, on all ranks, from one number per gradient."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from blockopt.distributed import local, num_ranks, sharers

READ_AT_ONCE = ("cpu",)  # the devices whose numbers can be read without waiting for them


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


def found_nonfinite(
    named: list[tuple[str, Tensor]],
    magnitudes: list[Tensor],
    everywhere: bool,
    replicas: Any,
    wait: bool,
) -> Tensor:
    """1 if a magnitude is not finite on one of the ranks that must decide alike, otherwise 0.

    These are the ranks that share sharded parameters or divide the work on others, and with
    `everywhere` all of them: replicas (DDP) of which one would step and another would not are no
    replicas any more. It is 1 too if a gradient that they share is missing on some of them only.

    The answer stays on the device of the first magnitude, and nothing here waits for it. Torch's
    fused kernels take it as `found_inf`.

    Args:
        named: All parameters of the optimizer by name, with or without a gradient: every rank asks
            the others in the same order, even one that has no gradient.
        magnitudes: Of the gradients.
        everywhere: Whether all ranks decide alike; all must ask then.
        replicas: The process group whose ranks divide the work on plain parameters, if they do.
        wait: Whether to wait for the other ranks' answer about missing gradients on any device.

    Raises:
        ValueError: If a gradient is missing on some ranks only, and the device can tell at once.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for magnitude in magnitudes:
        by_device.setdefault(magnitude.device, []).append(magnitude)
    ranks = num_ranks()  # what they add up must be finite too
    rows = [
        _in_a_row(some) if ranks == 1 else ranks * _in_a_row(some) for some in by_device.values()
    ]
    flags = [(~torch.isfinite(row)).any().float() for row in rows]
    device = named[0][1].device if named else None  # a rank may have been given none
    flag = flags[0] if flags else torch.zeros((), dtype=torch.float32, device=device)
    for other in flags[1:]:
        flag = torch.maximum(flag, other.to(flag.device, non_blocking=True))
    return flag if ranks == 1 else _over_ranks(flag, named, everywhere, replicas, wait)


def _in_a_row(magnitudes: list[Tensor]) -> Tensor:
    if all(magnitude.ndim == 0 for magnitude in magnitudes):
        return torch.stack(magnitudes)
    return torch.cat([magnitude.reshape(-1) for magnitude in magnitudes])


@_disable_dynamo
def _over_ranks(
    flag: Tensor, named: list[tuple[str, Tensor]], everywhere: bool, replicas: Any, wait: bool
) -> Tensor:
    """Exchange the flag, and beside it a number that tells which gradients are missing."""
    differs = torch.zeros_like(flag)
    for group, device, shared in sharers([p for _, p in named], replicas, everywhere):
        number = float(missing_gradients(shared))
        told = torch.stack([flag, *(flag.new_full((), sign * number) for sign in (1, -1))])
        told = told.to(device or told.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        flag, largest, smallest = told.to(flag.device)
        differs = torch.maximum(differs, (largest != -smallest).to(flag.dtype))
    if (wait or flag.device.type in READ_AT_ONCE) and bool(differs):
        names = [name for name, p in named if p.grad is None]
        shown = f": {', '.join(names[:5])}{', …' if len(names) > 5 else ''}" if names else ""
        raise ValueError(
            "A gradient is missing (None) on some ranks, and not on others that share its "
            f"parameter. This rank lacks {len(names)} of {len(named)}{shown}. Assign zeros where a "
            "rank has none: p.grad = torch.zeros_like(p). No weight and no state was changed."
        )
    return torch.maximum(flag, differs)


def missing_gradients(parameters: Sequence[Tensor]) -> int:
    """A number that tells which gradients are missing, small enough for a float32."""
    return zlib.crc32(bytes(p.grad is None for p in parameters)) % (1 << 24)


def can_read_at_once(found_inf: Tensor) -> bool:
    """Whether a step may branch on the flag: it costs no wait, and no compiler records the step."""
    return not torch.compiler.is_compiling() and found_inf.device.type in READ_AT_ONCE


def flag_on(found_inf: Tensor | None, device: torch.device) -> Tensor | None:
    """The flag where the tensors are that it is about."""
    return None if found_inf is None else found_inf.to(device, non_blocking=True)


def share_kept(found_inf: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `found_inf` is 1, otherwise 1, to multiply rates for tensors of a dtype by."""
    return 1 - found_inf.to(torch.promote_types(dtype, torch.float32))


def keep_if(found_inf: Tensor | None, tensors: list[Tensor]) -> list[Tensor]:
    """Return copies to put back by `put_back`; none if the gradients are known to be finite."""
    return [] if found_inf is None else [tensor.clone() for tensor in tensors]


def put_back(found_inf: Tensor | None, tensors: list[Tensor], kept: list[Tensor]) -> None:
    """Write what was kept where `found_inf` is 1, without waiting for the device to know."""
    for tensor, old in zip(tensors, kept):
        assert found_inf is not None
        tensor.copy_(torch.where(found_inf.bool(), old, tensor))
