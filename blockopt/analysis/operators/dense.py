"""Exact dense matrices of operators, by products with the columns of the identity."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from blockopt.analysis.memory import check_memory
from blockopt.analysis.operators.base import ModelOperator
from blockopt.analysis.progress import progress_bar
from blockopt.analysis.spectral.products import SymmetricOperator
from blockopt.blocks import BlockGroup


def dense(
    operator: SymmetricOperator,
    *,
    chunk: int = 128,
    max_bytes: int | None = None,
    progress: bool = False,
) -> Tensor:
    """Return the matrix of a symmetric operator, `A @ I`, made exactly symmetric.

    A and its transpose should differ by rounding only. If they differ by more, a warning gives the
    number: the operator is not symmetric, or not deterministic.

    Args:
        operator: Anything with `shape`, `dtype`, `device` and `@`: an operator of a model, of its
            parameters or heads, or a closed form.
        chunk: Columns per product.
        max_bytes: Memory that it may take; by default what is free now.
        progress: Whether to show a bar over the chunks. Set it here rather than in the
            operator.

    Raises:
        ValueError: If it does not fit into memory, or an argument is wrong.
        FloatingPointError: If an entry is not finite.

    Example:
        >>> from torch import nn
        >>> from blockopt.analysis.operators.model_operators import HessianOperator
        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> dense(HessianOperator(model, lambda: model(x).square().sum()))
        tensor([[18., 24.],
                [24., 32.]])
    """
    size = operator.shape[0]
    check_memory(size, size, operator.dtype, operator.device, chunk, max_bytes)
    matrix = _columns(operator, torch.arange(size), torch.arange(size), chunk, progress)
    if not bool(torch.isfinite(matrix).all()):
        raise FloatingPointError(
            "The matrix has entries that are not finite. Check weights and data for NaN or "
            "infinity."
        )
    largest, asymmetry = 0.0, 0.0
    for start in range(0, size, chunk):  # in bands: no second matrix
        upper = matrix[start : start + chunk, start:]
        lower = matrix[start:, start : start + chunk].T
        largest = max(largest, float(upper.abs().max()))
        asymmetry = max(asymmetry, float((upper - lower).abs().max()))
        mean = (upper + lower) / 2
        matrix[start : start + chunk, start:] = mean
        matrix[start:, start : start + chunk] = mean.T
    precision = torch.finfo(operator.dtype).eps
    # A block that vanishes, such as that of a key's bias, is all rounding: hence the second term.
    if asymmetry > precision**0.5 * largest + precision:
        warnings.warn(
            "The matrix is not symmetric: entries differ from their mirror images by up to "
            f"{asymmetry:.3g}, the largest is {largest:.3g}. Their mean is returned. Is the "
            "operator deterministic and symmetric, and the dtype wide enough?",
            stacklevel=2,
        )
    return matrix


def dense_block(
    operator: ModelOperator,
    rows: str | BlockGroup,
    columns: str | BlockGroup,
    *,
    chunk: int = 128,
    max_bytes: int | None = None,
    progress: bool = False,
) -> Tensor:
    """Return the block of a model's matrix between two parameters, or between two blocks of them.

    It takes as many products as the smaller side has entries, and differentiates only the two
    parameters.

    Args:
        operator: An operator on parameters that include both.
        rows: The name of a parameter, or a group of `operator.blocks()`.
        columns: The same.
        chunk: Columns per product.
        max_bytes: Memory that it may take; by default what is free now.
        progress: Whether to show a bar over the chunks.

    Returns:
        The matrix, (entries of `rows`, entries of `columns`), each in row-major order.

    Raises:
        ValueError: If a name is wrong, or it does not fit into memory.

    Example:
        >>> from torch import nn
        >>> from blockopt.analysis.operators.model_operators import HessianOperator
        >>> model, x = nn.Linear(2, 1), torch.tensor([[3.0, 4.0]])
        >>> dense_block(HessianOperator(model, lambda: model(x).square().sum()), "bias", "weight")
        tensor([[6., 8.]])
    """
    pair = operator.restrict({operator.block(rows).names[0], operator.block(columns).names[0]})
    left, right = pair.entries(rows), pair.entries(columns)
    check_memory(len(left), len(right), pair.dtype, pair.device, chunk, max_bytes)
    if len(right) > len(left):
        return _columns(pair, right, left, chunk, progress).T.contiguous()
    return _columns(pair, left, right, chunk, progress)


def _columns(
    operator: SymmetricOperator, rows: Tensor, columns: Tensor, chunk: int, progress: bool
) -> Tensor:
    size, options = operator.shape[0], {"dtype": operator.dtype, "device": operator.device}
    matrix: Tensor = torch.empty(len(rows), len(columns), **options)  # type: ignore[call-overload]
    whole = len(rows) == size
    rows = rows.to(operator.device)
    with progress_bar(progress, "dense", len(columns)) as advance:
        for start in range(0, len(columns), chunk):
            chosen = columns[start : start + chunk].to(operator.device)
            unit = torch.zeros(size, len(chosen), **options)  # type: ignore[call-overload]
            unit[chosen, torch.arange(len(chosen), device=operator.device)] = 1
            product = operator @ unit
            matrix[:, start : start + chunk] = product if whole else product[rows]
            advance(len(chosen))
    return matrix
