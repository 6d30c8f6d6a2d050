"""Loss differences: along an update, to second order and measured, and by one more sample.

Along an update δ the loss changes by `g·δ + ½ δᵀHδ` up to third order. That splits into what each
block does alone and what blocks do to one another. The second half of the file is about another
difference, which one more sample makes to the mean loss of a data set (Petrov, Kiselev, Meshkov and
Grabovoy, arXiv 2510.16927, Theorem 7).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockopt.analysis.closed_forms.exponents import Exponent, fit_exponent
from blockopt.analysis.plots.loss_differences import loss_difference_bars
from blockopt.analysis.results import Result
from blockopt.blocks import BlockGroup, Blocks, Level, block_groups, expand, sum_groups
from blockopt.blocks.find import checked_blocks
from blockopt.measure.along_update import along_update
from blockopt.measure.closures import (
    Evaluation,
    Losses,
    average_over_batches,
    trainable_parameters,
)
from blockopt.measure.second_derivatives import twice_differentiable
from blockopt.tables import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LossDifference(Result):
    """Predicted and actual differences of the loss along an update δ, jointly and by group.

    Printed, it is a table. `second_order` is the sum of `group_second_order` and `interaction`.

    Attributes:
        loss: `L(θ)`.
        actual: `L(θ + δ) - L(θ)`.
        first_order: `g·δ`.
        second_order: `g·δ + ½ δᵀHδ`.
        labels: The groups of blocks that moved, or other names for them.
        group_actual: (G,) `L(θ + δ_b) - L(θ)`, with only group b moved.
        group_first_order: (G,) `g_b·δ_b`.
        group_second_order: (G,) `g_b·δ_b + ½ δ_bᵀ H_bb δ_b`.
        interaction: (G,) `½ Σ_{c≠b} δ_bᵀ H_bc δ_c`: half of what the other groups' moves add to
            group b.
        curvature: (G, G) `δ_bᵀ H_bc δ_c`.
    """

    loss: float
    actual: float
    first_order: float
    second_order: float
    labels: tuple[BlockGroup | str, ...]
    group_actual: Tensor
    group_first_order: Tensor
    group_second_order: Tensor
    interaction: Tensor
    curvature: Tensor

    @property
    def actual_interaction(self) -> float:
        """The joint difference minus the sum over groups: the interaction of all orders."""
        return self.actual - float(self.group_actual.sum())

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per group, and a last one for all of them jointly."""
        names = ("actual", "first_order", "second_order")
        rows: list[dict[str, Any]] = []
        for number, label in enumerate(self.labels):
            values = {name: float(getattr(self, f"group_{name}")[number]) for name in names}
            interaction = float(self.interaction[number])
            rows.append({"group": str(label), **values, "interaction": interaction})
        jointly = {name: getattr(self, name) for name in names}
        return [*rows, {"group": "jointly", **jointly, "interaction": None}]

    def plot(self) -> Figure:
        """Draw the differences by group and jointly (needs matplotlib)."""
        figure: Figure = loss_difference_bars(self).figure  # type: ignore[assignment]
        return figure

    def __str__(self) -> str:
        groups = torch.stack(
            [self.group_actual, self.group_first_order, self.group_second_order, self.interaction]
        )
        within = [self.actual_interaction, None, float(self.interaction.sum()), None]
        lines = [
            *zip(self.labels, groups.T.tolist()),
            ("sum of groups", groups.sum(1).tolist()),
            ("interaction", within),
            ("jointly", [self.actual, self.first_order, self.second_order, None]),
        ]
        rows = [["group", "actual", "first order", "second order", "interaction"]]
        for label, values in lines:
            rows.append([str(label), *("" if v is None else f"{v:.4g}" for v in values)])
        return aligned(rows)


