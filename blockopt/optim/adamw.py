"""AdamW with a learning rate and, if wanted, a single second moment for each Hessian block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from blockopt.blocks import Blocks, block_numel, block_sum_along
from blockopt.checks import check_choice, check_range
from blockopt.distributed import Reduced, local, sums_over_ranks
from blockopt.optim.base import BlockOptimizer, Entry, Parameters, Work, decay, spread
from blockopt.optim.chunks import in_chunks
from blockopt.optim.finite_gradients import gradient_norms
from blockopt.optim.fused import by_kind, fused_kernel_serves
from blockopt.optim.scale_runs import by_scale

SMALLEST_DIVISOR = 1e-3  # below, decay is done apart, lest weight_decay / scale overflow


class BlockAdamW(BlockOptimizer):
    r"""AdamW whose step is multiplied by the scale of each block.

    With :math:`m` the running mean of the gradient :math:`g`, :math:`v` that of its square, hats
    for bias correction, and :math:`s_b` the scale of block :math:`b`:

    .. math:: p \leftarrow p - \eta\lambda p - \eta\, s_b\, \hat m / (\sqrt{\hat v} + \epsilon)

    With `second_moment="coordinate"` and all scales 1 this is `torch.optim.AdamW`. With `"block"`,
    :math:`v` is one number per block, the running mean of :math:`\|g_b\|^2 / \mathrm{dim}\, b` (the
    idea of Adam-mini, on the blocks of `find_blocks`), which halves the memory of the state. Weight
    decay uses the unscaled learning rate.

    Args:
        params: What `param_groups(model)` returns; for `second_moment="coordinate"` also anything
            that `torch.optim.AdamW` takes.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, for groups that do not bring their own.
        second_moment: `"coordinate"` or `"block"`.
        maximize: Ascend instead of descend.
        nonfinite: What to do when a gradient, or its square (above about 1e19), is not finite:
            `"raise"`, or `"skip"` the step, count it in `optimizer.nonfinite_steps` and warn the
            first time. Weights and state are untouched in both cases. With `"skip"` all ranks of
            the default process group decide alike, so all of them must call `step`.

    Raises:
        ValueError: If a hyperparameter is out of range, or `second_moment="block"` without blocks.

    Example:
        >>> import torch, blockopt
        >>> model = torch.nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32)
        >>> groups = blockopt.param_groups(model)
        >>> optimizer = blockopt.BlockAdamW(groups, lr=1e-3, second_moment="block")
        >>> model(torch.randn(3, 1, 16)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.linear1.weight]["exp_avg_sq"].shape  # one per neuron
        torch.Size([32])
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        second_moment: str = "coordinate",
        maximize: bool = False,
        nonfinite: str = "raise",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "second_moment": second_moment,
            "maximize": maximize,
            "nonfinite": nonfinite,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_adamw_options(group)
        if group["second_moment"] == "block" and group["blocks"] is None:
            raise ValueError(
                "second_moment='block' needs to know the blocks, and a whole tensor as one block "
                "trains badly. Pass blockopt.param_groups(model) instead of model.parameters()."
            )

    def _new_state(
        self, parameter: Tensor, blocks: Blocks, group: dict[str, Any]
    ) -> dict[str, Any]:
        return new_adamw_state(parameter, blocks, group)

    def _magnitudes(self, work: Work) -> list[list[Tensor]]:
        return adamw_magnitudes(work)

    def _update(
        self, entries: list[Entry], magnitudes: list[Tensor], group: dict[str, Any]
    ) -> None:
        adamw_update(entries, magnitudes, group, self._scaled_step())


def check_adamw_options(group: dict[str, Any]) -> None:
    """Raise `ValueError` for options of AdamW that are out of range."""
    check_range("betas[0]", group["betas"][0], high=1.0)
    check_range("betas[1]", group["betas"][1], high=1.0)
    check_range("eps", group["eps"])
    check_choice("second_moment", group["second_moment"], ("coordinate", "block"))


