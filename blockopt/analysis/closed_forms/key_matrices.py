"""The matrices E_i of the key block `H(K,K) = Σ_i E_i ⊗ q_i q_iᵀ` of attention, never built.

The matrices of queries and values are small, dk or dv on a side, and simply held. Those of keys
have the width of the tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.attention_head import AttentionHead
from blockopt.analysis.closed_forms.banded_product import bands
from blockopt.analysis.closed_forms.key_inner_products import (
    inner_products_by_coordinates,
    inner_products_by_tokens,
)


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
        self._head, self._scale = head, head.scale**2
        self._x = head.features["x"]
        batch, length, self.size = self._x.shape
        self.count = batch * length
        self._curvature = None if part == "functional" else curvature
        self._w = w if part != "outer" and head.softmax else None
        self._built: Tensor | None = None

    def traces(self) -> Tensor:
        """Return the trace of each, (n,)."""
        shared = self._curvature is None or self._curvature.stride()[:2] == (0, 0)
        if not shared or not self._head.softmax:
            return self.diagonals().sum(-1)
        # Without any D_i: everything in inner products of tokens, in O(n L).
        tokens, A = self._x @ self._x.mT, self._head.weights
        seen = A @ tokens
        total = self._x.new_zeros(A.shape[:2])
        if self._curvature is not None:
            value = self._head.features["value"]
            outputs = value @ self._curvature[0, 0] @ value.mT
            of_outputs = A @ outputs
            products = (A @ (outputs * tokens) - 2 * of_outputs * seen) * A
            total += products.sum(-1) + (of_outputs * A).sum(-1) * (seen * A).sum(-1)
        if self._w is not None:
            squares = tokens.diagonal(dim1=-2, dim2=-1).unsqueeze(1)
            total += (self._w * (squares - 2 * seen)).sum(-1)
        return self._scale * total.flatten()

    def diagonals(self) -> Tensor:
        """Return the diagonal of each, (n, d)."""
        total = torch.zeros_like(self._x)
        if self._curvature is not None:
            total = self._outer_diagonals(self._curvature)
        if self._w is not None:
            c, m = self._w @ self._x, self._head.means["x"]
            total = total + self._w @ self._x.square() - 2 * c * m
        return self._scale * total.flatten(0, 1)

    def product(self, z: Tensor) -> Tensor:
        """Return `E_i z_i`, (n, d, k)."""
        z = z.unflatten(0, self._x.shape[:2])
        total = torch.zeros_like(z)
        if self._curvature is not None:
            D = self._covariance()
            total = D.mT @ (self._curvature @ (D @ z))
        if self._w is not None:
            seen = self._w.unsqueeze(-1) * torch.einsum("bjd,bidk->bijk", self._x, z)
            total = total + torch.einsum("bjd,bijk->bidk", self._x, seen)
            m, c = self._head.means["x"].unsqueeze(-1), (self._w @ self._x).unsqueeze(-1)
            total = total - c * (m * z).sum(-2, keepdim=True) - m * (c * z).sum(-2, keepdim=True)
        return self._scale * total.flatten(0, 1)

    def inner_products(self) -> Tensor:
        """Return `⟨E_i, E_j⟩`, (n, n), without holding all E_i at once."""
        length = self._x.shape[1]
        if self._curvature is None and self._w is None:
            return self._x.new_zeros(self.count, self.count)
        # The costs of the two ways per pair of positions, in multiplications
        cheaper = inner_products_by_coordinates
        if self._head.softmax and 6 * length**2 < self.size**2:
            cheaper = inner_products_by_tokens
        return self._scale**2 * cheaper(self._head, self._curvature, self._w)

    def _outer_diagonals(self, curvature: Tensor) -> Tensor:
        """Return the diagonals of `D_iᵀ Λ_i D_i`, (B, L, d), some positions at a time."""
        head = self._head
        if not head.softmax:
            D = self._covariance()
            return (D * (curvature @ D)).sum(-2)
        value, mean, strengths = head.features["value"], head.means["value"], None
        if curvature.stride()[:2] == (0, 0):  # one Λ, which a rotation of the values diagonalises
            strengths, basis = torch.linalg.eigh(curvature[0, 0])
            value, mean = value @ basis, mean @ basis
        products = (value.unsqueeze(-1) * self._x.unsqueeze(-2)).flatten(2)
        total = torch.empty_like(self._x)
        for rows, end in bands(head.last_seen):
            D = (head.weights[:, rows, :end] @ products[:, :end]).unflatten(2, (-1, self.size))
            D -= mean[:, rows].unsqueeze(-1) * head.means["x"][:, rows].unsqueeze(-2)
            if strengths is None:
                total[:, rows] = (D * (curvature[:, rows] @ D)).sum(-2)
            else:
                total[:, rows] = torch.einsum("p,bipa->bia", strengths, D.square_())
        return total

    def _covariance(self) -> Tensor:
        """Return `D_i`, (B, L, dv, d), kept for the next product."""
        if self._built is None:
            self._built = self._head.covariance("value", "x")
        return self._built
