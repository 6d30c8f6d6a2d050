"""Diagonal Hessian blocks as sums of Kronecker products, never built: `H = Σ_i a_i a_iᵀ ⊗ E_i`, or with the factors swapped.

The queries of one layer of GPT-2 small have 589 824 entries, and a dense block of them takes terabytes. Its trace, diagonal,
Frobenius norm and products with vectors only need the vectors `a_i` and the small matrices `E_i` of each position i. With n
positions, `a` of size p and `E` of size r:

    trace     Σ_i |a_i|² tr E_i                          O(n (p + r))
    diagonal  Σ_i a_i² ⊗ diag E_i                        O(n p r)
    |H|_F²    Σ_ij (a_i·a_j)² ⟨E_i, E_j⟩                   O(n² (p + r²))
    H v       Σ_i a_i ⊗ E_i (V ᵀ a_i), v = vec V           O(n r (p + r))
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from blockopt.analysis.attention_map import AttentionHead
from blockopt.analysis.eigenpairs import Which, top_eigenpairs

# Slices of the matrices of all positions take about this much memory.
CHUNK_BYTES = 2**28


class PositionMatrices(Protocol):
    """The symmetric matrices `E_i` of all positions i."""

    size: int
    count: int

    def traces(self) -> Tensor:
        """(n,)."""

    def diagonals(self) -> Tensor:
        """(n, r)."""

    def product(self, z: Tensor) -> Tensor:
        """`E_i z_i`, (n, r, k) for z of that shape."""

    def inner_products(self) -> Tensor:
        """`⟨E_i, E_j⟩`, (n, n)."""


class Matrices:
    """Matrices that are held as they are.

    Args:
        E: (..., r, r).
    """

    def __init__(self, E: Tensor) -> None:
        self._E = E.flatten(0, -3)
        self.count, self.size = self._E.shape[:2]

    def traces(self) -> Tensor:
        """(n,)."""
        return self.diagonals().sum(-1)

    def diagonals(self) -> Tensor:
        """(n, r)."""
        return self._E.diagonal(dim1=-2, dim2=-1)

    def product(self, z: Tensor) -> Tensor:
        """`E_i z_i`, (n, r, k)."""
        return self._E @ z

    def inner_products(self) -> Tensor:
        """`⟨E_i, E_j⟩`, (n, n)."""
        flat = self._E.flatten(1)
        return flat @ flat.mT


class SharedMatrix:
    """The same matrix for all positions, as squared error has it.

    Args:
        E: (r, r).
        count: Number of positions.
    """

    def __init__(self, E: Tensor, count: int) -> None:
        self._E, self.count, self.size = E, count, len(E)

    def traces(self) -> Tensor:
        """(n,)."""
        return self._E.trace().expand(self.count)

    def diagonals(self) -> Tensor:
        """(n, r)."""
        return self._E.diagonal().expand(self.count, self.size)

    def product(self, z: Tensor) -> Tensor:
        """`E z_i`, (n, r, k)."""
        return (z.mT @ self._E).mT  # one matrix product; E is symmetric

    def inner_products(self) -> Tensor:
        """`⟨E, E⟩`, (n, n)."""
        return self._E.square().sum().expand(self.count, self.count)


class KeyMatrices:
    """The matrices of a key block, d by d for each position: held through what they are made of.

    `E_i = scale² (D_iᵀ Λ_i D_i + T_i)`, with `D_i = Cov_i(v, x)` and, as the w_ij of i sum to 0,
    `T_i = Σ_j w_ij x_j x_jᵀ - c_i m_iᵀ - m_i c_iᵀ`, `c_i = Σ_j w_ij x_j`.

    Args:
        head: The attention head.
        curvature: Λ_i before the output matrix, (B, L, dv, dv).
        w: Derivatives of the loss by the scores, (B, L, L).
        part: "outer", "functional" or "full".
    """

    def __init__(self, head: AttentionHead, curvature: Tensor, w: Tensor, part: str) -> None:
        self._scale = head.scale**2
        self._x = head.features["x"]
        batch, length, self.size = self._x.shape
        self.count = batch * length
        self._outer = None if part == "functional" else (head.covariance("value", "x"), curvature)
        self._w = w if part != "outer" and head.softmax else None
        self._m, self._c = head.means["x"], w @ self._x

    def traces(self) -> Tensor:
        """(n,)."""
        return self.diagonals().sum(-1)

    def diagonals(self) -> Tensor:
        """(n, d)."""
        total = self._x.new_zeros(self._x.shape)
        if self._outer is not None:
            D, curvature = self._outer
            total = (D * (curvature @ D)).sum(-2)
        if self._w is not None:
            total = total + self._w @ self._x.square() - 2 * self._c * self._m
        return self._scale * total.flatten(0, 1)

    def product(self, z: Tensor) -> Tensor:
        """`E_i z_i`, (n, d, k)."""
        z = z.unflatten(0, self._x.shape[:2])
        total = torch.zeros_like(z)
        if self._outer is not None:
            D, curvature = self._outer
            total = D.mT @ (curvature @ (D @ z))
        if self._w is not None:
            seen = self._w.unsqueeze(-1) * torch.einsum("bjd,bidk->bijk", self._x, z)
            total = total + torch.einsum("bjd,bijk->bidk", self._x, seen)
            m, c = self._m.unsqueeze(-1), self._c.unsqueeze(-1)
            total = total - c * (m * z).sum(-2, keepdim=True) - m * (c * z).sum(-2, keepdim=True)
        return self._scale * total.flatten(0, 1)

    def inner_products(self) -> Tensor:
        """`⟨E_i, E_j⟩`, (n, n), without holding all E_i at once."""
        total = self._x.new_zeros(self.count, self.count)
        if self._outer is not None:
            total += self._outer_outer()
        if self._w is not None:
            total += self._functional_functional()
        if self._outer is not None and self._w is not None:
            mixed = self._functional_outer()
            total += mixed + mixed.mT
        return self._scale**2 * total

    def _outer_outer(self) -> Tensor:
        assert self._outer is not None
        D, curvature = (t.flatten(0, 1) for t in self._outer)
        weighted = curvature @ D
        total = D.new_zeros(self.count, self.count)
        step = max(1, CHUNK_BYTES // (D.element_size() * self.count * self.size))
        for start in range(0, self.size, step):
            # Symmetric matrices: columns from `start` on, what is beyond the diagonal square counts twice.
            square = min(step, self.size - start)
            slab = weighted[:, :, start : start + square].mT @ D[:, :, start:]
            slab[:, :, square:] *= 2**0.5
            _add_gram(total, slab.flatten(1))
        return total.tril() + total.tril(-1).mT

    def _functional_functional(self) -> Tensor:
        """`⟨T_i, T_j⟩` by the inner products of tokens: O(n² L) and no d by d matrix."""
        assert self._w is not None
        x, w = self._x.flatten(0, 1), torch.block_diag(*self._w)
        m, c = self._m.flatten(0, 1), self._c.flatten(0, 1)
        quartic = w @ (x @ x.mT).square() @ w.mT
        # ⟨Σ_j w_ij x_j x_jᵀ, c_l m_lᵀ + m_l c_lᵀ⟩
        cubic = 2 * w @ ((x @ c.mT) * (x @ m.mT))
        low = 2 * ((c @ c.mT) * (m @ m.mT) + (c @ m.mT) * (m @ c.mT))
        total: Tensor = quartic - cubic - cubic.mT + low
        return total

    def _functional_outer(self) -> Tensor:
        """`⟨T_i, D_lᵀ Λ_l D_l⟩`: row i, column l."""
        assert self._outer is not None
        assert self._w is not None
        D, curvature = (t.flatten(0, 1) for t in self._outer)
        x, m, c = self._x.flatten(0, 1), self._m.flatten(0, 1), self._c.flatten(0, 1)
        columns = []
        step = max(1, CHUNK_BYTES // (3 * D.element_size() * self.count * D.shape[1]))
        for D_l, curvature_l in zip(D.split(step), curvature.split(step)):
            D_x, D_m, D_c = (D_l @ t.mT for t in (x, m, c))  # (chunk, dv, n)
            squares = (D_x * (curvature_l @ D_x)).sum(1)  # x_jᵀ Dᵀ Λ D x_j, (chunk, n)
            by_sequence = squares.unflatten(1, self._x.shape[:2])
            mean = torch.einsum("bij,lbj->lbi", self._w, by_sequence).flatten(1)
            columns.append(mean - 2 * (D_c * (curvature_l @ D_m)).sum(1))
        return torch.cat(columns).mT


def _add_gram(total: Tensor, rows: Tensor) -> None:
    """Add the inner products of all rows to the lower triangle of `total`."""
    step = max(1, len(rows) // 8)
    for start in range(0, len(rows), step):
        band = rows[start : start + step]
        total[start : start + step, : start + len(band)].addmm_(band, rows[: start + len(band)].mT)


class KroneckerSum:
    """`Σ_i a_i a_iᵀ ⊗ E_i`, or `Σ_i E_i ⊗ a_i a_iᵀ`: a symmetric operator on vectors.

    Args:
        vectors: `a_i`, (n, p).
        matrices: `E_i`.
        vector_first: Which of the two.

    Example:
        >>> block = KroneckerSum(torch.tensor([[1.0, 2.0]]), Matrices(torch.tensor([[[3.0]]])), True)
        >>> float(block.trace()), float(block.squared_frobenius()), block @ torch.tensor([1.0, 0.0])
        (15.0, 225.0, tensor([3., 6.]))
    """

    def __init__(self, vectors: Tensor, matrices: PositionMatrices, vector_first: bool) -> None:
        self._vectors, self._matrices, self._vector_first = vectors, matrices, vector_first
        size = vectors.shape[1] * matrices.size
        self.shape = (size, size)
        self.dtype, self.device = vectors.dtype, vectors.device

    def trace(self) -> Tensor:
        """A scalar."""
        return self._vectors.square().sum(1) @ self._matrices.traces()

    def diagonal(self) -> Tensor:
        """(p r,), in the order of the weight's entries."""
        diagonal = self._vectors.square().mT @ self._matrices.diagonals()
        return (diagonal if self._vector_first else diagonal.mT).flatten()

    def squared_frobenius(self) -> Tensor:
        """The sum of the squares of all entries."""
        return ((self._vectors @ self._vectors.mT).square() * self._matrices.inner_products()).sum()

    def frobenius(self) -> Tensor:
        """The Frobenius norm."""
        return self.squared_frobenius().clamp(min=0).sqrt()

    def top_eigenvalues(self, k: int = 1, which: Which = "largest magnitude") -> Tensor:
        """The k outermost eigenvalues, by `top_eigenpairs`."""
        return top_eigenpairs(self, k, which=which).values

    def __matmul__(self, v: Tensor) -> Tensor:
        """`H v` for v of shape (p r,) or (p r, k)."""
        if v.ndim not in (1, 2) or v.shape[0] != self.shape[0]:
            raise ValueError(f"Invalid vector of shape {tuple(v.shape)}. Must be ({self.shape[0]},) or ({self.shape[0]}, k).")
        columns = v.reshape(v.shape[0], -1)
        p, r, k = self._vectors.shape[1], self._matrices.size, columns.shape[1]
        if self._vector_first:
            z = (self._vectors @ columns.view(p, r * k)).unflatten(1, (r, k))
            result = (self._vectors.mT @ self._matrices.product(z).flatten(1)).reshape(p * r, k)
        else:
            z = torch.einsum("np,rpk->nrk", self._vectors, columns.view(r, p, k))
            result = torch.einsum("np,nrk->rpk", self._vectors, self._matrices.product(z)).reshape(p * r, k)
        return result.reshape(v.shape)
