"""Parameters that are sharded over ranks (`DTensor`): FSDP2, tensor parallelism, or both at once.

A block's boundaries need not meet a shard's, so a sharded parameter is never cut into blocks.
Updates are elementwise on the local part; what differs by block is a short vector, complete on
every rank, of which each takes its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from blockopt.distributed.ranks import num_ranks

Stretches = list[tuple[int, int]]  # from (included) to (excluded) along one dimension


def is_sharded(tensor: Tensor) -> bool:
    """Whether the tensor is spread over ranks.

    `DTensor` is imported where it is used: its import takes as long as that of torch itself. Plain
    tensors come first, since every step asks hundreds of times.
    """
    if type(tensor) in (Tensor, nn.Parameter):
        return False
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


def placed_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in the layout of its parameter.

    Tensor and sequence parallelism leave gradients that are still to be summed over ranks, or that
    are cut along another dimension than the parameter. Torch brings them into the parameter's
    layout when an operation takes both; who reads the local parts must do so first.

    Raises:
        ValueError: If one of them is sharded and the other is not.
    """
    if is_sharded(gradient) != is_sharded(parameter):
        raise ValueError(
            f"A parameter of shape {tuple(parameter.shape)} is {_kind(parameter)} and its gradient "
            f"is {_kind(gradient)}. Both must be of one kind: assign "
            "distribute_tensor(gradient, p.device_mesh, p.placements)."
        )
    if not is_sharded(parameter):
        return gradient
    placements = parameter.placements  # type: ignore[attr-defined]
    if gradient.placements == placements:  # type: ignore[attr-defined]
        return gradient
    return gradient.redistribute(placements=placements)  # type: ignore[attr-defined, no-any-return]


def _kind(tensor: Tensor) -> str:
    return "a DTensor" if is_sharded(tensor) else "a plain tensor"


def shard_dims(like: Tensor) -> list[tuple[int, Any]]:
    """The mesh dimensions that a tensor is cut over, each with its placement.

    Under FSDP2 and tensor parallelism together a placement is torch's `_StridedShard`, which is no
    `Shard`. Both have the dimension `dim` of the tensor that they cut.
    """
    placements = like.placements  # type: ignore[attr-defined]
    return [(i, p) for i, p in enumerate(placements) if not (p.is_replicate() or p.is_partial())]


def local_stretches(like: Tensor, dim: int) -> Stretches:
    """Which entries of the dimension `dim` of a sharded tensor this rank holds, in their order.

    Raises:
        ValueError: If that does not fit the local part, which can happen where torch's own layout
            is ambiguous: FSDP2 with tensor parallelism on a dimension that does not divide.
    """
    stretches = [(0, like.shape[dim])]
    mesh = like.device_mesh  # type: ignore[attr-defined]
    coordinate = mesh.get_coordinate()
    for mesh_dim, placement in shard_dims(like):
        if placement.dim == dim:
            pieces = _chunks(stretches, getattr(placement, "split_factor", 1))
            number, index = mesh.size(mesh_dim), coordinate[mesh_dim]
            stretches = [s for piece in pieces for s in _chunks(piece, number)[index]]
    held = local(like).shape[dim]
    if sum(end - start for start, end in stretches) != held:
        raise ValueError(
            f"Cannot tell which {held} of the {like.shape[dim]} entries in dimension {dim} of a "
            f"parameter of shape {tuple(like.shape)} this rank holds, with placements "
            f"{like.placements}. Choose sizes that the ranks divide."  # type: ignore[attr-defined]
        )
    return stretches


