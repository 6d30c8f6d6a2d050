"""Softmax and linear self-attention with the derivatives of its output by its weights, in closed form.

A head maps the tokens `x_i` to `F_i = Σ_j A_ij v_j` with `A = softmax(scale · q kᵀ)`, `q = X W_Q`,
`k = X W_K`, `v = X W_V`. The score of i and j enters through `A_i` alone, so every derivative is an
average under `A_i` (bars; Cov_i is the covariance):

    ∂F_i / ∂W_Q[a, b] = scale · x_i[a] Cov_i(v, k)[:, b]
    ∂F_i / ∂W_K[a, b] = scale · Cov_i(v, x)[:, a] q_i[b]
    ∂F_i / ∂W_V[a, b] = m_i[a] e_b,                        m_i = x̄_i

each the product of a vector, over one index of the weight, and a small matrix, over the other. The
papers' Kronecker forms (Theorems 3.1 and 3.2 of Ormaniec, Dangel and Singh, ICLR 2025) are sums
over i of these products. Linear attention, `A = scale · q kᵀ` without softmax, has sums over the
visible tokens in the place of covariances.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.checks import check_number, check_tensors
from blockopt.analysis.memory import check_memory
from blockopt.checks import check_choice

ROLES = ("query", "query_key", "key", "value", "output")
SCORE_ROLES = ("query", "query_key", "key")
Activation = Literal["softmax", "linear"]
Parametrization = Literal["query_key", "single"]


class Factor(NamedTuple):
    """The Jacobian of one head's output at each position by one weight: a vector times a matrix.

    Attributes:
        vector: Over the rows or the columns of the weight, (B, L, p).
        core: Over the other index, (B, L, d, r): d is what the head puts out, before its output
            matrix. None is the identity.
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
        biases: What is added to queries, keys and values, each (dk,) or (dv,), or 0.
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
        biases: tuple[Tensor | float, Tensor | float, Tensor | float],
    ) -> None:
        self.x, self.query, self.value = X, X @ W_Q + biases[0], X @ W_V + biases[2]
        self.key = X if W_K is None else X @ W_K + biases[1]
        self.W_V, self.W_U, self.scale, self.softmax, self.visible = (
            W_V,
            W_U,
            scale,
            softmax,
            visible,
        )
        scores = scale * self.query @ self.key.mT
        scores = scores if bias is None else scores + bias
        self.weights = (
            scores.masked_fill(~visible, -math.inf).softmax(-1) if softmax else scores * visible
        )
        self.first_moment = self.weights @ X
        # Derivatives of softmax do not see a common shift. Without it, tokens that differ little
        # from their mean keep digits.
        features = {"x": X, "key": self.key, "value": self.value}
        self.features = {
            name: f - f.mean(1, keepdim=True) if softmax else f for name, f in features.items()
        }
        self.means = {name: self.weights @ f for name, f in self.features.items()}

    @property
    def output(self) -> Tensor:
        """(B, L, d_out)."""
        mixed = self.weights @ self.value
        return mixed if self.W_U is None else mixed @ self.W_U

    def covariance(self, a: str, b: str) -> Tensor:
        """`Cov_i(a, b)` under the attention of each position i, (B, L, p, r), or for linear attention `Σ_j a_j b_jᵀ`.

        It is `Σ_jl a_j (∂A_ij / ∂T_il) b_lᵀ`, for scores T.

        Args:
            a: "x", "key" or "value".
            b: Another, or the same.
        """
        if not self.softmax:
            return _sum_of_products(self.visible.to(self.x), self.features[a], self.features[b])
        products = _sum_of_products(self.weights, self.features[a], self.features[b])
        return products - self.means[a].unsqueeze(-1) * self.means[b].unsqueeze(-2)

    def score_gradient(self, g: Tensor) -> Tensor:
        """`w_ij`, the derivative of `Σ_i g_i · F_i` by each score, (B, L, L), for g before the output matrix, (B, L, dv)."""
        direct = g @ self.features["value"].mT
        if not self.softmax:
            return direct * self.visible
        return self.weights * (direct - (g * self.means["value"]).sum(-1, keepdim=True))

    def third_moment(self, w: Tensor, a: str, b: str) -> Tensor:
        """`Σ_j w_ij (a_j - ā_i)(b_j - b̄_i)ᵀ`, (B, L, p, r), for w of `score_gradient`; 0 for linear attention."""
        left, right = self.features[a], self.features[b]
        if not self.softmax:
            return w.new_zeros(*w.shape[:2], left.shape[-1], right.shape[-1])
        cross = (w @ left).unsqueeze(-1) * self.means[b].unsqueeze(
            -2
        )  # the w_ij of i sum to 0: no product of both means
        cross = cross + (
            cross.mT if a == b else self.means[a].unsqueeze(-1) * (w @ right).unsqueeze(-2)
        )
        return _sum_of_products(w, left, right) - cross

    def factor(self, role: str) -> Factor:
        """The Jacobian by one weight."""
        if role in ("query", "query_key"):
            return Factor(self.x, self.scale * self.covariance("value", "key"), True, True)
        if role == "key":
            return Factor(self.query, self.scale * self.covariance("value", "x"), False, True)
        if role == "value":
            return Factor(self.first_moment, None, True, True)
        return Factor(self.weights @ self.value, None, True, False)

    def functional(
        self, row: str, column: str, g: Tensor, w: Tensor, scratch: Tensor | None = None
    ) -> Tensor:
        """`Σ_i g_i · ∂²F_i / ∂W_row ∂W_column` by the entries of both weights: zero unless the two differ or are at the scores.

        Args:
            row: A role.
            column: Another, or the same.
            g: A gradient at the output of the layer, (B, L, d_out).
            w: `score_gradient` at it.
            scratch: Memory to use for the result.
        """
        if ROLES.index(row) > ROLES.index(column):
            return self.functional(column, row, g, w, scratch).permute(2, 3, 0, 1)
        vectors = {"key": self.query, "query": self.x, "query_key": self.x}
        if column in vectors:
            left, right = (
                Factor(vectors[role], None, role != "key", True) for role in (row, column)
            )
            block = assemble(left, right, self.functional_matrices(row, column, w), scratch)
            return block if row == column else add_on_diagonal(block, self.score_mixed(w))
        if row in vectors:
            # The other weight multiplies m_i, or the output of the head, which move with the
            # scores.
            moved, other = ("x", self.before_output(g)) if column == "value" else ("value", g)
            covariance = self.covariance(moved, "x" if row == "key" else "key")
            pattern = "nb,ne,nca" if row == "key" else "na,ne,ncb"
            return _sum(pattern, vectors[row], other, self.scale * covariance, scratch)
        rows, columns = (
            self.W_V.shape if role == "value" else (self.W_V.shape[1], g.shape[-1])
            for role in (row, column)
        )
        block = g.new_zeros(*rows, *columns)
        if row != column:  # F is linear in the value and in the output matrix, and in their product
            block.diagonal(dim1=1, dim2=2).add_(
                torch.einsum("bla,ble->ae", self.first_moment, g).unsqueeze(-1)
            )
        return block

    def functional_matrices(self, row: str, column: str, w: Tensor) -> Tensor:
        """Between queries and keys: what the second derivative of softmax adds to `C_iᵀ Λ_i C_i`, (B, L, r, s)."""
        left, right = ("x" if role == "key" else "key" for role in (row, column))
        return self.scale**2 * self.third_moment(w, left, right)

    def before_output(self, g: Tensor) -> Tensor:
        """A gradient at the output of the layer, taken back to what the head puts out before its output matrix."""
        return g if self.W_U is None else g @ self.W_U.mT

    def score_mixed(self, w: Tensor) -> Tensor:
        """`scale · B`: what `W_Q W_Kᵀ` being a product adds between queries and keys, `B = Σ_ij w_ij x_i x_jᵀ`, (d, d)."""
        return self.scale * torch.einsum("bia,bij,bjc->ac", self.x, w, self.x)


