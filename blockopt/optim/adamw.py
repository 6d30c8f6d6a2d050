"""AdamW with a learning rate and, if wanted, a single second moment for each Hessian block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockopt.blocks import Blocks
from blockopt.checks import check_choice, check_range
from blockopt.optim.adamw_update import (
    adamw_magnitudes,
    adamw_update,
    is_whitened,
    whole_mean_squares,
)
from blockopt.optim.base import BlockOptimizer, Parameters
from blockopt.optim.block_squares import accumulation_dtype
from blockopt.optim.entry import Entry, Work
from blockopt.optim.whitened_table import new_table_state

SECOND_MOMENTS = ("coordinate", "block", "whitened")
# Whitened tables take steps of this many learning rates. They bear the step that Muon's matrices
# do, whose best learning rate is three times that of AdamW's.
TABLE_STEP = 3.0
# Columns of the sketch that whitens a table. Of 128 columns 16, 32, 64 and all end at 4.070, 4.044,
# 3.988 and 3.978 (1M parameters, 1,200 steps, one seed).
TABLE_PROBES = 64


class BlockAdamW(BlockOptimizer):
    r"""AdamW whose step is multiplied by the scale of each block.

    With :math:`m` the running mean of the gradient :math:`g`, :math:`v` that of its square, hats
    for bias correction, and :math:`s_b` the scale of block :math:`b`:

    .. math:: p \leftarrow p - \eta\lambda p - \eta\, s_b\, \hat m / (\sqrt{\hat v} + \epsilon)

    With `second_moment="coordinate"` and all scales 1 this is `torch.optim.AdamW`. With
    `"whitened"`, embeddings and heads have one number per row and a matrix for their columns, which
    whitens their steps (see `blockopt/optim/whitened_table.py`), three times as long as the
    learning rate says; all else has :math:`v` per coordinate. With `"block"` too tables are
    whitened, and all else has as :math:`v` one number per block, the running mean of
    :math:`\|g_b\|^2 / \mathrm{dim}\, b` (the idea of Adam-mini, on the blocks of `find_blocks`):
    that halves the memory of the state. Weight decay uses the unscaled learning rate.

    Args:
        params: What `param_groups(model)` returns; for `second_moment="coordinate"` also anything
            that `torch.optim.AdamW` takes.
        lr: Learning rate.
        betas: Decay rates of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, for groups that do not bring their own.
        second_moment: `"coordinate"`, `"block"` or `"whitened"`.
        maximize: Ascend instead of descend.
        nonfinite: What to do when a gradient, or its square (above about 1e19), is not finite:
            `"raise"`, or `"skip"` the step, count it in `optimizer.nonfinite_steps` and warn the
            first time. Weights and state are untouched in both cases. With `"skip"` all ranks of
            the default process group decide alike, so all of them must call `step`. On an
            accelerator the error or warning comes one step later, since waiting for the answer
            would leave it idle. `"ignore"` checks nothing, as `torch.optim` does, and saves the
            time of reading all gradients once more.

    Raises:
        ValueError: If a hyperparameter is out of range, or `second_moment` needs blocks that are
            missing.

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
        if group["second_moment"] != "coordinate" and group["blocks"] is None:
            raise ValueError(
                f"second_moment={group['second_moment']!r} needs to know the blocks, and a whole "
                "tensor as one block trains badly. Pass blockopt.param_groups(model) instead of "
                "model.parameters()."
            )

    def _new_state(
        self, parameter: Tensor, blocks: Blocks, group: dict[str, Any]
    ) -> dict[str, Any]:
        return new_adamw_state(parameter, blocks, group, TABLE_PROBES)

    def _needs_shapes(self, group: dict[str, Any]) -> bool:
        return bool(group["second_moment"] != "coordinate")

    def _magnitudes(self, work: Work) -> list[list[Tensor]]:
        return adamw_magnitudes(work)

    def _whole_magnitudes(self, work: Work, own: list[list[Tensor]]) -> list[list[Tensor]]:
        return whole_mean_squares(work, own)

    def _update(
        self,
        entries: list[Entry],
        magnitudes: list[Tensor],
        group: dict[str, Any],
        found_inf: Tensor | None,
    ) -> None:
        scaled = self._scaled_step()
        adamw_update(entries, magnitudes, group, scaled, found_inf, TABLE_STEP)


def check_adamw_options(group: dict[str, Any]) -> None:
    """Raise `ValueError` for options of AdamW that are out of range."""
    check_range("betas[0]", group["betas"][0], high=1.0)
    check_range("betas[1]", group["betas"][1], high=1.0)
    check_range("eps", group["eps"])
    check_choice("second_moment", group["second_moment"], SECOND_MOMENTS)


def new_adamw_state(
    parameter: Tensor, blocks: Blocks, group: dict[str, Any], table_probes: int
) -> dict[str, Any]:
    """The state of a parameter before its first step, named as in `torch.optim.AdamW`."""
    if is_whitened(parameter, blocks, group):
        return new_table_state(parameter, blocks, table_probes)
    exp_avg = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    if group["second_moment"] == "block":
        dtype = accumulation_dtype(parameter)
        exp_avg_sq = torch.zeros(blocks.num_blocks, dtype=dtype, device=parameter.device)
    else:
        exp_avg_sq = torch.zeros_like(exp_avg)
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