def _chunks(stretches: Stretches, number: int) -> list[Stretches]:
    """Cut as `torch.chunk` does, with empty ones at the end."""
    size = -(-sum(end - start for start, end in stretches) // number)
    chunks: list[Stretches] = [[] for _ in range(number)]
    position = 0
    for start, end in stretches:
        while start < end:
            index = position // size
            take = min(end - start, (index + 1) * size - position)
            chunks[index].append((start, start + take))
            start, position = start + take, position + take
    return chunks


def local_part(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole`, which every rank holds, that broadcasts against the local `like`."""
    if not is_sharded(like):
        return whole
    for dim in {placement.dim for _, placement in shard_dims(like)}:
        if whole.shape[dim] > 1:
            stretches = local_stretches(like, dim) or [(0, 0)]  # an empty shard
            pieces = [whole.narrow(dim, a, b - a) for a, b in stretches]
            whole = torch.cat(pieces, dim) if len(pieces) != 1 else pieces[0]
    return whole


class Reduced(NamedTuple):
    """Sums that a rank has computed from the local part of a parameter.

    Attributes:
        part: Reduced over all dimensions of the local part except `dims`; of length 1 if there are
            none.
        like: The parameter.
        dims: The dimensions of `like` that `part` has, in their order.
    """

    part: Tensor
    like: Tensor
    dims: tuple[int, ...]


def sums_over_ranks(vectors: Sequence[Reduced]) -> list[Tensor]:
    """The whole of each part, on every rank, with one sum over ranks for all of one layout.

    Those of sharded parameters come flattened to vectors.
    """
    if not any(is_sharded(vector.like) for vector in vectors):
        return [vector.part for vector in vectors]
    return _sums_of_shards(vectors)


@_disable_dynamo
def _sums_of_shards(vectors: Sequence[Reduced]) -> list[Tensor]:
    results = [vector.part for vector in vectors]
    buckets: dict[Any, list[int]] = {}
    for index, (part, like, _) in enumerate(vectors):
        dims = tuple(i for i, _ in shard_dims(like)) if is_sharded(like) else ()
        if dims:
            mesh = like.device_mesh  # type: ignore[attr-defined]
            buckets.setdefault((mesh, dims, part.dtype), []).append(index)
    for (mesh, dims, _), chosen in buckets.items():
        wide = [_widened(vectors[i]) for i in chosen]
        total = torch.cat(wide).to(mesh.device_type)
        for dim in dims:
            dist.all_reduce(total, group=mesh.get_group(dim))
        sums = total.to(wide[0].device).split([len(w) for w in wide])
        for index, whole in zip(chosen, sums):
            results[index] = whole
    return results


def _widened(vector: Reduced) -> Tensor:
    """The part at its place in the whole, with zeros elsewhere, as a vector."""
    whole = vector.part
    for axis, dim in enumerate(vector.dims):
        part, position = whole, 0
        whole = part.new_zeros(
            [*part.shape[:axis], vector.like.shape[dim], *part.shape[axis + 1 :]]
        )
        for start, end in local_stretches(vector.like, dim):
            piece = part.narrow(axis, position, end - start)
            whole.narrow(axis, start, end - start).copy_(piece)
            position += end - start
    return whole.reshape(-1)


def meshes(parameters: Sequence[Tensor]) -> Iterator[Any]:
    """The meshes of sharded parameters, in the order of the parameters: the same on all ranks.

    A set would have another order on each rank, and the ranks would wait for one another.
    """
    sharded = (p for p in parameters if is_sharded(p))
    yield from dict.fromkeys(p.device_mesh for p in sharded)  # type: ignore[attr-defined]


def largest_over_ranks(
    value: Tensor, parameters: Sequence[Tensor], everywhere: bool = False
) -> Tensor:
    """The largest value of a scalar over the ranks that share sharded parameters, or over all."""
    if everywhere and num_ranks() > 1:
        mesh = next(meshes(parameters), None)
        shared = value.detach().clone().to(value.device if mesh is None else mesh.device_type)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        return shared.to(value.device)
    for mesh in meshes(parameters):
        shared = value.detach().clone().to(mesh.device_type)
        for dim in range(mesh.ndim):
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        value = shared.to(value.device)
    return value