class AttentionMap:
    """Self-attention as a function of its weights: its output, its Jacobians, its contracted second derivatives.

    Every head has weights of its own: keys shared by several heads (GQA) and rotated ones (RoPE)
    are not here; a `HessianOperator` takes both.

    Args:
        X: Tokens, (L, d) or (B, L, d).
        W_Q: Query weights, (d, dk), or (H, d, dk) for H heads; for "single" the matrix W_QK, (d, d)
            or (H, d, d).
        W_K: Key weights, of the shape of W_Q; None for "single".
        W_V: Value weights, (d, dv) or (H, d, dv).
        W_U: Output matrix of each head, (dv, d_out) or (H, dv, d_out): what a head puts out is
            multiplied by it. None for none. The paper's Appendix E calls W_V here W_O, and writes
            its own W_V for the product `W_V W_U`.
        mask: Bool, True where a position (row) sees another (column), or numbers to add to the
            scores (softmax only); (L, L) or (B, L, L). Everything is visible by default.
        scale: Of the scores; `1 / sqrt(dk)` by default, and 1 for "single". A temperature t divides
            it.
        activation: "softmax", or "linear" for `A = T`, without softmax.
        parametrization: "query_key" for scores `X W_Q W_Kᵀ Xᵀ`, "single" for `X W_QK Xᵀ`.
        biases: Added to "query", "key" and "value", each (dk,) or (H, dk), as GPT-2 has them. They
            are constants here, without blocks of their own.

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
        biases: Mapping[str, Tensor] | None = None,
    ) -> None:
        single = parametrization == "single"
        _check_options(W_K, activation, parametrization)
        X = X.detach().unsqueeze(0) if X.ndim == 2 else X.detach()
        if X.ndim != 3:
            raise ValueError(f"Invalid X of shape {tuple(X.shape)}. Must be (L, d) or (B, L, d).")
        weights = {"W_Q": W_Q, "W_K": W_K, "W_V": W_V, "W_U": W_U}
        named = {f"bias of {role}": b for role, b in (biases or {}).items()}
        check_tensors(
            {"X": X}
            | {name: weight for name, weight in weights.items() if weight is not None}
            | named
        )
        stacked = {
            name: _stacked(name, weight) for name, weight in weights.items() if weight is not None
        }
        self.num_heads = len(stacked["W_Q"])
        width, key_width, value_width = (
            X.shape[-1],
            stacked["W_Q"].shape[-1],
            stacked["W_V"].shape[-1],
        )
        expected = {
            "W_Q": (width, width if single else key_width),
            "W_K": (width, key_width),
            "W_V": (width, value_width),
        }
        expected["W_U"] = (value_width, stacked["W_U"].shape[-1] if "W_U" in stacked else 0)
        for name, weight in stacked.items():
            if weight.shape != (self.num_heads, *expected[name]):
                shared = (
                    " For heads that share keys and values give the sum over them yourself."
                    if len(weight) < self.num_heads
                    else ""
                )
                wanted = (self.num_heads, *expected[name])
                raise ValueError(
                    f"Invalid {name} of shape {tuple(weight.shape)}. Must be {wanted}.{shared}"
                )
        visible, bias = _read_mask(mask, X, activation)
        scale = (1.0 if single else 1 / math.sqrt(key_width)) if scale is None else float(scale)
        none = [None] * self.num_heads
        weights_of_heads = zip(
            stacked["W_Q"], stacked.get("W_K", none), stacked["W_V"], stacked.get("W_U", none)
        )
        added = _read_biases(
            biases or {},
            single,
            self.num_heads,
            {"query": key_width, "key": key_width, "value": value_width},
        )
        self.heads = [
            AttentionHead(
                X, *weights_of_head, visible, bias, scale, activation == "softmax", added_to_head
            )
            for weights_of_head, added_to_head in zip(weights_of_heads, zip(*added))
        ]
        self.scale, self.X, self.biased = scale, X, bool({"query", "key"} & (biases or {}).keys())
        self.roles = (
            *(("query_key",) if single else ("query", "key")),
            "value",
            *(("output",) if W_U is not None else ()),
        )
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
        check_number("head", head, self.num_heads)
        check_memory(self.output.numel(), self.size(role), self.X.dtype, self.X.device)
        factor, W_U = self.heads[head].factor(role), self.heads[head].W_U
        core = factor.core
        if factor.projected and W_U is not None:
            core = (
                W_U.mT.expand(*factor.vector.shape[:2], *W_U.mT.shape)
                if core is None
                else W_U.mT @ core
            )
        if core is None:
            core = torch.eye(self.output.shape[-1], dtype=self.X.dtype, device=self.X.device)
            core = core.expand(*factor.vector.shape[:2], *core.shape)
        pattern = "na,nob->noab" if factor.vector_first else "nb,noa->noab"
        return torch.einsum(pattern, factor.vector.flatten(0, 1), core.flatten(0, 1)).reshape(
            self.output.numel(), -1
        )

    def functional(self, row: str, column: str, g: Tensor) -> Tensor:
        """`Σ g · ∂²F / ∂W_row ∂W_column`, (H n_row, H n_column): zero between different heads (Appendix E)."""
        sizes = self.size(row), self.size(column)
        if g.shape[-2:] != self.output.shape[-2:] or g.numel() != self.output.numel():
            raise ValueError(
                f"Invalid g of shape {tuple(g.shape)}. Must be that of the output, {tuple(self.output.shape)}."
            )
        g = g.reshape(self.output.shape)
        gradients = [head.score_gradient(head.before_output(g)) for head in self.heads]
        blocks = [
            head.functional(row, column, g, w).reshape(sizes)
            for head, w in zip(self.heads, gradients)
        ]
        whole: Tensor = torch.block_diag(*blocks)
        return whole


def _check_options(W_K: Tensor | None, activation: str, parametrization: str) -> None:
    check_choice("activation", activation, get_args(Activation))
    check_choice("parametrization", parametrization, get_args(Parametrization))
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


def _read_biases(
    biases: Mapping[str, Tensor], single: bool, heads: int, widths: Mapping[str, int]
) -> list[list[Tensor | float]]:
    """What is added to the queries, keys and values of each head."""
    allowed = ("value",) if single else tuple(widths)
    unknown = sorted(biases.keys() - set(allowed))
    if unknown:
        raise ValueError(f"Invalid biases {unknown}. Must be of {', '.join(allowed)}.")
    found: list[list[Tensor | float]] = []
    for role, width in widths.items():
        if role not in biases:
            found.append([0.0] * heads)
            continue
        if biases[role].shape not in ((heads, width), (width,)) or (
            biases[role].ndim == 1 and heads > 1
        ):
            raise ValueError(
                f"Invalid bias of {role} of shape {tuple(biases[role].shape)}. Must be {(heads, width)}."
            )
        found.append(list(biases[role].detach().reshape(heads, width)))
    return found


def _read_mask(mask: Tensor | None, X: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    """Who sees whom, (B, L, L), and what is added to the scores."""
    shape = (X.shape[0], X.shape[1], X.shape[1])
    if mask is None:
        return torch.ones((), dtype=torch.bool, device=X.device).expand(shape), None
    if mask.shape not in (shape, shape[1:]):
        raise ValueError(
            f"Invalid mask of shape {tuple(mask.shape)}. Must be {shape[1:]} or {shape}."
        )
    if mask.dtype != torch.bool and (
        not mask.is_floating_point()
        or bool((mask == 1).any() and ((mask == 0) | (mask == 1)).all())
    ):
        raise ValueError(
            f"Invalid mask of {mask.dtype}, all 0 and 1: numbers would be added to the scores. Use mask.bool()."
        )
    if mask.dtype != torch.bool and not bool((mask < math.inf).all()):
        raise ValueError(
            "Invalid mask: numbers that are added to the scores must not be NaN or +inf; -inf hides a token."
        )
    visible = mask if mask.dtype == torch.bool else mask > -math.inf
    if not bool(visible.any(-1).all()):
        raise ValueError(
            "Invalid mask: a position sees no other, not even itself. Let it see itself, or leave it out."
        )
    if mask.dtype == torch.bool:
        return visible.expand(shape), None
    if activation == "linear":
        raise ValueError(
            "Invalid mask: linear attention has no use for numbers added to the scores. Must be of bool."
        )
    return visible.expand(shape), mask.expand(shape).to(X)


def outer_matrices(left: Factor, right: Factor, curvature: Tensor) -> Tensor:
    """`core_leftᵀ Λ_i core_right`, (B, L, r, s), for Λ (B, L, d_left, d_right) between what the two Jacobians end in."""
    middle = curvature if left.core is None else left.core.mT @ curvature
    return middle if right.core is None else middle @ right.core


def assemble(
    left: Factor, right: Factor, matrices: Tensor, scratch: Tensor | None = None
) -> Tensor:
    """The sum over positions of the vectors of both times a matrix between their other indices: by the entries of both."""
    rows, columns = "ab" if left.vector_first else "ba", "ce" if right.vector_first else "ec"
    return _sum(
        f"n{rows[0]},n{columns[0]},n{rows[1]}{columns[1]}",
        left.vector,
        right.vector,
        matrices,
        scratch,
    )


def add_on_diagonal(block: Tensor, matrix: Tensor) -> Tensor:
    """Add `matrix[a, c]` where b = e to a block (a, b, c, e): `matrix ⊗ I`."""
    block.diagonal(dim1=1, dim2=3).add_(matrix.unsqueeze(-1))
    return block


def _sum(
    pattern: str, left: Tensor, right: Tensor, matrices: Tensor, scratch: Tensor | None
) -> Tensor:
    """The einsum `pattern` over all positions n to abce: one matrix product, a view of its result.

    The operand that holds the last index e comes second, so that it stays contiguous: results are
    large, and moving them is most of the work. For the same reason they go to `scratch` if there is
    one: fresh memory costs more than the product.
    """
    i, j, k = pattern.replace("n", "").split(",")
    left, right = left.flatten(0, 1), right.flatten(0, 1)
    if matrices.stride()[:2] == (0, 0):  # one matrix for all positions
        vectors, matrices = (left.mT @ right).flatten().unsqueeze(0), matrices[0, :1]
    else:
        vectors, matrices = (
            (left.unsqueeze(-1) * right.unsqueeze(-2)).flatten(1),
            matrices.flatten(0, 1),
        )
    sizes = dict(zip(i + j + k, (left.shape[1], right.shape[1], *matrices.shape[1:])))
    first, second = (vectors, matrices.flatten(1)) if "e" in k else (matrices.flatten(1), vectors)
    order = i + j + k if "e" in k else k + i + j
    out = (
        None
        if scratch is None
        else scratch[: first.shape[1] * second.shape[1]].view(first.shape[1], second.shape[1])
    )
    product = torch.mm(first.mT, second, out=out).view([sizes[index] for index in order])
    return product.permute([order.index(index) for index in "abce"])


def _sum_of_products(w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`Σ_j w_ij a_j b_jᵀ`, (B, L, p, r)."""
    products = (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-2)
    sums: Tensor = (w @ products).unflatten(-1, (a.shape[-1], b.shape[-1]))
    return sums
