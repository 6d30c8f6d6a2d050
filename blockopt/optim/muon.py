"""Muon on the matrices of a transformer and AdamW on the rest, with a learning rate for each Hessian block."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockopt.blocks import Blocks
from blockopt.blocks.split import Split
from blockopt.distributed import full, is_sharded, local, local_part
from blockopt.optim.adamw import (
    adamw_magnitudes,
    adamw_update,
    check_adamw_options,
    new_adamw_state,
)
from blockopt.optim.base import (
    BlockOptimizer,
    Entry,
    Parameters,
    check_range,
    decay,
    gradient_norms,
)

HEAD_ROLES = frozenset({"query", "key", "value", "output"})
MATRIX_ROLES = HEAD_ROLES | {"mlp_in", "mlp_gate", "mlp_out"}
# Entries orthogonalised in one batch: enough to fill the device, few enough to bound the memory of
# temporaries.
CPU_BATCH, GPU_BATCH = 1 << 20, 1 << 24
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def fastest_cpu_dtype() -> torch.dtype:
    """A CPU with instructions for bfloat16 multiplies it twice as fast as float32; one without is far slower at it."""
    checks = [
        getattr(torch.cpu, name, None)
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    ]
    return (
        torch.bfloat16 if any(check is not None and check() for check in checks) else torch.float32
    )


CPU_DTYPE = fastest_cpu_dtype()


class BlockMuon(BlockOptimizer):
    r"""Muon for the matrices inside the layers, AdamW for all else, in one optimizer with one learning rate.

    The query, key, value, output and MLP matrices move along their momentum with all singular
    values set to about 1, by five steps of Newton and Schulz's iteration. Each matrix is what it
    would be if it were stored alone: a fused matrix is taken apart, in any storage order. With
    :math:`A \times B` the shape of the matrix and :math:`s_b` the block's scale:

    .. math:: p \leftarrow p - \eta\lambda p - \eta\, s_b\, 0.2 \sqrt{\max(A, B)}\; \mathrm{orthogonalize}(m)

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
        split_heads: Orthogonalize each head's query, key, value and output alone rather than the
            matrix of all heads. Off by default because whole matrices trained better in our runs
            (README).
        iterations: Number of Newton-Schulz steps.
        betas: Of AdamW, for the other parameters.
        eps: Of AdamW.
        second_moment: Of AdamW, `"coordinate"` or `"block"`.
        maximize: Ascend instead of descend.
        nonfinite: What to do when a gradient, or its square (above about 1e19), is not finite:
            `"raise"`, or `"skip"` the step, count it in `optimizer.nonfinite_steps` and warn the
            first time. Weights and state are untouched in both cases.

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
        split_heads: bool = False,
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
            "split_heads": split_heads,
            "iterations": iterations,
            "betas": betas,
            "eps": eps,
            "second_moment": second_moment,
            "momentum_dtype": None,
            "compiled": False,
            "maximize": maximize,
            "nonfinite": nonfinite,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_range("momentum", group["momentum"], high=1.0)
        check_adamw_options(group)
        if not isinstance(group["iterations"], int) or group["iterations"] < 1:
            raise ValueError(f"Invalid iterations={group['iterations']}. Must be an integer >= 1.")
        if group["blocks"] is None:
            raise ValueError(
                "BlockMuon needs to know which matrices are embeddings, heads or hidden. "
                "Pass blockopt.param_groups(model) instead of model.parameters()."
            )

    def _new_state(
        self, parameter: Tensor, blocks: Blocks, group: dict[str, Any]
    ) -> dict[str, Any]:
        if is_hidden_matrix(parameter, blocks):
            return {
                "momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)
            }
        return new_adamw_state(parameter, blocks, group)

    def _magnitudes(self, entries: list[Entry], group: dict[str, Any]) -> list[Tensor]:
        matrices, others = _divide(entries)
        found = dict(
            zip(matrices, gradient_norms([entries[i].gradient for i in matrices]))
            if matrices
            else ()
        )
        found |= dict(
            zip(others, adamw_magnitudes([entries[i] for i in others], group)) if others else ()
        )
        return [found[i] for i in range(len(entries))]

    def _update(
        self, entries: list[Entry], magnitudes: list[Tensor], group: dict[str, Any]
    ) -> None:
        matrices, others = _divide(entries)
        if others:
            adamw_update(
                [entries[i] for i in others],
                [magnitudes[i] for i in others],
                group,
                self._scaled_step(),
            )
        if matrices:
            muon_update([entries[i] for i in matrices], group)


def is_hidden_matrix(parameter: Tensor, blocks: Blocks) -> bool:
    """Whether Muon takes the parameter."""
    return parameter.ndim == 2 and set(blocks.roles) <= MATRIX_ROLES


def _divide(entries: list[Entry]) -> tuple[list[int], list[int]]:
    taken = [is_hidden_matrix(entry.parameter, entry.blocks) for entry in entries]
    return [i for i, t in enumerate(taken) if t], [i for i, t in enumerate(taken) if not t]


