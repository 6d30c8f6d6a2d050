"""The exact Hessian of the loss of one self-attention layer in closed form."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.attention_head import ROLES, SCORE_ROLES
from blockopt.analysis.closed_forms.attention_map import Activation, AttentionMap, Parametrization
from blockopt.analysis.closed_forms.checks import check_number
from blockopt.analysis.closed_forms.factored_attention import factored_attention
from blockopt.analysis.closed_forms.factored_block import FactoredBlock
from blockopt.analysis.closed_forms.jacobian_factors import (
    Factor,
    Term,
    add_on_diagonal,
    assemble,
    outer_block,
    outer_matrices,
)
from blockopt.analysis.closed_forms.output_loss import OutputLoss, SquaredError
from blockopt.analysis.closed_forms.rotary_positions import RotaryPositions
from blockopt.analysis.closed_forms.score_vectors import HeadNorm
from blockopt.analysis.closed_forms.transformed_head import TransformedHead
from blockopt.analysis.closed_forms.transformer_sites import between
from blockopt.analysis.memory import check_memory
from blockopt.checks import check_choice

__all__ = ["AttentionMap", "Part", "SelfAttentionHessian"]

Part = Literal["outer", "functional", "full", "score_outer", "score_functional"]
Place = tuple[str, int]  # role and head


class SelfAttentionHessian:
    """`H = H_o + H_f` of `ℓ(F(X))` for self-attention F, for every pair of weights.

    It holds Theorems 3.1 and 3.2 of the ICLR 2025 paper, and more. With Λ_i and g_i the Hessian and
    the gradient of the loss in `F_i`, bars and covariances under the attention `A_i`,
    `C_i = Cov_i(v, k)`, `D_i = Cov_i(v, x)` and `w_ij = A_ij (g_i·v_j - mean)`, the diagonal blocks
    are

        H(Q,Q) = scale² Σ_i x_i x_iᵀ ⊗ (C_iᵀ Λ_i C_i + Σ_j w_ij (k_j - k̄_i)(k_j - k̄_i)ᵀ)
        H(K,K) = scale² Σ_i (D_iᵀ Λ_i D_i + Σ_j w_ij (x_j - m_i)(x_j - m_i)ᵀ) ⊗ q_i q_iᵀ
        H(V,V) = Σ_i m_i m_iᵀ ⊗ Λ_i

    The first summand is the outer product (Gauss-Newton) part H_o, the second the functional part
    H_f. They equal the paper's Kronecker forms, which are exact as printed for Theorems 3.1 and
    3.2, Remarks 3.1 and 4.1, with any mask. In print, however, Lemma 4.1 (single matrix) and Remark
    D.1 (the split at the scores) lack the factor `2 / (L d_V)`, and Remark D.1 has the weights in
    the order K, Q: for `[W_Q; W_K]`, B is upper right and Bᵀ lower left.

    The parts "outer" and "functional" split H at the output F, "score_outer" and "score_functional"
    at the scores T (Appendix D). "score_functional" is `B ⊗ I` between query and key and zero
    elsewhere; "score_outer" is the rest of the query and key blocks.

    Args:
        X: Tokens, (L, d) or (B, L, d).
        W_Q: Query weights, (d, dk), or (H, d, dk) for H heads; for "single" the matrix W_QK.
        W_K: Key weights, (d, dk), or (G, d, dk) if the heads share them in G groups; None for
            "single".
        W_V: Value weights, (d, dv) or (G, d, dv).
        Y: Target of the squared error, of the shape of the output. Either this or `loss`.
        loss: `SquaredError(Y)` or `CrossEntropy(W, targets)` on top of the layer.
        W_U: Output matrix of each head, (dv, d_out) or (H, dv, d_out); see `AttentionMap`.
        mask: See `AttentionMap`.
        scale: The factor of the scores; `1 / sqrt(dk)` by default, 1 for "single". A temperature t
            divides it: at given attention weights, `score_outer` blocks fall as `1 / t²` and
            `score_functional` ones as `1 / t`.
        activation: "softmax" or "linear".
        parametrization: "query_key" or "single".
        biases: Constants added to "query", "key", "value" and "output"; see `AttentionMap`.
        rotary: Rotations of queries and keys by their positions (RoPE).
        norms: Norms of "query" and "key" (QK-norm); see `AttentionMap`.

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
        biases: Mapping[str, Tensor] | None = None,
        rotary: RotaryPositions | None = None,
        norms: Mapping[str, HeadNorm] | None = None,
    ) -> None:
        if (Y is None) == (loss is None):
            raise ValueError(
                "Give either Y, the target of the squared error, or loss=CrossEntropy(...) or "
                "SquaredError(...)."
            )
        self.attention = AttentionMap(
            *(X, W_Q, W_K, W_V),
            W_U=W_U,
            mask=mask,
            scale=scale,
            activation=activation,
            parametrization=parametrization,
            biases=biases,
            rotary=rotary,
            norms=norms,
        )
        if loss is None:
            assert Y is not None
            loss = SquaredError(Y.to(self.attention.X))
        self.loss = loss
        self.roles, self.num_heads = self.attention.roles, self.attention.num_heads
        self.counts = self.attention.counts
        self.gradient_of_output = self.loss.gradient(self.attention.output)
        heads = self.attention.heads
        self.score_gradients = [
            head.score_gradient(head.before_output(self.gradient_of_output)) for head in heads
        ]

    def value(self) -> Tensor:
        """Return the loss."""
        return self.loss.value(self.attention.output)

    def block(
        self, row: str, column: str, part: Part = "full", heads: tuple[int, int] | None = None
    ) -> Tensor:
        """Return the second derivatives by the weights of two roles, each row-major.

        Args:
            row: A role: "query", "key", "value", "output"; "query_key" for a single matrix; or
                "input" for all tokens X. Only "outer", "functional" and "full" have that.
            column: Another, or the same.
            part: Which part of the Hessian.
            heads: The head of each; by default all heads one after another, (H n_row, H n_column).
                Keys and values that heads share are counted by group: `counts` has their number.
        """
        check_choice("part", part, get_args(Part))
        if "input" in (row, column):
            return self._input_block(row, column, part)
        for role in (row, column):
            self.attention.size(role)  # raises if there is none
        if heads is not None and (not isinstance(heads, tuple) or len(heads) != 2):
            raise ValueError(
                f"Invalid heads={heads!r}. Must be two numbers, one for the row and one for the "
                "column."
            )
        for role, head in zip((row, column), heads or ()):
            check_number("head", head, self.counts[role])
        every = {role: range(self.counts[role]) for role in (row, column)}
        rows = [(row, head) for head in (every[row] if heads is None else heads[:1])]
        columns = [(column, head) for head in (every[column] if heads is None else heads[1:])]
        factors = self._factors({*rows, *columns})
        sizes, X = (self.attention.size(row), self.attention.size(column)), self.attention.X
        check_memory(len(rows) * sizes[0], len(columns) * sizes[1], X.dtype, X.device)

        def of_row(one: Place) -> Tensor:
            found = [self._block(one, other, factors, part) for other in columns]
            return torch.cat([block.reshape(sizes) for block in found], 1)

        return torch.cat([of_row(one) for one in rows])

    def dense(self, part: Part = "full") -> Tensor:
        """Return the whole matrix by role, by head, and row-major within a weight.

        Raises:
            ValueError: If it does not fit into memory; `factored` does.
        """
        check_choice("part", part, get_args(Part))
        places = [(role, n) for role in self.roles for n in range(self.counts[role])]
        factors, X = self._factors(places), self.attention.X
        offsets = [0, *itertools.accumulate(self.attention.size(role) for role, _ in places)]
        check_memory(offsets[-1], offsets[-1], X.dtype, X.device)
        whole = X.new_empty(offsets[-1], offsets[-1])
        scratch = X.new_empty(max(self.attention.size(role) for role in self.roles) ** 2)
        for (i, left), (j, right) in itertools.combinations_with_replacement(enumerate(places), 2):
            rows, columns = slice(offsets[i], offsets[i + 1]), slice(offsets[j], offsets[j + 1])
            block = self._block(left, right, factors, part, scratch)
            target = whole[rows, columns]
            target.unflatten(1, block.shape[2:]).unflatten(0, block.shape[:2]).copy_(block)
            if i != j:
                _copy_transposed(target, whole[columns, rows])
        return whole

    def factored(self, role: str, head: int = 0, part: Part = "full") -> FactoredBlock:
        """Return a diagonal block as an operator that is never built.

        It has a trace, a diagonal, a Frobenius norm and products with vectors.

        Args:
            role: The role of the weight.
            head: The number of the head, or of the group for keys and values that heads share.
            part: "outer", "functional" or "full".
        """
        check_choice("part", part, ("outer", "functional", "full"))
        self.attention.size(role)
        check_number("head", head, self.counts[role])
        return factored_attention(self.attention, self.loss, self.score_gradients, role, head, part)

    def score_functional_spectrum(self, head: int = 0) -> Tensor:
        """Return the eigenvalues of the "score_functional" part, ascending.

        They are ± the singular values of `scale · B`, dk times each, with
        `B = Σ_i x_i (D_iᵀ g_i)ᵀ`, which is not symmetric. Remark D.1 lacks the factor of the loss.
        """
        self._query_key(head)
        mixed = self.attention.heads[head].score_mixed(self.score_gradients[head])
        values = torch.linalg.svdvals(mixed)
        both = torch.cat([values, -values]).repeat_interleave(self.attention.shapes["query"][1])
        return both.sort().values

    def score_outer_rank_bound(self, head: int = 0) -> int:
        """Return a bound on the rank of the "score_outer" part.

        Lemma D.2 gives `2 dk d - dk²` for dk < d, and d² otherwise: scores do not change if queries
        and keys are transformed against each other. A bias of the queries leaves fewer such
        transformations, which gives `2 dk d - dk (dk - 1)` and d² + d. Softmax does not see a bias
        of the keys; linear attention does. The part is also a sum over positions i of
        matrices of rank at most `min(d, n_i - 1)`, if i sees n_i tokens, since only differences
        between tokens count. That is sharper for short sequences.
        """
        self._query_key(head)
        width, key_width = self.attention.shapes["query"]
        biased = self.attention.biased
        # Transformations that leave the scores alone, and products of (biased) queries and keys
        free = (key_width**2, key_width * (key_width - 1), (key_width - 1) ** 2)[len(biased)]
        products = (width**2, width**2 + width, (width + 1) ** 2 - 1)[len(biased)]
        lemma = 2 * key_width * width - free if key_width < width else products
        one = self.attention.heads[head]
        seen = one.visible.sum(-1) - int(one.softmax)
        apart = width + int("key" in biased)
        return min(lemma, int(seen.clamp(max=apart).sum()))

    def _input_block(self, row: str, column: str, part: Part) -> Tensor:
        """Return a block whose rows, columns or both are the tokens."""
        if row != "input":
            return self._input_block(column, row, part).mT
        check_choice("part", part, ("outer", "functional", "full"))
        attention = self.attention
        total = attention.X.new_zeros(())
        if part != "functional":
            rows = attention.input_jacobian()
            columns = rows if column == "input" else attention.jacobian(column)
            curvature = self.loss.curvature(attention.output).flatten(0, 1)
            total = between(rows, curvature, columns)
        if part != "outer":
            total = total + attention.input_functional(column, self.gradient_of_output)
        return total

    def _query_key(self, head: int) -> None:
        check_number("head", head, self.num_heads)
        if "key" not in self.roles:
            raise ValueError(
                "Queries and keys are one matrix here: there is no functional part at the scores."
            )
        if self.attention.transformed or self.counts["key"] < self.num_heads:
            raise ValueError(
                "This closed form is for heads with keys of their own, neither rotated nor "
                "normalized. Build the part with `block` and decompose it."
            )

    def _factors(self, places: Iterable[Place]) -> dict[Place, Factor]:
        """Return the Jacobians of each role and head that use these weights."""
        used = [(role, h) for role, n in places for h in self.attention.heads_of(role, n)]
        return {(role, h): self.attention.heads[h].factor(role) for role, h in used}

    def _block(
        self,
        left: Place,
        right: Place,
        factors: Mapping[Place, Factor],
        part: Part,
        scratch: Tensor | None = None,
    ) -> Tensor:
        """Return the block of two weights by the entries of both; `scratch` has room for it.

        For weights that heads share, it is the sum of the blocks between these heads.
        """
        at_scores = left[0] in SCORE_ROLES and right[0] in SCORE_ROLES
        if part.startswith("score") and not at_scores:
            raise ValueError(
                f"Invalid part={part!r} for {left[0]!r}, {right[0]!r}: at the scores there are "
                "queries and keys only."
            )
        one, two = (
            [(role, h) for h in self.attention.heads_of(role, n)] for role, n in (left, right)
        )
        pairs = list(itertools.product(one, two))
        if self.attention.transformed:
            blocks = [self._between_transformed(*pair, factors, part) for pair in pairs]
        elif len(pairs) == 1:
            return self._between(left, right, factors, part, scratch)
        else:
            blocks = [self._between(*pair, factors, part, None) for pair in pairs]
        return torch.stack(blocks).sum(0)

    def _between(
        self,
        left: Place,
        right: Place,
        factors: Mapping[Place, Factor],
        part: Part,
        scratch: Tensor | None,
    ) -> Tensor:
        """Return the block of the weights of two heads."""
        (row, head), (column, other) = left, right
        if ROLES.index(row) > ROLES.index(column):
            return self._between(right, left, factors, part, scratch).permute(2, 3, 0, 1)
        one, w, same = self.attention.heads[head], self.score_gradients[head], head == other
        factor, terms = factors[left], []
        if part in ("outer", "full", "score_outer"):
            curvature = self._curvature_between(left, right, factors)
            matrices = outer_matrices(factor, factors[right], curvature)
            terms = [_term(matrices, factors[right])]
        at_rows = same and row in SCORE_ROLES and part not in ("outer", "score_functional")
        if at_rows:  # both parts have the same vector in the rows: one sum for both
            terms.append(one.functional_term(row, column, self.gradient_of_output, w))
        if terms:
            assert factor.vector is not None
            entries = assemble(factor.vector, factor.vector_first, terms, scratch)
        else:
            entries = w.new_zeros(self.attention.shapes[row] + self.attention.shapes[column])
        if same and (row, column) == ("query", "key") and part not in ("outer", "score_outer"):
            add_on_diagonal(entries, one.score_mixed(w))
        if same and (row, column) == ("value", "output") and part in ("functional", "full"):
            entries += one.functional(row, column, self.gradient_of_output, w)
        return entries

    def _between_transformed(
        self, left: Place, right: Place, factors: Mapping[Place, Factor], part: Part
    ) -> Tensor:
        """Return the block of the weights of two heads with rotated or normalized keys."""
        (row, head), (column, other) = left, right
        shape = self.attention.shapes[row] + self.attention.shapes[column]
        entries = self.attention.X.new_zeros(shape)
        if part in ("outer", "full", "score_outer"):
            curvature = self._curvature_between(left, right, factors)
            entries += outer_block(factors[left], factors[right], curvature, shape)
        if head != other or part == "outer":
            return entries
        one, w = self.attention.heads[head], self.score_gradients[head]
        assert isinstance(one, TransformedHead)
        if part in ("functional", "full"):
            entries += one.functional(row, column, self.gradient_of_output, w)
        elif part == "score_outer":
            entries += one.moment_part(row, column, w)
        else:
            entries += one.score_part(row, column, w)
        return entries

    def _curvature_between(
        self, left: Place, right: Place, factors: Mapping[Place, Factor]
    ) -> Tensor:
        """Return Λ_i between the outputs of two heads, before their output matrices."""
        ends = [
            self.attention.heads[place[1]].W_U if factors[place].projected else None
            for place in (left, right)
        ]
        return self.loss.curvature(self.attention.output, *ends)


def _term(matrices: Tensor, right: Factor) -> Term:
    assert right.vector is not None
    return Term(matrices, right.vector, right.vector_first)


def _copy_transposed(source: Tensor, target: Tensor) -> None:
    """Write the transpose of a matrix, some rows at a time: small contiguous pieces are faster."""
    step = max(64, 2**16 // source.shape[1])
    for start in range(0, len(source), step):
        piece = source[start : start + step].contiguous()
        target[:, start : start + step] = piece.mT.contiguous()
