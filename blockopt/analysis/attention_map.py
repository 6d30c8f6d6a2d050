"""Softmax and linear self-attention with the derivatives of its output by its weights, in closed form.

A head maps the tokens `x_i` to `F_i = Σ_j A_ij v_j` with `A = softmax(scale · q kᵀ)`, `q = X W_Q`, `k = X W_K`, `v = X W_V`.
The score of i and j enters through `A_i` alone, so every derivative is an average under `A_i` (bars; Cov_i is the covariance):

    ∂F_i / ∂W_Q[a, b] = scale · x_i[a] Cov_i(v, k)[:, b]
    ∂F_i / ∂W_K[a, b] = scale · Cov_i(v, x)[:, a] q_i[b]
    ∂F_i / ∂W_V[a, b] = m_i[a] e_b,                        m_i = x̄_i

each the product of a vector, over one index of the weight, and a small matrix, over the other. The papers' Kronecker forms
(Theorems 3.1 and 3.2 of Ormaniec, Dangel and Singh, ICLR 2025) are sums over i of these products. Linear attention,
`A = scale · q kᵀ` without softmax, has sums over the visible tokens in the place of covariances.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

ROLES = ("query", "key", "value", "output")
Activation = Literal["softmax", "linear"]
Parametrization = Literal["query_key", "single"]


class Factor(NamedTuple):
    """The Jacobian of one head's output at each position by one weight: a vector times a matrix.

    Attributes:
        vector: Over the rows or the columns of the weight, (B, L, p).
        core: Over the other index, (B, L, d, r): d is what the head puts out, before its output matrix. None is the identity.
        vector_first: Whether the vector goes with the rows of the weight.
        projected: Whether the head's output matrix comes after it; its own weight does not.
    """

    vector: Tensor
    core: Tensor | None
    vector_first: bool
    projected: bool


class AttentionHead:
    """One head on a batch of sequences.

    Args:
        X: Tokens, (B, L, d).
        W_Q: (d, dk), or the single matrix W_QK, (d, d).
        W_K: (d, dk), or None for a single matrix: the keys are the tokens then.
        W_V: (d, dv).
        W_U: Output matrix (dv, d_out), or None.
        visible: Who sees whom, bool, (B, L, L).
        bias: Added to the scores, (B, L, L), or None.
        scale: Of the scores.
        softmax: Or linear.
    """

    def __init__(
        self,
        X: Tensor,
        W_Q: Tensor,
        W_K: Tensor | None,
        W_V: Tensor,
        W_U: Tensor | None,
        visible: Tensor,
        bias: Tensor | None,
        scale: float,
        softmax: bool,
    ) -> None:
        self.x, self.query, self.value = X, X @ W_Q, X @ W_V
        self.key = X if W_K is None else X @ W_K
        self.W_V, self.W_U, self.scale, self.softmax, self.visible = W_V, W_U, scale, softmax, visible
        scores = scale * self.query @ self.key.mT
        scores = scores if bias is None else scores + bias
        self.weights = scores.masked_fill(~visible, -math.inf).softmax(-1) if softmax else scores * visible
        self.first_moment = self.weights @ X

    @property
    def output(self) -> Tensor:
        """(B, L, d_out)."""
        mixed = self.weights @ self.value
        return mixed if self.W_U is None else mixed @ self.W_U

    def covariance(self, a: Tensor, b: Tensor) -> Tensor:
        """`Cov_i(a, b)` under the attention of each position i, (B, L, p, r), or for linear attention `Σ_j a_j b_jᵀ`.

        It is `Σ_j a_j (∂A_ij / ∂T_il) b_l` over j and l, for scores T.
        """
        if not self.softmax:
            return _sum_of_products(self.visible.to(a), a, b)
        # Covariances do not see a common shift. Taking it away first keeps digits when tokens differ little from their mean.
        a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
        mean_a, mean_b = self.weights @ a, self.weights @ b
        return _sum_of_products(self.weights, a, b) - mean_a.unsqueeze(-1) * mean_b.unsqueeze(-2)

    def score_gradient(self, g: Tensor) -> Tensor:
        """The derivative of `Σ_i g_i · F_i` by each score, (B, L, L), for g before the output matrix, (B, L, dv)."""
        direct = g @ self.value.mT
        if not self.softmax:
            return direct * self.visible
        return self.weights * (direct - (self.weights * direct).sum(-1, keepdim=True))

    def third_moment(self, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """`Σ_j w_ij (a_j - ā_i)(b_j - b̄_i)ᵀ`, (B, L, p, r), for w of `score_gradient`; 0 for linear attention."""
        if not self.softmax:
            return a.new_zeros(*a.shape[:2], a.shape[-1], b.shape[-1])
        a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
        mean_a, mean_b = self.weights @ a, self.weights @ b  # the w_ij of i sum to 0: no product of both means
        cross = (w @ a).unsqueeze(-1) * mean_b.unsqueeze(-2) + mean_a.unsqueeze(-1) * (w @ b).unsqueeze(-2)
        return _sum_of_products(w, a, b) - cross

    def factor(self, role: str) -> Factor:
        """The Jacobian by one weight."""
        if role in ("query", "query_key"):
            return Factor(self.x, self.scale * self.covariance(self.value, self.key), True, True)
        if role == "key":
            return Factor(self.query, self.scale * self.covariance(self.value, self.x), False, True)
        if role == "value":
            return Factor(self.first_moment, None, True, True)
        return Factor(self.first_moment @ self.W_V, None, True, False)

    def functional(self, row: str, column: str, g: Tensor) -> Tensor:
        """`Σ_i g_i · ∂²F_i / ∂W_row ∂W_column`, (n_row, n_column) row-major, for g of the shape of the output."""
        row, column = (("query" if role == "query_key" else role) for role in (row, column))
        if ROLES.index(row) > ROLES.index(column):
            return self.functional(column, row, g).mT
        inner = g if self.W_U is None else g @ self.W_U.mT  # before the output matrix
        x, k, q, v = self.x, self.key, self.query, self.value
        if (row, column) == ("query", "query"):
            return _assemble("na,nc,nbe->abce", x, x, self.scale**2 * self.third_moment(self.score_gradient(inner), k, k))
        if (row, column) == ("key", "key"):
            return _assemble("nb,ne,nac->abce", q, q, self.scale**2 * self.third_moment(self.score_gradient(inner), x, x))
        if (row, column) == ("query", "key"):
            w = self.score_gradient(inner)
            second = _assemble("na,ne,nbc->abce", x, q, self.scale**2 * self.third_moment(w, k, x))
            identity = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
            return second + torch.kron(self.score_mixed(g), identity)
        if (row, column) == ("query", "value"):
            return _assemble("na,ne,ncb->abce", x, inner, self.scale * self.covariance(x, k))
        if (row, column) == ("key", "value"):
            return _assemble("nb,ne,nac->abce", q, inner, self.scale * self.covariance(x, x))
        if (row, column) == ("query", "output"):
            return _assemble("na,ne,ncb->abce", x, g, self.scale * self.covariance(v, k))
        if (row, column) == ("key", "output"):
            return _assemble("nb,ne,nca->abce", q, g, self.scale * self.covariance(v, x))
        if (row, column) == ("value", "output"):
            middle = torch.einsum("bla,ble->ae", self.first_moment, g)
            identity = torch.eye(self.W_V.shape[-1], dtype=g.dtype, device=g.device)
            return torch.einsum("ae,bc->abce", middle, identity).reshape(self.W_V.numel(), -1)
        size = self.W_V.numel() if row == "value" else self.W_V.shape[-1] * g.shape[-1]
        return g.new_zeros(size, size)  # F is linear in the value and in the output matrix

    def score_mixed(self, g: Tensor) -> Tensor:
        """`scale · B`: what `W_Q W_Kᵀ` being a product adds between queries and keys, `B = Σ_ij w_ij x_i x_jᵀ`, (d, d)."""
        w = self.score_gradient(g if self.W_U is None else g @ self.W_U.mT)
        return self.scale * torch.einsum("bia,bij,bjc->ac", self.x, w, self.x)


class AttentionMap:
    """Self-attention as a function of its weights: its output, its Jacobians, its contracted second derivatives.

    Args:
        X: Tokens, (L, d) or (B, L, d).
        W_Q: Query weights, (d, dk), or (H, d, dk) for H heads; for "single" the matrix W_QK, (d, d) or (H, d, d).
        W_K: Key weights, of the shape of W_Q; None for "single".
        W_V: Value weights, (d, dv) or (H, d, dv).
        W_U: Output matrix of each head, (dv, d_out) or (H, dv, d_out): what a head puts out is multiplied by it. None for none.
            The paper's Appendix E calls W_V here W_O, and writes its own W_V for the product `W_V W_U`.
        mask: Bool, True where a position (row) sees another (column), or numbers to add to the scores (softmax only); (L, L) or
            (B, L, L). Everything is visible by default.
        scale: Of the scores; `1 / sqrt(dk)` by default, and 1 for "single". A temperature t divides it.
        activation: "softmax", or "linear" for `A = T`, without softmax.
        parametrization: "query_key" for scores `X W_Q W_Kᵀ Xᵀ`, "single" for `X W_QK Xᵀ`.

    Raises:
        ValueError: If shapes do not fit, or if a position sees nothing.
    """

    def __init__(
        self,
        X: Tensor,
        W_Q: Tensor,
        W_K: Tensor | None,
        W_V: Tensor,
        *,
        W_U: Tensor | None = None,
        mask: Tensor | None = None,
        scale: float | None = None,
        activation: Activation = "softmax",
        parametrization: Parametrization = "query_key",
    ) -> None:
        single = parametrization == "single"
        _check_options(W_K, activation, parametrization)
        X = X.detach().unsqueeze(0) if X.ndim == 2 else X.detach()
        if X.ndim != 3 or not X.is_floating_point():
            raise ValueError(
                f"Invalid X of shape {tuple(X.shape)} and {X.dtype}. Must be (L, d) or (B, L, d), of floating point."
            )
        weights = {"W_Q": W_Q, "W_K": W_K, "W_V": W_V, "W_U": W_U}
        stacked = {name: _stacked(name, weight) for name, weight in weights.items() if weight is not None}
        self.num_heads = len(stacked["W_Q"])
        width, key_width, value_width = X.shape[-1], stacked["W_Q"].shape[-1], stacked["W_V"].shape[-1]
        expected = {"W_Q": (width, width if single else key_width), "W_K": (width, key_width), "W_V": (width, value_width)}
        expected["W_U"] = (value_width, stacked["W_U"].shape[-1] if "W_U" in stacked else 0)
        for name, weight in stacked.items():
            if weight.shape != (self.num_heads, *expected[name]):
                raise ValueError(f"Invalid {name} of shape {tuple(weight.shape)}. Must be {(self.num_heads, *expected[name])}.")
        visible, bias = _read_mask(mask, X, activation)
        scale = (1.0 if single else 1 / math.sqrt(key_width)) if scale is None else float(scale)
        none = [None] * self.num_heads
        self.heads = [
            AttentionHead(X, q, k, v, u, visible, bias, scale, activation == "softmax")
            for q, k, v, u in zip(stacked["W_Q"], stacked.get("W_K", none), stacked["W_V"], stacked.get("W_U", none))
        ]
        self.scale, self.X = scale, X
        self.roles = (*(("query_key",) if single else ("query", "key")), "value", *(("output",) if W_U is not None else ()))
        names = {"query_key": "W_Q", "query": "W_Q", "key": "W_K", "value": "W_V", "output": "W_U"}
        self.shapes = {role: tuple(stacked[names[role]].shape[1:]) for role in self.roles}
        self.output = torch.stack([head.output for head in self.heads]).sum(0)

    def size(self, role: str) -> int:
        """Number of entries of a weight in one head."""
        if role not in self.shapes:
            raise ValueError(f"Invalid role {role!r}. Must be one of {', '.join(self.roles)}.")
        return math.prod(self.shapes[role])

    def jacobian(self, role: str, head: int | None = None) -> Tensor:
        """The derivative of the output by a weight, (B L d_out, n): of one head, or of all heads one after the other."""
        if head is None:
            return torch.cat([self.jacobian(role, number) for number in range(self.num_heads)], 1)
        self.size(role)
        factor, W_U = self.heads[head].factor(role), self.heads[head].W_U
        core = factor.core
        if factor.projected and W_U is not None:
            core = W_U.mT.expand(*factor.vector.shape[:2], *W_U.mT.shape) if core is None else W_U.mT @ core
        if core is None:
            core = torch.eye(self.output.shape[-1], dtype=self.X.dtype, device=self.X.device)
            core = core.expand(*factor.vector.shape[:2], *core.shape)
        pattern = "na,nob->noab" if factor.vector_first else "nb,noa->noab"
        return torch.einsum(pattern, factor.vector.flatten(0, 1), core.flatten(0, 1)).reshape(self.output.numel(), -1)

    def functional(self, row: str, column: str, g: Tensor) -> Tensor:
        """`Σ g · ∂²F / ∂W_row ∂W_column`, (H n_row, H n_column): zero between different heads (Appendix E)."""
        sizes = self.size(row), self.size(column)
        g = g.reshape(self.output.shape)
        if self.num_heads == 1:
            return self.heads[0].functional(row, column, g)
        whole = g.new_zeros(self.num_heads * sizes[0], self.num_heads * sizes[1])
        for number, head in enumerate(self.heads):
            rows, columns = (slice(number * size, (number + 1) * size) for size in sizes)
            whole[rows, columns] = head.functional(row, column, g)
        return whole


def _check_options(W_K: Tensor | None, activation: str, parametrization: str) -> None:
    if activation not in ("softmax", "linear"):
        raise ValueError(f"Invalid activation={activation!r}. Must be 'softmax' or 'linear'.")
    if parametrization not in ("query_key", "single"):
        raise ValueError(f"Invalid parametrization={parametrization!r}. Must be 'query_key' or 'single'.")
    if (W_K is None) != (parametrization == "single"):
        fix = (
            "pass W_QK as W_Q, and None for W_K"
            if W_K is not None
            else "pass W_K, or parametrization='single' with W_QK as W_Q"
        )
        raise ValueError(f"Invalid W_K for parametrization={parametrization!r}: {fix}.")


def _stacked(name: str, weight: Tensor) -> Tensor:
    if weight.ndim not in (2, 3):
        raise ValueError(
            f"Invalid {name} of shape {tuple(weight.shape)}. Must be a matrix, or one for each head: (H, rows, columns)."
        )
    return weight.detach().unsqueeze(0) if weight.ndim == 2 else weight.detach()


def _read_mask(mask: Tensor | None, X: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    """Who sees whom, (B, L, L), and what is added to the scores."""
    shape = (X.shape[0], X.shape[1], X.shape[1])
    if mask is None:
        return torch.ones((), dtype=torch.bool, device=X.device).expand(shape), None
    if mask.shape not in (shape, shape[1:]):
        raise ValueError(f"Invalid mask of shape {tuple(mask.shape)}. Must be {shape[1:]} or {shape}.")
    visible = mask if mask.dtype == torch.bool else mask > -math.inf
    if not bool(visible.any(-1).all()):
        raise ValueError("Invalid mask: a position sees no other, not even itself. Let it see itself, or leave it out.")
    if mask.dtype == torch.bool:
        return visible.expand(shape), None
    if activation == "linear":
        raise ValueError("Invalid mask: linear attention has no use for numbers added to the scores. Must be of bool.")
    return visible.expand(shape), mask.expand(shape).to(X)


def outer_block(left: Factor, right: Factor, curvature: Tensor) -> Tensor:
    """`Σ_i J_leftᵀ Λ_i J_right`, (n_left, n_right), for Λ (B, L, d_left, d_right) between what the two Jacobians end in."""
    middle = curvature if left.core is None else left.core.mT @ curvature
    middle = middle if right.core is None else middle @ right.core  # (B, L, r, s)
    rows, columns = "ab" if left.vector_first else "ba", "ce" if right.vector_first else "ec"
    return _assemble(f"n{rows[0]},n{columns[0]},n{rows[1]}{columns[1]}->abce", left.vector, right.vector, middle)


def _assemble(pattern: str, left: Tensor, right: Tensor, matrices: Tensor) -> Tensor:
    """An einsum over all positions of two vectors and a matrix into (a b, c e): one matrix product, then a permutation."""
    blocks = torch.einsum(pattern, left.flatten(0, 1), right.flatten(0, 1), matrices.flatten(0, 1))
    return blocks.reshape(blocks.shape[0] * blocks.shape[1], -1)


def _sum_of_products(w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`Σ_j w_ij a_j b_jᵀ`, (B, L, p, r)."""
    products = (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-2)
    sums: Tensor = (w @ products).unflatten(-1, (a.shape[-1], b.shape[-1]))
    return sums
