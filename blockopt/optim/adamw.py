"""AdamW with a learning rate and, if wanted, a single second moment for each Hessian block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockopt.blocks import Blocks
from blockopt.blocks.split import block_numel, block_sum_along
from blockopt.distributed import local, sum_over_ranks
from blockopt.optim._kernels import adam_step, is_large, momentum_step, run_compiled
from blockopt.optim._rounding import lerp_momentum, rounding_noise
from blockopt.optim.base import (
    BlockOptimizer,
    Entry,
    Parameters,
    check_range,
    choose,
    decay,
    gradient_norms,
    spread,
)
from blockopt.optim.chunks import in_chunks
from blockopt.optim.fused import by_kind, fused_kernel_serves


class BlockAdamW(BlockOptimizer):
    r"""AdamW whose step is multiplied by the scale of each block.

    With :math:`m` the running mean of the gradient :math:`g`, :math:`v` that of its square, hats
    for bias correction, and :math:`s_b` the scale of block :math:`b`:

    .. math:: p \leftarrow p - \eta\lambda p - \eta\, s_b\, \hat m / (\sqrt{\hat v} + \epsilon)

    With `second_moment="coordinate"` and all scales 1 this is `torch.optim.AdamW`. With `"block"`,
    :math:`v` is one number a block, the running mean of :math:`\|g_b\|^2 / \mathrm{dim}\, b` (the
    idea of Adam-mini, on the blocks of `find_blocks`), which halves the memory of the state. Weight
    decay uses the unscaled learning rate.

    Args:
        params: What `param_groups(model)` returns; for `second_moment="coordinate"` also anything
            `torch.optim.AdamW` takes.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, for groups that do not bring their own.
        second_moment: `"coordinate"` or `"block"`.
        momentum_dtype: Dtype of the stored first moment; None takes the parameter's, as
            `torch.optim` does. `torch.bfloat16` is rounded stochastically: unbiased, with a
            relative error below 2^-7 an entry and step.
        compiled: Update large matrices by kernels that torch compiles on first use: one pass
            through memory, rather than several, where second moments or scales differ by block.
            Needs what `torch.compile` needs.
        maximize: Ascend instead of descend.
        nonfinite: What to do when a gradient, or its square (above about 1e19), is not finite:
            `"raise"`, or `"skip"` the step, count it in `optimizer.nonfinite_steps` and warn the
            first time. Weights and state are untouched in both cases.

    Raises:
        ValueError: If a hyperparameter is out of range, or `second_moment="block"` without blocks.

    Example:
        >>> import blockopt
        >>> model = torch.nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32)
        >>> optimizer = blockopt.BlockAdamW(blockopt.param_groups(model), lr=1e-3, second_moment="block")
        >>> model(torch.randn(3, 1, 16)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.linear1.weight]["exp_avg_sq"].shape  # one second moment a neuron
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
        momentum_dtype: torch.dtype | None = None,
        compiled: bool = False,
        maximize: bool = False,
        nonfinite: str = "raise",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "second_moment": second_moment,
            "momentum_dtype": momentum_dtype,
            "compiled": compiled,
            "maximize": maximize,
            "nonfinite": nonfinite,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_adamw_options(group)
        if group["second_moment"] == "block" and group["blocks"] is None:
            raise ValueError(
                "second_moment='block' needs to know the blocks, and a whole tensor as one block trains badly. "
                "Pass blockopt.param_groups(model) instead of model.parameters()."
            )

    def _new_state(
        self, parameter: Tensor, blocks: Blocks, group: dict[str, Any]
    ) -> dict[str, Any]:
        return new_adamw_state(parameter, blocks, group)

    def _magnitudes(self, entries: list[Entry], group: dict[str, Any]) -> list[Tensor]:
        return adamw_magnitudes(entries, group)

    def _update(
        self, entries: list[Entry], magnitudes: list[Tensor], group: dict[str, Any]
    ) -> None:
        adamw_update(entries, magnitudes, group, self._scaled_step())


def check_adamw_options(group: dict[str, Any]) -> None:
    """Raise `ValueError` for options of AdamW that are out of range."""
    check_range("betas[0]", group["betas"][0], high=1.0)
    check_range("betas[1]", group["betas"][1], high=1.0)
    check_range("eps", group["eps"])
    choose("second_moment", group["second_moment"], ("coordinate", "block"))
    choose("momentum_dtype", group["momentum_dtype"], (None, torch.float32, torch.bfloat16))


