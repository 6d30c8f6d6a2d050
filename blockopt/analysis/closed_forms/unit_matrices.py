"""The m × m matrices of an MLP's hidden units in its factored Hessian, never built."""

from __future__ import annotations

import torch
from torch import Tensor

# Slices of the matrices of all rows take about this much memory.
CHUNK_BYTES = 2**28


class UnitMatrices:
    """`E_i = D_i W Λ_i Wᵀ D_i + diag(e_i)` of each row i, for diagonal matrices D_i.

    Args:
        slopes: The diagonals of D_i, the slopes of the units, (n, m).
        W: The weight after the units, (m, d).
        curvature: Λ_i, (n, d, d), or None for none.
        bends: e_i, (n, m), or None for none.
    """

    def __init__(
        self, slopes: Tensor, W: Tensor, curvature: Tensor | None, bends: Tensor | None
    ) -> None:
        self._slopes, self._W, self._curvature, self._bends = slopes, W, curvature, bends
        self.count, self.size = slopes.shape

    def traces(self) -> Tensor:
        """Return the trace of each, (n,)."""
        return self.diagonals().sum(-1)

    def diagonals(self) -> Tensor:
        """Return the diagonal of each, (n, m)."""
        total = torch.zeros_like(self._slopes) if self._bends is None else self._bends
        if self._curvature is None:
            return total
        step = self._step(self._W.numel())
        squares = [
            ((self._W @ curvature) * self._W).sum(-1) for curvature in self._curvature.split(step)
        ]
        return total + self._slopes.square() * torch.cat(squares)

    def product(self, z: Tensor) -> Tensor:
        """Return `E_i z_i`, (n, m, k)."""
        total = torch.zeros_like(z) if self._bends is None else self._bends.unsqueeze(-1) * z
        if self._curvature is None:
            return total
        slopes = self._slopes.unsqueeze(-1)
        return total + slopes * (self._W @ (self._curvature @ (self._W.mT @ (slopes * z))))

    def inner_products(self) -> Tensor:
        """Return `⟨E_i, E_j⟩`, (n, n), without holding all E_i at once."""
        total = self._slopes.new_zeros(self.count, self.count)
        step = self._step(self.count * self.size)
        for start in range(0, self.size, step):
            # By symmetry only from the diagonal on; what is beyond it counts twice.
            stop = min(start + step, self.size)
            slab = self._slopes.new_zeros(self.count, stop - start, self.size - start)
            if self._curvature is not None:
                left = self._slopes[:, start:stop, None] * (self._W[start:stop] @ self._curvature)
                slab = (left @ self._W[start:].mT) * self._slopes[:, None, start:]
            if self._bends is not None:
                slab.diagonal(dim1=1, dim2=2).add_(self._bends[:, start:stop])
            slab[:, :, stop - start :] *= 2**0.5
            flat = slab.flatten(1)
            total.addmm_(flat, flat.mT)
        return total

    def _step(self, entries: int) -> int:
        return max(1, CHUNK_BYTES // (self._slopes.element_size() * entries))
