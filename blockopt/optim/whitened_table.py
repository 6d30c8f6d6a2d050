"""Steps of tables, such as an embedding or a head: rows by their own size, columns whitened.

The Hessian block of a head under softmax is close to `diag(p) ⊗ E[h hᵀ]`: one number per token, and
one matrix for the features, which all tokens share. AdamW divides every entry by its own root mean
square, which is blind to that matrix. Here each row `i` has one second moment, and the `d` columns
share their `d × d` second moment `C`, whose inverse root `W` whitens the step:

    m ← β₁ m + (1 − β₁) g      v_i ← β₂ v_i + (1 − β₂) mean_j g_ij²      C ← β₂ C + (1 − β₂) gᵀg
    p_i ← p_i − lr · size · scale_i · m_i W / √v_i        W = (C / mean diag C + damping)^(−1/2)

with the corrections of Adam for the first steps; `size` is the optimizer's. This is Shampoo (Gupta
et al., 2018) with a diagonal factor on the side of the tokens. If the columns are white already, it
is AdamW with one second moment per row. State: the momentum, one number per row and a `d × d`
matrix; AdamW has two numbers per entry.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from blockopt.distributed import Reduced, full, local, local_part, sums_over_ranks
from blockopt.optim.block_squares import accumulation_dtype
from blockopt.optim.entry import Entry, decay
from blockopt.optim.finite_gradients import keep_if, put_back

DAMPING = 0.1  # of the mean second moment; without it, directions of pure noise get full steps
FAST, EXACT = (3.4445, -4.7750, 2.0315), (1.875, -1.25, 0.375)  # a σ + b σ³ + c σ⁵
EXACT_STEPS = 5  # from [0.7, 1.2] to the rounding of float64
CHUNK = 1 << 22  # entries that are whitened at once, to bound the memory


def new_table_state(parameter: Tensor) -> dict[str, Any]:
    """The state of a table before its first step."""
    rows, columns = parameter.shape
    device, dtype = parameter.device, accumulation_dtype(parameter)
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros(rows, dtype=dtype, device=device),
        "covariance": torch.zeros(columns, columns, dtype=dtype, device=device),
    }


def table_update(
    entries: list[Entry],
    mean_squares: list[Tensor],
    group: dict[str, Any],
    found_inf: Tensor | None,
    size: float,
) -> None:
    """Take one step for tables of a group.

    Args:
        entries: The tables.
        mean_squares: Of the gradient, for each row.
        group: The options.
        found_inf: If 1, nothing changes; None if that is ruled out.
        size: How long the step is, as a multiple of the learning rate.
    """
    products = sums_over_ranks([_column_products(entry.gradient) for entry in entries])
    for entry, squares, product in zip(entries, mean_squares, products):
        state, forget = entry.state, 1 - group["betas"][1]
        changing = [state["step"], state["exp_avg_sq"], state["covariance"]]
        changing += [local(entry.parameter), local(state["exp_avg"])]
        kept = keep_if(found_inf, changing)
        state["step"] += 1
        state["exp_avg_sq"].lerp_(squares.to(state["exp_avg_sq"].dtype), forget)
        state["covariance"].lerp_(product.view_as(state["covariance"]), forget)
        _move(entry, group, size)
        put_back(found_inf, changing, kept)


def _column_products(gradient: Tensor) -> Reduced:
    """`gᵀg` of the rows that this rank holds, or of all rows if it holds a part of each."""
    cut = local(gradient).shape[1] != gradient.shape[1]
    rows = full(gradient) if cut else local(gradient)
    wide = accumulation_dtype(rows)
    total = rows.new_zeros(rows.shape[1], rows.shape[1], dtype=wide)
    for some in _row_chunks(rows):
        total.addmm_(some.mT.to(wide), some.to(wide))
    return Reduced(total.flatten(), total if cut else gradient, ())


def whitening(covariance: Tensor, damping: float = DAMPING) -> Tensor:
    """Return `(C / mean diag C + damping)^(−1/2)`, by products of matrices alone.

    The iteration is that of `newton_schulz.py`, coupled with the inverse: fast steps bring all
    eigenvalues near 1, exact ones make them so. How many it takes is known beforehand, since the
    eigenvalues lie between `damping` and `damping + d`. So nothing waits for an accelerator.

    Example:
        >>> whitening(torch.diag(torch.tensor([7.0, 1.0])), damping=0.25)
        tensor([[0.7071, 0.0000],
                [0.0000, 1.4142]])
    """
    size, mean = len(covariance), covariance.diagonal().mean()
    identity = torch.diag_embed(torch.ones_like(covariance.diagonal()))
    largest = size + damping
    relative = torch.where(mean > 0, covariance / mean, identity)
    root, inverse = (relative + damping * identity) / largest, identity
    smallest = math.sqrt(damping / largest)
    fast = math.ceil(max(0.0, math.log(0.7 / smallest)) / math.log(FAST[0]))
    for a, b, c in (FAST,) * fast + (EXACT,) * EXACT_STEPS:
        product = inverse @ root
        polynomial = a * identity + b * product + c * (product @ product)
        root, inverse = root @ polynomial, polynomial @ inverse
    return inverse / math.sqrt(largest)


def _move(entry: Entry, group: dict[str, Any], size: float) -> None:
    """Update the momentum, and subtract it, whitened, from the weights."""
    parameter, state, (beta1, beta2) = entry.parameter, entry.state, group["betas"]
    gradient = -entry.gradient if group["maximize"] else entry.gradient
    momentum = state["exp_avg"].lerp_(gradient.to(state["exp_avg"].dtype), 1 - beta1)
    step = state["step"].to(state["exp_avg_sq"].dtype)
    root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
    length = group["lr"] * size / (1 - beta1**step)
    sizes = state["scale"].to(root.dtype) / root * length  # per row
    weights, matrix = local(parameter), whitening(state["covariance"])
    decay([weights], group)
    cut = weights.shape[1] != parameter.shape[1]
    rows = full(momentum) if cut else local(momentum)
    sizes = (sizes if cut else local_part(sizes[:, None], parameter)).view(-1, 1)
    for target, some, rates in zip(*map(_row_chunks, (weights, rows, sizes.expand_as(rows)))):
        update = (some.to(matrix.dtype) @ matrix) * rates
        target.sub_((local_part(update, parameter) if cut else update).to(target.dtype))


def _row_chunks(table: Tensor) -> tuple[Tensor, ...]:
    return tuple(table.split(max(1, CHUNK // max(1, table.shape[1]))))
