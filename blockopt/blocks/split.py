"""How one parameter is cut into blocks, and the two maps between a parameter and its blocks.

`block_sum` goes from a parameter to one number per block, `expand` goes back. Both work on whole
tensors and never slice a parameter block by block, so they are the same few vectorised operations
for 3 blocks or 50 257.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Split(NamedTuple):
    """A parameter's dimension `dim`, cut into sections, each cut into equal blocks.

    The sections of lengths `sizes` follow one another along `dim`; section `s` holds `parts[s]`
    equal blocks. `repeat` says how often that pattern recurs along `dim` (heads stored
    interleaved). With `pooled`, the repeats belong to the same blocks, otherwise every repeat
    brings blocks of its own. Blocks are numbered in storage order.

    A parameter that stacks matrices along its dimension 0, as those of experts, has their number as
    `stack`: each matrix is cut alike and has blocks of its own.

    Attributes:
        dim: The dimension that is cut.
        sizes: Length of each section.
        parts: Number of equal blocks in each section.
        repeat: How many times the sections recur.
        pooled: Whether the repeats share blocks.
        stack: How many matrices the parameter stacks along dimension 0; 1 if it is no stack.

    Example:
        Query, key and value of 12 heads, fused in GPT-2's `c_attn` (a `Conv1D`, stored input
        first), and the same for GPT-NeoX, which interleaves them head by head:

        >>> Split(dim=1, sizes=(768, 768, 768), parts=(12, 12, 12)).num_blocks
        36
        >>> Split(dim=0, sizes=(64, 64, 64), parts=(1, 1, 1), repeat=12).num_blocks
        36

        Gate and input of 8 experts in one parameter of shape (8, 2 · 32, 16), by neuron:

        >>> Split(dim=1, sizes=(32, 32), parts=(32, 32), stack=8).num_blocks
        512
    """

    dim: int
    sizes: tuple[int, ...]
    parts: tuple[int, ...]
    repeat: int = 1
    pooled: bool = False
    stack: int = 1

    def __repr__(self) -> str:
        extra = "".join(
            f", {name}={getattr(self, name)}"
            for name, default in self._field_defaults.items()
            if getattr(self, name) != default
        )
        return f"Split(dim={self.dim}, sizes={self.sizes}, parts={self.parts}{extra})"

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions that tell which block an entry belongs to."""
        return (self.dim,) if self.stack == 1 else (0, self.dim)

    @property
    def length(self) -> int:
        """Length of the dimension that is cut."""
        return sum(self.sizes) * self.repeat

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.stack * sum(self.parts) * (1 if self.pooled else self.repeat)

    @property
    def is_even(self) -> bool:
        """Whether all blocks are of one size."""
        return len({size // parts for size, parts in zip(self.sizes, self.parts)}) == 1

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` unless this split fits a parameter of `shape`."""
        if not 0 <= self.dim < len(shape):
            raise ValueError(
                f"Invalid dim={self.dim} for a parameter of shape {tuple(shape)}. Must be in "
                f"0..{len(shape) - 1}."
            )
        if self.stack != 1 and (self.dim == 0 or self.stack != shape[0]):
            raise ValueError(
                f"Invalid stack={self.stack} with dim={self.dim} for a parameter of shape "
                f"{tuple(shape)}. Must be 1, or the length of dimension 0 and the split along "
                "another dimension."
            )
        if len(self.sizes) != len(self.parts) or not self.sizes:
            raise ValueError(
                f"Invalid sizes={self.sizes}, parts={self.parts}. Must be of one length, at least "
                "1."
            )
        if self.repeat < 1 or any(p < 1 or s < 1 or s % p for s, p in zip(self.sizes, self.parts)):
            raise ValueError(
                f"Invalid {self}. Every size must be a positive multiple of its parts, and repeat "
                "at least 1."
            )
        if self.length != shape[self.dim]:
            raise ValueError(
                f"Invalid {self}: its sections cover {self.length} of the {shape[self.dim]} "
                f"entries in dimension {self.dim} of a parameter of shape {tuple(shape)}. They "
                "must cover all of them."
            )


def block_numel(shape: tuple[int, ...], split: Split | None) -> Tensor:
    """Number of entries in each block of a parameter of `shape`, as an int64 tensor.

    Example:
        >>> block_numel((6, 10), Split(dim=0, sizes=(4, 2), parts=(2, 1)))
        tensor([20, 20, 20])
    """
    if split is None:
        return torch.tensor([torch.Size(shape).numel()])
    along = split.stack * split.length
    return block_sum_along(torch.full((along,), torch.Size(shape).numel() // along), split)


def block_sum(x: Tensor, split: Split | None) -> Tensor:
    """Sum of `x` over each block, as a tensor of length `num_blocks`.

    Example:
        >>> block_sum(torch.ones(6, 10), Split(dim=0, sizes=(4, 2), parts=(2, 1)))
        tensor([20., 20., 20.])
    """
    if split is None:
        return x.sum().reshape(1)
    others = [d for d in range(x.ndim) if d not in split.dims]
    return block_sum_along(x.sum(dim=others) if others else x, split)


def block_sum_along(row: Tensor, split: Split) -> Tensor:
    """`block_sum` of a tensor already reduced to `split.dims`."""
    if split.num_blocks == row.numel():
        return row.reshape(-1)
    if split.is_even and not split.pooled:
        return row.reshape(split.num_blocks, -1).sum(dim=1)
    sections = row.reshape(split.stack, split.repeat, -1).split(split.sizes, dim=2)
    sums = [s.unflatten(2, (parts, -1)).sum(dim=3) for s, parts in zip(sections, split.parts)]
    total = sums[0] if len(sums) == 1 else torch.cat(sums, dim=2)
    return (total.sum(dim=1) if split.pooled else total).reshape(-1)


def expand(values: Tensor, split: Split | None, ndim: int) -> Tensor:
    """Spread one value per block to a tensor that broadcasts against the parameter.

    Example:
        >>> split = Split(dim=0, sizes=(4, 2), parts=(2, 1))
        >>> expand(torch.tensor([1.0, 2.0, 3.0]), split, ndim=2).T
        tensor([[1., 1., 2., 2., 3., 3.]])
    """
    if split is None:
        return values.reshape((1,) * ndim)
    shape = [1] * ndim
    shape[0] = split.stack
    shape[split.dim] = split.length
    return expand_along(values, split).view(shape)


def expand_along(values: Tensor, split: Split) -> Tensor:
    """`expand` to a vector along `split.dims`, the first of them outermost."""
    length = split.stack * split.length
    if split.num_blocks == length:
        return values
    if split.is_even and not split.pooled:
        return values.unsqueeze(1).expand(-1, length // split.num_blocks).reshape(-1)
    by_repeat = values.view(split.stack, 1 if split.pooled else split.repeat, -1)
    sections = by_repeat.expand(-1, split.repeat, -1).split(split.parts, dim=2)
    wide = [
        s.unsqueeze(3).expand(-1, -1, -1, size // parts).flatten(2)
        for s, size, parts in zip(sections, split.sizes, split.parts)
    ]
    return (wide[0] if len(wide) == 1 else torch.cat(wide, dim=2)).reshape(-1)
