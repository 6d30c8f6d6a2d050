"""The exact Hessian of the loss of one self-attention layer, every pair of weights, in closed form."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from blockopt.analysis.attention_map import Activation, AttentionMap, Factor, Parametrization, outer_block
from blockopt.analysis.factored_attention import KeyMatrices, KroneckerSum, Matrices
from blockopt.analysis.output_loss import OutputLoss, SquaredError

__all__ = ["AttentionMap", "Part", "SelfAttentionHessian"]

Part = Literal["outer", "functional", "full", "score_outer", "score_functional"]
PARTS = ("outer", "functional", "full", "score_outer", "score_functional")


class SelfAttentionHessian:
    """`H = H_o + H_f` of `ℓ(F(X))` for self-attention F: Theorems 3.1 and 3.2 of the ICLR 2025 paper, and more.

    With Λ_i and g_i the Hessian and the gradient of the loss in `F_i`, bars and covariances under the attention `A_i`,
    `C_i = Cov_i(v, k)`, `D_i = Cov_i(v, x)` and `w_ij = A_ij (g_i·v_j - mean)`, the diagonal blocks are

        H(Q,Q) = scale² Σ_i x_i x_iᵀ ⊗ (C_iᵀ Λ_i C_i + Σ_j w_ij (k_j - k̄_i)(k_j - k̄_i)ᵀ)
        H(K,K) = scale² Σ_i (D_iᵀ Λ_i D_i + Σ_j w_ij (x_j - m_i)(x_j - m_i)ᵀ) ⊗ q_i q_iᵀ
        H(V,V) = Σ_i m_i m_iᵀ ⊗ Λ_i

    The first summand is the outer product (Gauss-Newton) part H_o, the second the functional part H_f. They equal the paper's
    Kronecker forms, which are exact as printed for Theorems 3.1 and 3.2, Remarks 3.1 and 4.1, with any mask. In print, however,
    Lemma 4.1 (single matrix) and Remark D.1 (the split at the scores) lack the factor `2 / (L d_V)`, and Remark D.1 has the
    weights in the order K, Q: for `[W_Q; W_K]`, B is upper right and Bᵀ lower left.

    Parts: "outer" and "functional" split at the output F, "score_outer" and "score_functional" at the scores T (Appendix D):
    the latter is `B ⊗ I` between query and key, and zero elsewhere, the former the rest of the query and key blocks.

    Args:
        X: Tokens, (L, d) or (B, L, d).
        W_Q: Query weights, (d, dk), or (H, d, dk) for H heads; for "single" the matrix W_QK.
        W_K: Key weights; None for "single".
        W_V: Value weights, (d, dv) or (H, d, dv).
        Y: Target of the squared error, of the shape of the output. Either this or `loss`.
        loss: `SquaredError(Y)` or `CrossEntropy(W, targets)` on top of the layer.
        W_U: Output matrix of each head, (dv, d_out) or (H, dv, d_out); see `AttentionMap`.
        mask: See `AttentionMap`.
        scale: Of the scores; `1 / sqrt(dk)` by default, 1 for "single". A temperature t divides it: `score_outer` blocks go as
            `1 / t²`, `score_functional` ones as `1 / t`, at given attention weights.
        activation: "softmax" or "linear".
        parametrization: "query_key" or "single".

    Example:
        >>> X, W = torch.eye(2), torch.eye(2)
        >>> hessian = SelfAttentionHessian(X, W, W, W, Y=torch.zeros(2, 2))
        >>> hessian.dense().shape
        torch.Size([12, 12])
        >>> float(hessian.block("value", "value", part="functional").abs().max())
        0.0
    """

    def __init__(
        self,
        X: Tensor,
        W_Q: Tensor,
        W_K: Tensor | None,
        W_V: Tensor,
        Y: Tensor | None = None,
        *,
        loss: OutputLoss | None = None,
        W_U: Tensor | None = None,
        mask: Tensor | None = None,
        scale: float | None = None,
        activation: Activation = "softmax",
        parametrization: Parametrization = "query_key",
    ) -> None:
        if (Y is None) == (loss is None):
            raise ValueError("Give either Y, the target of the squared error, or loss=CrossEntropy(...) or SquaredError(...).")
        self.attention = AttentionMap(
            X, W_Q, W_K, W_V, W_U=W_U, mask=mask, scale=scale, activation=activation, parametrization=parametrization
        )
        self.loss: OutputLoss = SquaredError(Y.to(self.attention.X)) if loss is None else loss  # type: ignore[union-attr]
        self.roles, self.num_heads = self.attention.roles, self.attention.num_heads
        self.gradient_of_output = self.loss.gradient(self.attention.output)

    def value(self) -> Tensor:
        """The loss."""
        return self.loss.value(self.attention.output)

    def block(self, row: str, column: str, part: Part = "full", heads: tuple[int, int] | None = None) -> Tensor:
        """One block: second derivatives by the weights of two roles, row-major.

        Args:
            row: A role: "query", "key", "value", "output"; "query_key" for a single matrix.
            column: Another, or the same.
            part: Which summand.
            heads: The head of each; all heads one after the other by default, (H n_row, H n_column).
        """
        if part not in PARTS:
            raise ValueError(f"Invalid part={part!r}. Must be one of {', '.join(PARTS)}.")
        sizes = self.attention.size(row), self.attention.size(column)
        if heads is not None:
            return self._block(row, column, part, *heads)
        if self.num_heads == 1:
            return self._block(row, column, part, 0, 0)
        number = range(self.num_heads)
        rows = [torch.cat([self._block(row, column, part, h, other) for other in number], 1) for h in number]
        assert rows[0].shape == (sizes[0], self.num_heads * sizes[1])
        return torch.cat(rows)

    def dense(self, part: Part = "full") -> Tensor:
        """The whole matrix, roles in the order query, key, value, output, each row-major (and by head)."""
        sizes = [self.num_heads * self.attention.size(role) for role in self.roles]
        offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        whole = self.attention.X.new_empty(sum(sizes), sum(sizes))
        for i, row in enumerate(self.roles):
            for j, column in enumerate(self.roles[i:], start=i):
                block = self.block(row, column, part)
                rows, columns = slice(offsets[i], offsets[i] + sizes[i]), slice(offsets[j], offsets[j] + sizes[j])
                whole[rows, columns] = block
                if i != j:
                    whole[columns, rows] = block.mT
        return whole

    def factored(self, role: str, head: int = 0, part: Part = "full") -> KroneckerSum:
        """A diagonal block as an operator that is never built: trace, diagonal, Frobenius norm, products with vectors.

        Args:
            role: Of the weight.
            head: Of which head.
            part: "outer" or "full"; "functional" for query and key.
        """
        if part not in ("outer", "functional", "full"):
            raise ValueError(f"Invalid part={part!r}. A factored block has outer, functional and full.")
        self.attention.size(role)
        one = self.attention.heads[head]
        inner = self.gradient_of_output if one.W_U is None else self.gradient_of_output @ one.W_U.mT
        if role == "key":
            return KroneckerSum(one.query.flatten(0, 1), KeyMatrices(one, self._curvature(head, head), inner, part), False)
        if role in ("value", "output"):
            factor = one.factor(role)
            curvature = self._curvature(head, head) if role == "value" else self.loss.curvature(self.attention.output)
            matrices = torch.zeros_like(curvature) if part == "functional" else curvature
            return KroneckerSum(factor.vector.flatten(0, 1), Matrices(matrices), True)
        matrices = self.attention.X.new_zeros(())
        if part != "functional":
            C = one.covariance(one.value, one.key)
            matrices = C.mT @ self._curvature(head, head) @ C
        if part != "outer":
            matrices = matrices + one.third_moment(one.score_gradient(inner), one.key, one.key)
        return KroneckerSum(one.x.flatten(0, 1), Matrices(one.scale**2 * matrices), True)

    def score_functional_spectrum(self, head: int = 0) -> Tensor:
        """Eigenvalues of the "score_functional" part: ± the singular values of `scale · B`, dk times each.

        `B = Σ_i x_i (D_iᵀ g_i)ᵀ`, not symmetric. In print (Remark D.1) the factor of the loss is missing from it.
        """
        self._query_key()
        values = torch.linalg.svdvals(self.attention.heads[head].score_mixed(self.gradient_of_output))
        return torch.cat([values, -values]).repeat_interleave(self.attention.shapes["query"][1]).sort().values

    def score_outer_rank_bound(self, head: int = 0) -> int:
        """A bound on the rank of the "score_outer" part: Lemma D.2, and a sharper one where sequences are short.

        Lemma D.2 gives `2 dk d - dk²` for dk < d, and d² else. The part is also a sum over positions i of matrices of rank
        `min(d, n_i - 1)` at most, if i sees n_i tokens: only differences between tokens count.
        """
        self._query_key()
        width, key_width = self.attention.shapes["query"]
        lemma = 2 * key_width * width - key_width**2 if key_width < width else width**2
        one = self.attention.heads[head]
        seen = one.visible.sum(-1) - (1 if one.softmax else 0)
        return min(lemma, int(seen.clamp(max=width).sum()))

    def _query_key(self) -> None:
        if "key" not in self.roles:
            raise ValueError("Queries and keys are one matrix here: there is no functional part at the scores.")

    def _curvature(self, head: int, other: int) -> Tensor:
        """`W_U Λ_i W_Uᵀ` between what two heads put out, (B, L, dv, dv)."""
        return self.loss.curvature(self.attention.output, self.attention.heads[head].W_U, self.attention.heads[other].W_U)

    def _block(self, row: str, column: str, part: Part, head: int, other: int) -> Tensor:
        size = self.attention.size(row), self.attention.size(column)
        total = self.attention.X.new_zeros(size)
        at_scores = head == other and {row, column} == {"query", "key"}
        scores = {"query", "key", "query_key"}
        if part.startswith("score"):
            if not scores.issuperset((row, column)):
                raise ValueError(
                    f"Invalid part={part!r} for {row!r}, {column!r}: at the scores there are queries and keys only."
                )
            functional = self._score_functional(row, head) if at_scores else total
            return functional if part == "score_functional" else self._block(row, column, "full", head, other) - functional
        if part != "functional":
            left, right = self.attention.heads[head].factor(row), self.attention.heads[other].factor(column)
            total = outer_block(left, right, self._curvature_between(left, right, head, other))
        if part != "outer" and head == other:
            total = total + self.attention.heads[head].functional(row, column, self.gradient_of_output)
        return total

    def _curvature_between(self, left: Factor, right: Factor, head: int, other: int) -> Tensor:
        heads = self.attention.heads
        ends = heads[head].W_U if left.projected else None, heads[other].W_U if right.projected else None
        return self.loss.curvature(self.attention.output, *ends)

    def _score_functional(self, row: str, head: int) -> Tensor:
        mixed = self.attention.heads[head].score_mixed(self.gradient_of_output)
        identity = torch.eye(self.attention.shapes["query"][1], dtype=mixed.dtype, device=mixed.device)
        return torch.kron(mixed if row == "query" else mixed.mT.contiguous(), identity)
