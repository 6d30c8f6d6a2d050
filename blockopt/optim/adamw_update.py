"""The arithmetic of a step of AdamW: torch's fused kernel wherever it can serve.

Three ways lead to the same numbers. The kernel takes all rows of one scale in one call. Where the
scales run along columns or change with every row, it works on a scratch chunk, of which each entry
is then scaled. Elementary operations serve mixed dtypes, other devices and `torch.compile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockopt.blocks import Blocks
from blockopt.distributed import Reduced, is_sharded, local, sums_over_ranks
from blockopt.optim.block_squares import accumulation_dtype, own_mean_squares
from blockopt.optim.chunks import Scratch, in_chunks
from blockopt.optim.entry import Entry, Work, decay, norms_to_check, spread, subtract_and_decay
from blockopt.optim.finite_gradients import READ_AT_ONCE, keep_if, put_back
from blockopt.optim.fused import by_dtype, fused_kernel_serves
from blockopt.optim.scale_runs import by_scale
from blockopt.optim.whitened_table import table_update

SMALLEST_DIVISOR = 1e-3  # below, decay is done apart, lest weight_decay / scale overflow

Columns = Sequence[list[Tensor]]


def is_whitened(parameter: Tensor, blocks: Blocks, group: dict[str, Any]) -> bool:
    """Whether a parameter takes the step of a table."""
    return group["second_moment"] != "coordinate" and blocks.is_table(tuple(parameter.shape))


def adamw_magnitudes(work: Work) -> list[list[Tensor]]:
    """Norms of the own parts of gradients, or the mean squares of blocks, of the same parts."""
    found, nothing = [], torch.empty(0)  # for gradients that are not checked
    for group, entries in work:
        by_block = [_is_by_block(entry, group) for entry in entries]
        others = [entry for entry, flag in zip(entries, by_block) if not flag]
        norms = iter(norms_to_check(others, group))
        found.append(
            [
                own_mean_squares(entry.gradient, entry.blocks) if flag else next(norms, nothing)
                for entry, flag in zip(entries, by_block)
            ]
        )
    return found


def whole_mean_squares(work: Work, own: list[list[Tensor]]) -> list[list[Tensor]]:
    """The same, with the mean squares of whole blocks."""
    chosen = [
        _own_part(entry, magnitude)
        for (group, entries), some in zip(work, own)
        for entry, magnitude in zip(entries, some)
        if _is_by_block(entry, group)
    ]
    whole = iter(sums_over_ranks(chosen))
    return [
        [next(whole) if _is_by_block(entry, group) else m for entry, m in zip(entries, some)]
        for (group, entries), some in zip(work, own)
    ]


def _own_part(entry: Entry, magnitude: Tensor) -> Reduced:
    gradient = entry.gradient
    if is_sharded(gradient) and gradient is not entry.parameter.grad:  # it had another layout
        magnitude = own_mean_squares(gradient, entry.blocks)
    return Reduced(magnitude, gradient, ())


def _is_by_block(entry: Entry, group: dict[str, Any]) -> bool:
    return group["second_moment"] == "block" or is_whitened(entry.parameter, entry.blocks, group)


def adamw_update(
    entries: list[Entry],
    magnitudes: list[Tensor],
    group: dict[str, Any],
    scaled: bool,
    found_inf: Tensor | None,
    table_step: float = 1.0,
) -> None:
    """Take one step for parameters of a group that are on one device.

    Args:
        entries: The parameters.
        magnitudes: Those of `whole_mean_squares`.
        group: The options.
        scaled: Whether to look at the scales.
        found_inf: If 1, nothing changes; None if that is ruled out.
        table_step: How long the steps of whitened tables are, as a multiple of the learning rate.
    """
    tables = [is_whitened(entry.parameter, entry.blocks, group) for entry in entries]
    if any(tables):
        chosen = [(e, m) for e, m, table in zip(entries, magnitudes, tables) if table]
        table_update([e for e, _ in chosen], [m for _, m in chosen], group, found_inf, table_step)
        rest = [(e, m) for e, m, table in zip(entries, magnitudes, tables) if not table]
        entries, magnitudes = [e for e, _ in rest], [m for _, m in rest]
        if not entries:
            return
    steps = [entry.state["step"] for entry in entries]
    torch._foreach_add_(steps, 1)
    columns = [
        [local(entry.parameter) for entry in entries],
        [local(entry.gradient) for entry in entries],
        [local(entry.state["exp_avg"]) for entry in entries],
    ]
    if group["second_moment"] == "block":
        _update_by_block(entries, magnitudes, columns, group, found_inf)
    else:
        columns.append([local(entry.state["exp_avg_sq"]) for entry in entries])
        if not fused_kernel_serves(*columns):
            _foreach_update(entries, columns, group, scaled, found_inf)
        elif scaled:
            _fused_scaled_update(entries, [*columns, steps], group, found_inf)
        else:
            _fused_update([*columns, steps], group, 1.0, found_inf)
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))


def _fused_scaled_update(
    entries: list[Entry], columns: Columns, group: dict[str, Any], found_inf: Tensor | None
) -> None:
    """One call of the kernel per scale, on views of the rows that share it; then all the others."""
    simple, others = by_scale((entry.runs for entry in entries), columns)
    for scale, views in simple.items():
        _fused_update(views, group, scale, found_inf)
    if others:
        remaining = [[column[i] for i in others] for column in columns]
        _fused_entrywise_update([entries[i] for i in others], remaining, group, found_inf)


def _fused_update(
    columns: Columns, group: dict[str, Any], scale: float, found_inf: Tensor | None
) -> None:
    """Torch's own kernel on parameters of one scale; `lr * scale` must not scale the decay."""
    lr, weight_decay = group["lr"], group["weight_decay"]
    if scale < SMALLEST_DIVISOR:
        decay(columns[0], group, found_inf)
        weight_decay = 0.0
    for some in by_dtype(*columns):
        _fused_adamw(some, group, lr * scale, weight_decay / (scale or 1.0), found_inf)


