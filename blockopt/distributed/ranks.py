"""The processes that train together, and what they agree on."""

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