def new_adamw_state(parameter: Tensor, blocks: Blocks, group: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter before its first step, under the names that `torch.optim.AdamW` uses."""
    if group["second_moment"] == "coordinate":
        exp_avg_sq = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    else:
        exp_avg_sq = torch.zeros(
            blocks.num_blocks, dtype=_accumulation_dtype(parameter), device=parameter.device
        )
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(
            parameter, dtype=group["momentum_dtype"], memory_format=torch.preserve_format
        ),
        "exp_avg_sq": exp_avg_sq,
    }


def adamw_magnitudes(entries: list[Entry], group: dict[str, Any]) -> list[Tensor]:
    """Norms of the gradients, or the mean squares of their blocks, which the update needs anyway."""
    if group["second_moment"] == "coordinate":
        return gradient_norms([entry.gradient for entry in entries])
    return [block_mean_squares(entry.gradient, entry.blocks) for entry in entries]


def adamw_update(
    entries: list[Entry], magnitudes: list[Tensor], group: dict[str, Any], scaled: bool
) -> None:
    """One step of AdamW for parameters of a group, by the number of steps that they have behind them."""
    for entry in entries:
        entry.state["step"] += 1
    if (
        torch.compiler.is_compiling()
    ):  # the counts stay tensors there; the compiler joins what is done one by one
        for entry, magnitude in zip(entries, magnitudes):
            _adamw_update([entry], [magnitude], group, scaled, entry.state["step"])
        return
    counts = [int(entry.state["step"].item()) for entry in entries]
    for count in sorted(set(counts)):
        chosen = [i for i, c in enumerate(counts) if c == count]
        _adamw_update(
            [entries[i] for i in chosen], [magnitudes[i] for i in chosen], group, scaled, count
        )


def _adamw_update(
    entries: list[Entry],
    magnitudes: list[Tensor],
    group: dict[str, Any],
    scaled: bool,
    step: int | Tensor,
) -> None:
    beta1, beta2 = group["betas"]
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    parameters = [local(entry.parameter) for entry in entries]
    gradients = [local(entry.gradient) for entry in entries]
    exp_avgs = [local(entry.state["exp_avg"]) for entry in entries]
    if group["second_moment"] == "block":
        exp_avg_sqs = [entry.state["exp_avg_sq"] for entry in entries]
        torch._foreach_lerp_(
            exp_avg_sqs, [m.to(v.dtype) for m, v in zip(magnitudes, exp_avg_sqs)], 1 - beta2
        )
        denominators = _denominators(exp_avg_sqs, correction2, group["eps"])
        sizes = [
            entry.state["scale"] / d * (group["lr"] / correction1)
            for entry, d in zip(entries, denominators)
        ]
        _scaled_momentum_update(
            parameters, gradients, exp_avgs, spread(entries, sizes), step, group
        )
        return
    exp_avg_sqs = [local(entry.state["exp_avg_sq"]) for entry in entries]
    scales = None if not scaled else spread(entries, [entry.state["scale"] for entry in entries])
    if scales is not None and _takes_compiled_kernels(group):
        columns = [
            parameters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [s * (group["lr"] / correction1) for s in scales],
        ]
        numbers = (
            1 - group["lr"] * group["weight_decay"],
            1 - beta1,
            beta2,
            correction2**0.5,
            group["eps"],
        )
        parameters, gradients, exp_avgs, exp_avg_sqs, _ = run_compiled(adam_step, columns, *numbers)
        scales = [s for s, p in zip(scales, columns[0]) if not is_large(p)]
    if fused_kernel_serves(parameters, gradients, exp_avgs, exp_avg_sqs):
        _fused_update(parameters, gradients, exp_avgs, exp_avg_sqs, scales, step, group)  # type: ignore[arg-type]
    else:
        scales = scales or [p.new_ones((1,) * p.ndim) for p in parameters]
        _foreach_update(parameters, gradients, exp_avgs, exp_avg_sqs, scales, step, group)


def _denominators(
    exp_avg_sqs: list[Tensor], correction: float | Tensor, eps: float
) -> list[Tensor]:
    """`sqrt(v / correction) + eps`."""
    denominators = list(torch._foreach_div(exp_avg_sqs, correction))
    torch._foreach_sqrt_(denominators)
    torch._foreach_add_(denominators, eps)
    return denominators


def block_mean_squares(gradient: Tensor, blocks: Blocks) -> Tensor:
    """Mean of the squared gradient over each block, whole on every rank."""
    part, split, dtype = local(gradient), blocks.split, _accumulation_dtype(gradient)
    if split is None:
        row = torch.linalg.vector_norm(part, dtype=dtype).square().reshape(1)
        return sum_over_ranks(row, gradient, None, 1) / max(1, gradient.numel())
    row = _square_sums(part, split.dim, dtype)
    row = sum_over_ranks(row, gradient, split.dim, split.length)
    sums = block_sum_along(row, split)
    if split.is_even:
        return sums / max(1, gradient.numel() // split.num_blocks)
    return sums / block_numel(tuple(gradient.shape), split).to(sums)


def _square_sums(x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Sums of squares over all dimensions but `dim`."""
    if x.ndim == 1:
        return x.to(dtype).square()
    if dim == 0:
        norms: Tensor = torch.linalg.vector_norm(x, dim=list(range(1, x.ndim)), dtype=dtype)
        return norms.square()
    if torch.compiler.is_compiling() or x.numel() == 0:
        return x.to(dtype).square().sum(dim=[d for d in range(x.ndim) if d != dim])
    # Norms of columns are ten times slower on a CPU than norms of rows. Squares of slabs, added up
    # in a cached slab, are not.
    total: Tensor | None = None
    for (slab,) in in_chunks([x]):
        wide = slab[0].to(dtype)
        if total is None:
            total = wide.square()
        else:
            total.narrow(0, 0, len(wide)).addcmul_(wide, wide)
    return total.sum(dim=[d for d in range(x.ndim) if d != dim])  # type: ignore[union-attr]


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _takes_compiled_kernels(group: dict[str, Any]) -> bool:
    plain = group["momentum_dtype"] != torch.bfloat16 and not group["maximize"]
    return group["compiled"] and plain and not torch.compiler.is_compiling()


def _noise(
    parameters: list[Tensor], step: int | Tensor, group: dict[str, Any]
) -> tuple[list[Tensor], ...]:
    return rounding_noise(parameters, step) if group["momentum_dtype"] == torch.bfloat16 else ()


def _fused_update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    scales: list[Tensor] | None,
    step: int,
    group: dict[str, Any],
) -> None:
    """Torch's own kernel: on the parameters if no block is scaled, otherwise on zeros that come out as the unscaled step."""
    columns = (parameters, gradients, exp_avgs, exp_avg_sqs)
    if scales is None:
        for ps, gs, ms, vs in by_kind(*columns):
            _fused_adamw(
                ps, gs, ms, vs, step, group, lr=group["lr"], weight_decay=group["weight_decay"]
            )
        return
    for chunk in in_chunks(*columns, scales):
        for ps, gs, ms, vs, ss in by_kind(*chunk):
            updates = [torch.zeros_like(p) for p in ps]
            _fused_adamw(updates, gs, ms, vs, step, group, lr=1.0, weight_decay=0.0)
            decay(ps, group)
            torch._foreach_addcmul_(ps, updates, [s * group["lr"] for s in ss])


