"""Steps of tables, such as an embedding or a head: rows by their own size, columns whitened.

The Hessian block of a head under softmax is close to `diag(p) ⊗ E[h hᵀ]`: one number per token, and
one matrix for the features, which all tokens share. AdamW divides every entry by its own root mean
square, which is blind to that matrix. Here each row `i` has one second moment, and the `d` columns
share their second moment `C`, of which a sketch finds the dominant directions (`nystrom.py`):

    m ← β₁ m + (1 − β₁) g      v_i ← β₂ v_i + (1 − β₂) mean_j g_ij²      C ← β₂ C + (1 − β₂) gᵀg
    p_i ← p_i − lr · size · scale_i · m_i W / √v_i        W = (d C / tr C)^(−1/2), C ≈ B Bᵀ + μ

with the corrections of Adam for the first steps; `size` is the optimizer's. This is Shampoo (Gupta
et al., 2018) with a diagonal factor on the side of the tokens and a damped one of low rank on that
of the features. If the columns are white already, it is AdamW with one second moment per row.
State: the momentum, one number per row and two per column and probe; AdamW has two numbers per
entry. How many probes it takes depends on what else the optimizer does, so each has its number.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from blockopt.blocks import Blocks
from blockopt.distributed import Reduced, full, local, local_part, sums_over_ranks
from blockopt.optim.block_squares import accumulation_dtype
from blockopt.optim.chunks import in_chunks
from blockopt.optim.entry import Entry, decay
from blockopt.optim.finite_gradients import keep_if, put_back
from blockopt.optim.nystrom import DAMPING, dominant_directions, new_probes, times_thin

CPU_CHUNK = 1 << 18  # entries that a core works on at once: products with them reuse its own cache
FAST, EXACT = (3.4445, -4.7750, 2.0315), (1.875, -1.25, 0.375)  # a σ + b σ³ + c σ⁵
EXACT_STEPS = 5  # from [0.7, 1.2] to the rounding of float64


def new_table_state(parameter: Tensor, blocks: Blocks, probes: int) -> dict[str, Any]:
    """The state of a table before its first step, with a sketch of at most so many columns."""
    rows, columns = tokens_first(parameter, blocks).shape
    probes = min(probes, columns)
    device, dtype = parameter.device, accumulation_dtype(parameter)
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros(rows, dtype=dtype, device=device),
        "column_probes": new_probes(columns, probes, dtype, device),
        "column_sketch": torch.zeros(columns, probes, dtype=dtype, device=device),
        "column_trace": torch.zeros(1, dtype=dtype, device=device),  # DCP drops new scalars
    }


def tokens_first(tensor: Tensor, blocks: Blocks) -> Tensor:
    """A table, or what has its shape, with tokens as rows: a view if it is stored input first."""
    return tensor.mT if blocks.split is not None and blocks.split.dim == 1 else tensor


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
    sketches = sums_over_ranks([_sketch(entry) for entry in entries])
    for entry, squares, sketch in zip(entries, mean_squares, sketches):
        state, forget = entry.state, 1 - group["betas"][1]
        names = ("step", "exp_avg_sq", "column_sketch", "column_trace")
        changing = [*(state[name] for name in names)]
        changing += [local(entry.parameter), local(state["exp_avg"])]
        kept = keep_if(found_inf, changing)
        state["step"] += 1
        state["exp_avg_sq"].lerp_(squares.to(state["exp_avg_sq"].dtype), forget)
        state["column_sketch"].lerp_(sketch.view_as(state["column_sketch"]), forget)
        trace = squares.sum(dim=0, keepdim=True) * len(state["column_probes"])
        state["column_trace"].lerp_(trace.to(state["column_trace"].dtype), forget)
        _move(entry, group, size)
        put_back(found_inf, changing, kept)


def _sketch(entry: Entry) -> Reduced:
    """`gᵀ(g Ω)` of the rows that this rank holds, or of all rows if it holds a part of each."""
    gradient = tokens_first(entry.gradient, entry.blocks)
    probes = entry.state["column_probes"]
    cut = local(gradient).shape[1] != gradient.shape[1]
    rows = full(gradient) if cut else local(gradient)
    total = torch.zeros_like(probes)
    for ((some,),) in in_chunks([rows], cpu_chunk=CPU_CHUNK):
        wide = some.to(probes.dtype)
        total += times_thin(wide.mT, times_thin(wide, probes))
    return Reduced(total.flatten(), total if cut else gradient, ())


def whitening(state: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return `a`, `B` and `K` of `W = a + B K Bᵀ`, by products of small matrices alone.

    With `R` the root of `BᵀB + μ`, `K` is `−(√μ R (R + √μ))⁻¹ / √d` and `a` is `1 / √(d μ)`.
    """
    probes, sketch, trace = (state[f"column_{name}"] for name in ("probes", "sketch", "trace"))
    found = dominant_directions(probes, sketch, trace[0])
    columns, identity = len(found.basis), torch.diag_embed(torch.ones_like(found.gram[0]))
    root, inverse = root_and_inverse(
        found.gram + found.rest * identity, DAMPING / columns, 1 + 2 / columns
    )
    small = found.rest.sqrt()
    inner = inverse @ torch.linalg.solve_ex(root + small * identity, identity).result
    size = math.sqrt(columns)
    return 1 / (size * small), found.basis, inner / (-size * small)


