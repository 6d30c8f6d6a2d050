"""Inner products `⟨E_i, E_j⟩` of the matrices of a key block, for its Frobenius norm.

The d by d matrices of all n positions are never held at once. There are two ways:

By tokens. `E_i = Xᵀ B_i X` with an L by L matrix B_i over the tokens that position i may see, so
`⟨E_i, E_j⟩ = tr(B_i K B_j Kᵀ)` with the inner products K of the tokens of both sequences. It costs
n² L² and is meant for short sequences.

By coordinates. The tokens are written in an orthonormal basis that follows their order, a QR
decomposition. Then the first tokens lie in the span of the first basis vectors, and under a causal
mask E_i is zero beyond the coordinates of the tokens that i sees. The matrices are formed tile by
tile of their entries, only for the positions that reach a tile.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.attention_head import AttentionHead
from blockopt.analysis.closed_forms.banded_product import banded_product

TILE = 64  # coordinates on a side of a tile
# Products of one sequence with several others take about this much memory.
CHUNK_BYTES = 2**27


def inner_products_by_tokens(
    head: AttentionHead, curvature: Tensor | None, w: Tensor | None
) -> Tensor:
    """Return `⟨E_i, E_j⟩` without the scale, (n, n); for softmax attention.

    Args:
        head: The attention head.
        curvature: Λ_i, (B, L, dv, dv), or None to leave out `D_iᵀ Λ_i D_i`.
        w: Derivatives of the loss by the scores, (B, L, L), or None to leave out T_i.
    """
    x, A = head.features["x"], head.weights
    batch, length = x.shape[:2]
    B = x.new_zeros(batch, length, length, length)  # over position i and two tokens
    if curvature is not None:
        apart = head.features["value"].unsqueeze(1) - head.means["value"].unsqueeze(2)
        apart = A.unsqueeze(-1) * apart
        B += apart @ curvature @ apart.mT
    if w is not None:
        cross = w.unsqueeze(-1) * A.unsqueeze(-2)
        B += torch.diag_embed(w) - cross - cross.mT
    total = x.new_zeros(batch, length, batch, length)
    step = max(1, CHUNK_BYTES // (2 * x.element_size() * length**3))
    for one in range(batch):
        for start in range(one, batch, step):
            others = slice(start, start + step)
            K = x[one] @ x[others].mT  # (others, L, L)
            half = torch.einsum("ijl,tlm->tjim", B[one], K)
            both = torch.einsum("tjim,tjr->tirm", half, K)  # Kᵀ B_i K
            found = both.flatten(2) @ B[others].flatten(2).mT
            total[one, :, others] = found.movedim(0, 1)
            total[others, :, one] = found.mT
    return total.view(batch * length, -1)


def inner_products_by_coordinates(
    head: AttentionHead, curvature: Tensor | None, w: Tensor | None
) -> Tensor:
    """Return `⟨E_i, E_j⟩` without the scale, (n, n). The arguments are as above."""
    ordered = _OrderedTokens(head)
    total = head.x.new_zeros(ordered.length, ordered.batch, ordered.length, ordered.batch)
    flat = total.view(ordered.length * ordered.batch, -1)
    for columns in ordered.tiles():
        first, rows = ordered.first_position(columns)
        for other in ordered.tiles():
            if other.start > columns.start:
                break
            slab = ordered.entries(curvature, w, other, columns, first)
            if other.start < columns.start:  # the tile on the other side of the diagonal
                slab *= 2**0.5
            _add_gram(flat[rows:, rows:], slab)
    lower = flat.tril() + flat.tril(-1).mT
    return lower.view_as(total).permute(1, 0, 3, 2).reshape(flat.shape)


class _OrderedTokens:
    """Tokens in a basis in which the first ones have the first coordinates.

    Sequences are interleaved: the first tokens of all, the second of all, and so on.
    """

    def __init__(self, head: AttentionHead) -> None:
        x = head.features["x"]
        self.batch, self.length, _ = x.shape
        origins = (head.x - x)[:, 0]  # features of softmax are centred; the centres come first
        ordered = torch.cat([origins, head.x.transpose(0, 1).flatten(0, 1)])
        R = torch.linalg.qr(ordered.mT, mode="r").R.mT
        rows: Tensor = R[self.batch :].unflatten(0, (self.length, self.batch)) - R[: self.batch]
        self.x = rows.transpose(0, 1).contiguous()
        self._head, self.means = head, head.weights @ self.x
        self._covariances: dict[int, Tensor] = {}

    def tiles(self) -> Iterator[slice]:
        """Yield slices of the coordinates."""
        width = self.x.shape[-1]
        for start in range(0, width, TILE):
            yield slice(start, min(start + TILE, width))

    def first_position(self, columns: slice) -> tuple[int, int]:
        """Return the first position whose matrix reaches a tile, and its row in the result."""
        reach = ((last + 1) * self.batch > columns.start for last in self._head.last_seen)
        first = next((i for i, reaches in enumerate(reach) if reaches), self.length)
        return first, first * self.batch

    def entries(
        self, curvature: Tensor | None, w: Tensor | None, a: slice, b: slice, first: int
    ) -> Tensor:
        """Return a tile of all matrices from a position on, (positions · B, entries)."""
        shape = (self.length - first, self.batch, a.stop - a.start, b.stop - b.start)
        slab = self.x.new_zeros(shape)
        if curvature is not None:
            left, right = (self._covariance(tile)[:, first:] for tile in (a, b))
            slab += (left.mT @ (curvature[:, first:] @ right)).transpose(0, 1)
        if w is not None:
            slab += self._third_moment(w, a, b, first).transpose(0, 1)
        entries: Tensor = slab.flatten(0, 1).flatten(1)
        return entries

    def _third_moment(self, w: Tensor, a: slice, b: slice, first: int) -> Tensor:
        """Return a tile of `Σ_j w_ij x_j x_jᵀ - c_i m_iᵀ - m_i c_iᵀ`, (B, positions, a, b)."""
        x, m, start = self.x, self.means[:, first:], self._first_token(b)
        products = (x[:, start:, a].unsqueeze(-1) * x[:, start:, b].unsqueeze(-2)).flatten(2)
        sums = banded_product(
            w[:, first:, start:], products, self._head.last_seen, first, start
        ).view(*m.shape[:2], a.stop - a.start, b.stop - b.start)
        c_a, c_b = (w[:, first:] @ x[..., tile] for tile in (a, b))
        sums -= c_a.unsqueeze(-1) * m[:, :, None, b]
        sums -= m[:, :, a].unsqueeze(-1) * c_b.unsqueeze(-2)
        return sums

    def _covariance(self, tile: slice) -> Tensor:
        """Return some columns of `D_i`, (B, L, dv, columns), kept until the end."""
        if tile.start not in self._covariances:
            head, start = self._head, self._first_token(tile)
            value = head.features["value"]
            weights = head.weights if head.softmax else head.visible.to(value)
            x = self.x[:, start:, tile]
            products = (value[:, start:].unsqueeze(-1) * x.unsqueeze(-2)).flatten(2)
            sums = banded_product(weights[..., start:], products, head.last_seen, 0, start)
            found = sums.view(*value.shape, -1)
            if head.softmax:
                found -= head.means["value"].unsqueeze(-1) * self.means[:, :, None, tile]
            self._covariances[tile.start] = found
        return self._covariances[tile.start]

    def _first_token(self, tile: slice) -> int:
        """Return the first token that has any of these coordinates."""
        return max(0, int(tile.start) // self.batch - 1)


def _add_gram(total: Tensor, rows: Tensor) -> None:
    """Add the inner products of all rows to the lower triangle of `total`."""
    step = max(1, len(rows) // 8)
    for start in range(0, len(rows), step):
        stop = start + len(rows[start : start + step])
        total[start:stop, :stop].addmm_(rows[start:stop], rows[:stop].mT)