class Section(NamedTuple):
    """One role of one parameter, as views of shape (repeat, parts, rows of a block, columns)."""

    direction: Tensor
    target: Tensor
    scale: Tensor  # (repeat or 1, parts, 1, 1)
    number: int  # of matrices that are orthogonalized alone

    def matrices(self) -> Tensor:
        """The matrices to orthogonalize, (number, rows, columns) with rows <= columns."""
        stacked = self.direction.reshape(self.number, -1, self.direction.shape[3])
        return stacked.mT if stacked.shape[1] > stacked.shape[2] else stacked

    def apply(self, orthogonal: Tensor, size: float | Tensor) -> None:
        """Subtract `size` times the orthogonal matrices, in the order of `matrices`, times the scale of each block."""
        transposed = self.direction.numel() // self.number > self.direction.shape[3] ** 2
        update = (orthogonal.mT if transposed else orthogonal).reshape(self.direction.shape)
        self.target.sub_(update * (self.scale.to(update.dtype) * size))


def sections(
    direction: Tensor, target: Tensor, scale: Tensor, blocks: Blocks, split_heads: bool
) -> list[Section]:
    """The sections of one parameter."""
    split = blocks.split
    if split is None:
        return [Section(direction[None, None], target[None, None], scale.view(1, 1, 1, 1), 1)]
    scales = scale.view(1 if split.pooled else split.repeat, -1).split(split.parts, dim=1)
    found = []
    for role, d, t, s in zip(
        blocks.roles, _section_views(direction, split), _section_views(target, split), scales
    ):
        by_head = split_heads and role in HEAD_ROLES and not split.pooled
        number = d.shape[0] * d.shape[1] if by_head else 1
        found.append(Section(d, t, s[:, :, None, None], number))
    return found


def _section_views(x: Tensor, split: Split) -> list[Tensor]:
    """Views of the sections of a matrix, each of shape (repeat, parts, size of a block, other dimension)."""
    pieces = x.movedim(split.dim, 0).unflatten(0, (split.repeat, -1)).split(split.sizes, dim=1)
    return [piece.unflatten(1, (parts, -1)) for piece, parts in zip(pieces, split.parts)]


def muon_update(entries: list[Entry], group: dict[str, Any]) -> None:
    """One step of Muon for the matrices of a group; those of equal shape run in batches."""
    pending: dict[torch.Size, list[Section]] = {}
    for entry in entries:
        parameter, gradient = (
            entry.parameter,
            -entry.gradient if group["maximize"] else entry.gradient,
        )
        buffer = entry.state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        direction = full(gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer)
        decay([local(parameter)], group)
        target = torch.zeros_like(direction) if is_sharded(parameter) else parameter
        for section in sections(
            direction, target, entry.state["scale"], entry.blocks, group["split_heads"]
        ):
            shape = section.matrices().shape[1:]
            batch = pending.setdefault(shape, [])
            batch.append(section)
            if sum(s.number for s in batch) * shape.numel() >= (
                CPU_BATCH if parameter.device.type == "cpu" else GPU_BATCH
            ):
                _orthogonalize_and_apply(pending.pop(shape), group)
        if is_sharded(
            parameter
        ):  # every rank has the whole update, and takes its part before the next is gathered
            while pending:
                _orthogonalize_and_apply(pending.popitem()[1], group)
            local(parameter).add_(local_part(target, parameter))
    for batch in pending.values():
        _orthogonalize_and_apply(batch, group)


def _orthogonalize_and_apply(batch: list[Section], group: dict[str, Any]) -> None:
    stacks = [section.matrices() for section in batch]
    dtype = iteration_dtype(stacks[0])
    orthogonal = orthogonalize(
        torch.cat([stack.to(dtype) for stack in stacks]), group["iterations"]
    )
    size = group["lr"] * (0.2 * math.sqrt(orthogonal.shape[2]))
    for section, part in zip(batch, orthogonal.split([section.number for section in batch])):
        section.apply(part, size)


def iteration_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which Newton-Schulz runs: what the device multiplies fastest, or float64 for float64."""
    if tensor.dtype == torch.float64:
        return torch.float64
    return CPU_DTYPE if tensor.device.type == "cpu" else torch.bfloat16


def orthogonalize(matrices: Tensor, iterations: int) -> Tensor:
    """The nearest (semi-)orthogonal matrix of each matrix, roughly: singular values in about [0.7, 1.2].

    Each step maps every singular value by the quintic a σ + b σ³ + c σ⁵ whose coefficients Jordan
    et al. chose for speed.

    Args:
        matrices: (number, rows, columns) with rows <= columns. Overwritten.
        iterations: Number of steps.
    """
    a, b, c = COEFFICIENTS
    x = matrices.div_(torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp_min_(1e-7))
    for _ in range(iterations):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x
