"""Exact dense matrices of operators, by products with the columns of the identity, and how much memory they need."""

from __future__ import annotations

import math
import os
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockopt.analysis.operators.model_operators import ModelOperator
from blockopt.analysis.progress import track

if TYPE_CHECKING:
    from blockopt.analysis.spectral.density import SymmetricOperator

GIB = 2**30


def memory_needed(rows: int, columns: int, dtype: torch.dtype, chunk: int = 128) -> int:
    """Bytes of a dense matrix and of the columns that are in work at a time, without the activations of the model.

    Example:
        The Hessian of one fused query, key and value matrix of GPT-2 small, in GiB:

        >>> memory_needed(768 * 2304, 768 * 2304, torch.float32) // 2**30
        11666
    """
    return (rows * columns + 3 * rows * min(chunk, columns)) * dtype.itemsize


def dense(
    operator: SymmetricOperator,
    *,
    chunk: int = 128,
    max_bytes: int | None = None,
    progress: bool = False,
) -> Tensor:
    """The matrix of a symmetric operator, `A @ I`, made exactly symmetric: `(A + Aᵀ) / 2`.

    A and its transpose differ by rounding only. If they differ by more, there is a warning with the
    number: the operator is not symmetric, or not deterministic.

    Args:
        operator: Anything with `shape`, `dtype`, `device` and `@`: of a model, its parameters or
            heads, or in closed form.
        chunk: Columns a product.
        max_bytes: Memory that it may take; by default what is free now.
        progress: Whether to show a bar over the chunks; needs rich. Give it here, not to the
            operator.

    Raises:
        ValueError: If it does not fit into memory, or an argument is wrong.

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
            "The matrix has entries that are not finite. Check weights and data for NaN or infinity."
        )
    largest, asymmetry = 0.0, 0.0
    for start in range(0, size, chunk):  # in bands: no second matrix
        upper, lower = (
            matrix[start : start + chunk, start:],
            matrix[start:, start : start + chunk].T,
        )
        largest = max(largest, float(upper.abs().max()))
        asymmetry = max(asymmetry, float((upper - lower).abs().max()))
        mean = (upper + lower) / 2
        matrix[start : start + chunk, start:] = mean
        matrix[start:, start : start + chunk] = mean.T
    precision = torch.finfo(operator.dtype).eps
    # Blocks that vanish, as that of a key's bias does, are made of rounding: hence the second term.
    if asymmetry > precision**0.5 * largest + precision:
        warnings.warn(
            f"The matrix is not symmetric: entries differ from their mirror images by up to {asymmetry:.3g}, the largest is "
            f"{largest:.3g}. Their mean is returned. Is the operator deterministic and symmetric, and the dtype wide enough?",
            stacklevel=2,
        )
    return matrix


def dense_block(
    operator: ModelOperator,
    rows: str,
    columns: str,
    *,
    chunk: int = 128,
    max_bytes: int | None = None,
    progress: bool = False,
) -> Tensor:
    """The block of a model's matrix between two parameters, or two of their blocks, without the rest of the matrix.

    As many products as the smaller side has entries, which differentiate only the two parameters.

    Args:
        operator: Of the whole model, or of parameters with both among them.
        rows: Name of a parameter, or label of a block, see `operator.blocks()`.
        columns: The same.
        chunk: Columns a product.
        max_bytes: Memory that it may take; by default what is free now.
        progress: Whether to show a bar over the chunks; needs rich.

    Returns:
        The matrix, entries of `rows` by entries of `columns`, each in row-major order.

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
    for start in track(range(0, len(columns), chunk), "dense", progress):
        chosen = columns[start : start + chunk].to(operator.device)
        unit = torch.zeros(size, len(chosen), **options)  # type: ignore[call-overload]
        unit[chosen, torch.arange(len(chosen), device=operator.device)] = 1
        product = operator @ unit
        matrix[:, start : start + chunk] = product if whole else product[rows]
    return matrix


def check_memory(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    chunk: int = 1,
    max_bytes: int | None = None,
) -> None:
    """Raise `ValueError`, with the numbers and the alternative, if a dense matrix does not fit into memory."""
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"Invalid chunk={chunk}. Must be an integer >= 1.")
    if max_bytes is not None and not max_bytes > 0:
        raise ValueError(f"Invalid max_bytes={max_bytes}. Must be > 0.")
    needed = memory_needed(rows, columns, dtype, chunk)
    limit = free_memory(device) if max_bytes is None else max_bytes
    if limit is not None and needed > limit:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"A dense matrix of {rows:,} x {columns:,} in {name} needs {needed / GIB:,.2f} GiB, and "
            f"{limit / GIB:,.2f} GiB {'are free' if max_bytes is None else 'are allowed by max_bytes'}. Take a block, "
            "operator.block(name, index), or the functions of blockopt.analysis.spectral.density, which need products only, or, for "
            "attention, SelfAttentionHessian(...).factored(role)."
        )


def _free_in_container() -> float:
    """Bytes that a control group of Linux leaves, infinity without one."""
    try:
        with (
            open("/sys/fs/cgroup/memory.max", encoding="ascii") as most,
            open("/sys/fs/cgroup/memory.current") as now,
        ):
            return int(most.read()) - int(now.read())
    except (OSError, ValueError):  # the file says "max" if there is no limit
        return math.inf


def free_memory(device: torch.device) -> int | None:
    """Bytes, None if the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open(
            "/proc/meminfo", encoding="ascii"
        ) as file:  # what caches hold can be had too, unlike in sysconf
            free = next(
                int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")
            )
        return int(min(free, _free_in_container()))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
