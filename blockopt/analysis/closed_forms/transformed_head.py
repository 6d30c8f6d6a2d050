"""A head whose queries and keys are rotated by their positions (RoPE) or normalized (QK-norm).

The score is `T_ij = scale · q_i·k_j` with `q_i = R_i N(W_Qᵀ x_i)` and `k_j = R_j N(W_Kᵀ x_j)`. With
the Jacobians `Q_i`, `K_j` of q_i and k_j by what comes before norm and rotation:

    ∂T_ij / ∂W_Q[a, b] = scale · x_i[a] (Q_iᵀ k_j)[b]
    ∂T_ij / ∂W_K[a, b] = scale · x_j[a] u_ij[b],           u_ij = K_jᵀ q_i

The first is still a vector of position i times a matrix over the keys, so query blocks keep their
form with `E_i` replaced by `Q_iᵀ E_i Q_i`. The second depends on j in both indices. For rotations
alone, `u_ij` is a sum over planes of `cos(jθ_f)` and `sin(jθ_f)` times vectors of position i; with
a norm it is no such sum. Here the features `x_j ⊗ u_ij` take the place of `x_j`, which covers both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.attention_head import ROLES, AttentionHead
from blockopt.analysis.closed_forms.jacobian_factors import Factor, Term, assemble


class TransformedHead(AttentionHead):
    """One head with rotary positions, norms of queries and keys, or both."""

    def key_covariance(self, a: str) -> Tensor:
        """Return `Cov_i(a, x ⊗ u_i)` under the attention of each position i, (B, L, p, d dk)."""
        feature = self.features[a]
        if self.softmax:
            apart = feature.unsqueeze(1) - self.means[a].unsqueeze(2)  # (B, i, j, p)
            apart = self.weights.unsqueeze(-1) * apart
        else:
            apart = self.visible.unsqueeze(-1) * feature.unsqueeze(1)
        return self._summed(apart)

    def factor(self, role: str) -> Factor:
        """Return the Jacobian by one weight."""
        if role == "key":
            return Factor(None, self.scale * self.key_covariance("value"), True, True)
        plain = super().factor(role)
        if role != "query":
            return plain
        assert plain.core is not None
        return plain._replace(core=plain.core @ self.queries.jacobian)

    def functional(self, row: str, column: str, g: Tensor, w: Tensor) -> Tensor:
        """Return `Σ_i g_i · ∂²F_i / ∂W_row ∂W_column` by the entries of both weights."""
        if ROLES.index(row) > ROLES.index(column):
            return self.functional(column, row, g, w).permute(2, 3, 0, 1)
        if column in ("query", "key"):
            return self.moment_part(row, column, w) + self.score_part(row, column, w)
        if row not in ("query", "key"):
            return super().functional(row, column, g, w)
        moved, other = ("x", self.before_output(g)) if column == "value" else ("value", g)
        if row == "query":
            covariance = self.scale * self.queries.jacobian.mT @ self.covariance("key", moved)
            return assemble(self.x, True, [Term(covariance, other, False)])
        covariance = self.scale * self.key_covariance(moved)
        block = torch.einsum("bipn,bie->npe", covariance, other)
        return block.view(self.x.shape[-1], -1, *block.shape[1:])

    def moment_part(self, row: str, column: str, w: Tensor) -> Tensor:
        """Return what the second derivative of softmax adds between queries and keys."""
        if (row, column) == ("key", "query"):
            return self.moment_part("query", "key", w).permute(2, 3, 0, 1)
        Q, factor = self.queries.jacobian, self.scale**2
        if row == column == "query":
            return assemble(self.x, True, [Term(self._query_moments(w), self.x, True)])
        width = self.x.shape[-1]
        shape = (width, Q.shape[-1], width, Q.shape[-1])
        if not self.softmax:
            return w.new_zeros(shape)
        mean, c = self._summed(self.weights.unsqueeze(-1)), self._summed(w.unsqueeze(-1))
        if row == "query":
            apart = self.key.unsqueeze(1) - (self.weights @ self.key).unsqueeze(2)
            moment = self._summed(w.unsqueeze(-1) * apart)
            moment = moment - (w @ self.key).unsqueeze(-1) * mean
            block = torch.einsum("bia,bipn->apn", self.x, Q.mT @ moment)
            return (factor * block).reshape(shape)
        K = self.keys.jacobian
        seen = torch.einsum("bij,bip,biq->bjpq", w, self.query, self.query)  # Σ_i w_ij q_i q_iᵀ
        squares = assemble(self.x, True, [Term(K.mT @ seen @ K, self.x, True)])
        mean, c = mean.flatten(0, 2), c.flatten(0, 2)
        cross = (mean.mT @ c).view(shape)
        return factor * (squares - cross - cross.permute(2, 3, 0, 1))

    def score_part(self, row: str, column: str, w: Tensor) -> Tensor:
        """Return `Σ_ij w_ij ∂²T_ij` between queries and keys.

        Between both it is there since the scores hold their product, and for one of them twice if
        it has a norm.
        """
        if (row, column) == ("key", "query"):
            return self.score_part("query", "key", w).permute(2, 3, 0, 1)
        if row == column:
            return assemble(self.x, True, [Term(self.second_derivative(row, w), self.x, True)])
        Q, K, x = self.queries.jacobian, self.keys.jacobian, self.x
        by_query, by_key = (
            (x[:, :, None, :, None] * t.unsqueeze(3)).flatten(3) for t in (Q, K)
        )  # (B, L, dk, d dk)
        pulled = (w.mT @ by_query.flatten(2)).view(by_query.shape)
        block = self.scale * pulled.flatten(0, 2).mT @ by_key.flatten(0, 2)
        width = x.shape[-1]
        return block.view(width, Q.shape[-1], width, Q.shape[-1])

    def second_derivative(self, role: str, w: Tensor) -> Tensor:
        """Return the second derivative of `Σ_ij w_ij T_ij` by each query, or key, (B, L, dk, dk).

        That is before norm and rotation.
        """
        if role == "query":
            found = self.queries.hessian(self.scale * w @ self.key)
        else:
            found = self.keys.hessian(self.scale * w.mT @ self.query)
        return torch.zeros_like(self.queries.jacobian) if found is None else found

    def functional_matrices(self, row: str, column: str, w: Tensor) -> Tensor:
        """Return what is added to `C_iᵀ Λ_i C_i` in the block of the queries, (B, L, dk, dk)."""
        assert row == column == "query"
        return self._query_moments(w) + self.second_derivative("query", w)

    def _query_moments(self, w: Tensor) -> Tensor:
        Q = self.queries.jacobian
        return self.scale**2 * Q.mT @ self.third_moment(w, "key", "key") @ Q

    def _summed(self, a: Tensor) -> Tensor:
        """Return `Σ_j a_ij (x_j ⊗ u_ij)ᵀ`, (B, L, p, d dk), for a of shape (B, L, L, p)."""
        K, x = self.keys.jacobian, self.x
        u = torch.einsum("bip,bjpq->bijq", self.query, K)
        products = (a.unsqueeze(-1) * u.unsqueeze(-2)).flatten(3)  # (B, i, j, p dk)
        sums = products.mT @ x.unsqueeze(1)  # (B, i, p dk, d)
        by_entry = sums.view(*sums.shape[:2], a.shape[-1], -1, x.shape[-1])
        return by_entry.transpose(-1, -2).flatten(3)
