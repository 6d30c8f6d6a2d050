"""Muon on the matrices of a transformer and AdamW on the rest, with a scale per Hessian block."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockopt.blocks import MATRIX_ROLES, Blocks, expand
from blockopt.checks import check_count, check_range
from blockopt.distributed import full, is_sharded, local, local_part
from blockopt.optim.adamw import check_adamw_options, new_adamw_state
from blockopt.optim.adamw_update import adamw_magnitudes, adamw_update
from blockopt.optim.base import BlockOptimizer, Parameters
from blockopt.optim.entry import Entry, Work, norms_to_check
from blockopt.optim.finite_gradients import flag_on, put_back, share_kept
from blockopt.optim.groups import blocks_of, names_of
from blockopt.optim.matrix_sections import (
    Section,
    block_sizes,
    is_hidden_matrix,
    section_scales,
    sections,
    update_size,
)
from blockopt.optim.newton_schulz import iteration_dtype, orthogonalize

# Entries orthogonalized in one batch: enough to fill the device, few enough to bound memory.
CPU_BATCH, GPU_BATCH = 1 << 20, 1 << 24


class BlockMuon(BlockOptimizer):
    r"""Muon for the matrices inside the layers and AdamW for all else, with one learning rate.

    The query, key, value, output and MLP matrices move along their momentum with all singular
    values set to about 1, by four steps of an iteration of Newton and Schulz's kind
    (`newton_schulz.py`). Each matrix is what it would be if it were stored alone: a fused matrix is
    taken apart, in any storage order, and so is a stack of experts. With
    :math:`A \times B` the shape of the matrix and :math:`s_b` the block's scale:

    .. math::
        p \leftarrow p - \eta\lambda p
        - \eta\, s_b\, 0.2 \sqrt{\max(A, B)}\; \mathrm{orthogonalize}(m)

    The factor gives the update the root mean square that AdamW's has, so that one learning rate
    serves both. Embeddings, norms, biases, the head and all other parameters take the step of
    `BlockAdamW`. On unsplit matrices with all scales 1 this is `torch.optim.Muon` with
    `adjust_lr_fn="match_rms_adamw"`, except for the iteration: torch takes five steps, each with
    the same coefficients, which bring singular values from 0.16 % of their root of squares up to
    [0.68, 1.2]. The four steps here, each with its own, bring those from 0.31 % of about the
    largest up to [0.7, 1.2]. The dtype is bfloat16, or float32 on a CPU without instructions for
    bfloat16.

    An expert that saw no token has a gradient of zeros, not none. As with `torch.optim.Muon` its
    momentum decays, its direction stays, and weight decay applies. Before its first token its
    momentum is zero, and so is its update.

    Args:
        params: What `param_groups(model)` returns.
        lr: Learning rate.
        momentum: Decay rate of the momentum of the matrices.
        weight_decay: Decoupled weight decay, for groups that do not bring their own.
        nesterov: Look ahead by one step of momentum.
        iterations: Number of steps of the iteration. With 3 a step takes 0.8 of the time, and
            singular values below 1.2 % of the largest stay below 0.7; with 5, 0.08 %.
        betas: Decay rates of the two moments of AdamW, for the other parameters.
        eps: Added to the root of their second moment.
        second_moment: Theirs, `"coordinate"` or `"block"`, see `BlockAdamW`.
        maximize: Ascend instead of descend.
        nonfinite: What to do when a gradient, or its square (above about 1e19), is not finite:
            `"raise"`, or `"skip"` the step, count it in `optimizer.nonfinite_steps` and warn the
            first time. Weights and state are untouched in both cases. With `"skip"` all ranks of
            the default process group decide alike, so all of them must call `step`. On an
            accelerator the error or warning comes one step later, since waiting for the answer
            would leave it idle. `"ignore"` checks nothing, as `torch.optim` does, and saves the
            time of reading all gradients once more.

    Raises:
        ValueError: If a hyperparameter is out of range, or `params` carry no blocks.

    Example:
        >>> import blockopt
        >>> model = torch.nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32)
        >>> optimizer = BlockMuon(blockopt.param_groups(model), lr=1e-3)
        >>> model(torch.randn(3, 1, 16)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        *,
        nesterov: bool = True,
        iterations: int = 4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        second_moment: str = "coordinate",
        maximize: bool = False,
        nonfinite: str = "raise",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "iterations": iterations,
            "betas": betas,
            "eps": eps,
            "second_moment": second_moment,
            "maximize": maximize,
            "nonfinite": nonfinite,
        }
        super().__init__(params, defaults)
        self._warn_of_missed_matrices()

    @property
    def muon_share(self) -> float:
        """The share of the entries of hidden matrices that Muon takes, 1 if there are none.

        Hidden matrices are all parameters with at least two dimensions whose role is that of a
        matrix inside a layer, or `other`.
        """
        taken, missed = self._hidden_entries()
        return taken / (taken + sum(missed.values())) if taken or missed else 1.0

    def _hidden_entries(self) -> tuple[int, dict[str, int]]:
        """How many entries Muon takes, and those of each hidden parameter that it does not."""
        taken, missed, hidden = 0, {}, MATRIX_ROLES | {"other"}
        for group in self.param_groups:
            for name, p, blocks in zip(names_of(group), group["params"], blocks_of(group)):
                if is_hidden_matrix(p, blocks):
                    taken += p.numel()
                elif set(blocks.roles) <= hidden and sum(size > 1 for size in p.shape) > 1:
                    missed[name] = p.numel()
        return taken, missed

    def _warn_of_missed_matrices(self) -> None:
        if self.muon_share >= 0.9:
            return
        missed = self._hidden_entries()[1]
        largest = sorted(missed, key=lambda name: -missed[name])[:3]
        warnings.warn(
            f"BlockMuon orthogonalizes {self.muon_share:.0%} of the entries of the hidden matrices "
            f"and updates the others as AdamW does, the largest being {', '.join(largest)}. Their "
            "role is not known: give it in param_groups(model, find_blocks(model, overrides=...)).",
            stacklevel=3,
        )

    def _check_group(self, group: dict[str, Any]) -> None:
        check_range("momentum", group["momentum"], high=1.0)
        check_adamw_options(group)
        check_count("iterations", group["iterations"])
        if group["blocks"] is None:
            raise ValueError(
                "BlockMuon needs to know which matrices are embeddings, heads or hidden. "
                "Pass blockopt.param_groups(model) instead of model.parameters()."
            )

    def _new_state(
        self, parameter: Tensor, blocks: Blocks, group: dict[str, Any]
    ) -> dict[str, Any]:
        if is_hidden_matrix(parameter, blocks):
            buffer = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            return {"momentum_buffer": buffer}
        return new_adamw_state(parameter, blocks, group)

    def _entries(self, group: dict[str, Any]) -> list[Entry]:
        """Matrices first, as `_magnitudes` returns theirs."""
        matrices, others = _divide(super()._entries(group))
        return matrices + others

    def _needs_shapes(self, group: dict[str, Any]) -> bool:
        return True

    def _magnitudes(self, work: Work) -> list[list[Tensor]]:
        divided = [(group, *_divide(entries)) for group, entries in work]
        norms = [norms_to_check(matrices, group) for group, matrices, _ in divided]
        rest = adamw_magnitudes([(group, others) for group, _, others in divided])
        return [of_matrices + of_others for of_matrices, of_others in zip(norms, rest)]

    def _update_all(
        self, work: Work, magnitudes_of_all: list[list[Tensor]], found_inf: Tensor | None
    ) -> None:
        """AdamW group by group; the matrices of all groups at once, to share batches."""
        super()._update_all(work, magnitudes_of_all, found_inf)
        take_steps(
            start_step(entry, group, flag_on(found_inf, entry.parameter.device))
            for group, entries in work
            for entry in _divide(entries)[0]
        )

    def _update(
        self,
        entries: list[Entry],
        magnitudes: list[Tensor],
        group: dict[str, Any],
        found_inf: Tensor | None,
    ) -> None:
        others = _divide(entries)[1]
        if others:
            sums = magnitudes[-len(others) :]
            adamw_update(others, sums, group, self._scaled_step(), found_inf)