def new_adamw_state(parameter: Tensor, blocks: Blocks, group: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter before its first step, named as in `torch.optim.AdamW`."""
    exp_avg = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    if group["second_moment"] == "coordinate":
        exp_avg_sq = torch.zeros_like(exp_avg)
    else:
        dtype = _accumulation_dtype(parameter)
        exp_avg_sq = torch.zeros(blocks.num_blocks, dtype=dtype, device=parameter.device)
    step = torch.zeros((), dtype=torch.float32)
    return {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def adamw_magnitudes(work: Work) -> list[list[Tensor]]:
    """Norms of the gradients, or the mean squares of their blocks, which the update needs too."""
    by_block = [group["second_moment"] == "block" for group, _ in work]
    chosen = [entry for (_, entries), block in zip(work, by_block) if block for entry in entries]
    squares = iter(block_mean_squares([(entry.gradient, entry.blocks) for entry in chosen]))
    return [
        list(islice(squares, len(entries)))
        if block
        else gradient_norms([e.gradient for e in entries])
        for (_, entries), block in zip(work, by_block)
    ]


def adamw_update(
    entries: list[Entry], magnitudes: list[Tensor], group: dict[str, Any], scaled: bool
) -> None:
    """Take one step for parameters of a group; `magnitudes` are those of `adamw_magnitudes`."""
    for entry in entries:
        entry.state["step"] += 1
    if torch.compiler.is_compiling():  # counts stay tensors; the compiler joins single updates
        for entry, magnitude in zip(entries, magnitudes):
            _update([entry], [magnitude], group, scaled, entry.state["step"])
        return
    counts = [int(entry.state["step"].item()) for entry in entries]
    for count in sorted(set(counts)):
        chosen = [i for i, c in enumerate(counts) if c == count]
        _update([entries[i] for i in chosen], [magnitudes[i] for i in chosen], group, scaled, count)


def _update(
    entries: list[Entry],
    magnitudes: list[Tensor],
    group: dict[str, Any],
    scaled: bool,
    step: int | Tensor,
) -> None:
    parameters = [local(entry.parameter) for entry in entries]
    gradients = [local(entry.gradient) for entry in entries]
    momenta = [local(entry.state["exp_avg"]) for entry in entries]
    if group["second_moment"] == "block":
        _update_by_block(entries, magnitudes, (parameters, gradients, momenta), group, step)
        return
    columns = (parameters, gradients, momenta, [local(e.state["exp_avg_sq"]) for e in entries])
    if isinstance(step, Tensor) or not fused_kernel_serves(*columns):
        scales = [p.new_ones((1,) * p.ndim) for p in parameters]
        if scaled:
            scales = spread(entries, [entry.state["scale"] for entry in entries])
        _foreach_update(columns, scales, group, step)
    elif scaled:
        _fused_scaled_update(entries, columns, group, step)
    else:
        _fused_update(columns, group, step, 1.0)


def _update_by_block(
    entries: list[Entry],
    mean_squares: list[Tensor],
    columns: tuple[list[Tensor], ...],
    group: dict[str, Any],
    step: int | Tensor,
) -> None:
    """`m ← lerp(m, g)`, then `p ← p − size·m`, with one second moment and one size per block."""
    beta1, beta2 = group["betas"]
    exp_avg_sqs = [entry.state["exp_avg_sq"] for entry in entries]
    new = [square.to(v.dtype) for square, v in zip(mean_squares, exp_avg_sqs)]
    torch._foreach_lerp_(exp_avg_sqs, new, 1 - beta2)
    denominators = _denominators(exp_avg_sqs, 1 - beta2**step, group["eps"])
    rate = group["lr"] / (1 - beta1**step)
    sizes = [entry.state["scale"] / d * rate for entry, d in zip(entries, denominators)]
    for ps, gs, ms, ss in in_chunks(*columns, spread(entries, sizes)):
        _lerp(ms, gs, group)
        decay(ps, group)
        torch._foreach_addcmul_(ps, ms, ss, value=-1)


def _fused_update(
    columns: Sequence[list[Tensor]], group: dict[str, Any], step: int, scale: float
) -> None:
    """Torch's own kernel on parameters of one scale; `lr * scale` must not scale the decay."""
    lr, weight_decay = group["lr"], group["weight_decay"]
    if scale < SMALLEST_DIVISOR:
        decay(columns[0], group)
        weight_decay = 0.0
    for kind in by_kind(*columns):
        _fused_adamw(kind, group, step, lr * scale, weight_decay / (scale or 1.0))


def _fused_scaled_update(
    entries: list[Entry], columns: tuple[list[Tensor], ...], group: dict[str, Any], step: int
) -> None:
    """One call of the kernel per scale, on views of the rows that share it.

    Where blocks are not rows, the kernel works on zeros that come out as the step to be scaled.
    """
    rows = list(zip(entries, zip(*columns)))
    simple = [(entry.runs, row) for entry, row in rows if entry.runs is not None]
    for scale, views in by_scale(*zip(*simple)).items() if simple else ():
        _fused_update(views, group, step, scale)
    others = [(entry, row) for entry, row in rows if entry.runs is None]
    if others:
        chosen = [entry for entry, _ in others]
        scales = spread(chosen, [entry.state["scale"] for entry in chosen])
        for chunk in in_chunks(*map(list, zip(*(row for _, row in others))), scales):
            for ps, gs, ms, vs, ss in by_kind(*chunk):
                updates = [torch.zeros_like(p) for p in ps]
                _fused_adamw([updates, gs, ms, vs], group, step, 1.0, 0.0)
                decay(ps, group)
                torch._foreach_addcmul_(ps, updates, [s * group["lr"] for s in ss])


def _fused_adamw(
    columns: list[list[Tensor]],
    group: dict[str, Any],
    step: int,
    lr: float | Tensor,
    weight_decay: float,
) -> None:
    device = columns[0][0].device
    torch._fused_adamw_(  # type: ignore[call-overload]
        *columns,
        [],
        [torch.full((), float(step), device=device)] * len(columns[0]),
        lr=float(lr) if device.type == "cpu" else lr,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=weight_decay,
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )


def _foreach_update(
    columns: tuple[list[Tensor], ...],
    scales: list[Tensor],
    group: dict[str, Any],
    step: int | Tensor,
) -> None:
    """The same from elementary operations: for mixed dtypes, other devices and `torch.compile`."""
    beta1, beta2 = group["betas"]
    for ps, gs, ms, vs, ss in in_chunks(*columns, scales):
        torch._foreach_mul_(vs, beta2)
        torch._foreach_addcmul_(vs, gs, gs, 1 - beta2)
        _lerp(ms, gs, group)
        decay(ps, group)
        updates = torch._foreach_div(ms, _denominators(vs, 1 - beta2**step, group["eps"]))
        factors = [s * (group["lr"] / (1 - beta1**step)) for s in ss]
        torch._foreach_addcmul_(ps, updates, factors, value=-1)


def _lerp(momenta: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
    """`m ← m + (1 − β1)·(g − m)`, with `−g` for `maximize`."""
    gradients = [g.to(m.dtype) for g, m in zip(gradients, momenta)]
    if group["maximize"]:
        gradients = list(torch._foreach_neg(gradients))
    torch._foreach_lerp_(momenta, gradients, 1 - group["betas"][0])


def _denominators(
    exp_avg_sqs: list[Tensor], correction: float | Tensor, eps: float
) -> list[Tensor]:
    """`sqrt(v / correction) + eps`."""
    denominators = list(torch._foreach_div(exp_avg_sqs, correction))
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, eps)
    return denominators


def block_mean_squares(gradients: list[tuple[Tensor, Blocks]]) -> list[Tensor]:
    """The mean of the squared gradients over each block, whole on every rank."""
    rows = sums_over_ranks([_square_row(*pair) for pair in gradients])
    return [
        _mean_over_blocks(row, tuple(gradient.shape), blocks)
        for row, (gradient, blocks) in zip(rows, gradients)
    ]


def _square_row(gradient: Tensor, blocks: Blocks) -> Reduced:
    part, split, dtype = local(gradient), blocks.split, _accumulation_dtype(gradient)
    if split is None:
        row = torch.linalg.vector_norm(part, dtype=dtype).square().reshape(1)
        return Reduced(row, gradient, ())
    return Reduced(_square_sums(part, split.dims, dtype), gradient, split.dims)


def _mean_over_blocks(row: Tensor, shape: tuple[int, ...], blocks: Blocks) -> Tensor:
    split, numel = blocks.split, math.prod(shape)
    if split is None:
        return row / max(1, numel)
    sums = block_sum_along(row, split)
    if split.is_even:
        return sums / max(1, numel // split.num_blocks)
    return sums / block_numel(shape, split).to(sums)


def _square_sums(x: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Sums of squares over all dimensions but `dims`."""
    others = [d for d in range(x.ndim) if d not in dims]
    if not others:
        return x.to(dtype).square()
    if dims[0] == 0:  # as rows of a matrix, or of each matrix of a stack
        norms: Tensor = torch.linalg.vector_norm(x, dim=others, dtype=dtype)
        return norms.square()
    if torch.compiler.is_compiling() or x.numel() == 0:
        return x.to(dtype).square().sum(dim=others)
    # On a CPU norms of columns take ten times as long as norms of rows. Squares of slabs, added up
    # in a slab that stays in the cache, do not.
    total: Tensor | None = None
    for (slab,) in in_chunks([x]):
        wide = slab[0].to(dtype)
        if total is None:
            total = wide.square()
        else:
            total.narrow(0, 0, len(wide)).addcmul_(wide, wide)
    return total.sum(dim=others)  # type: ignore[union-attr]


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
