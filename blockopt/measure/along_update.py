"""The second-order model of the loss along an update, block by block: slopes and curvature where training actually goes.

Random probes average over all directions of a block, most of which training never takes. Along the
update `u` the second-order model of the loss is `L(w + t u) ≈ L + t Σ_b g_b·u_b + t²/2 Σ_bc u_bᵀ
H_bc u_c`, and one product `H u` gives the row sums `(H u)_b · u_b` of all blocks at once: exactly,
or as a secant, the difference of two gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks
from blockopt.blocks.groups import Level, block_groups, sum_groups
from blockopt.blocks.split import expand
from blockopt.measure.closures import (
    Curvature,
    Evaluation,
    Losses,
    batch_means,
    block_dots,
    checked_blocks,
    eager_math,
    refuse_sharded,
    trainable,
)

Method = Literal["exact", "secant"]


class AlongUpdate(NamedTuple):
    """The second-order model of the loss along an update `u`.

    Attributes:
        slope: `g_b · u_b` of each block; negative where the update descends.
        row_sum: `(H u)_b · u_b` of each block.
        square: `u_b · u_b` of each block.
        labels: The groups of blocks that the matrix is between; empty if it was not asked for.
        matrix: `u_bᵀ H u_c` between the groups; its row sums are the sums of `row_sum` over each
            group.
    """

    slope: Curvature
    row_sum: Curvature
    square: Curvature
    labels: tuple[str, ...]
    matrix: Tensor | None


def along_update(
    model: nn.Module,
    losses: Losses,
    update: Mapping[str, Tensor],
    *,
    blocks: Mapping[str, Blocks] | None = None,
    method: Method = "exact",
    matrix_by: Level | None = None,
) -> AlongUpdate:
    """Slopes and curvature of the loss along an update, block by block.

    Args:
        model: Any module; with `method="exact"` its parameters must be whole (not FSDP2).
        losses: A closure that returns the mean loss of a batch, or that and its number of tokens,
            or several of them; they are averaged by tokens. Any loss function. A fresh batch, not
            the one of the update, gives unbiased slopes.
        update: `{parameter name: change}`: the weights now minus those before the step. A parameter
            without one did not move.
        blocks: What `find_blocks(model)` returns; found here by default.
        method: "exact", one Hessian-vector product with math attention; or "secant", the difference
            of the gradients now and before the update, two ordinary backward passes: for flash
            attention, FSDP2 and compiled models.
        matrix_by: If given, also the matrix between groups of blocks, one product a group;
            `block_scales` names the groups.

    Returns:
        The `AlongUpdate`.

    Raises:
        ValueError: If the update does not fit the parameters, or one is sharded and the method
            exact.
    """
    if method not in ("exact", "secant"):
        raise ValueError(f"Invalid method={method!r}. Must be 'exact' or 'secant'.")
    if method == "exact":
        refuse_sharded(model, "directional")
    parameters = trainable(model)
    blocks = checked_blocks(model, blocks)
    _check_update(update, parameters)
    moved = {name: p for name, p in parameters.items() if name in update}
    labels, groups = block_groups(blocks, matrix_by) if matrix_by else ((), {})

    def measure(evaluation: Evaluation) -> dict[tuple[str, str], Tensor]:
        gradient, times = (_exact if method == "exact" else _secant)(evaluation, moved)
        product = times(update)
        found = {}
        for name, u in update.items():
            found["slope", name] = block_dots(gradient[name], u, blocks[name])
            found["row_sum", name] = block_dots(product[name], u, blocks[name])
        for index, label in enumerate(labels):
            row = times(
                {
                    n: u * expand((groups[n] == index).to(u), blocks[n].split, u.ndim)
                    for n, u in update.items()
                }
            )
            dots = {n: block_dots(row[n], u, blocks[n]) for n, u in update.items()}
            found["matrix", label] = sum_groups(dots, groups, len(labels))
        return found

    means = batch_means(model, losses, measure)
    zeros = {
        name: torch.zeros(b.num_blocks, device=parameters[name].device)
        for name, b in blocks.items()
    }
    parts = {
        kind: {n: means.get((kind, n), zero) for n, zero in zeros.items()}
        for kind in ("slope", "row_sum")
    }
    square = {
        n: block_dots(update[n], update[n], blocks[n]) if n in update else zero
        for n, zero in zeros.items()
    }
    matrix = torch.stack([means["matrix", label] for label in labels]) if labels else None
    return AlongUpdate(parts["slope"], parts["row_sum"], square, tuple(labels), matrix)


def _check_update(update: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    if not update:
        raise ValueError(
            "Invalid update: empty. Must be {parameter name: change} for the parameters that moved."
        )
    for name, change in update.items():
        if name not in parameters:
            raise ValueError(
                f"Invalid update: {name!r} is no trainable parameter, such as {next(iter(parameters))!r}."
            )
        if change.shape != parameters[name].shape:
            shape = tuple(parameters[name].shape)
            raise ValueError(
                f"Invalid update of shape {tuple(change.shape)} for {name!r}. Must be {shape}."
            )


Product = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def _exact(
    evaluation: Evaluation, parameters: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], Product]:
    """The gradient, and `v ↦ H v` by a second backward pass."""
    tensors = list(parameters.values())
    with eager_math():
        gradients = torch.autograd.grad(
            evaluation(), tensors, create_graph=True, materialize_grads=True
        )
    connected = [(name, g) for name, g in zip(parameters, gradients) if g.requires_grad]

    def times(vector: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        outputs, along = [g for _, g in connected], [vector[name].to(g) for name, g in connected]
        if not connected:
            return {name: torch.zeros_like(g) for name, g in zip(parameters, gradients)}
        with eager_math():
            products = torch.autograd.grad(
                outputs, tensors, along, retain_graph=True, materialize_grads=True
            )
        return dict(zip(parameters, products))

    return {name: g.detach() for name, g in zip(parameters, gradients)}, times


def _secant(
    evaluation: Evaluation, parameters: Mapping[str, Tensor]
) -> tuple[Mapping[str, Tensor], Product]:
    """The gradient, and `v ↦ g(w) - g(w - v)` by a second gradient of the same batch."""

    def gradient() -> dict[str, Tensor]:
        evaluation().backward()
        gradients = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.detach()
            for n, p in parameters.items()
        }
        for p in parameters.values():
            p.grad = None
        return gradients

    now = gradient()

    def times(vector: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        saved = {name: p.detach().clone() for name, p in parameters.items()}
        try:
            with torch.no_grad():
                for name, p in parameters.items():
                    p.sub_(vector[name])
            before = gradient()
        finally:
            with torch.no_grad():  # copied back, not added back: that would not give the same bits
                for name, p in parameters.items():
                    p.copy_(saved[name])
        return {name: now[name] - before[name] for name in parameters}

    return now, times
