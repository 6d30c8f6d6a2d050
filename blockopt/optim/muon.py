"""Muon on the matrices of a transformer and AdamW on the rest, with a scale per Hessian block."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockopt.blocks import Blocks, Split
from blockopt.checks import check_count, check_range
from blockopt.distributed import full, is_sharded, local, local_part
from blockopt.optim.adamw import (
    adamw_magnitudes,
    adamw_update,
    check_adamw_options,
    new_adamw_state,
)
from blockopt.optim.base import BlockOptimizer, Entry, Parameters, Work, decay
from blockopt.optim.finite_gradients import gradient_norms
from blockopt.optim.newton_schulz import iteration_dtype, orthogonalize

# Entries orthogonalized in one batch: enough to fill the device, few enough to bound memory.
CPU_BATCH, GPU_BATCH = 1 << 20, 1 << 24


class BlockMuon(BlockOptimizer):
    r"""Muon for the matrices inside the layers and AdamW for all else, with one learning rate.

    The query, key, value, output and MLP matrices move along their momentum with all singular
    values set to about 1, by five steps of Newton and Schulz's iteration. Each matrix is what it
    would be if it were stored alone: a fused matrix is taken apart, in any storage order. With
    :math:`A \times B` the shape of the matrix and :math:`s_b` the block's scale:

    .. math::
        p \leftarrow p - \eta\lambda p
        - \eta\, s_b\, 0.2 \sqrt{\max(A, B)}\; \mathrm{orthogonalize}(m)

    The factor gives the update the root mean square that AdamW's has, so that one learning rate
    serves both. Embeddings, norms, biases, the head and all other parameters take the step of
    `BlockAdamW`. On unsplit matrices with all scales 1 this is `torch.optim.Muon` with
    `adjust_lr_fn="match_rms_adamw"`, up to the dtype of the iteration: bfloat16, or float32 on a
    CPU without instructions for bfloat16.

    Args:
        params: What `param_groups(model)` returns.
        lr: Learning rate.
        momentum: Decay rate of the momentum of the matrices.
        weight_decay: Decoupled weight decay, for groups that do not bring their own.
        nesterov: Look ahead by one step of momentum.
        iterations: Number of Newton-Schulz steps.
        betas: Decay rates of the two moments of AdamW, for the other parameters.
        eps: Added to the root of their second moment.
        second_moment: Theirs, `"coordinate"` or `"block"`, see `BlockAdamW`.
        maximize: Ascend instead of descend.
        nonfinite: What to do when a gradient, or its square (above about 1e19), is not finite:
            `"raise"`, or `"skip"` the step, count it in `optimizer.nonfinite_steps` and warn the
            first time. Weights and state are untouched in both cases. With `"skip"` all ranks of
            the default process group decide alike, so all of them must call `step`.

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
        iterations: int = 5,
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

    def _magnitudes(self, work: Work) -> list[list[Tensor]]:
        divided = [_divide(entries) for _, entries in work]
        rest = [(g, [some[i] for i in others]) for (g, some), (_, others) in zip(work, divided)]
        found = []
        for (_, entries), (matrices, others), sums in zip(work, divided, adamw_magnitudes(rest)):
            norms = gradient_norms([entries[i].gradient for i in matrices])
            by_index = dict(zip([*matrices, *others], [*norms, *sums]))
            found.append([by_index[i] for i in range(len(entries))])
        return found

    def _update(
        self, entries: list[Entry], magnitudes: list[Tensor], group: dict[str, Any]
    ) -> None:
        matrices, others = _divide(entries)
        if others:
            chosen, sums = [entries[i] for i in others], [magnitudes[i] for i in others]
            adamw_update(chosen, sums, group, self._scaled_step())
        if matrices:
            muon_update([entries[i] for i in matrices], group)


