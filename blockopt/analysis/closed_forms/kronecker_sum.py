"""Sums of Kronecker products `H = Σ_i a_i a_iᵀ ⊗ E_i` as operators that are never built.

The queries of one layer of GPT-2 small have 589,824 entries, and a dense block of them takes
terabytes. Its trace, diagonal, Frobenius norm and products with vectors only need the vectors `a_i`
and the small matrices `E_i` of each position i. With n positions, `a` of size p and `E` of size r:

    trace     Σ_i |a_i|² tr E_i                          O(n (p + r))
    diagonal  Σ_i a_i² ⊗ diag E_i                        O(n p r)
    |H|_F²    Σ_ij (a_i·a_j)² ⟨E_i, E_j⟩                   O(n² (p + r²))
    H v       Σ_i a_i ⊗ E_i (Vᵀ a_i), v = vec V            O(n r (p + r))
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.factored_block import FactoredBlock


class PositionMatrices(Protocol):
    """The symmetric matrices `E_i` of all positions i."""

    size: int
    count: int

    def traces(self) -> Tensor:
        """Return the trace of each, (n,)."""

    def diagonals(self) -> Tensor:
        """Return the diagonal of each, (n, r)."""

    def product(self, z: Tensor) -> Tensor:
        """Return `E_i z_i`, (n, r, k), for z of that shape."""

    def inner_products(self) -> Tensor:
        """Return `⟨E_i, E_j⟩`, (n, n)."""


class Matrices:
    """Matrices that are held as they are.

    Args:
        E: (..., r, r).
    """

    def __init__(self, E: Tensor) -> None:
        self._E = E.flatten(0, -3)
        self.count, self.size = self._E.shape[:2]

    def traces(self) -> Tensor:
        """Return the trace of each, (n,)."""
        return self.diagonals().sum(-1)

    def diagonals(self) -> Tensor:
        """Return the diagonal of each, (n, r)."""
        return self._E.diagonal(dim1=-2, dim2=-1)

    def product(self, z: Tensor) -> Tensor:
        """Return `E_i z_i`, (n, r, k)."""
        return self._E @ z

    def inner_products(self) -> Tensor:
        """Return `⟨E_i, E_j⟩`, (n, n)."""
        flat = self._E.flatten(1)
        used = flat.any(1)  # positions that the loss does not count have none
        products = flat.new_zeros(self.count, self.count)
        products[used.nonzero(), used.nonzero().mT] = flat[used] @ flat[used].mT
        return products


class SharedMatrix:
    """One matrix for all positions, as for the squared error.

    Args:
        E: (r, r).
        count: The number of positions.
    """

    def __init__(self, E: Tensor, count: int) -> None:
        self._E, self.count, self.size = E, count, len(E)

    def traces(self) -> Tensor:
        """Return the trace of each, (n,)."""
        return self._E.trace().expand(self.count)

    def diagonals(self) -> Tensor:
        """Return the diagonal of each, (n, r)."""
        return self._E.diagonal().expand(self.count, self.size)

    def product(self, z: Tensor) -> Tensor:
        """Return `E z_i`, (n, r, k)."""
        return (z.mT @ self._E).mT  # one matrix product; E is symmetric

    def inner_products(self) -> Tensor:
        """Return `⟨E, E⟩`, (n, n)."""
        return self._E.square().sum().expand(self.count, self.count)


class KroneckerSum(FactoredBlock):
    """`Σ_i a_i a_iᵀ ⊗ E_i`, or `Σ_i E_i ⊗ a_i a_iᵀ`: a symmetric operator on vectors.

    Args:
        vectors: `a_i`, (n, p).
        matrices: `E_i`.
        vector_first: Whether the vectors come first.

    Example:
        >>> three = Matrices(torch.tensor([[[3.0]]]))
        >>> block = KroneckerSum(torch.tensor([[1.0, 2.0]]), three, True)
        >>> float(block.trace()), float(block.squared_frobenius()), block @ torch.tensor([1.0, 0.0])
        (15.0, 225.0, tensor([3., 6.]))
    """

    def __init__(self, vectors: Tensor, matrices: PositionMatrices, vector_first: bool) -> None:
        self._vectors, self._matrices, self._vector_first = vectors, matrices, vector_first
        super().__init__(vectors.shape[1] * matrices.size, vectors.dtype, vectors.device)

    def trace(self) -> Tensor:
        """Return the trace."""
        return self._vectors.square().sum(1) @ self._matrices.traces()

    def diagonal(self) -> Tensor:
        """Return the diagonal, (p r,), in the order of the weight's entries."""
        diagonal = self._vectors.square().mT @ self._matrices.diagonals()
        return (diagonal if self._vector_first else diagonal.mT).flatten()

    def squared_frobenius(self) -> Tensor:
        """Return the sum of the squares of all entries."""
        return ((self._vectors @ self._vectors.mT).square() * self._matrices.inner_products()).sum()

    def _product(self, columns: Tensor) -> Tensor:
        p, r, k = self._vectors.shape[1], self._matrices.size, columns.shape[1]
        if self._vector_first:
            z = (self._vectors @ columns.view(p, r * k)).unflatten(1, (r, k))
            result = self._vectors.mT @ self._matrices.product(z).flatten(1)
        else:
            z = torch.einsum("np,rpk->nrk", self._vectors, columns.view(r, p, k))
            result = torch.einsum("np,nrk->rpk", self._vectors, self._matrices.product(z))
        return result.reshape(columns.shape)