def root_and_inverse(matrix: Tensor, smallest: float, largest: float) -> tuple[Tensor, Tensor]:
    """The root of a symmetric matrix and its inverse, whose eigenvalues lie between two numbers.

    The iteration is that of `newton_schulz.py`, coupled with the inverse: fast steps bring all
    eigenvalues near 1, exact ones make them so. How many it takes is known beforehand, so nothing
    waits for an accelerator.

    Example:
        >>> root_and_inverse(torch.diag(torch.tensor([4.0, 0.25])), 0.1, 5.0)[0]
        tensor([[2.0000, 0.0000],
                [0.0000, 0.5000]])
    """
    identity = torch.diag_embed(torch.ones_like(matrix[0]))
    root, inverse = matrix / largest, identity
    fast = math.ceil(max(0.0, math.log(0.7 / math.sqrt(smallest / largest))) / math.log(FAST[0]))
    for a, b, c in (FAST,) * fast + (EXACT,) * EXACT_STEPS:
        product = inverse @ root
        polynomial = a * identity + b * product + c * (product @ product)
        root, inverse = root @ polynomial, polynomial @ inverse
    return root * math.sqrt(largest), inverse / math.sqrt(largest)


def _move(entry: Entry, group: dict[str, Any], size: float) -> None:
    """Update the momentum, and subtract it, whitened, from the weights."""
    state, (beta1, beta2) = entry.state, group["betas"]
    gradient = -entry.gradient if group["maximize"] else entry.gradient
    momentum = state["exp_avg"].lerp_(gradient.to(state["exp_avg"].dtype), 1 - beta1)
    parameter, momentum = (tokens_first(x, entry.blocks) for x in (entry.parameter, momentum))
    step = state["step"].to(state["exp_avg_sq"].dtype)
    root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
    length = group["lr"] * size / (1 - beta1**step)
    sizes = state["scale"].to(root.dtype) / root * length  # per row
    weights, (own, basis, inner) = local(parameter), whitening(state)
    decay([weights], group)
    back = inner @ basis.mT
    cut = weights.shape[1] != parameter.shape[1]
    rows = full(momentum) if cut else local(momentum)
    sizes = (sizes if cut else local_part(sizes[:, None], parameter)).view(-1, 1)
    chunks = in_chunks([weights], [rows], [sizes], cpu_chunk=CPU_CHUNK)
    for (target,), (some,), (rates,) in chunks:
        wide = some.to(basis.dtype)
        update = (wide * (own * rates)).addmm_(times_thin(wide, basis) * rates, back)
        target.sub_((local_part(update, parameter) if cut else update).to(target.dtype))
