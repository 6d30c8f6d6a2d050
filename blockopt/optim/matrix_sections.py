"""The matrices inside a parameter, as views: those of a fused one, of a stack of experts, or one.

Nothing is copied or transposed: a section of a fused matrix stays as it is stored.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from blockopt.blocks import Blocks, flattened
from blockopt.optim.input_directions import maps_of

# At a width of 128 the update of a square matrix then has the root mean square of AdamW's, 0.2.
UNIT = 0.2 * math.sqrt(128)


class Section(NamedTuple):
    """The matrices of one section of a parameter, one for each matrix that it stacks.

    Attributes:
        view: The section, (stacked, ...), a view of the parameter in which the blocks of the
            section have dimensions of their own.
        scale_shape: The shape in which the scales of its blocks broadcast against `view`.
        rows: How many rows each matrix has.
    """

    view: Tensor
    scale_shape: tuple[int, ...]
    rows: int

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of each matrix."""
        return self.rows, self.view[0].numel() // self.rows

    def matrices(self) -> Tensor:
        """The matrices, (stacked, rows, columns)."""
        return self.view.reshape(-1, *self.matrix_shape)


def is_hidden_matrix(parameter: Tensor, blocks: Blocks) -> bool:
    """Whether Muon takes the parameter: a hidden matrix, a stack of them or a 1x1 convolution."""
    return blocks.hidden_matrices(tuple(parameter.shape)) is not None and (
        blocks.split is None or blocks.split.dim <= (1 if blocks.split.stack == 1 else 2)
    )


def sections(parameter: Tensor, blocks: Blocks) -> list[Section]:
    """The sections of a parameter that Muon takes, or of a tensor of its shape.

    Example:
        >>> from blockopt.blocks import Split
        >>> fused = Blocks(("query", "key"), split=Split(dim=0, sizes=(8, 4), parts=(2, 1)))
        >>> [s.matrix_shape for s in sections(torch.empty(12, 6), fused)]
        [(8, 6), (4, 6)]
    """
    split = blocks.split
    if split is None:
        rows, _ = flattened(parameter.shape)
        return [Section(parameter[None], (1,) * (parameter.ndim + 1), rows)]
    stacked = split.stack > 1
    x, dim = (parameter, split.dim) if stacked else (parameter[None], split.dim + 1)
    pieces = x.unflatten(dim, (split.repeat, -1)).split(split.sizes, dim=dim + 1)
    found = []
    for piece, size, parts in zip(pieces, split.sizes, split.parts):
        view = piece.unflatten(dim + 1, (parts, -1))  # (stacked, ..., repeat, parts, block, ...)
        scale_shape = [1] * view.ndim
        scale_shape[0] = x.shape[0] if stacked else 1
        scale_shape[dim : dim + 2] = 1 if split.pooled else split.repeat, parts
        shape = [split.repeat * size if d == dim else x.shape[d] for d in range(1, x.ndim)]
        rows, _ = flattened(shape)
        found.append(Section(view, tuple(scale_shape), rows))
    return found


def section_scales(scale: Tensor, blocks: Blocks, of: list[Section]) -> list[Tensor]:
    """The scales of the blocks of each section, to be broadcast against its view."""
    split = blocks.split
    if split is None:
        return [scale.view(of[0].scale_shape)]
    per_pattern = scale.view(-1, 1 if split.pooled else split.repeat, sum(split.parts))
    pieces = per_pattern.split(split.parts, dim=2)
    return [piece.reshape(section.scale_shape) for piece, section in zip(pieces, of)]


def update_size(blocks: Blocks, shape: tuple[int, int]) -> float:
    """The spectral norm of an update at learning rate 1: `UNIT √max(1, outputs / inputs)`.

    With it a step changes the outputs of a map by as much at every width, so that the best learning
    rate is the same (Yang, Simon and Bernstein, 2023).

    Args:
        blocks: Of the parameter, which tell inputs from outputs.
        shape: Of the matrix as it is stored.
    """
    maps = maps_of(blocks)
    outputs, inputs = shape if maps.out < maps.inp else reversed(shape)
    return UNIT * math.sqrt(max(1.0, outputs / max(1, inputs)))


def block_sizes(blocks: Blocks, of: list[Section], device: torch.device) -> Tensor:
    """`update_size` of the matrix that each block belongs to, one value per block."""
    parts = (1,) if blocks.split is None else blocks.split.parts
    sizes = [update_size(blocks, section.matrix_shape) for section in of]
    once = torch.cat(
        [
            torch.full((number,), size, dtype=torch.float64, device=device)
            for number, size in zip(parts, sizes)
        ]
    )
    return once.repeat(blocks.num_blocks // len(once))
