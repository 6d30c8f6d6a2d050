"""Second-order loss differences: what gradient and Hessian say an update does to the loss, and what it does.

Along an update δ the loss changes by `g·δ + ½ δᵀHδ` up to third order, and that splits into what
each block does alone and what blocks do to one another. The second half is another difference: the
one that a further sample makes to the mean loss of a data set (Petrov, Kiselev, Meshkov and
Grabovoy, arXiv 2510.16927, Theorem 7).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from blockopt.analysis.closed_forms.growth import Exponent, fit_exponent
from blockopt.blocks import Blocks
from blockopt.blocks.groups import Level, block_groups, sum_groups
from blockopt.blocks.split import expand
from blockopt.measure.along_update import along_update
from blockopt.measure.closures import (
    Curvature,
    Evaluation,
    Losses,
    batch_means,
    checked_blocks,
    eager_math,
    trainable,
)


@dataclass(frozen=True)
class LossDifference:
    """Predicted and actual differences of the loss along an update δ, jointly and group by group; printed, a table of them.

    `second_order` is exactly the sum of `group_second_order` and of `interaction`.

    Attributes:
        loss: `L(θ)`.
        actual: `L(θ + δ) - L(θ)`.
        first_order: `g·δ`.
        second_order: `g·δ + ½ δᵀHδ`.
        labels: The groups of blocks that moved.
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
    labels: tuple[str, ...]
    group_actual: Tensor
    group_first_order: Tensor
    group_second_order: Tensor
    interaction: Tensor
    curvature: Tensor

    @property
    def actual_interaction(self) -> float:
        """The joint difference minus the sum of those of the groups alone: the interaction, of all orders."""
        return self.actual - float(self.group_actual.sum())

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("group", "actual", "first order", "second order", "interaction")
        ]
        columns = (
            self.group_actual,
            self.group_first_order,
            self.group_second_order,
            self.interaction,
        )
        for label, *values in zip(self.labels, *(column.tolist() for column in columns)):
            rows.append((label, *(f"{value:.4g}" for value in values)))
        sums = [f"{float(column.sum()):.4g}" for column in columns]
        rows.append(("sum of groups", *sums))
        rows.append(
            (
                "interaction",
                f"{self.actual_interaction:.4g}",
                "",
                f"{float(self.interaction.sum()):.4g}",
                "",
            )
        )
        rows.append(
            (
                "jointly",
                f"{self.actual:.4g}",
                f"{self.first_order:.4g}",
                f"{self.second_order:.4g}",
                "",
            )
        )
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
            for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)