def loss_difference(
    model: nn.Module,
    losses: Losses,
    update: Mapping[str, Tensor],
    *,
    blocks: Mapping[str, Blocks] | None = None,
    by: Level = "tensor",
) -> LossDifference:
    """Predict what an update does to the loss from gradient and Hessian, and measure it.

    The update is what would be added to the weights as they are now, unlike in `along_update`,
    which looks back at one. The weights are put back at the end as the same tensors. For each group
    of blocks this takes a Hessian-vector product and a forward pass of every batch. The result is a
    difference of nearly equal losses: use a float64 model, or an update that changes the loss by
    much more than its rounding.

    Args:
        model: Any module with whole parameters (not FSDP2).
        losses: A closure that returns the mean loss of a batch, or that and its number of tokens,
            or several such closures, which are averaged by tokens. Each is called many times, and
            must give the same batch every time.
        update: `{parameter name: δ}`. A parameter without one does not move.
        blocks: What `find_blocks(model)` returns; found here by default.
        by: The groups of blocks that are moved alone, as for `block_scales`; "head" moves each
            block alone.

    Raises:
        ValueError: If the update does not fit the parameters, or one is sharded.
        FloatingPointError: If the loss after the update is not finite.

    Example:
        The loss `(3a + 4b)²` at a = b = 1 is quadratic, so the second order is exact:

        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> _ = nn.init.ones_(model.weight)
        >>> update = {"weight": torch.tensor([[-1.0, 0.0]])}
        >>> found = loss_difference(model, lambda: model(x).square().sum(), update)
        >>> found.actual, found.first_order, found.second_order
        (-33.0, -42.0, -33.0)
    """
    closures = losses if callable(losses) else list(losses)  # used twice; may be a generator
    blocks = checked_blocks(model, blocks)
    along = along_update(model, closures, update, blocks=blocks, matrix_by=by)
    labels, groups = block_groups(blocks, by)
    moved = torch.zeros(len(labels), dtype=torch.bool)
    for name in update:
        moved[groups[name]] = True
    indices = moved.nonzero().flatten().tolist()
    parameters = {name: p for name, p in trainable_parameters(model).items() if name in update}

    def part(group: int) -> dict[str, Tensor]:
        """Return the part of the update that moves one group."""
        chosen = {name: groups[name] == group for name in parameters}
        return {
            n: update[n] * expand(c.to(update[n]), blocks[n].split, update[n].ndim)
            for n, c in chosen.items()
            if c.any()
        }

    def measure(evaluation: Evaluation) -> dict[str, Tensor]:
        with twice_differentiable():
            start = evaluation().detach().double()
            with _moved(parameters, update):
                joint = evaluation().detach().double() - start
            alone = []
            for group in indices:
                with _moved(parameters, part(group)):
                    alone.append(evaluation().detach().double() - start)
        return {"loss": start, "actual": joint, "alone": torch.stack(alone)}

    found = average_over_batches(model, closures, measure)
    assert along.matrix is not None
    curvature = along.matrix[moved][:, moved]
    slope = sum_groups(along.slope, groups, len(labels))[moved]
    own = curvature.diagonal()
    return LossDifference(
        loss=float(found["loss"]),
        actual=float(found["actual"]),
        first_order=float(slope.sum()),
        second_order=float(slope.sum() + curvature.sum() / 2),
        labels=tuple(labels[index] for index in indices),
        group_actual=found["alone"].cpu(),
        group_first_order=slope,
        group_second_order=slope + own / 2,
        interaction=(curvature.sum(1) - own) / 2,
        curvature=curvature,
    )


def sample_differences(losses: Tensor) -> Tensor:
    """Return `L_{k+1} - L_k` for k = 1, 2, …: what sample k + 1 does to the mean loss.

    The weights are fixed, and k is the size of the data set, not a step of training. With `L_k` the
    mean of the first k losses, this is `(ℓ_{k+1} - L_k) / (k + 1)`, which does not cancel.

    Args:
        losses: (n,) the loss of each sample, or (…, n) for several orders of the samples.

    Returns:
        (n - 1,) or (…, n - 1), in float64.

    Raises:
        ValueError: If there are fewer than two samples.

    Example:
        >>> sample_differences(torch.tensor([1.0, 3.0, 5.0]))  # means 1, 2, 3
        tensor([1., 1.], dtype=torch.float64)
    """
    if losses.ndim < 1 or losses.shape[-1] < 2:
        raise ValueError(
            f"Invalid losses of shape {tuple(losses.shape)}. Must be (..., samples) with at least "
            "two samples."
        )
    values = losses.detach().double()
    sizes = torch.arange(1, values.shape[-1], dtype=torch.float64, device=values.device)
    means = values.cumsum(-1)[..., :-1] / sizes
    return (values[..., 1:] - means) / (sizes + 1)