def _fused_entrywise_update(
    entries: Sequence[Entry], columns: Columns, group: dict[str, Any], found_inf: Tensor | None
) -> None:
    """The kernel works on cleared scratch, which becomes the step to be scaled entry by entry."""
    scales = spread(entries, [entry.state["scale"] for entry in entries])
    rates = [scale * -group["lr"] for scale in scales]
    scratch = Scratch()
    for chunk in in_chunks(*columns, rates):
        for ps, gs, ms, vs, ts, rs in by_dtype(*chunk):
            updates = scratch.zeros(ps)
            _fused_adamw([updates, gs, ms, vs, ts], group, 1.0, 0.0, found_inf)
            torch._foreach_mul_(updates, rs)
            subtract_and_decay(ps, updates, group, found_inf)


def _fused_adamw(
    columns: Columns,
    group: dict[str, Any],
    lr: float | Tensor,
    weight_decay: float,
    found_inf: Tensor | None,
) -> None:
    *moments, steps = columns
    torch._fused_adamw_(  # type: ignore[call-overload]
        *moments,
        [],
        steps,
        lr=float(lr) if steps[0].device.type == "cpu" else lr,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=weight_decay,
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
        found_inf=found_inf,
    )


def _update_by_block(
    entries: list[Entry],
    mean_squares: list[Tensor],
    columns: Columns,
    group: dict[str, Any],
    found_inf: Tensor | None,
) -> None:
    """`m ← lerp(m, g)`, then `p ← p − size·m`, with one second moment and one size per block."""
    beta1, beta2 = group["betas"]
    exp_avg_sqs = [entry.state["exp_avg_sq"] for entry in entries]
    kept = keep_if(found_inf, exp_avg_sqs)
    new = [square.to(v.dtype) for square, v in zip(mean_squares, exp_avg_sqs)]
    torch._foreach_lerp_(exp_avg_sqs, new, 1 - beta2)
    denominators = _denominators(exp_avg_sqs, _corrections(entries, beta2), group["eps"])
    rates = [group["lr"] / correction for correction in _corrections(entries, beta1)]
    sizes = [e.state["scale"] / d * r for e, d, r in zip(entries, denominators, rates)]
    put_back(found_inf, exp_avg_sqs, kept)
    for ps, gs, ms, ss in in_chunks(*columns, spread(entries, sizes)):
        kept = keep_if(found_inf, ps + ms)
        _lerp(ms, gs, group)
        decay(ps, group)
        torch._foreach_addcmul_(ps, ms, ss, value=-1)
        put_back(found_inf, ps + ms, kept)


def _foreach_update(
    entries: list[Entry],
    columns: Columns,
    group: dict[str, Any],
    scaled: bool,
    found_inf: Tensor | None,
) -> None:
    """Do the same by elementary operations."""
    beta1, beta2 = group["betas"]
    rates = [group["lr"] / correction for correction in _corrections(entries, beta1)]
    if scaled:
        scales = spread(entries, [entry.state["scale"] for entry in entries])
    else:
        scales = [p.new_ones((1,) * p.ndim) for p in columns[0]]
    factors = [scale * rate for scale, rate in zip(scales, rates)]
    corrections = [
        torch.as_tensor(c, dtype=s.dtype, device=s.device)
        for c, s in zip(_corrections(entries, beta2), scales)
    ]
    for ps, gs, ms, vs, fs, cs in in_chunks(*columns, factors, corrections):
        kept = keep_if(found_inf, ps + ms + vs)
        torch._foreach_mul_(vs, beta2)
        torch._foreach_addcmul_(vs, gs, gs, 1 - beta2)
        _lerp(ms, gs, group)
        decay(ps, group)
        updates = torch._foreach_div(ms, _denominators(vs, cs, group["eps"]))
        torch._foreach_addcmul_(ps, updates, fs, value=-1)
        put_back(found_inf, ps + ms + vs, kept)


def _lerp(momenta: list[Tensor], gradients: list[Tensor], group: dict[str, Any]) -> None:
    """`m ← m + (1 − β1)·(g − m)`, with `−g` for `maximize`."""
    gradients = [g.to(m.dtype) for g, m in zip(gradients, momenta)]
    if group["maximize"]:
        gradients = list(torch._foreach_neg(gradients))
    torch._foreach_lerp_(momenta, gradients, 1 - group["betas"][0])


def _corrections(entries: Sequence[Entry], beta: float) -> list[float] | list[Tensor]:
    """`1 − β^step` for each parameter: numbers where reading the count is free, else tensors."""
    steps = [entry.state["step"] for entry in entries]
    if torch.compiler.is_compiling() or steps[0].device.type not in READ_AT_ONCE:
        dtypes = [accumulation_dtype(entry.parameter) for entry in entries]
        return [1 - beta ** step.to(dtype) for step, dtype in zip(steps, dtypes)]
    return [1 - beta ** step.item() for step in steps]


def _denominators(
    exp_avg_sqs: list[Tensor], corrections: list[float] | list[Tensor], eps: float
) -> list[Tensor]:
    """`sqrt(v / correction) + eps`."""
    denominators = list(torch._foreach_div(exp_avg_sqs, corrections))
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, eps)
    return denominators
