"""Many processes: what ranks agree on, and parameters that are sharded over them (`DTensor`).

A block's boundaries need not meet a shard's, so a sharded parameter is never cut into blocks.
Updates are elementwise on the local part; what differs by block is a short vector, complete on
every rank, of which each takes its part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from blockopt.errors import NonFiniteError


def num_ranks() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process among them."""
    return dist.get_rank() if num_ranks() > 1 else 0


def mean_over_ranks(values: Tensor, device: torch.device) -> Tensor:
    """Return the mean of a vector over all ranks, with the same bits on each.

    Args:
        values: A vector on the CPU.
        device: A device that the ranks can communicate from.
    """
    if num_ranks() == 1:
        return values
    shared = values.to(device)
    dist.all_reduce(shared)
    shared /= num_ranks()
    dist.broadcast(shared, src=0)  # a reduction need not give every rank the same bits
    return shared.cpu()


def agreed(closure: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """Make the loss closure of a sharded model fail on all ranks if it fails on one.

    The backward pass of a sharded model waits for all ranks. So if one refuses a loss that is not
    finite, all must.
    """

    def run() -> Any:
        error, result = None, None
        try:
            result = closure()
        except Exception as caught:
            error = caught
        loss = result[0] if isinstance(result, tuple) else result
        usable = isinstance(loss, Tensor) and bool(torch.isfinite(loss.detach()).all())
        if bool(mean_over_ranks(torch.tensor([float(usable)]), device) == 1):
            return result
        if error is not None:
            raise error
        if usable:
            raise NonFiniteError("The loss closure of another rank returned no finite loss.")
        return result  # whoever asked for it finds out what is wrong with it

    return run


def reshard(model: nn.Module) -> None:
    """Put back the shards that FSDP2 leaves whole after a forward pass without a backward one."""
    if num_ranks() > 1:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is spread over ranks.

    `DTensor` is imported where it is used: its import takes as long as that of torch itself.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined, no-any-return]


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all ranks."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined, no-any-return]


def local_part(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole`, which every rank holds, that broadcasts against the local `like`."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = like.device_mesh  # type: ignore[attr-defined]
    placements = [
        p if isinstance(p, Shard) and whole.shape[p.dim] > 1 else Replicate()
        for p in like.placements  # type: ignore[attr-defined]
    ]
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local(everywhere.redistribute(placements=placements))


def sum_over_ranks(part: Tensor, like: Tensor, dim: int | None, length: int) -> Tensor:
    """The whole of a vector that this rank has computed from the local part of `like`.

    Args:
        part: Reduced over all dimensions of the local part except `dim`, or over all of them for
            `dim=None`.
        like: The sharded parameter.
        dim: The dimension of `like` that `part` runs along.
        length: Of the whole vector.
    """
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

    placements: list[Placement] = []
    for placement in like.placements:  # type: ignore[attr-defined]
        if not isinstance(placement, Shard):
            placements.append(Replicate())
        else:
            placements.append(Shard(0) if placement.dim == dim else Partial())
    mesh = like.device_mesh  # type: ignore[attr-defined]
    return full(
        DTensor.from_local(
            part, mesh, placements, run_check=False, shape=torch.Size((length,)), stride=(1,)
        )
    )


def largest_over_ranks(value: Tensor, parameters: list[Tensor]) -> Tensor:
    """The largest value of a scalar over the ranks that share sharded parameters."""
    sharded = [p for p in parameters if is_sharded(p)]
    if not sharded:
        return value
    from torch.distributed.tensor import DTensor, Partial

    # In the order of the parameters, which is the same on all ranks; that of a set is not.
    for mesh in dict.fromkeys(p.device_mesh for p in sharded):  # type: ignore[attr-defined]
        part = DTensor.from_local(
            value.to(mesh.device_type), mesh, [Partial("max")] * mesh.ndim, run_check=False
        )
        value = full(part)
    return value