def sample_bound(
    sizes: Tensor,
    largest_loss: float,
    curvature: float = 0.0,
    distance: float = 0.0,
    *,
    sharp: bool = True,
) -> Tensor:
    """Return the bound `(L̄ + M ‖w - w*‖²) / (k + 1)` of `|L_{k+1}(w) - L_k(w)|`.

    L̄ bounds the losses of the samples at `w*`, M the spectral norms of their Hessians there, and
    all gradients vanish at `w*` (the paper's assumption). To second order, exactly for quadratic
    losses, `ℓ_{k+1}(w) - L_k(w)` is then a difference of losses at `w*` plus
    `½ (w - w*)ᵀ (H_{k+1} - mean H) (w - w*)`. The last term is at most `M ‖w - w*‖²`, and half of
    that if no Hessian has a negative eigenvalue. Theorem 7 has `2 L̄` instead of `L̄`, more than is
    needed, since two numbers in [0, L̄] differ by at most L̄. Where L̄ bounds the losses at w itself,
    `L̄ / (k + 1)` holds without any assumption: leave out the other two.

    Args:
        sizes: k, the sizes of the data set before the sample.
        largest_loss: L̄, where no loss is negative.
        curvature: M.
        distance: `‖w - w*‖`.
        sharp: Whether to count L̄ once; False for Theorem 7 as printed.

    Raises:
        ValueError: If one of the numbers is negative.

    Example:
        >>> sample_bound(torch.tensor([1, 3]), largest_loss=4.0)
        tensor([2., 1.], dtype=torch.float64)
        >>> sample_bound(torch.tensor([1, 3]), 4.0, curvature=1.0, distance=2.0, sharp=False)
        tensor([6., 3.], dtype=torch.float64)
    """
    if not all(number >= 0 for number in (largest_loss, curvature, distance)):
        given = f"largest_loss={largest_loss}, curvature={curvature}, distance={distance}"
        raise ValueError(
            f"Invalid {given}. None must be negative: losses are bounded by 0 and L̄, and M and "
            "‖w - w*‖ are norms."
        )
    return ((1 if sharp else 2) * largest_loss + curvature * distance**2) / (sizes.double() + 1)


def sample_rate(differences: Tensor) -> Exponent:
    """Fit the power of k + 1 with which `|L_{k+1} - L_k|` falls; -1 in theory.

    Single differences scatter around it by an order of magnitude, since a loss may be close to the
    mean. Several orders of the samples average that out.

    Args:
        differences: (n - 1,) or (orders, n - 1), what `sample_differences` returns.

    Example:
        >>> round(sample_rate(1 / torch.arange(2.0, 9.0)).value, 6)
        -1.0
    """
    sizes = torch.arange(2, differences.shape[-1] + 2, dtype=torch.float64)
    differences = differences.detach().double().abs().cpu()
    # A loss equal to the mean has no logarithm.
    present = (differences > 0).reshape(-1, len(sizes)).all(0)
    return fit_exponent(sizes[present], differences[..., present])


@contextmanager
def _moved(parameters: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> Iterator[None]:
    """Add the update inside; then put back the same tensors, so that no bit changes."""
    held = {name: parameters[name].data for name in update}
    try:
        with torch.no_grad():
            for name, change in update.items():
                parameters[name].data = held[name] + change.to(held[name])
        yield
    finally:
        for name, tensor in held.items():
            parameters[name].data = tensor