def is_hidden_matrix(parameter: Tensor, blocks: Blocks) -> bool:
    """Whether Muon takes the parameter."""
    return parameter.ndim == 2 and blocks.hidden_matrices(tuple(parameter.shape)) is not None


def _divide(entries: list[Entry]) -> tuple[list[int], list[int]]:
    taken = [is_hidden_matrix(entry.parameter, entry.blocks) for entry in entries]
    return [i for i, t in enumerate(taken) if t], [i for i, t in enumerate(taken) if not t]


class Section(NamedTuple):
    """One role of one parameter, as views of shape (repeat, parts, rows of a block, columns)."""

    direction: Tensor
    target: Tensor
    scale: Tensor  # (repeat or 1, parts, 1, 1)

    def matrix(self) -> Tensor:
        """The matrix to orthogonalize, (rows, columns) with rows <= columns."""
        flat = self.direction.reshape(-1, self.direction.shape[3])
        return flat.mT if flat.shape[0] > flat.shape[1] else flat

    def apply(self, orthogonal: Tensor, size: float | Tensor) -> None:
        """Subtract `size` times the orthogonal matrix, times the scale of each block."""
        transposed = self.direction.numel() > self.direction.shape[3] ** 2
        update = (orthogonal.mT if transposed else orthogonal).reshape(self.direction.shape)
        self.target.sub_(update * (self.scale.to(update.dtype) * size))


def sections(direction: Tensor, target: Tensor, scale: Tensor, blocks: Blocks) -> list[Section]:
    """The sections of one parameter."""
    split = blocks.split
    if split is None:
        return [Section(direction[None, None], target[None, None], scale.view(1, 1, 1, 1))]
    scales = scale.view(1 if split.pooled else split.repeat, -1).split(split.parts, dim=1)
    views = zip(_section_views(direction, split), _section_views(target, split), scales)
    return [Section(d, t, s[:, :, None, None]) for d, t, s in views]


def _section_views(x: Tensor, split: Split) -> list[Tensor]:
    """Views of the sections of a matrix, each of shape (repeat, parts, size of a block, others)."""
    pieces = x.movedim(split.dim, 0).unflatten(0, (split.repeat, -1)).split(split.sizes, dim=1)
    return [piece.unflatten(1, (parts, -1)) for piece, parts in zip(pieces, split.parts)]


def muon_update(entries: list[Entry], group: dict[str, Any]) -> None:
    """Take one step of Muon for the matrices of a group; those of equal shape run in batches."""
    pending: dict[torch.Size, list[Section]] = {}
    for entry in entries:
        parameter = entry.parameter
        gradient = -entry.gradient if group["maximize"] else entry.gradient
        buffer = entry.state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        direction = full(gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer)
        decay([local(parameter)], group)
        target = torch.zeros_like(direction) if is_sharded(parameter) else parameter
        largest = CPU_BATCH if parameter.device.type == "cpu" else GPU_BATCH
        for section in sections(direction, target, entry.state["scale"], entry.blocks):
            shape = section.matrix().shape
            batch = pending.setdefault(shape, [])
            batch.append(section)
            if len(batch) * shape.numel() >= largest:
                _orthogonalize_and_apply(pending.pop(shape), group)
        if is_sharded(parameter):  # take the own part of the update before gathering the next one
            while pending:
                _orthogonalize_and_apply(pending.popitem()[1], group)
            local(parameter).add_(local_part(target, parameter))
    for batch in pending.values():
        _orthogonalize_and_apply(batch, group)


def _orthogonalize_and_apply(batch: list[Section], group: dict[str, Any]) -> None:
    matrices = [section.matrix() for section in batch]
    dtype = iteration_dtype(matrices[0])
    stack = torch.stack([matrix.to(dtype) for matrix in matrices])
    orthogonal = orthogonalize(stack, group["iterations"])
    size = group["lr"] * (0.2 * math.sqrt(orthogonal.shape[2]))
    for section, matrix in zip(batch, orthogonal):
        section.apply(matrix, size)
