"""Who orthogonalizes what: every rank its own matrices, while those who share some divide them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from blockopt.blocks import Blocks
from blockopt.distributed import is_sharded, local
from blockopt.distributed.shards import group_over, regions_in, shard_dims
from blockopt.optim.divided_work import Job, Team, Whole, divide
from blockopt.optim.entry import Entry
from blockopt.optim.matrix_sections import sections
from blockopt.optim.muon_step import (
    MatrixStep,
    Piece,
    Waiting,
    apply_all,
    in_batches,
    orthogonalized_into,
    pieces,
    start_steps,
)
from blockopt.optim.newton_schulz import iteration_dtype, orthogonalization_flops

# Replicas divide matrices with at least this many rows and columns. An orthogonalization takes
# about 10 n operations for each byte of its result, n being the shorter side; what a GPU computes
# while its network brings a byte is about 4000. So smaller ones are faster to compute than to send.
DIVIDED_FROM = 512

Member = tuple[Waiting, MatrixStep | None]  # with its step, if that has begun
Updates = list[tuple[MatrixStep, Tensor]]  # the own part of each


def take_steps(waiting: list[Waiting], replicas: Any = None) -> None:
    """Take the step of each matrix.

    Args:
        waiting: The matrices, the same in the same order on all ranks that share them.
        replicas: The process group whose ranks hold copies of plain parameters, if they divide.
    """
    if replicas is not None or any(is_sharded(w.entry.parameter) for w in waiting):
        waiting = _divided(waiting, replicas)
    in_batches(piece for member in waiting for piece in pieces(*start_steps([member])))


@_disable_dynamo
def _divided(waiting: list[Waiting], replicas: Any) -> list[Waiting]:
    """Take the steps of sharded matrices, and return those that each rank takes by itself."""
    alone: list[Waiting] = []
    at_home: list[MatrixStep] = []
    shared: dict[Any, tuple[Tensor, list[Member]]] = {}
    for member, step in _started(waiting):
        entry = member.entry
        if step is not None and _is_local(entry):
            at_home.append(step)
            continue
        team = _team(entry, replicas)
        if team == Team():
            alone.append(member)
        else:
            like = _like(entry.parameter)
            key = (team, like.dtype, like.device)
            shared.setdefault(key, (like, []))[1].append((member, step))
    updates: Updates = []  # of neurons that ranks share, which add up their squares at once
    for (team, *_), (like, members) in shared.items():
        updates += _divide_over(team, members, like)
    for step, update in _updates_at_home(at_home):
        updates += _apply_or_hold(step, update)
    apply_all(updates)
    return alone


def _started(waiting: list[Waiting]) -> list[Member]:
    """Start the steps of sharded matrices, all at once: their ranks add up vectors."""
    sharded = [member for member in waiting if is_sharded(member.entry.parameter)]
    steps = iter(start_steps(sharded))
    return [(m, next(steps) if is_sharded(m.entry.parameter) else None) for m in waiting]


def _apply_or_hold(step: MatrixStep, update: Tensor) -> Updates:
    """Apply an update, unless it has neurons that ranks share: return that."""
    if step.has_neurons and is_sharded(step.entry.parameter):
        return [(step, update)]
    apply_all([(step, update)])
    return []


def _is_local(entry: Entry) -> bool:
    """Whether each rank holds whole matrices of a sharded parameter: experts cut by expert."""
    if not is_sharded(entry.parameter):
        return False
    split = entry.blocks.split
    stacked = split is not None and split.stack > 1
    return all(placement.dim == 0 and stacked for _, placement in _cuts(entry.parameter))


def _updates_at_home(steps: list[MatrixStep]) -> Updates:
    """The updates of the whole matrices that this rank holds."""
    updates: Updates = []
    found: list[Piece] = []
    for step in steps:
        direction, blocks = local(step.direction), step.entry.blocks
        update = torch.empty_like(direction, dtype=iteration_dtype(direction))
        updates.append((step, update))
        if direction.numel() > 0:
            one, like = _as_matrices(direction, blocks), _as_matrices(update, blocks)
            found += orthogonalized_into(like[0], *one, step.iterations)
    in_batches(found)
    return updates


def _as_matrices(part: Tensor, blocks: Blocks) -> tuple[Tensor, Blocks]:
    """The experts that a rank holds, as a parameter of its own, with its blocks."""
    split = blocks.split
    if split is None or split.stack == 1:
        return part, blocks
    if len(part) == 1:  # one matrix is no stack
        return part[0], blocks._replace(split=split._replace(stack=1, dim=split.dim - 1))
    return part, blocks._replace(split=split._replace(stack=len(part)))


def _cuts(parameter: Tensor) -> list[tuple[int, Any]]:
    """The dimensions of the mesh that cut a parameter, each with its placement."""
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    return [(dim, placement) for dim, placement in shard_dims(parameter) if mesh.size(dim) > 1]


def _team(entry: Entry, replicas: Any) -> Team:
    """The ranks that divide the work on a parameter."""
    parameter = entry.parameter
    if not is_sharded(parameter):
        large = all(min(s.matrix_shape) >= DIVIDED_FROM for s in sections(parameter, entry.blocks))
        return Team(replicas=replicas) if large else Team()
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    cut = tuple(dim for dim, _ in _cuts(parameter))
    others = tuple(dim for dim in range(mesh.ndim) if mesh.size(dim) > 1 and dim not in cut)
    return Team(group_over(mesh, cut), group_over(mesh, others))


def _like(parameter: Tensor) -> Tensor:
    """An empty tensor of the device that communicates and of the dtype of the iteration."""
    if is_sharded(parameter):
        device = torch.device(parameter.device_mesh.device_type)  # type: ignore[attr-defined]
        device = parameter.device if parameter.device.type == device.type else device
    else:
        device = parameter.device
    empty = torch.empty(0, dtype=parameter.dtype, device=device)
    return empty.to(iteration_dtype(empty))


def _whole(member: Waiting, team: Team) -> Whole:
    parameter = member.entry.parameter
    regions = () if team.shards is None else regions_in(team.shards, parameter)
    shape = tuple(parameter.shape)
    return Whole(shape, regions, _flops(shape, member))


def _flops(shape: tuple[int, ...], member: Waiting) -> int:
    iterations = member.group["iterations"]
    return sum(
        len(section.view) * orthogonalization_flops(*section.matrix_shape, iterations)
        for section in sections(torch.empty(shape, device="meta"), member.entry.blocks)
    )


def _divide_over(team: Team, members: list[Member], like: Tensor) -> Updates:
    """Take the steps of matrices that a team shares; return those that wait for other ranks."""
    steps: dict[int, MatrixStep] = {}
    updates: Updates = []

    def part(index: int) -> Tensor:
        member, step = members[index]
        steps[index] = start_steps([member])[0] if step is None else step
        return local(steps[index].direction).to(like.device, like.dtype)

    def work(found: list[tuple[int, Tensor]]) -> list[Tensor]:
        results = [torch.empty_like(whole) for _, whole in found]
        in_batches(
            piece
            for (index, whole), result in zip(found, results)
            for piece in orthogonalized_into(
                result, whole, steps[index].entry.blocks, steps[index].iterations
            )
        )
        return results

    def finish(index: int, update: Tensor) -> None:
        step = steps.pop(index)
        updates.extend(_apply_or_hold(step, update.to(step.entry.parameter.device)))

    wholes = [_whole(member, team) for member, _ in members]
    divide(wholes, team, Job(part, work, finish), like)
    return updates