def _fused_adamw(
    ps: list[Tensor],
    gs: list[Tensor],
    ms: list[Tensor],
    vs: list[Tensor],
    step: int,
    group: dict[str, Any],
    lr: float | Tensor,
    weight_decay: float,
) -> None:
    device = ps[0].device
    torch._fused_adamw_(
        ps,
        gs,
        ms,
        vs,
        [],
        [torch.full((), float(step), device=device)] * len(ps),
        lr=float(lr) if device.type == "cpu" else lr,  # type: ignore[arg-type]
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=weight_decay,
        eps=group["eps"],
        amsgrad=False,
        maximize=group["maximize"],
    )


def _foreach_update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    scales: list[Tensor],
    step: int | Tensor,
    group: dict[str, Any],
) -> None:
    """The same from elementary operations, where there is no kernel: mixed dtypes, other devices, `torch.compile`."""
    beta1, beta2 = group["betas"]
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    noise = _noise(parameters, step, group)
    for ps, gs, ms, vs, ss, *noises in in_chunks(
        parameters, gradients, exp_avgs, exp_avg_sqs, scales, *noise
    ):
        gs = list(torch._foreach_neg(gs)) if group["maximize"] else gs
        torch._foreach_mul_(vs, beta2)
        torch._foreach_addcmul_(vs, gs, gs, 1 - beta2)
        momenta = lerp_momentum(ms, gs, 1 - beta1, *noises)
        denominators = _denominators(vs, correction2, group["eps"])
        decay(ps, group)
        factors = [s * (group["lr"] / correction1) for s in ss]
        updates = torch._foreach_div(momenta, denominators)
        torch._foreach_addcmul_(ps, updates, factors, value=-1)


def _scaled_momentum_update(
    parameters: list[Tensor],
    gradients: list[Tensor],
    exp_avgs: list[Tensor],
    sizes: list[Tensor],
    step: int | Tensor,
    group: dict[str, Any],
) -> None:
    """`m ← lerp(m, g)`, then `p ← p − size·m`, with one size a block."""
    if _takes_compiled_kernels(group):
        columns = [parameters, gradients, exp_avgs, sizes]
        numbers = (1 - group["lr"] * group["weight_decay"], 1 - group["betas"][0])
        parameters, gradients, exp_avgs, sizes = run_compiled(momentum_step, columns, *numbers)
    noise = _noise(parameters, step, group)
    for ps, gs, ms, ss, *noises in in_chunks(parameters, gradients, exp_avgs, sizes, *noise):
        gs = list(torch._foreach_neg(gs)) if group["maximize"] else gs
        momenta = lerp_momentum(ms, gs, 1 - group["betas"][0], *noises)
        decay(ps, group)
        torch._foreach_addcmul_(ps, momenta, ss, value=-1)
