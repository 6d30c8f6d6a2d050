"""The processes that train together, and what they agree on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


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


def average_gradients(gradients: Sequence[Tensor]) -> None:
    """Replace gradients of whole parameters by their means over all ranks, as DDP does."""
    works = [dist.all_reduce(gradient, async_op=True) for gradient in gradients]
    for work, gradient in zip(works, gradients):
        work.wait()  # type: ignore[union-attr]
        gradient /= num_ranks()


def reshard(model: nn.Module) -> None:
    """Put back the shards that FSDP2 leaves whole after a forward pass without a backward one."""
    if num_ranks() > 1:
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
