"""The stages of a step of Muon: momentum, damping, orthogonalization, even neurons, update.

All but the orthogonalization work on whatever part of a parameter a rank holds, and add up short
vectors over ranks. The orthogonalization needs whole matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockopt.blocks import Blocks, expand
from blockopt.distributed import is_sharded, local, local_part, sums_over_ranks
from blockopt.optim.chunks import in_chunks
from blockopt.optim.entry import Entry
from blockopt.optim.finite_gradients import keep_if, put_back, share_kept
from blockopt.optim.input_directions import Damped, damp_inputs
from blockopt.optim.matrix_sections import (
    Section,
    block_sizes,
    section_scales,
    sections,
    update_size,
)
from blockopt.optim.neuron_steps import neuron_factors, neuron_sums
from blockopt.optim.newton_schulz import iteration_dtype, orthogonalize

# Entries orthogonalized in one batch: enough to fill the device, few enough to bound memory.
CPU_BATCH, GPU_BATCH = 1 << 20, 1 << 24


class Waiting(NamedTuple):
    """A parameter that waits for its step.

    Attributes:
        entry: The parameter.
        group: The options of its group.
        found_inf: Where it is 1 nothing may change. None if the gradients are known to be finite.
    """

    entry: Entry
    group: dict[str, Any]
    found_inf: Tensor | None


class MatrixStep(NamedTuple):
    """One parameter in a step of Muon.

    Attributes:
        entry: The parameter.
        direction: What is orthogonalized, sharded as the parameter is.
        lr: The learning rate of its group.
        kept: The share of the weights that weight decay leaves.
        group: The options of its group.
        found_inf: Where it is 1 nothing may change. None if the gradients are known to be finite.
    """

    entry: Entry
    direction: Tensor
    lr: float | Tensor
    kept: float | Tensor
    group: dict[str, Any]
    found_inf: Tensor | None

    @property
    def iterations(self) -> int:
        """Steps of the orthogonalization."""
        return int(self.group["iterations"])

    @property
    def has_neurons(self) -> bool:
        """Whether the update is evened out over neurons."""
        return "neuron_squares" in self.entry.state


class Piece(NamedTuple):
    """Matrices on their way through a batch: where they come from, and what takes the result."""

    source: Section
    take: Callable[[Tensor], None]
    iterations: int


def start_steps(members: list[Waiting]) -> list[MatrixStep]:
    """What steps do before the orthogonalization, on the own shards: momentum and damping.

    Where `found_inf` is 1 the step has length 0.
    """
    steps: list[MatrixStep] = []
    damped: list[Damped] = []
    for entry, group, found_inf in members:
        gradient = _finite_gradient(entry, group, found_inf)
        direction = _momentum_direction(entry, gradient, group)
        if "input_sketch" in entry.state:
            forget = 1 - group["betas"][1]
            direction = direction if group["nesterov"] else direction.clone()
            damped.append(Damped(entry, gradient, direction, forget, found_inf))
        lr = group["lr"]
        if found_inf is not None:
            lr = lr * share_kept(found_inf, entry.parameter.dtype)
        kept = 1 - lr * group["weight_decay"]
        steps.append(MatrixStep(entry, direction, lr, kept, group, found_inf))
    damp_inputs(damped)
    return steps


def _finite_gradient(entry: Entry, group: dict[str, Any], found_inf: Tensor | None) -> Tensor:
    """The gradient; where `found_inf` is 1, the momentum, which so stays as it is."""
    gradient = -entry.gradient if group["maximize"] else entry.gradient
    if found_inf is not None:
        gradient = gradient.clone()
        put_back(found_inf, [local(gradient)], [local(entry.state["momentum_buffer"])])
    return gradient


def _momentum_direction(entry: Entry, gradient: Tensor, group: dict[str, Any]) -> Tensor:
    """Update the momentum, and return the direction to orthogonalize."""
    buffer: Tensor = entry.state["momentum_buffer"]
    buffer.lerp_(gradient, 1 - group["momentum"])
    return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def pieces(step: MatrixStep) -> Iterator[Piece]:
    """The matrices of a parameter, which apply their own updates."""
    if step.has_neurons:
        yield from _pieces_with_neurons(step)
        return
    for source, (target, factor) in zip(
        sections(step.direction, step.entry.blocks), _targets(step)
    ):
        yield Piece(source, partial(apply, target.view, factor, step.kept), step.iterations)


def _targets(step: MatrixStep) -> Iterator[tuple[Section, Tensor]]:
    """The matrices of a whole parameter, each with what its update is multiplied by."""
    found = sections(step.entry.parameter, step.entry.blocks)
    scales = section_scales(_wide_scale(step.entry), step.entry.blocks, found)
    for target, scale in zip(found, scales):
        yield target, scale * (step.lr * update_size(step.entry.blocks, target.matrix_shape))


def _pieces_with_neurons(step: MatrixStep) -> Iterator[Piece]:
    """The matrices of a parameter; with the last one that is done, all take their update."""
    update = torch.empty_like(step.direction, dtype=iteration_dtype(step.direction))
    found = list(orthogonalized_into(update, step.direction, step.entry.blocks, step.iterations))
    waiting = [len(found)]  # in a list, so that all pieces count down the same number

    def take(piece: Piece, result: Tensor) -> None:
        piece.take(result)
        waiting[0] -= 1
        if waiting[0] == 0:
            apply_all([(step, update)])

    for piece in found:
        yield piece._replace(take=partial(take, piece))


def orthogonalized_into(
    update: Tensor, direction: Tensor, blocks: Blocks, iterations: int
) -> Iterator[Piece]:
    """The matrices of a whole direction, which leave their results in `update`."""
    for source, target in zip(sections(direction, blocks), sections(update, blocks)):
        yield Piece(source, partial(_put, target.view), iterations)


def _put(target: Tensor, update: Tensor) -> None:
    target.copy_(update.view(target.shape))


def apply_all(updates: list[tuple[MatrixStep, Tensor]]) -> None:
    """Apply the own parts of updates, evened out over neurons where there are any."""
    chosen = [(step.entry, update) for step, update in updates if step.has_neurons]
    sums = iter(sums_over_ranks([neuron_sums(u, e.parameter, e.blocks) for e, u in chosen]))
    for step, update in updates:
        if step.has_neurons:
            update = update * _neuron_factors(step, next(sums)).to(update.dtype)
        _apply_part(step, update)


def _neuron_factors(step: MatrixStep, sums: Tensor) -> Tensor:
    parameter, squares = step.entry.parameter, step.entry.state["neuron_squares"]
    kept = keep_if(step.found_inf, [squares])
    means = sums.reshape(-1) * (len(squares) / max(1, parameter.numel()))
    squares.lerp_(means.to(squares.dtype), 1 - step.group["betas"][1])
    factors = neuron_factors(squares, parameter, step.entry.blocks)
    put_back(step.found_inf, [squares], kept)
    return factors


def _apply_part(step: MatrixStep, update: Tensor) -> None:
    """Apply the part of an update that belongs to the own shard of the parameter."""
    parameter, blocks = step.entry.parameter, step.entry.blocks
    if not is_sharded(parameter):
        for source, (target, factor) in zip(sections(update, blocks), _targets(step)):
            apply(target.view, factor, step.kept, source.view)
        return
    like = torch.empty(parameter.shape, device="meta")
    scale = _wide_scale(step.entry)
    sizes = step.lr * block_sizes(blocks, sections(like, blocks), scale.device)
    factor = expand(scale * sizes.to(scale.dtype), blocks.split, parameter.ndim)
    apply(local(parameter), local_part(factor, parameter), step.kept, update)


def apply(weights: Tensor, factor: Tensor, kept: float | Tensor, update: Tensor) -> None:
    """`w ← kept · w − factor · update`, in chunks: in another dtype, the update is copied."""
    update = update.reshape(weights.shape)
    while weights.ndim > 1 and len(weights) == 1:  # chunks are cut along the first dimension
        weights, update, factor = weights[0], update[0], factor[0]
    for (w,), (u,), (f,) in in_chunks([weights], [update], [factor]):
        w.mul_(kept).addcmul_(u, f, value=-1)


def _wide_scale(entry: Entry) -> Tensor:
    """The scales of the blocks in the dtype of the weights, or float32 if that has less bits."""
    scale: Tensor = entry.state["scale"]
    return scale.to(torch.promote_types(scale.dtype, entry.parameter.dtype))


def in_batches(found: Iterable[Piece]) -> None:
    """Orthogonalize matrices, those of equal shape in batches, and hand them to their takers."""
    pending: dict[tuple[Any, ...], list[Piece]] = {}
    for piece in found:
        view, shape = piece.source.view, piece.source.matrix_shape
        key = (shape, view.dtype, view.device, piece.iterations)
        batch = pending.setdefault(key, [])
        batch.append(piece)
        count = sum(len(member.source.view) for member in batch)
        largest = CPU_BATCH if view.device.type == "cpu" else GPU_BATCH
        if count * math.prod(shape) >= largest:
            _orthogonalize_batch(pending.pop(key))
    for batch in pending.values():
        _orthogonalize_batch(batch)


def _orthogonalize_batch(batch: list[Piece]) -> None:
    first = batch[0].source
    lengths = [len(piece.source.view) for piece in batch]
    dtype = iteration_dtype(first.view)
    stack = first.view.new_empty((sum(lengths), *first.matrix_shape), dtype=dtype)
    for slot, piece in zip(stack.split(lengths), batch):
        slot.view(piece.source.view.shape).copy_(piece.source.view)
    orthogonal = orthogonalize(stack, batch[0].iterations)
    for update, piece in zip(orthogonal.split(lengths), batch):
        piece.take(update)
