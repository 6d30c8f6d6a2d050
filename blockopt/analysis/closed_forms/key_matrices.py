"""The matrices E_i of the key block `H(K,K) = Σ_i E_i ⊗ q_i q_iᵀ` of attention, never built.

The matrices of queries and values are small, dk or dv on a side, and simply held. Those of keys
have the width of the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.attention_head import AttentionHead

# Slices of the matrices of all positions take about this much memory.
CHUNK_BYTES = 2**28


class KeyMatrices:
    """The matrices of a key block, d by d for each position, held through their factors.

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
        """Return the trace of each, (n,)."""
        return self.diagonals().sum(-1)

    def diagonals(self) -> Tensor:
        """Return the diagonal of each, (n, d)."""
        total = self._x.new_zeros(self._x.shape)
        if self._outer is not None:
            D, curvature = self._outer
            total = (D * (curvature @ D)).sum(-2)
        if self._w is not None:
            total = total + self._w @ self._x.square() - 2 * self._c * self._m
        return self._scale * total.flatten(0, 1)

    def product(self, z: Tensor) -> Tensor:
        """Return `E_i z_i`, (n, d, k)."""
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
        """Return `⟨E_i, E_j⟩`, (n, n), without holding all E_i at once."""
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
            # By symmetry only from the diagonal on; what is beyond it counts twice.
            square = min(step, self.size - start)
            slab = weighted[:, :, start : start + square].mT @ D[:, :, start:]
            slab[:, :, square:] *= 2**0.5
            _add_gram(total, slab.flatten(1))
        return total.tril() + total.tril(-1).mT

    def _functional_functional(self) -> Tensor:
        """Return `⟨T_i, T_j⟩` by inner products of tokens, in O(n² L) without d by d matrices."""
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
        """Return `⟨T_i, D_lᵀ Λ_l D_l⟩` in row i and column l."""
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
