"""Muon on the matrices of a transformer and AdamW on the rest, with a scale per Hessian block."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockopt.blocks import MATRIX_ROLES, Blocks, pattern_of
from blockopt.checks import check_count, check_range
from blockopt.optim.adamw import check_adamw_options, new_adamw_state
from blockopt.optim.adamw_update import adamw_magnitudes, adamw_update, whole_mean_squares
from blockopt.optim.base import BlockOptimizer, Parameters
from blockopt.optim.entry import Entry, Work, norms_to_check
from blockopt.optim.finite_gradients import flag_on
from blockopt.optim.groups import blocks_of, names_of
from blockopt.optim.input_directions import new_input_state
from blockopt.optim.matrix_sections import is_hidden_matrix
from blockopt.optim.muon_on_ranks import take_steps
from blockopt.optim.muon_step import Waiting
from blockopt.optim.neuron_steps import new_neuron_state

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Columns of the sketch that whitens a table. More of them gain nothing beside steps of Muon: of 128
# columns 16, 32 and all end at 3.742, 3.761 and 3.746 (1M parameters, 1,200 steps, one seed).
TABLE_PROBES = 16


class BlockMuon(BlockOptimizer):
    r"""Muon for the matrices inside the layers and AdamW for all else, with one learning rate.

    The query, key, value, output and MLP matrices move along their momentum with all singular
    values set to about 1, by four steps of an iteration of Newton and Schulz's kind
    (`newton_schulz.py`). Each matrix is what it would be if it were stored alone: a fused matrix is
    taken apart, in any storage order, and so is a stack of experts. With
    :math:`A` outputs, :math:`B` inputs and :math:`s_b` the block's scale:

    .. math::
        p \leftarrow p - \eta\lambda p
        - \eta\, s_b\, 2.26 \sqrt{\max(1, A / B)}\; \mathrm{orthogonalize}(m)

    So a step changes the outputs of a map by as much at every width, and one learning rate serves
    models of all widths, beside the steps of AdamW. Before the orthogonalization, the dominant
    directions of each matrix's input are damped, as Newton's step would damp them
    (`input_directions.py`); after it, all neurons of an MLP get steps of the same size
    (`neuron_steps.py`). Embeddings, norms, biases, the head and all other parameters take the step
    of `BlockAdamW`.

    With `precondition=False`, on unsplit matrices with all scales 1 this is `torch.optim.Muon` with
    2.26 times the learning rate, except for the iteration: torch takes five steps, each with the
    same coefficients, which bring singular values from 0.16 % of their root of squares up to
    [0.68, 1.2]. The four steps here, each with its own, bring those from 0.31 % of about the
    largest up to [0.7, 1.2]. The dtype is bfloat16, or float32 on a CPU without instructions for
    bfloat16.

    An expert that saw no token has a gradient of zeros, not none. As with `torch.optim.Muon` its
    momentum decays, its direction stays, and weight decay applies. Before its first token its
    momentum is zero, and so is its update.

    Ranks that share a sharded matrix divide the work: each matrix is orthogonalized once, and its
    parts travel to its owner and back (`divided_work.py`). Experts that are sharded by expert stay
    where they are.

    Args:
        params: What `param_groups(model)` returns.
        lr: Learning rate. The default is the best found at a width of 128, and its meaning does not
            change with the width.
        momentum: Decay rate of the momentum of the matrices. In our runs 0.9 ends lower than the
            usual 0.95, with 1,000 tokens per step and with 8,000.
        weight_decay: Decoupled weight decay, for groups that do not bring their own.
        nesterov: Look ahead by one step of momentum.
        iterations: Number of steps of the iteration. With 3 there are 0.8 of the products, and
            singular values below 1.2 % of the largest stay below 0.7; with 5, 0.08 %.
        precondition: Damp dominant inputs before the orthogonalization and even out the neurons of
            MLPs after it; False is plain Muon.
        betas: Decay rates of the two moments of AdamW, for the other parameters; the second is also
            that of what `precondition` keeps.
        eps: Added to the root of their second moment.
        second_moment: Theirs, `"whitened"`, `"coordinate"` or `"block"`, see `BlockAdamW`.
        maximize: Ascend instead of descend.
        nonfinite: What to do when a gradient is not finite, see `BlockAdamW`.
        replicas: Under DDP, the process group whose ranks train copies of the same model, such as
            `torch.distributed.group.WORLD`: they divide the orthogonalizations and exchange the
            updates. None leaves every rank with all of them. Sharded parameters need no such hint.

    Raises:
        ValueError: If a hyperparameter is out of range, or `params` carry no blocks.

    Example:
        >>> import blockopt
        >>> model = torch.nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32)
        >>> optimizer = BlockMuon(blockopt.param_groups(model))
        >>> model(torch.randn(3, 1, 16)).square().mean().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 1e-2,
        momentum: float = 0.9,
        weight_decay: float = 0.1,
        *,
        nesterov: bool = True,
        iterations: int = 4,
        precondition: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        second_moment: str = "whitened",
        maximize: bool = False,
        nonfinite: str = "raise",
        replicas: ProcessGroup | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "iterations": iterations,
            "precondition": precondition,
            "betas": betas,
            "eps": eps,
            "second_moment": second_moment,
            "maximize": maximize,
            "nonfinite": nonfinite,
        }
        super().__init__(params, defaults)
        self._replicas = replicas
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
        missed: dict[str, int] = {}
        for name, entries in self._hidden_entries()[1].items():
            missed[pattern_of(name)] = missed.get(pattern_of(name), 0) + entries
        largest = sorted(missed, key=lambda name: -missed[name])[:3]
        warnings.warn(
            f"BlockMuon orthogonalizes {self.muon_share:.0%} of the entries of the hidden matrices "
            f"and updates the others as AdamW does, most of them in {', '.join(largest)}. Their "
            "role is not known. A forward pass may tell it: param_groups(model, example=batch). Or "
            "give it: param_groups(model, find_blocks(model, overrides=...)).",
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
            if not group["precondition"]:
                return {"momentum_buffer": buffer}
            inputs, neurons = (
                new_input_state(parameter, blocks),
                new_neuron_state(parameter, blocks),
            )
            return {"momentum_buffer": buffer, **inputs, **neurons}
        return new_adamw_state(parameter, blocks, group, TABLE_PROBES)

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

    def _whole_magnitudes(self, work: Work, own: list[list[Tensor]]) -> list[list[Tensor]]:
        """Return the magnitudes of the other parameters; the matrices need none."""
        others = [(group, _divide(entries)[1]) for group, entries in work]
        of_others = [some[len(some) - len(o) :] for some, (_, o) in zip(own, others)]
        return whole_mean_squares(others, of_others)

    def _update_all(self, work: Work, own: list[list[Tensor]], found_inf: Tensor | None) -> None:
        """AdamW group by group; the matrices of all groups at once, to share batches."""
        super()._update_all(work, own, found_inf)
        waiting = [
            Waiting(entry, group, flag_on(found_inf, entry.parameter.device))
            for group, entries in work
            for entry in _divide(entries)[0]
        ]
        take_steps(waiting, self._replicas)

    def _update(
        self,
        entries: list[Entry],
        magnitudes: list[Tensor],
        group: dict[str, Any],
        found_inf: Tensor | None,
    ) -> None:
        others = _divide(entries)[1]
        if others:
            adamw_update(others, magnitudes, group, self._scaled_step(), found_inf)


def _divide(entries: list[Entry]) -> tuple[list[Entry], list[Entry]]:
    """The hidden matrices, and the others."""
    taken = [is_hidden_matrix(entry.parameter, entry.blocks) for entry in entries]
    matrices = [entry for entry, hidden in zip(entries, taken) if hidden]
    return matrices, [entry for entry, hidden in zip(entries, taken) if not hidden]
