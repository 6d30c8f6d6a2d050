"""First and second derivatives of attention by its input X, all tokens at once.

The tokens enter through the scores `T_ij = scale · q_i·k_j` and the values `v_j`. With `S` and `V`
their derivatives by the input or by a weight, the output `F_i = Σ_j A_ij v_j` has

    ∂F_i = Σ_j A_ij (v_j - v̄_i) S_ij + Σ_j A_ij V_j
    Σ_i g_i·∂²F_i = Σ_i S_iᵀ B_i S_i + Σ_ij g_i·(∂A_ij V_j + V_j ∂A_ij) + Σ_ij w_ij ∂²T_ij + ...

with the score gradients w, `B_i = diag(w_i) - w_i A_iᵀ - A_i w_iᵀ` and, in the dots, `∂²v_j`
between the input and the value weights. Everything is dense, with B·L·d rows: for small sizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.attention_head import AttentionHead


class Slopes(NamedTuple):
    """Derivatives of scores and values by n entries, of one sequence.

    Attributes:
        scores: (L, L, n).
        values: (L, dv, n).
    """

    scores: Tensor
    values: Tensor


class InputDerivatives:
    """Derivatives of one head's output by its input.

    Args:
        head: The head.
    """

    def __init__(self, head: AttentionHead) -> None:
        self._head = head
        self._length, self._width = head.x.shape[1:]
        identity = torch.eye(self._length, dtype=head.x.dtype, device=head.x.device)
        self._tokens = identity

    def jacobian(self) -> Tensor:
        """Return `∂F_i / ∂X`, (B, L, d_out, L d)."""
        W_U = self._head.W_U
        before = torch.stack([self._moved(b, self._by_input(b)) for b in range(len(self._head.x))])
        return before if W_U is None else W_U.mT @ before

    def functional(self, role: str, g: Tensor) -> Tensor:
        """Return `Σ_i g_i · ∂²F_i / ∂X ∂role`, (B, L d, n), or (B, L d, L d) for "input"."""
        head = self._head
        before = head.before_output(g)
        w = head.score_gradient(before)
        found = []
        for b in range(len(head.x)):
            by_input = self._by_input(b)
            if role == "output":
                moved = self._moved(b, by_input)
                found.append(torch.einsum("ipn,ie->npe", moved, g[b]).flatten(1))
                continue
            other = by_input if role == "input" else self._by_weight(b, role)
            first = self._second_order(b, by_input, other, before[b], w[b])
            found.append(first + self._products(b, role, before[b], w[b]))
        return torch.stack(found)

    def _by_input(self, b: int) -> Slopes:
        """Return the derivatives by all tokens of a sequence, n = L d."""
        head = self._head
        assert head.W_K is not None
        query = head.W_Q @ head.queries.jacobian[b].mT @ head.key[b].mT  # (i, d, j)
        key = head.W_K @ head.keys.jacobian[b].mT @ head.query[b].mT  # (j, d, i)
        scores = torch.einsum("il,iaj->ijla", self._tokens, query)
        scores = scores + torch.einsum("jl,jai->ijla", self._tokens, key)
        values = torch.einsum("jl,ap->jpla", self._tokens, head.W_V)
        return Slopes(head.scale * scores.flatten(2), values.flatten(2))

    def _by_weight(self, b: int, role: str) -> Slopes:
        """Return the derivatives by the query, key or value weight."""
        head, x = self._head, self._head.x[b]
        size = (head.W_V if role == "value" else head.W_Q).numel()
        scores = x.new_zeros(self._length, self._length, size)
        values = x.new_zeros(*head.value.shape[1:], size)
        if role == "query":
            slope = head.key[b] @ head.queries.jacobian[b]  # (i, j, dk)
            scores = head.scale * torch.einsum("ia,ijq->ijaq", x, slope).flatten(2)
        elif role == "key":
            slope = torch.einsum("ip,jpq->ijq", head.query[b], head.keys.jacobian[b])
            scores = head.scale * torch.einsum("ja,ijq->ijaq", x, slope).flatten(2)
        else:
            unit = torch.eye(head.W_V.shape[1], dtype=x.dtype, device=x.device)
            values = torch.einsum("ja,pq->jpaq", x, unit).flatten(2)
        return Slopes(scores, values)

    def _moved(self, b: int, slopes: Slopes) -> Tensor:
        """Return the derivative of the head's output before the output matrix, (L, dv, n)."""
        of_weights = torch.einsum(
            "ijn,jp->ipn", self._weights_moved(b, slopes), self._head.value[b]
        )
        return of_weights + torch.einsum("ij,jpn->ipn", self._head.weights[b], slopes.values)

    def _weights_moved(self, b: int, slopes: Slopes) -> Tensor:
        """Return `∂A_ij`, (L, L, n)."""
        head, scores = self._head, slopes.scores
        if not head.softmax:
            return head.visible[b].unsqueeze(-1) * scores
        A = head.weights[b].unsqueeze(-1)
        return A * (scores - (A * scores).sum(1, keepdim=True))

    def _second_order(self, b: int, one: Slopes, two: Slopes, g: Tensor, w: Tensor) -> Tensor:
        """Return what products of first derivatives give, (n_one, n_two)."""
        head, total = self._head, torch.zeros((), dtype=w.dtype, device=w.device)
        if head.softmax:
            A = head.weights[b]
            (mean_one, c_one), (mean_two, c_two) = (
                [torch.einsum("ij,ijn->in", t, s.scores) for t in (A, w)] for s in (one, two)
            )
            weighted = (w.unsqueeze(-1) * one.scores).flatten(0, 1)
            total = weighted.mT @ two.scores.flatten(0, 1)
            total = total - c_one.mT @ mean_two - mean_one.mT @ c_two
        for first, second, transposed in ((one, two, False), (two, one, True)):
            seen = torch.einsum("ip,jpn->ijn", g, second.values)  # g_i·V_j
            found = self._weights_moved(b, first).flatten(0, 1).mT @ seen.flatten(0, 1)
            total = total + (found.mT if transposed else found)
        return total

    def _products(self, b: int, role: str, g: Tensor, w: Tensor) -> Tensor:
        """Return `Σ_ij w_ij ∂²T_ij` and what `∂²v_j` gives, (L d, n)."""
        head, x, tokens = self._head, self._head.x[b], self._tokens
        width, length = self._width, self._length
        unit = torch.eye(width, dtype=x.dtype, device=x.device)
        if role == "value":
            pulled = head.weights[b].mT @ g  # (j, dv)
            return torch.einsum("ca,je->jcae", unit, pulled).reshape(length * width, -1)
        assert head.W_K is not None
        Q, K = head.queries.jacobian[b], head.keys.jacobian[b]
        to_query, to_key = head.scale * w @ head.key[b], head.scale * w.mT @ head.query[b]
        bends = [
            vectors.hessian(slope.expand_as(vectors.value))
            for vectors, slope in ((head.queries, to_query), (head.keys, to_key))
        ]
        by_query, by_key = (None if bend is None else bend[b] for bend in bends)
        if role == "input":
            left, right = head.W_Q @ Q.mT, K @ head.W_K.mT  # (i, d, dk), (j, dk, d)
            mixed = head.scale * torch.einsum("ij,iap,jpc->iajc", w, left, right)
            mixed = mixed.reshape(length * width, -1)
            total = mixed + mixed.mT
            for bend, W in ((by_query, head.W_Q), (by_key, head.W_K)):
                if bend is not None:
                    own = torch.einsum("il,iac->ialc", tokens, W @ bend @ W.mT)
                    total = total + own.reshape(total.shape)
            return total
        one, other = (Q, K) if role == "query" else (K, Q)
        weights, W = (w, head.W_K) if role == "query" else (w.mT, head.W_Q)
        slope, bend = (to_query, by_query) if role == "query" else (to_key, by_key)
        own_W = head.W_Q if role == "query" else head.W_K
        # The token of the weight's own vector, l = i for queries, and that of the other one
        pulled = (one.mT @ slope.unsqueeze(-1)).squeeze(-1)  # (l, dk)
        total = torch.einsum("ca,lq->lcaq", unit, pulled)
        if bend is not None:
            total = total + torch.einsum("lqr,cr,la->lcaq", bend, own_W, x)
        across = torch.einsum("il,ia,ipq->lapq", weights, x, one)  # (l, a, dk, q)
        through = W @ other.mT  # (l, d, dk)
        total = total + head.scale * torch.einsum("lapq,lcp->lcaq", across, through)
        return total.reshape(length * width, -1)


def lookup_rows(matrix: Tensor, ids: Tensor, count: int) -> Tensor:
    """Return derivatives by the rows of a table from those by what is looked up in it.

    With `X = table[ids]`, as in an embedding, the derivative by a row is the sum over the tokens
    that look it up. For a Hessian by X on both sides, call it for the rows, and again for the
    transposed result.

    Args:
        matrix: Rows by all entries of X, (N d, m).
        ids: The rows that were looked up, any shape with N entries. For positions these are
            `torch.arange(L)` for every sequence.
        count: The number of rows of the table.

    Returns:
        (count d, m).

    Example:
        >>> lookup_rows(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0, 2, 0]), 3).flatten()
        tensor([5., 0., 2.])
    """
    number = ids.numel()
    if matrix.ndim != 2 or number == 0 or len(matrix) % number:
        raise ValueError(
            f"Invalid matrix of shape {tuple(matrix.shape)}. Must have rows for the {number} "
            "tokens of ids, as many for each."
        )
    by_token = matrix.reshape(number, -1)
    table = by_token.new_zeros(count, by_token.shape[1]).index_add_(0, ids.flatten(), by_token)
    return table.reshape(-1, matrix.shape[1])
