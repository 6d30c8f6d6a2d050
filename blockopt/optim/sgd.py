"""SGD with momentum and a learning rate for each Hessian block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockopt.blocks import Blocks
from blockopt.checks import check_range
from blockopt.distributed import local
from blockopt.optim.base import BlockOptimizer, Parameters
from blockopt.optim.chunks import in_chunks
from blockopt.optim.entry import Entry, decay, spread
from blockopt.optim.finite_gradients import keep_if, put_back
from blockopt.optim.fused import by_dtype, fused_kernel_serves
from blockopt.optim.scale_runs import by_scale


class BlockSGD(BlockOptimizer):
    r"""SGD whose step is multiplied by the scale of each block.

    With :math:`\mu` the momentum and :math:`s_b` the scale of block :math:`b`:

    .. math:: u \leftarrow \mu u + g, \qquad p \leftarrow p - \eta\lambda p - \eta\, s_b\, u

    and :math:`g + \mu u` in place of :math:`u` in the second formula with `nesterov`. With all
    scales 1 and no decay this is `torch.optim.SGD`; decay is decoupled here, and uses the unscaled
    learning rate.

    Args:
        params: What `param_groups(model)` returns, or anything that `torch.optim.SGD` takes.
        lr: Learning rate.
        momentum: Decay rate of the sum of gradients; 0 keeps no state.
        weight_decay: Decoupled weight decay, for groups that do not bring their own.
        nesterov: Look ahead by one step of momentum.
        maximize: Ascend instead of descend.
        nonfinite: What to do when a gradient is not finite, see `BlockAdamW`.

    Raises:
        ValueError: If a hyperparameter is out of range.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = BlockSGD([("w", w)], lr=0.1)
        >>> optimizer.set_block_scales({"w": torch.tensor([2.0])})
        >>> w.sum().backward()
        >>> optimizer.step()
        >>> w.detach()
        tensor([0.8000, 1.8000])
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        maximize: bool = False,
        nonfinite: str = "raise",
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "nonfinite": nonfinite,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_range("momentum", group["momentum"], high=1.0)
        if group["nesterov"] and group["momentum"] == 0:
            raise ValueError(
                "Invalid nesterov=True with momentum=0. Nesterov needs a momentum, such as 0.9."
            )

    def _new_state(
        self, parameter: Tensor, blocks: Blocks, group: dict[str, Any]
    ) -> dict[str, Any]:
        if group["momentum"] == 0:
            return {}
        return {"momentum_buffer": torch.zeros_like(parameter, memory_format=torch.preserve_format)}

    def _update(
        self,
        entries: list[Entry],
        magnitudes: list[Tensor],
        group: dict[str, Any],
        found_inf: Tensor | None,
    ) -> None:
        lr, momentum = group["lr"], group["momentum"]
        columns = [
            [local(entry.parameter) for entry in entries],
            [local(entry.gradient) for entry in entries],
        ]
        if momentum:
            for entry in entries:  # a schedule may turn momentum on after steps without
                if "momentum_buffer" not in entry.state:
                    entry.state["momentum_buffer"] = torch.zeros_like(entry.parameter)
            columns.append([local(entry.state["momentum_buffer"]) for entry in entries])
        if isinstance(lr, Tensor) or not fused_kernel_serves(*columns):
            self._foreach_update(entries, columns, group, found_inf)
            return
        if not self._scaled_step():
            _fused_update(columns, group, lr, found_inf)
            return
        simple, others = by_scale((entry.runs for entry in entries), columns)
        for scale, views in simple.items():
            _fused_update(views, group, lr * scale, found_inf)
        if others:
            remaining = [[column[i] for i in others] for column in columns]
            self._foreach_update([entries[i] for i in others], remaining, group, found_inf)

    def _foreach_update(
        self,
        entries: Sequence[Entry],
        columns: list[list[Tensor]],
        group: dict[str, Any],
        found_inf: Tensor | None,
    ) -> None:
        """Do the same by elementary operations: for columns, tensor `lr` and `torch.compile`."""
        lr, momentum = group["lr"], group["momentum"]
        factors = []
        if self._scaled_step() or isinstance(lr, Tensor):
            scales = spread(entries, [entry.state["scale"] for entry in entries])
            factors = [[scale * lr for scale in scales]]
        for ps, gs, *rest in in_chunks(*columns, *factors):
            written = ps + (rest[0] if momentum else [])
            kept = keep_if(found_inf, written)
            directions = list(torch._foreach_neg(gs)) if group["maximize"] else gs
            if momentum:
                for g, u in zip(directions, rest[0]):
                    torch.add(g, u, alpha=momentum, out=u)
                if group["nesterov"]:
                    directions = list(torch._foreach_add(directions, rest[0], alpha=momentum))
                else:
                    directions = rest[0]
            decay(ps, group)
            if factors:
                torch._foreach_addcmul_(ps, directions, rest[-1], value=-1)
            else:
                torch._foreach_add_(ps, directions, alpha=-lr)
            put_back(found_inf, written, kept)


def _fused_update(
    columns: list[list[Tensor]], group: dict[str, Any], lr: float, found_inf: Tensor | None
) -> None:
    """Torch's own kernel, for parameters of one scale, which `lr` holds."""
    decay(columns[0], group, found_inf)
    for parameters, gradients, *buffers in by_dtype(*columns):
        torch._fused_sgd_(
            parameters,
            gradients,
            buffers[0] if buffers else [],
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=lr,
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            found_inf=found_inf,
        )
