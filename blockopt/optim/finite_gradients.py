"""Whether all gradients are finite, on all ranks, from one number per gradient."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from blockopt.distributed import largest_over_ranks, local, num_ranks

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


def found_nonfinite(parameters: list[Tensor], magnitudes: list[Tensor], everywhere: bool) -> Tensor:
    """1 if a magnitude is not finite on one of the ranks that must decide alike, otherwise 0.

    These are the ranks that share sharded parameters, and with `everywhere` all of them: replicas
    (DDP) of which one would step and another would not are no replicas any more.

    The answer stays on the device of the first magnitude, and nothing here waits for it. Torch's
    fused kernels take it as `found_inf`.

    Args:
        parameters: Of the optimizer, with or without a gradient: every rank asks the others in the
            same order, even one that has no gradient.
        magnitudes: Of the gradients.
        everywhere: Whether all ranks decide alike; all must ask then.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for magnitude in magnitudes:
        by_device.setdefault(magnitude.device, []).append(magnitude)
    flags = [(~torch.isfinite(_in_a_row(some))).any().float() for some in by_device.values()]
    device = parameters[0].device if parameters else None  # a rank may have been given none
    flag = flags[0] if flags else torch.zeros((), device=device)
    for other in flags[1:]:
        flag = torch.maximum(flag, other.to(flag.device, non_blocking=True))
    return flag if num_ranks() == 1 else _over_ranks(flag, parameters, everywhere)


def _in_a_row(magnitudes: list[Tensor]) -> Tensor:
    if all(magnitude.ndim == 0 for magnitude in magnitudes):
        return torch.stack(magnitudes)
    return torch.cat([magnitude.reshape(-1) for magnitude in magnitudes])


@_disable_dynamo
def _over_ranks(flag: Tensor, parameters: list[Tensor], everywhere: bool) -> Tensor:
    return largest_over_ranks(flag, parameters, everywhere)


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