def loss_difference(
    model: nn.Module,
    losses: Losses,
    update: Mapping[str, Tensor],
    *,
    blocks: Mapping[str, Blocks] | None = None,
    by: Level = "tensor",
) -> LossDifference:
    """The difference that an update would make to the loss, predicted from gradient and Hessian and measured.

    Unlike `along_update` in a training loop, the update starts here: it is what would be added to
    the weights as they are. They are put back at the end, as the same tensors, whatever happens.
    For each group of blocks this takes a Hessian-vector product and a forward pass of every batch.
    Losses are differences of nearly equal numbers: use a model in float64, or an update large
    enough for the loss to change by much more than its rounding.

    Args:
        model: Any module with whole parameters (not FSDP2).
        losses: A closure that returns the mean loss of a batch, or that and its number of tokens,
            or several of them; they are averaged by tokens. Each is called many times, and must
            give the same batch every time.
        update: `{parameter name: δ}`. A parameter without one does not move.
        blocks: What `find_blocks(model)` returns; found here by default.
        by: The groups of blocks that are moved alone, see `block_scales`; "head" moves each block
            of `blocks` alone.

    Returns:
        The `LossDifference`.

    Raises:
        ValueError: If the update does not fit the parameters, or one is sharded.
        FloatingPointError: If the loss after the update is not finite.

    Example:
        Loss `(3a + 4b)²` at a = b = 1, where a loss is quadratic and the second order exact:

        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> _ = nn.init.ones_(model.weight)
        >>> update = {"weight": torch.tensor([[-1.0, 0.0]])}
        >>> found = loss_difference(model, lambda: model(x).square().sum(), update)
        >>> found.actual, found.first_order, found.second_order
        (-33.0, -42.0, -33.0)
    """
    closures = (
        losses if callable(losses) else list(losses)
    )  # used twice, though it may be a generator
    blocks = checked_blocks(model, blocks)
    along = along_update(model, closures, update, blocks=blocks, matrix_by=by)
    labels, groups = block_groups(blocks, by)
    moved = torch.zeros(len(labels), dtype=torch.bool)
    for name in update:
        moved[groups[name]] = True
    indices = moved.nonzero().flatten().tolist()
    parameters = {name: p for name, p in trainable(model).items() if name in update}

    def part(group: int) -> dict[str, Tensor]:
        """What of the update moves one group."""
        chosen = {name: groups[name] == group for name in parameters}
        return {
            n: update[n] * expand(c.to(update[n]), blocks[n].split, update[n].ndim)
            for n, c in chosen.items()
            if c.any()
        }

    def measure(evaluation: Evaluation) -> dict[str, Tensor]:
        with eager_math():
            start = evaluation().detach().double()
            with _moved(parameters, update):
                joint = evaluation().detach().double() - start
            alone = []
            for group in indices:
                with _moved(parameters, part(group)):
                    alone.append(evaluation().detach().double() - start)
        return {"loss": start, "actual": joint, "alone": torch.stack(alone)}

    found = batch_means(model, closures, measure)
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
    """`L_{k+1} - L_k` for k = 1, 2, …: what sample k + 1 does to the mean loss of a data set, at fixed weights.

    With `L_k` the mean of the first k losses this is `(ℓ_{k+1} - L_k) / (k + 1)`, the form used
    here, which does not cancel. Here k is the size of the data set, not a step of training.

    Args:
        losses: (n,) the loss of each sample, or (…, n) of several orders of the samples.

    Returns:
        (n - 1,) or (…, n - 1), in float64.

    Raises:
        ValueError: If there are less than two samples.

    Example:
        >>> sample_differences(torch.tensor([1.0, 3.0, 5.0]))  # means 1, 2, 3
        tensor([1., 1.], dtype=torch.float64)
    """
    if losses.ndim < 1 or losses.shape[-1] < 2:
        raise ValueError(
            f"Invalid losses of shape {tuple(losses.shape)}. Must be (..., samples) of two samples or more."
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
    """A bound of `|L_{k+1}(w) - L_k(w)|`, `(L̄ + M ‖w - w*‖²) / (k + 1)`: its rate is 1/k.

    Theorem 7 has `2 L̄` in the place of `L̄`: more than is needed, since two numbers in [0, L̄]
    differ by at most L̄. Here L̄ bounds the losses of the samples at `w*` and M the spectral norms
    of their Hessians there, and all gradients vanish at `w*` (the paper's assumption). To second
    order, exactly for quadratic losses, `ℓ_{k+1}(w) - L_k(w)` is then a difference of losses at
    `w*` plus `½ (w - w*)ᵀ (H_{k+1} - mean H) (w - w*)`, of which the last is at most `M ‖w - w*‖²`;
    half of that, if no Hessian has a negative eigenvalue. Where L̄ bounds the losses at w itself,
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
        >>> sample_bound(torch.tensor([1, 3]), largest_loss=4.0, curvature=1.0, distance=2.0, sharp=False)
        tensor([6., 3.], dtype=torch.float64)
    """
    if not all(number >= 0 for number in (largest_loss, curvature, distance)):
        given = f"largest_loss={largest_loss}, curvature={curvature}, distance={distance}"
        raise ValueError(
            f"Invalid {given}. None must be negative: losses are bounded by 0 and L̄, and M and ‖w - w*‖ are norms."
        )
    return ((1 if sharp else 2) * largest_loss + curvature * distance**2) / (sizes.double() + 1)


def sample_rate(differences: Tensor) -> Exponent:
    """The power of k + 1 that `|L_{k+1} - L_k|` falls with, -1 in theory: the slope of a line in the log-log plot.

    Single differences scatter by an order of magnitude about it, since a loss may be close to the
    mean. More orders of the samples average that out.

    Args:
        differences: (n - 1,) or (orders, n - 1), what `sample_differences` returns.

    Example:
        >>> round(sample_rate(1 / torch.arange(2.0, 9.0)).value, 6)
        -1.0
    """
    sizes = torch.arange(2, differences.shape[-1] + 2, dtype=torch.float64)
    differences = differences.detach().double().abs().cpu()
    present = (
        (differences > 0).reshape(-1, len(sizes)).all(0)
    )  # a loss equal to the mean has no logarithm
    return fit_exponent(sizes[present], differences[..., present])


@contextmanager
def _moved(parameters: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> Iterator[None]:
    """The parameters with the update added, inside; the tensors they held are put back, not copied, so no bit changes."""
    held = {name: parameters[name].data for name in update}
    try:
        with torch.no_grad():
            for name, change in update.items():
                parameters[name].data = held[name] + change.to(held[name])
        yield
    finally:
        for name, tensor in held.items():
            parameters[name].data = tensor


def _sum_groups(values: Curvature, groups: Mapping[str, Tensor], number: int) -> Tensor:
    """The sum over the blocks of each group, in float64 on the CPU."""
    total = torch.zeros(number, dtype=torch.float64)
    for name, value in values.items():
        total.index_add_(0, groups[name], value.to("cpu", torch.float64))
    return total
