"""The value block of heads that share their values: `H = Σ_i Σ_gh m_ig m_ihᵀ ⊗ Λ_i,gh`.

`m_ig` is the mean token of position i under head g, and Λ_i,gh the curvature of the loss between
the outputs of two heads, before their output matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockopt.analysis.closed_forms import factored_block
from blockopt.analysis.closed_forms.factored_block import FactoredBlock


class GroupedValues(FactoredBlock):
    """The block of one value matrix that several heads use; its functional part is zero.

    Args:
        means: `m_ig` of each head, (B, L, d).
        curvatures: `curvatures[g][h]`, Λ_i,gh, (B, L, dv, dv).
        part: "outer", "functional" or "full".
    """

    def __init__(
        self, means: Sequence[Tensor], curvatures: Sequence[Sequence[Tensor]], part: str
    ) -> None:
        self._means = torch.stack([mean.flatten(0, 1) for mean in means], 1)  # (n, G, d)
        whole = torch.stack(
            [torch.stack([c.flatten(0, 1) for c in row], 1) for row in curvatures], 1
        )
        self._curvature = whole if part != "functional" else torch.zeros_like(whole)
        width, value_width = self._means.shape[-1], whole.shape[-1]
        super().__init__(width * value_width, whole.dtype, whole.device)

    def trace(self) -> Tensor:
        """Return the trace."""
        products = self._means @ self._means.mT  # (n, G, G)
        return (products * self._curvature.diagonal(dim1=-2, dim2=-1).sum(-1)).sum()

    def diagonal(self) -> Tensor:
        """Return the diagonal, in the order of the weight's entries."""
        diagonals = self._curvature.diagonal(dim1=-2, dim2=-1)  # (n, G, G, dv)
        weighted = torch.einsum("nghe,nha->ngae", diagonals, self._means)
        return torch.einsum("nga,ngae->ae", self._means, weighted).flatten()

    def squared_frobenius(self) -> Tensor:
        """Return the sum of the squares of all entries, from pairs of positions."""
        count, heads = self._means.shape[:2]
        flat = self._curvature.flatten(-2).flatten(1, 2)  # (n, G G, dv dv)
        step = max(1, factored_block.CHUNK_BYTES // (8 * count * heads**4))
        total = self._means.new_zeros(())
        for start in range(0, count, step):
            rows = slice(start, start + step)
            # ⟨Λ_i,gh, Λ_l,rs⟩ (m_ig·m_lr)(m_ih·m_ls)
            inner = torch.einsum("iuv,lwv->iluw", flat[rows], flat)
            inner = inner.unflatten(3, (heads, heads)).unflatten(2, (heads, heads))
            dots = torch.einsum("iga,lra->ilgr", self._means[rows], self._means)
            total += torch.einsum("ilghrs,ilgr,ilhs->", inner, dots, dots)
        return total

    def _product(self, columns: Tensor) -> Tensor:
        width, value_width = self._means.shape[-1], self._curvature.shape[-1]
        V = columns.view(width, value_width, -1)
        moved = torch.einsum("nha,aek->nhek", self._means, V)
        back = torch.einsum("nghpe,nhek->ngpk", self._curvature, moved)
        return torch.einsum("nga,ngpk->apk", self._means, back).reshape(columns.shape)
