"""Slopes and curvature of the loss along an update, block by block.

Random probes average over all directions of a block, most of which training never takes. Along the
update `u` the second-order model of the loss is

    L(w + t u) ≈ L + t Σ_b g_b·u_b + t²/2 Σ_bc u_bᵀ H_bc u_c,

and one product `H u` gives the row sums `(H u)_b · u_b` of all blocks at once: exactly, or as a
secant, the difference of two gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from blockopt.blocks import (
    BlockGroup,
    Blocks,
    Level,
    block_groups,
    checked_blocks,
    expand,
    sum_groups,
)
from blockopt.checks import check_choice
from blockopt.distributed import pass_together, placed_like
from blockopt.measure.closures import (
    Curvature,
    Evaluation,
    Losses,
    average_over_batches,
    block_dots,
    block_zeros,
    check_reached,
    refuse_sharded,
    trainable_parameters,
)
from blockopt.measure.second_derivatives import Product, Vectors, hessian_products

Method = Literal["exact", "secant"]


class AlongUpdate(NamedTuple):
    """The second-order model of the loss along an update `u`.

    Attributes:
        slope: `g_b · u_b` of each block; negative where the update descends.
        row_sum: `(H u)_b · u_b` of each block.
        square: `u_b · u_b` of each block.
        labels: The groups of blocks between which `matrix` is taken; empty without a matrix.
        matrix: `u_bᵀ H u_c` between the groups, or None. Its row sums are the sums of `row_sum`
            over each group.
    """

    slope: Curvature
    row_sum: Curvature
    square: Curvature
    labels: tuple[BlockGroup, ...]
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
    """Return the slopes and the curvature of the loss along an update, block by block.

    Args:
        model: Any module; with `method="exact"` its parameters must be whole (not FSDP2).
        losses: One or more closures that return the mean loss of a batch, alone or with its number
            of tokens, by which the batches are weighted. Any loss function. A fresh batch, not the
            one of the update, gives unbiased slopes.
        update: `{parameter name: change}`, the weights now minus those before the step. Parameters
            left out did not move.
        blocks: What `find_blocks(model)` returns; found here by default.
        method: "exact" for one Hessian-vector product with math attention, or "secant" for the
            difference of the gradients now and before the update: two ordinary backward passes,
            which flash attention, FSDP2 and compiled models allow.
        matrix_by: If given, also compute the matrix between groups of blocks, at one product per
            group; see `block_scales` for the groups.

    Raises:
        ValueError: If the update does not fit the parameters, or if the method is "exact" and a
            parameter is sharded.
    """
    check_choice("method", method, get_args(Method))
    if method == "exact":
        refuse_sharded(model, "directional")
    parameters = trainable_parameters(model)
    blocks = checked_blocks(model, blocks)
    _check_update(update, parameters)
    moved = {name: p for name, p in parameters.items() if name in update}
    labels, groups = block_groups(blocks, matrix_by) if matrix_by else ([], {})

    def measure(evaluation: Evaluation) -> dict[tuple[str, str], Tensor]:
        if method == "exact":
            gradient, times = hessian_products(evaluation, moved)
        else:
            gradient, times = _secant(evaluation, moved, model)
        product = times(update)
        found = {}
        for name, u in update.items():
            found["slope", name] = block_dots(gradient[name], u, blocks[name])
            found["row_sum", name] = block_dots(product[name], u, blocks[name])
        rows = []
        for index in range(len(labels)):
            inside = {
                n: u * expand((groups[n] == index).to(u), blocks[n].split, u.ndim)
                for n, u in update.items()
            }
            row = times(inside)
            dots = {n: block_dots(row[n], u, blocks[n]) for n, u in update.items()}
            rows.append(sum_groups(dots, groups, len(labels)))
        return found | ({("matrix", ""): torch.stack(rows)} if rows else {})

    means = average_over_batches(model, losses, measure)
    zeros = block_zeros(parameters, blocks)
    slope, row_sum = (
        {n: means.get((kind, n), zero) for n, zero in zeros.items()}
        for kind in ("slope", "row_sum")
    )
    square = zeros | {n: block_dots(u, u, blocks[n]) for n, u in update.items()}
    return AlongUpdate(slope, row_sum, square, tuple(labels), means.get(("matrix", "")))


def _check_update(update: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
    if not update:
        raise ValueError(
            "Invalid update: it is empty. Must be {parameter name: change} for the parameters that "
            "moved."
        )
    for name, change in update.items():
        if name not in parameters:
            raise ValueError(
                f"Invalid update: {name!r} is no trainable parameter, such as "
                f"{next(iter(parameters))!r}."
            )
        if change.shape != parameters[name].shape:
            shape = tuple(parameters[name].shape)
            raise ValueError(
                f"Invalid update of shape {tuple(change.shape)} for {name!r}. Must be {shape}."
            )


def _secant(
    evaluation: Evaluation, parameters: Mapping[str, Tensor], model: nn.Module
) -> tuple[Vectors, Product]:
    """Return the gradient, and `v ↦ g(w) - g(w - v)` by a second gradient of the same batch."""

    def gradient() -> dict[str, Tensor]:
        loss = evaluation()
        with pass_together(model):
            loss.backward()
        check_reached(p.grad for p in parameters.values())
        gradients = {
            n: torch.zeros_like(p) if p.grad is None else placed_like(p.grad.detach(), p)
            for n, p in parameters.items()
        }
        for p in parameters.values():
            p.grad = None
        return gradients

    now = gradient()

    def times(vector: Vectors) -> Vectors:
        saved = {name: p.detach().clone() for name, p in parameters.items()}
        try:
            with torch.no_grad():
                for name, p in parameters.items():
                    p.sub_(vector[name])
            before = gradient()
        finally:
            with torch.no_grad():  # copy back: adding back would not give the same bits
                for name, p in parameters.items():
                    p.copy_(saved[name])
        return {name: now[name] - before[name] for name in parameters}

    return now, times
