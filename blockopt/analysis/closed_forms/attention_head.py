"""One attention head, softmax or linear, and the derivatives of its output by its weights.

A head maps the tokens `x_i` to `F_i = Σ_j A_ij v_j` with `A = softmax(scale · q kᵀ)`, `q = X W_Q`,
`k = X W_K`, `v = X W_V`. The score of i and j enters through `A_i` alone, so every derivative is an
average under `A_i` (bars; Cov_i is the covariance):

    ∂F_i / ∂W_Q[a, b] = scale · x_i[a] Cov_i(v, k)[:, b]
    ∂F_i / ∂W_K[a, b] = scale · Cov_i(v, x)[:, a] q_i[b]
    ∂F_i / ∂W_V[a, b] = m_i[a] e_b,                        m_i = x̄_i

each the product of a vector, over one index of the weight, and a small matrix, over the other. The
papers' Kronecker forms (Theorems 3.1 and 3.2 of Ormaniec, Dangel and Singh, ICLR 2025) are sums
over i of these products. Linear attention, `A = scale · q kᵀ` without softmax, has sums over the
visible tokens instead of covariances.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.banded_product import banded_product, last_seen
from blockopt.analysis.closed_forms.jacobian_factors import (
    Factor,
    Term,
    add_on_diagonal,
    assemble,
)
from blockopt.analysis.closed_forms.rotary_positions import RotaryPositions
from blockopt.analysis.closed_forms.score_vectors import HeadNorm, ScoreVectors

ROLES = ("query", "query_key", "key", "value", "output")
SCORE_ROLES = ("query", "query_key", "key")


class HeadWeights(NamedTuple):
    """The weights of one head, as used on the right of the tokens.

    Attributes:
        query: (d, dk), or the single matrix W_QK, (d, d).
        key: (d, dk), or None for a single matrix: the keys are the tokens then.
        value: (d, dv).
        output: (dv, d_out), or None.
        biases: What is added to queries, keys and values, each (dk,) or (dv,), or 0.
    """

    query: Tensor
    key: Tensor | None
    value: Tensor
    output: Tensor | None
    biases: tuple[Tensor | float, Tensor | float, Tensor | float]


class Scoring(NamedTuple):
    """How queries and keys become scores, and scores attention.

    Attributes:
        visible: Whether a position sees another, bool, (B, L, L).
        added: What is added to the scores, (B, L, L), or None.
        scale: The factor of the scores.
        softmax: Whether attention is the softmax of the scores, rather than the scores themselves.
        query_norm: The norm of the queries, or None.
        key_norm: The norm of the keys, or None.
        rotary: The rotations of queries and keys by their positions, or None.
    """

    visible: Tensor
    added: Tensor | None
    scale: float
    softmax: bool
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    rotary: RotaryPositions | None = None


class AttentionHead:
    """One head on a batch of sequences.

    Args:
        X: Tokens, (B, L, d).
        weights: The weights of the head.
        scoring: How scores become attention.
    """

    def __init__(self, X: Tensor, weights: HeadWeights, scoring: Scoring) -> None:
        by_query, by_key, by_value = weights.biases
        self.x, self.value = X, X @ weights.value + by_value
        keys = X if weights.key is None else X @ weights.key + by_key
        queries = X @ weights.query + by_query
        self.queries = ScoreVectors(queries, scoring.query_norm, scoring.rotary)
        self.keys = ScoreVectors(keys, scoring.key_norm, scoring.rotary)
        self.query, self.key = self.queries.value, self.keys.value
        self.W_Q, self.W_K = weights.query, weights.key
        self.W_V, self.W_U = weights.value, weights.output
        self.visible, added, self.scale, self.softmax = scoring[:4]
        self.last_seen = last_seen(self.visible)
        scores = self.scale * self.query @ self.key.mT
        scores = scores if added is None else scores + added
        if self.softmax:
            self.weights = scores.masked_fill(~self.visible, -math.inf).softmax(-1)
        else:
            self.weights = scores * self.visible
        self.first_moment = self.weights @ X
        # Derivatives of softmax do not see a common shift. Without it, tokens keep their digits if
        # they differ little from each other, or if nearly all attention is on a few large ones.
        self.features = {"x": X, "key": self.key, "value": self.value}
        if self.softmax:
            self.features = {name: f - self._attended(f) for name, f in self.features.items()}
        self.means = {name: self.weights @ f for name, f in self.features.items()}

    @property
    def output(self) -> Tensor:
        """The output of the head, (B, L, d_out)."""
        mixed = self.weights @ self.value
        return mixed if self.W_U is None else mixed @ self.W_U

    def covariance(self, a: str, b: str) -> Tensor:
        """Return `Cov_i(a, b)` under the attention of each position i, (B, L, p, r).

        It is `Σ_jl a_j (∂A_ij / ∂T_il) b_lᵀ` for scores T, and `Σ_j a_j b_jᵀ` for linear attention.

        Args:
            a: "x", "key" or "value".
            b: Another, or the same.
        """
        if not self.softmax:
            return self._sum_of_products(self.visible.to(self.x), a, b)
        products = self._sum_of_products(self.weights, a, b)
        return products - self.means[a].unsqueeze(-1) * self.means[b].unsqueeze(-2)

    def score_gradient(self, g: Tensor) -> Tensor:
        """Return `w_ij`, the derivative of `Σ_i g_i · F_i` by each score, (B, L, L).

        Here g is before the output matrix, (B, L, dv).
        """
        direct = g @ self.features["value"].mT
        if not self.softmax:
            return direct * self.visible
        return self.weights * (direct - (g * self.means["value"]).sum(-1, keepdim=True))

    def third_moment(self, w: Tensor, a: str, b: str) -> Tensor:
        """Return `Σ_j w_ij (a_j - ā_i)(b_j - b̄_i)ᵀ`, (B, L, p, r), or 0 for linear attention.

        w is a `score_gradient`.
        """
        left, right = self.features[a], self.features[b]
        if not self.softmax:
            return w.new_zeros(*w.shape[:2], left.shape[-1], right.shape[-1])
        # The w_ij of i sum to 0, so there is no product of both means.
        cross = (w @ left).unsqueeze(-1) * self.means[b].unsqueeze(-2)
        if a == b:
            cross = cross + cross.mT
        else:
            cross = cross + self.means[a].unsqueeze(-1) * (w @ right).unsqueeze(-2)
        return self._sum_of_products(w, a, b) - cross

    def factor(self, role: str) -> Factor:
        """Return the Jacobian by one weight."""
        if role in ("query", "query_key"):
            return Factor(self.x, self.scale * self.covariance("value", "key"), True, True)
        if role == "key":
            return Factor(self.query, self.scale * self.covariance("value", "x"), False, True)
        if role == "value":
            return Factor(self.first_moment, None, True, True)
        return Factor(self.weights @ self.value, None, True, False)

    def functional(self, row: str, column: str, g: Tensor, w: Tensor) -> Tensor:
        """Return `Σ_i g_i · ∂²F_i / ∂W_row ∂W_column` by the entries of both weights.

        It is zero for one value or output matrix twice.

        Args:
            row: A role.
            column: Another, or the same.
            g: A gradient at the output of the layer, (B, L, d_out).
            w: `score_gradient` at it.
        """
        if ROLES.index(row) > ROLES.index(column):
            return self.functional(column, row, g, w).permute(2, 3, 0, 1)
        if row in SCORE_ROLES:
            vector = self.query if row == "key" else self.x
            block = assemble(vector, row != "key", [self.functional_term(row, column, g, w)])
            mixed = column in SCORE_ROLES and row != column
            return add_on_diagonal(block, self.score_mixed(w)) if mixed else block
        rows, columns = (
            self.W_V.shape if role == "value" else (self.W_V.shape[1], g.shape[-1])
            for role in (row, column)
        )
        block = g.new_zeros(*rows, *columns)
        if row != column:  # F is linear in the value and in the output matrix, and in their product
            mixed_entries = torch.einsum("bla,ble->ae", self.first_moment, g)
            block.diagonal(dim1=1, dim2=2).add_(mixed_entries.unsqueeze(-1))
        return block

    def functional_term(self, row: str, column: str, g: Tensor, w: Tensor) -> Term:
        """Return what the derivatives of softmax add to the block of queries or keys in `row`."""
        if column in SCORE_ROLES:
            vector = self.query if column == "key" else self.x
            return Term(self.functional_matrices(row, column, w), vector, column != "key")
        # The other weight multiplies m_i, or the head's output, which move with the scores.
        moved, other = ("x", self.before_output(g)) if column == "value" else ("value", g)
        covariance = self.covariance("x" if row == "key" else "key", moved)
        return Term(self.scale * covariance, other, False)

    def functional_matrices(self, row: str, column: str, w: Tensor) -> Tensor:
        """Return what the second derivative of softmax adds to `C_iᵀ Λ_i C_i`, (B, L, r, s)."""
        left, right = ("x" if role == "key" else "key" for role in (row, column))
        return self.scale**2 * self.third_moment(w, left, right)

    def _sum_of_products(self, w: Tensor, a: str, b: str) -> Tensor:
        """Return `Σ_j w_ij a_j b_jᵀ`, (B, L, p, r)."""
        left, right = self.features[a], self.features[b]
        products = (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(-2)
        sums = banded_product(w, products, self.last_seen)
        return sums.view(*w.shape[:2], left.shape[-1], right.shape[-1])

    def _attended(self, f: Tensor) -> Tensor:
        """Return what is seen on average, the mean of `A f` over positions, (B, 1, p)."""
        return self.weights.mean(1, keepdim=True) @ f

    def before_output(self, g: Tensor) -> Tensor:
        """Return a gradient at the output of the layer, taken back before the output matrix."""
        return g if self.W_U is None else g @ self.W_U.mT

    def score_mixed(self, w: Tensor) -> Tensor:
        """Return `scale · Σ_ij w_ij x_i x_jᵀ`, (d, d), between queries and keys.

        The functional query-key block has it because the scores hold the product `W_Q W_Kᵀ`.
        """
        return self.scale * (self.x.mT @ (w @ self.x)).sum(0)
