"""Parameters that are sharded over ranks (`DTensor`): FSDP2, tensor parallelism, or both at once.

A block's boundaries need not meet a shard's, so a sharded parameter is never cut into blocks.
Updates are elementwise on the local part; what differs by block is a short vector, complete on
every rank, of which each takes its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from blockopt.distributed.ranks import num_ranks

Region = tuple[tuple[int, int], ...]  # in each dimension the first entry, and one after the last


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


def compute_device(parameter: Tensor) -> torch.device:
    """Where ranks compute and exchange, also if offload keeps a sharded parameter on the CPU."""
    if is_sharded(parameter):
        return torch.device(parameter.device_mesh.device_type)  # type: ignore[attr-defined]
    return parameter.device


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


def own_range(length: int, cuts: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Which entries of a dimension a rank holds: the first, and one after the last.

    Args:
        length: Of the dimension.
        cuts: For each mesh dimension that cuts it, from left to right, how many ranks it has, which
            of them the rank is, and torch's `split_factor`: the number of ranks in the mesh
            dimensions to the right that have cut before, as those of tensor parallelism have before
            those of FSDP2; 1 if none have.

    Example:
        Seven rows cut by tensor parallelism into four and three, and then by FSDP2 over 3 ranks:

        >>> [own_range(7, [(3, i, 2), (2, j, 1)]) for j in range(2) for i in range(3)]
        [(0, 2), (2, 4), (4, 4), (4, 5), (5, 6), (6, 7)]
    """
    ordered: list[tuple[int, int]] = []
    for number, index, factor in reversed(cuts):
        before = 0
        while factor > 1 and before < len(ordered):
            factor //= ordered[before][0]
            before += 1
        ordered.insert(before, (number, index))
    start, end = 0, length
    for number, index in ordered:  # as `torch.chunk` cuts: the last may be shorter, or empty
        size = -(-(end - start) // number)
        start, end = min(end, start + index * size), min(end, start + (index + 1) * size)
    return start, end


def _range_of(
    length: int, dim: int, placements: tuple[Any, ...], mesh: Any, coordinate: Sequence[int]
) -> tuple[int, int]:
    """What the rank at a place of the mesh holds of a dimension of a tensor."""
    cuts = [
        (mesh.size(i), coordinate[i], getattr(placement, "split_factor", 1))
        for i, placement in enumerate(placements)
        if getattr(placement, "dim", None) == dim
    ]
    return own_range(length, cuts)


def regions_in(group: Any, like: Tensor) -> tuple[Region, ...]:
    """What each rank of a process group, all of them on its mesh, holds of a sharded tensor."""
    return _regions(group, tuple(like.shape), like.placements, like.device_mesh)  # type: ignore[attr-defined]


@lru_cache(maxsize=1024)  # many matrices are alike, and every step asks
def _regions(
    group: Any, shape: tuple[int, ...], placements: tuple[Any, ...], mesh: Any
) -> tuple[Region, ...]:
    return tuple(
        tuple(_range_of(size, dim, placements, mesh, place) for dim, size in enumerate(shape))
        for place in _coordinates(mesh, group)
    )


def _coordinates(mesh: Any, group: Any) -> list[list[int]]:
    """The places of the ranks of a process group on a mesh."""
    return [(mesh.mesh == r).nonzero()[0].tolist() for r in dist.get_process_group_ranks(group)]


def group_over(mesh: Any, dims: tuple[int, ...]) -> Any:
    """The process group of the ranks that share all other dimensions of a mesh with this one.

    None if there are no dimensions. All ranks of the mesh ask for the same, in the same order.
    """
    if len(dims) < 2:
        return mesh.get_group(dims[0]) if dims else None
    return _group_over(mesh, dims, dist.group.WORLD)


@lru_cache(maxsize=64)
def _group_over(mesh: Any, dims: tuple[int, ...], world: Any) -> Any:
    place = [slice(None) if i in dims else at for i, at in enumerate(mesh.get_coordinate())]
    ranks = sorted(mesh.mesh[tuple(place)].flatten().tolist())
    whole = len(ranks) == num_ranks()
    return world if whole else dist.new_group(ranks, use_local_synchronization=True)


def local_range(like: Tensor, dim: int) -> tuple[int, int]:
    """The entries of the dimension `dim` of a sharded tensor that this rank holds.

    Raises:
        ValueError: If that does not fit the local part, cut as neither FSDP2 nor tensor parallelism
            do.
    """
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    start, end = _range_of(like.shape[dim], dim, placements, mesh, mesh.get_coordinate())
    held = local(like).shape[dim]
    if end - start != held:
        raise ValueError(
            f"Cannot tell which {held} of the {like.shape[dim]} entries in dimension {dim} of a "
            f"parameter of shape {tuple(like.shape)} this rank holds, with placements "
            f"{placements}. Must be {end - start}, as torch.chunk cuts."
        )
    return start, end


def local_part(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole`, which every rank holds, that broadcasts against the local `like`."""
    if not is_sharded(like):
        return whole
    for dim in {placement.dim for _, placement in shard_dims(like)}:
        if whole.shape[dim] > 1:
            start, end = local_range(like, dim)
            whole = whole.narrow(dim, start, end - start)
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
        wide = [widened(vectors[i]) for i in chosen]
        total = torch.cat(wide).to(mesh.device_type)
        dist.all_reduce(total, group=group_over(mesh, dims))
        sums = total.to(wide[0].device).split([len(w) for w in wide])
        for index, whole in zip(chosen, sums):
            results[index] = whole
    return results


def widened(vector: Reduced) -> Tensor:
    """The part at its place in the whole, with zeros elsewhere; of a sharded parameter a vector."""
    if not is_sharded(vector.like):
        return vector.part
    whole = vector.part
    for axis, dim in enumerate(vector.dims):
        part, (start, end) = whole, local_range(vector.like, dim)
        shape = [*part.shape[:axis], vector.like.shape[dim], *part.shape[axis + 1 :]]
        whole = part.new_zeros(shape)
        whole.narrow(axis, start, end - start).copy_(part)
    return whole.reshape(-1)


class Sharers(NamedTuple):
    """Ranks that must decide alike.

    Attributes:
        group: Their process group.
        device: What they communicate from, None for any.
        parameters: What they share.
    """

    group: Any
    device: str | None
    parameters: list[Tensor]


def sharers(
    parameters: Sequence[Tensor], replicas: Any = None, everywhere: bool = False
) -> list[Sharers]:
    """The ranks that share sharded parameters, mesh by mesh, and others that must decide alike.

    They come in the order of the parameters, which is the same on all ranks. A set of meshes would
    have another order on each, and the ranks would wait for one another.

    Args:
        parameters: All of an optimizer.
        replicas: The process group whose ranks divide the work on plain parameters, if they do.
        everywhere: Whether all ranks decide alike.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    plain: list[Tensor] = []
    for p in parameters:
        (by_mesh.setdefault(p.device_mesh, []) if is_sharded(p) else plain).append(p)  # type: ignore[attr-defined]
    found = [
        Sharers(group_over(mesh, tuple(range(mesh.ndim))), mesh.device_type, some)
        for mesh, some in by_mesh.items()
    ]
    if replicas is not None:
        found.append(Sharers(replicas, None, plain))
    if everywhere and all(dist.get_world_size(some.group) < num_ranks() for some in found):
        device = found[0].device if found else None
        found.append(Sharers(dist.group.WORLD, device, []))
    return found
