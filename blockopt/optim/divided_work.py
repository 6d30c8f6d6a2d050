r"""Work on whole matrices, divided over the ranks that share them: each is worked on once.

The ranks form a grid of `P` replicas by `S` shards: FSDP2 is `P = 1`, alone or with tensor
parallelism, DDP is `S = 1`, and hybrid sharding has both. Each matrix gets an owner in the grid. In
the owner's replica the shards send it their parts and get their parts of the result back, both by
all-to-all; the replicas then exchange their results by all-gather.

With `N` entries of `b` bytes in all matrices together, a rank receives

.. math::
    b \left[ \frac{2 N}{P S} \left(1 - \frac{1}{S}\right)
           + \frac{N}{S} \left(1 - \frac{1}{P}\right) \right]

bytes. That is the least: the owner must receive what it lacks of its matrices, which are
:math:`N/PS` entries in the mean, and every rank what it lacks of the results for its own part,
:math:`N/S`, of which it has computed :math:`1/PS` itself. The least work is the whole work divided
by `P S`, or the largest matrix. Owners are chosen so that both come close: the costliest matrix
first, each to the rank that is then least loaded, in work and in bytes.

Exchanges run in buckets: while the owners work on one, the parts of the next are on their way to
their owners, and the results of the last on their way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from blockopt.distributed.shards import Region

BUCKET = 1 << 24  # entries that each owner gets at once


class Team(NamedTuple):
    """The ranks that divide the work.

    Attributes:
        shards: The process group whose ranks hold parts of each matrix, None if each holds it all.
        replicas: The process group whose ranks hold the same part, None if there is but one.
    """

    shards: Any = None
    replicas: Any = None

    @property
    def num_shards(self) -> int:
        """Over how many ranks each matrix is cut."""
        return 1 if self.shards is None else dist.get_world_size(self.shards)

    @property
    def num_replicas(self) -> int:
        """How many ranks hold the same part."""
        return 1 if self.replicas is None else dist.get_world_size(self.replicas)

    @property
    def place(self) -> tuple[int, int]:
        """The replica and the shard of this rank."""
        replica = 0 if self.replicas is None else dist.get_rank(self.replicas)
        return replica, 0 if self.shards is None else dist.get_rank(self.shards)


class Whole(NamedTuple):
    """A tensor that an owner works on.

    Attributes:
        shape: Of the whole.
        regions: What each shard holds of it; empty if it is not cut.
        cost: The work that it takes, in any unit.
    """

    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    cost: float

    def part_shape(self, shard: int) -> tuple[int, ...]:
        """The shape of what a shard holds."""
        if not self.regions:
            return self.shape
        return tuple(end - start for start, end in self.regions[shard])

    def part_of(self, tensor: Tensor, shard: int) -> Tensor:
        """What a shard holds of a whole tensor, as a view."""
        for dim, (start, end) in enumerate(self.regions[shard]):
            tensor = tensor.narrow(dim, start, end - start)
        return tensor


class Job(NamedTuple):
    """What is done with the tensors, by number.

    Attributes:
        part: Returns the part of this rank. Called once for each tensor, on every rank.
        work: Takes whole tensors and returns results of the same shapes and dtypes. Called on their
            owner.
        finish: Takes the part of a result that belongs to this rank. Called on every rank.
    """

    part: Callable[[int], Tensor]
    work: Callable[[list[tuple[int, Tensor]]], list[Tensor]]
    finish: Callable[[int, Tensor], None]


def divide(wholes: Sequence[Whole], team: Team, job: Job, like: Tensor) -> None:
    """Do the job on all tensors, each whole on one rank.

    All ranks of the team call this together, with the same tensors in the same order.

    Args:
        wholes: The tensors.
        team: The ranks.
        job: What to do.
        like: An empty tensor of the dtype and on the device of all of them.
    """
    num_ranks = team.num_replicas * team.num_shards
    owners = choose_owners(tuple((w.cost, _numel(w.shape)) for w in wholes), num_ranks)
    buckets = _buckets(owners, [_numel(w.shape) for w in wholes], num_ranks)
    exchange = _Exchange(wholes, owners, team, job, like)
    stages = (exchange.collect, exchange.work, exchange.share, exchange.finish)
    begun: dict[int, Any] = {}
    for time in range(len(buckets) + len(stages) - 1):
        for delay, stage in enumerate(stages):
            number = time - delay
            if 0 <= number < len(buckets):
                begun[number] = stage(buckets[number], begun.pop(number, None))


@lru_cache(maxsize=64)
def choose_owners(loads: tuple[tuple[float, int], ...], num_ranks: int) -> tuple[int, ...]:
    """The rank that owns each tensor, by its work and its entries.

    Example:
        >>> choose_owners(((3.0, 1), (2.0, 1), (1.0, 1), (1.0, 1)), 2)
        (0, 1, 1, 0)
    """
    work = sum(load[0] for load in loads) or 1.0
    entries = sum(load[1] for load in loads) or 1
    shares = [(cost / work, numel / entries) for cost, numel in loads]
    taken = [(0.0, 0.0)] * num_ranks
    owners = [0] * len(loads)
    for index in sorted(range(len(loads)), key=lambda i: -max(shares[i])):
        with_it = [(c + shares[index][0], e + shares[index][1]) for c, e in taken]
        owner = min(range(num_ranks), key=lambda rank: (max(with_it[rank]), sum(with_it[rank])))
        taken[owner], owners[index] = with_it[owner], owner
    return tuple(owners)


def _buckets(owners: Sequence[int], numels: list[int], num_ranks: int) -> list[list[int]]:
    """Buckets of tensors in which every owner has about as many entries."""
    buckets: list[list[int]] = []
    filled = [0] * num_ranks
    for index, (owner, numel) in enumerate(zip(owners, numels)):
        number = filled[owner] // BUCKET
        filled[owner] += numel
        buckets += [[] for _ in range(number + 1 - len(buckets))]
        buckets[number].append(index)
    return buckets


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


class _Exchange:
    """Moves parts to their owners, and parts of the results back.

    Each stage takes a bucket and what the stage before has begun, and begins the next exchange.
    """

    def __init__(
        self, wholes: Sequence[Whole], owners: Sequence[int], team: Team, job: Job, like: Tensor
    ) -> None:
        self.wholes, self.team, self.job, self.like = wholes, team, job, like
        self.num_shards = team.num_shards
        self.replica, self.shard = team.place
        self.places = [divmod(owner, self.num_shards) for owner in owners]

    def _owned_by(self, bucket: list[int], shard: int) -> list[int]:
        """The tensors of a bucket that a shard of this replica owns."""
        return [i for i in bucket if self.places[i] == (self.replica, shard)]

    def _part_shape(self, index: int, shard: int) -> tuple[int, ...]:
        return self.wholes[index].part_shape(shard)

    def collect(self, bucket: list[int], _: Any) -> Any:
        """Begin to send the parts of this rank to the owners in its replica."""
        parts = {index: self.job.part(index) for index in bucket}
        for index, part in parts.items():
            expected = self._part_shape(index, self.shard)
            if tuple(part.shape) != expected:
                raise ValueError(
                    f"A rank holds a part of shape {tuple(part.shape)} of a tensor of shape "
                    f"{self.wholes[index].shape}. Must be {expected}, as torch.chunk cuts."
                )
        to_owners = [[parts[i] for i in self._owned_by(bucket, s)] for s in range(self.num_shards)]
        if self.num_shards == 1:
            return to_owners[0]
        sizes = [
            sum(_numel(self._part_shape(i, s)) for i in self._owned_by(bucket, self.shard))
            for s in range(self.num_shards)
        ]
        return _all_to_all(to_owners, sizes, self.like, self.team.shards)

    def work(self, bucket: list[int], collected: Any) -> Any:
        """Work on the tensors that this rank owns, and begin to send back the shards' parts."""
        owned = self._owned_by(bucket, self.shard)
        if self.num_shards == 1:
            return self.job.work(list(zip(owned, collected)))
        wholes = {index: self.like.new_empty(self.wholes[index].shape) for index in owned}
        for shard, buffer in enumerate(_wait(collected)):
            shapes = [self._part_shape(index, shard) for index in owned]
            for index, piece in zip(owned, _unpack(buffer, shapes)):
                self.wholes[index].part_of(wholes[index], shard).copy_(piece)
        results = dict(zip(owned, self.job.work(list(wholes.items()))))
        by_shard = [
            [self.wholes[index].part_of(results[index], shard) for index in owned]
            for shard in range(self.num_shards)
        ]
        sizes = [
            sum(_numel(self._part_shape(i, self.shard)) for i in self._owned_by(bucket, s))
            for s in range(self.num_shards)
        ]
        return _all_to_all(by_shard, sizes, self.like, self.team.shards)

    def share(self, bucket: list[int], back: Any) -> Any:
        """Take the own parts of what this replica has found, and begin to tell the others."""
        if self.num_shards == 1:
            mine = dict(zip(self._owned_by(bucket, 0), back))
        else:
            mine = {}
            for shard, buffer in enumerate(_wait(back)):
                owned = self._owned_by(bucket, shard)
                shapes = [self._part_shape(index, self.shard) for index in owned]
                mine.update(zip(owned, _unpack(buffer, shapes)))
        if self.team.num_replicas == 1:
            return mine
        of_replica = self._by_replica(bucket)
        longest = max(sum(_numel(self._part_shape(i, self.shard)) for i in o) for o in of_replica)
        sent = self.like.new_zeros(longest)
        packed = _pack([mine[i] for i in of_replica[self.replica]], self.like)
        sent[: len(packed)] = packed
        got = [torch.empty_like(sent) for _ in of_replica]
        handle = dist.all_gather(
            [buffer.view(torch.uint8) for buffer in got],
            sent.view(torch.uint8),
            group=self.team.replicas,
            async_op=True,
        )
        return (handle, sent), got

    def finish(self, bucket: list[int], shared: Any) -> None:
        """Hand over the parts of the results that belong to this rank."""
        if self.team.num_replicas > 1:
            (handle, _), got = shared
            handle.wait()
            shared = {}
            for chosen, buffer in zip(self._by_replica(bucket), got):
                shapes = [self._part_shape(index, self.shard) for index in chosen]
                shared.update(zip(chosen, _unpack(buffer, shapes)))
        for index, part in shared.items():
            self.job.finish(index, part)

    def _by_replica(self, bucket: list[int]) -> list[list[int]]:
        """The tensors of a bucket whose owners each replica has."""
        replicas = range(self.team.num_replicas)
        return [[i for i in bucket if self.places[i][0] == replica] for replica in replicas]


def _pack(tensors: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat([like, *(tensor.reshape(-1) for tensor in tensors)])


def _unpack(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    numels = [_numel(shape) for shape in shapes]
    pieces = buffer[: sum(numels)].split(numels) if numels else ()
    return [piece.view(tuple(shape)) for piece, shape in zip(pieces, shapes)]


def _all_to_all(
    tensors: list[list[Tensor]], received: list[int], like: Tensor, group: Any
) -> tuple[Any, Tensor, list[int]]:
    """Begin to send a list of tensors to each rank, and to receive so many entries from each.

    In bytes, since not every backend knows every dtype.
    """
    packed = [_pack(some, like) for some in tensors]
    sent, got = torch.cat(packed), like.new_empty(sum(received))
    width = like.element_size()
    handle = dist.all_to_all_single(
        got.view(torch.uint8),
        sent.view(torch.uint8),
        [numel * width for numel in received],
        [len(some) * width for some in packed],
        group=group,
        async_op=True,
    )
    return (handle, sent), got, received  # what is sent must live until it has arrived


def _wait(begun: tuple[Any, Tensor, list[int]]) -> list[Tensor]:
    (handle, _), got, received = begun
    handle.wait()
    return list(got.split(received))
