"""Jacobians of attention by a weight as a vector times a matrix, and blocks summed from them.

A block of the Hessian is a sum over positions of products of two vectors and a matrix, one index of
each weight in the vectors and one in the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Products of matrices and vectors of some positions are formed at once; they take this much memory.
CHUNK_BYTES = 2**25


class Factor(NamedTuple):
    """The Jacobian of one head's output at each position by one weight: a vector times a matrix.

    Attributes:
        vector: Over the rows or the columns of the weight, (B, L, p). None if the Jacobian is no
            such product; `core` is the whole of it then.
        core: Over the other index, (B, L, d, r), where d is the width of the head's output before
            the output matrix. None is the identity.
        vector_first: Whether the vector belongs to the rows of the weight.
        projected: Whether the head's output matrix follows; it does not for that matrix itself.
    """

    vector: Tensor | None
    core: Tensor | None
    vector_first: bool
    projected: bool

    def jacobian(self, width: int) -> Tensor:
        """Return the whole Jacobian, (B L, d, n), for an output of the given width d."""
        if self.vector is None:
            assert self.core is not None
            return self.core.flatten(0, 1)
        vector, core = self.vector.flatten(0, 1), self.core
        if core is None:
            core = torch.eye(width, dtype=vector.dtype, device=vector.device).unsqueeze(0)
        else:
            core = core.flatten(0, 1)
        if self.vector_first:
            return (vector[:, None, :, None] * core.unsqueeze(2)).flatten(2)
        return (core.unsqueeze(3) * vector[:, None, None, :]).flatten(2)


class Term(NamedTuple):
    """A summand of a block besides the vector of its rows.

    Attributes:
        matrices: Over an index of the rows and one of the columns, (B, L, r, s).
        vector: Over the other index of the columns, (B, L, p).
        vector_first: Whether the vector belongs to the first index of the columns.
    """

    matrices: Tensor
    vector: Tensor
    vector_first: bool

    @property
    def columns(self) -> tuple[int, int, int]:
        """How many values the index of the rows has, and both indices of the columns."""
        (rows, one), other = self.matrices.shape[2:], self.vector.shape[2]
        return (rows, other, one) if self.vector_first else (rows, one, other)

    def parts(self) -> tuple[Tensor, Tensor]:
        """Return matrices and vectors that broadcast to (B L, r) and the columns in order."""
        matrices, vector = self.matrices.flatten(0, 1), self.vector.flatten(0, 1)
        if self.vector_first:
            return matrices.unsqueeze(2), vector[:, None, :, None]
        return matrices.unsqueeze(3), vector[:, None, None, :]


def assemble(
    vector: Tensor, vector_first: bool, terms: Sequence[Term], scratch: Tensor | None = None
) -> Tensor:
    """Return a block by the entries of both weights, (a, b, c, e): rows and columns of each.

    The vector of the rows comes last. What it multiplies has the columns (c, e) of the block side
    by side, so the result is written in order, and in one go for all terms.

    Args:
        vector: Over one index of the rows, (B, L, p).
        vector_first: Whether that is the first.
        terms: What it multiplies.
        scratch: Memory for the result: fresh memory costs more than the product.
    """
    vector = vector.flatten(0, 1)
    if len(terms) == 1 and terms[0].matrices.stride()[:2] == (0, 0) and terms[0].vector_first:
        return _same_everywhere(vector, terms[0])
    parts, columns = [term.parts() for term in terms], terms[0].columns
    shape = (vector.shape[1], *columns)
    size = math.prod(shape)
    out = vector.new_empty(shape) if scratch is None else scratch[:size].view(shape)
    step = max(1, CHUNK_BYTES // (vector.element_size() * math.prod(columns)))
    for start in range(0, len(vector), step):
        rows = slice(start, start + step)
        (matrices, other), *more = parts
        product = matrices[rows] * other[rows]
        for matrices, other in more:
            product.addcmul_(matrices[rows], other[rows])
        out.flatten(1).addmm_(vector[rows].mT, product.flatten(1), beta=int(start > 0))
    return out if vector_first else out.transpose(0, 1)


def _same_everywhere(vector: Tensor, term: Term) -> Tensor:
    """Return the block if the matrix is the same at all positions: vectors are summed first."""
    vectors = vector.mT @ term.vector.flatten(0, 1)
    return vectors[:, None, :, None] * term.matrices[0, 0][None, :, None, :]


def outer_block(left: Factor, right: Factor, curvature: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return `J_leftᵀ Λ J_right` of whole Jacobians, by the entries of both weights."""
    J_left, J_right = left.jacobian(curvature.shape[-2]), right.jacobian(curvature.shape[-1])
    middle = (curvature.flatten(0, 1) @ J_right).flatten(0, 1)
    return (J_left.flatten(0, 1).mT @ middle).view(shape)


def outer_matrices(left: Factor, right: Factor, curvature: Tensor) -> Tensor:
    """Return `core_leftᵀ Λ_i core_right`, (B, L, r, s), for Λ (B, L, d_left, d_right)."""
    middle = curvature if left.core is None else left.core.mT @ curvature
    return middle if right.core is None else middle @ right.core


def add_on_diagonal(block: Tensor, matrix: Tensor) -> Tensor:
    """Add `matrix[a, c]` where b = e to a block (a, b, c, e): `matrix ⊗ I`."""
    block.diagonal(dim1=1, dim2=3).add_(matrix.unsqueeze(-1))
    return block
