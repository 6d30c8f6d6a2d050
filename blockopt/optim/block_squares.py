"""The mean square of the gradient over each block, the second moment of Adam-mini."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blockopt.blocks import Blocks, block_sum_along
from blockopt.distributed import Reduced, local, widened
from blockopt.optim.chunks import in_chunks


def own_mean_squares(gradient: Tensor, blocks: Blocks) -> Tensor:
    """The mean of the squared gradient over each block, with zeros where other ranks hold it."""
    row = widened(_square_row(gradient, blocks))
    return _mean_over_blocks(row, tuple(gradient.shape), blocks)


def _square_row(gradient: Tensor, blocks: Blocks) -> Reduced:
    part, split, dtype = local(gradient), blocks.split, accumulation_dtype(gradient)
    if split is None:
        row = torch.linalg.vector_norm(part, dtype=dtype).square().reshape(1)
        return Reduced(row, gradient, ())
    return Reduced(square_sums(part, split.dims, dtype), gradient, split.dims)


def _mean_over_blocks(row: Tensor, shape: tuple[int, ...], blocks: Blocks) -> Tensor:
    split, numel = blocks.split, math.prod(shape)
    if split is None:
        return row / max(1, numel)
    sums = block_sum_along(row, split)
    if split.is_even:
        return sums / max(1, numel // split.num_blocks)
    along = torch.full_like(row, numel // max(1, row.numel()))
    return sums / block_sum_along(along, split)


def square_sums(x: Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Sums of squares over all dimensions but `dims`."""
    others = [d for d in range(x.ndim) if d not in dims]
    if not others:
        return x.to(dtype).square()
    if dims[0] == 0:  # as rows of a matrix, or of each matrix of a stack
        norms: Tensor = torch.linalg.vector_norm(x, dim=others, dtype=dtype)
        return norms.square()
    if torch.compiler.is_compiling() or x.numel() == 0:
        return x.to(dtype).square().sum(dim=others)
    # On a CPU norms of columns take ten times as long as norms of rows. Squares of slabs, added up
    # in a slab that stays in the cache, do not.
    total: Tensor | None = None
    for (slab,) in in_chunks([x]):
        wide = slab[0].to(dtype)
        if total is None:
            total = wide.square()
        else:
            total.narrow(0, 0, len(wide)).addcmul_(wide, wide)
    return total.sum(dim=others)  # type: ignore[union-attr]


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that sums over a tensor are kept in."""
    return torch.promote_types(tensor.dtype, torch.float32)