def _divide(entries: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """The hidden matrices, and the others."""
    taken = [is_hidden_matrix(entry.parameter, entry.blocks) for entry in entries]
    matrices = [entry for entry, hidden in zip(entries, taken) if hidden]
    return matrices, [entry for entry, hidden in zip(entries, taken) if not hidden]


class MatrixStep(NamedTuple):
    """One parameter in a step of Muon.

    Attributes:
        entry: The parameter.
        direction: What is orthogonalized, sharded as the parameter is.
        lr: The learning rate of its group.
        kept: The share of the weights that weight decay leaves.
        iterations: Steps of the orthogonalization.
    """

    entry: Entry
    direction: Tensor
    lr: float | Tensor
    kept: float | Tensor
    iterations: int


class Piece(NamedTuple):
    """Matrices on their way through a batch: where they come from, and what takes the result."""

    source: Section
    take: Callable[[Tensor], None]
    iterations: int


def momentum_direction(entry: Entry, group: dict[str, Any], found_inf: Tensor | None) -> Tensor:
    """Update the momentum and return the direction to orthogonalize.

    Where `found_inf` is 1 the momentum takes the place of the gradient, and so stays as it is.
    """
    gradient = -entry.gradient if group["maximize"] else entry.gradient
    buffer: Tensor = entry.state["momentum_buffer"]
    if found_inf is not None:
        gradient = gradient.clone()
        put_back(found_inf, [local(gradient)], [local(buffer)])
    buffer.lerp_(gradient, 1 - group["momentum"])
    return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer


def start_step(entry: Entry, group: dict[str, Any], found_inf: Tensor | None) -> MatrixStep:
    """What a step does entry by entry, on the own shard, before the orthogonalization.

    Where `found_inf` is 1 the step has length 0.
    """
    lr = group["lr"]
    if found_inf is not None:
        lr = lr * share_kept(found_inf, entry.parameter.dtype)
    kept = 1 - lr * group["weight_decay"]
    direction = momentum_direction(entry, group, found_inf)
    return MatrixStep(entry, direction, lr, kept, group["iterations"])


def take_steps(steps: Iterable[MatrixStep]) -> None:
    """Orthogonalize the directions and apply them."""
    in_batches(piece for step in steps for piece in pieces(step))


def pieces(step: MatrixStep) -> Iterator[Piece]:
    """The matrices of a parameter, which apply their own updates."""
    entry = step.entry
    if is_sharded(entry.parameter):
        gather_and_apply(step)
        return
    targets = sections(entry.parameter, entry.blocks)
    scales = section_scales(_wide_scale(entry), entry.blocks, targets)
    for source, target, scale in zip(sections(step.direction, entry.blocks), targets, scales):
        factor = scale * (step.lr * update_size(source.matrix_shape))
        yield Piece(source, partial(apply, target.view, factor, step.kept), step.iterations)


def gather_and_apply(step: MatrixStep) -> None:
    """Orthogonalize a sharded parameter on every rank, and apply the own part."""
    whole = full(step.direction)
    update = torch.empty_like(whole, dtype=iteration_dtype(whole))
    in_batches(orthogonalized_into(update, whole, step))
    apply_part(step, local_part(update, step.entry.parameter))


def orthogonalized_into(update: Tensor, whole: Tensor, step: MatrixStep) -> Iterator[Piece]:
    """The matrices of a whole direction, which leave their results in `update`."""
    blocks = step.entry.blocks
    for source, target in zip(sections(whole, blocks), sections(update, blocks)):
        yield Piece(source, partial(_put, target.view), step.iterations)


def _put(target: Tensor, update: Tensor) -> None:
    target.copy_(update.view(target.shape))


def apply_part(step: MatrixStep, update: Tensor) -> None:
    """Apply the part of an update that belongs to the own shard of the parameter."""
    parameter, blocks = step.entry.parameter, step.entry.blocks
    like = torch.empty(parameter.shape, device="meta")
    scale = _wide_scale(step.entry)
    sizes = block_sizes(blocks, sections(like, blocks)).to(scale)
    factor = expand(scale * sizes * step.lr, blocks.split, parameter.ndim)
    apply(local(parameter), local_part(factor, parameter), step.kept, update)


def apply(weights: Tensor, factor: Tensor, kept: float | Tensor, update: Tensor) -> None:
    """`w ← kept · w − factor · update`."""
    weights.mul_(kept)
    # Operations on two dtypes are slow on a CPU, conversions are not.
    weights.addcmul_(update.reshape(weights.shape).to(weights.dtype), factor, value=-1)


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
