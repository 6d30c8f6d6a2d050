"""The key block of heads that share their keys, or whose keys are rotated or normalized.

With `u_ij` the slope of the score by the key before norm and rotation (`u_ij = q_i` without them),
every derivative goes through the scores, `∂T_ij / ∂W_K = scale · x_j ⊗ u_ij`, and for each position
i the Hessian of the loss by the scores of two heads g, h that share the keys is

    M_i = P_i Λ_i P_iᵀ  [+ diag(w_i) - w_i A_iᵀ - A_i w_iᵀ,  g = h]

with rows `A_ij (v_j - v̄_i)` in P_i, each of its own head, and Λ_i between their outputs. Hence

    trace     scale² Σ_gh Σ_i Σ_jl M_i[j, l] (x_j·x_l)(u_ij·u_il)       O(n L² (dk + dv))
    H v       forward to the scores, M_i there, and back                 O(n L (dk + dv))

for n positions in sequences of length L. A norm adds its second derivative, one matrix dk by dk per
position. No matrix of the size of the block is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from blockopt.analysis.closed_forms import factored_block
from blockopt.analysis.closed_forms.attention_head import AttentionHead
from blockopt.analysis.closed_forms.factored_block import FactoredBlock


class GroupedKeys(FactoredBlock):
    """The block of one key matrix, which one or several heads use.

    Args:
        heads: The heads that use it.
        curvatures: `curvatures[g][h]`, Λ_i between the outputs of two of them, before their output
            matrices, (B, L, dv, dv).
        score_gradients: Derivatives of the loss by the scores of each, (B, L, L).
        part: "outer", "functional" or "full".
    """

    def __init__(
        self,
        heads: Sequence[AttentionHead],
        curvatures: Sequence[Sequence[Tensor]],
        score_gradients: Sequence[Tensor],
        part: str,
    ) -> None:
        self._heads, self._curvatures, self._w = heads, curvatures, score_gradients
        self._x, self._keys = heads[0].x, heads[0].keys
        self._outer, self._functional = part != "functional", part != "outer"
        self._softmax, self._squared_scale = heads[0].softmax, heads[0].scale ** 2
        super().__init__(
            self._x.shape[-1] * self._keys.value.shape[-1], self._x.dtype, self._x.device
        )
        self._bends = self._second_derivatives() if self._functional else None

    def trace(self) -> Tensor:
        """Return the trace."""
        total = self._x.new_zeros(())
        for b, rows in self._chunks(self._x.shape[1] ** 2):
            x = self._x[b]
            tokens = x @ x.mT
            slopes = [self._slopes(head, b, rows) for head in self._heads]
            for g in range(len(self._heads)):
                for h in range(len(self._heads)):
                    M = self._score_hessian(g, h, b, rows)
                    total += (M * tokens * (slopes[g] @ slopes[h].mT)).sum()
        total *= self._squared_scale
        if self._bends is not None:
            traces = self._bends.diagonal(dim1=-2, dim2=-1).sum(-1)
            total += (self._x.square().sum(-1) * traces).sum()
        return total

    def diagonal(self) -> Tensor:
        """Return the diagonal, in the order of the weight's entries."""
        total = self._x.new_zeros(self._x.shape[-1], self._keys.value.shape[-1])
        for b, rows in self._chunks(self._row_entries()):
            x, slopes = self._x[b], [self._slopes(head, b, rows) for head in self._heads]
            if self._outer:
                total += self._outer_diagonal(b, rows, slopes)
            if self._functional and self._softmax:
                for head, w, u in zip(self._heads, self._w, slopes):
                    w, A = w[b, rows], head.weights[b, rows]
                    seen = torch.einsum("ij,ijq->jq", w, u.square())
                    c, mean = (torch.einsum("ij,ja,ijq->iaq", t, x, u) for t in (w, A))
                    total += x.square().mT @ seen - 2 * (c * mean).sum(0)
        total *= self._squared_scale
        if self._bends is not None:
            bends = self._bends.diagonal(dim1=-2, dim2=-1).flatten(0, 1)
            total += self._x.square().flatten(0, 1).mT @ bends
        return total.flatten()

    def squared_frobenius(self) -> Tensor:
        """Return the sum of the squares of all entries, by a product with each unit vector.

        It costs as many products as the weight has entries.
        """
        batch, length, width = self._x.shape
        return self._squares_of_columns(3 * batch * length * (length + width))

    def _product(self, columns: Tensor) -> Tensor:
        x, K = self._x, self._keys.jacobian
        V = columns.view(x.shape[-1], K.shape[-1], -1)
        moved = torch.einsum("bja,aqk->bjqk", x, V)  # of the keys, before norm and rotation
        keys = K @ moved
        scores = [
            head.scale * torch.einsum("bip,bjpk->bijk", head.query, keys) for head in self._heads
        ]
        back = torch.zeros_like(keys)
        for head, pulled in zip(self._heads, self._score_products(scores)):
            back += head.scale * torch.einsum("bip,bijk->bjpk", head.query, pulled)
        back = K.mT @ back
        if self._bends is not None:
            back += self._bends @ moved
        return torch.einsum("bja,bjqk->aqk", x, back).reshape(columns.shape)

    def _score_products(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Return `M_i` times vectors over the scores of each head, (B, L, L, k)."""
        products = [torch.zeros_like(score) for score in scores]
        if self._outer:
            moved = [torch.einsum("bijp,bijk->bipk", self._apart(head), score)
                     for head, score in zip(self._heads, scores)]  # fmt: skip
            for g, head in enumerate(self._heads):
                at_output = sum(self._curvatures[g][h] @ moved[h] for h in range(len(moved)))
                products[g] += torch.einsum("bijp,bipk->bijk", self._apart(head), at_output)
        if self._functional and self._softmax:
            for product, head, w, score in zip(products, self._heads, self._w, scores):
                w, A = w.unsqueeze(-1), head.weights.unsqueeze(-1)
                product += w * score - w * (A * score).sum(2, keepdim=True)
                product -= A * (w * score).sum(2, keepdim=True)
        return products

    def _score_hessian(self, g: int, h: int, b: int, rows: slice) -> Tensor:
        """Return `M_i` between two heads, (rows, L, L), of one sequence."""
        length = self._x.shape[1]
        M = self._x.new_zeros(rows.stop - rows.start, length, length)
        if self._outer:
            left, right = (self._apart(self._heads[n], b, rows) for n in (g, h))
            M += left @ self._curvatures[g][h][b, rows] @ right.mT
        if self._functional and self._softmax and g == h:
            w, A = self._w[g][b, rows], self._heads[g].weights[b, rows]
            cross = w.unsqueeze(-1) * A.unsqueeze(-2)
            M += torch.diag_embed(w) - cross - cross.mT
        return M

    def _outer_diagonal(self, b: int, rows: slice, slopes: Sequence[Tensor]) -> Tensor:
        """Return the diagonal of `Σ_gh D_gᵀ Λ_i D_h`, (d, dk), with D the derivative by W_K."""
        x = self._x[b]
        D = []
        for head, u in zip(self._heads, slopes):
            products = self._apart(head, b, rows).unsqueeze(-1) * u.unsqueeze(-2)  # (i, j, p, q)
            D.append((products.flatten(2).mT @ x).unflatten(1, products.shape[2:]))  # (i, p, q, a)
        total = x.new_zeros(D[0].shape[-1], D[0].shape[-2])
        for g, left in enumerate(D):
            weighted = sum(
                torch.einsum("ipr,irqa->ipqa", self._curvatures[g][h][b, rows], right)
                for h, right in enumerate(D)
            )
            total += (left * weighted).sum((0, 1)).mT
        return total

    def _apart(
        self, head: AttentionHead, b: int | slice = slice(None), rows: slice = slice(None)
    ) -> Tensor:
        """Return the rows `A_ij (v_j - v̄_i)` of P_i, (..., L, L, dv)."""
        value = head.features["value"][b].unsqueeze(-3)
        if not head.softmax:
            return head.visible[b][..., rows, :].unsqueeze(-1) * value
        apart = value - head.means["value"][b][..., rows, :].unsqueeze(-2)
        return head.weights[b][..., rows, :].unsqueeze(-1) * apart

    def _slopes(self, head: AttentionHead, b: int, rows: slice) -> Tensor:
        """Return `u_ij`, (rows, L, dk), of one sequence."""
        if head.keys.plain:
            query = head.query[b, rows].unsqueeze(1)
            return query.expand(-1, self._x.shape[1], -1)
        return torch.einsum("ip,jpq->ijq", head.query[b, rows], head.keys.jacobian[b])

    def _second_derivatives(self) -> Tensor | None:
        """Return what the norm of the keys adds, (B, L, dk, dk)."""
        g = [head.scale * w.mT @ head.query for head, w in zip(self._heads, self._w)]
        return self._keys.hessian(torch.stack(g).sum(0))

    def _row_entries(self) -> int:
        """Return how many numbers the diagonal holds per position."""
        value_width, key_width = self._heads[0].value.shape[-1], self._keys.value.shape[-1]
        length, width = self._x.shape[1:]
        return len(self._heads) * value_width * key_width * (length + 2 * width)

    def _chunks(self, entries: int) -> Iterator[tuple[int, slice]]:
        """Yield sequences and positions in them, as many as fit into memory at once."""
        batch, length = self._x.shape[:2]
        step = max(1, factored_block.CHUNK_BYTES // (4 * self._x.element_size() * entries))
        for b in range(batch):
            for start in range(0, length, step):
                yield b, slice(start, min(start + step, length))
