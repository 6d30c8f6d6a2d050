"""Bounds on the spectral norms of Hessian blocks from norms of data and weights alone.

Petrov et al. (arXiv 2510.16927, Theorems 1 and 6) bound the blocks of a post-norm transformer block
with one head, ReLU and the squared error. Here are such bounds with what is wrong in print put
right, each constant derived below. Norms are spectral unless marked F; c = 2/(L d); x = |X|; the
weights are W_Q, W_K, W_V, W_1 (`mlp_in`) and W_2 (`mlp_out`).

**Attention.** Rows of the attention matrix A sum to 1, so |A| <= √L (printed: L). The derivative of
a row a by its scores is C = diag(a) - aaᵀ with |C| <= 1/2, which two equal weights attain. Printed
is 1/L, which holds for uniform attention only: the printed bound on H_o(Q,Q) fails where attention
is peaked. So for G_k = ∂F/∂W_k

    |G_V| <= √L x        |G_Q| <= ½ x³ |W_K| |W_V| / √dk        |G_K| <= ½ x³ |W_Q| |W_V| / √dk

The second derivative of a row is the third cumulant κ of its one-hot variable (printed: norm 6). As
a form in three vectors it is at most √6/9 for any L: a symmetric form is largest at three equal
unit vectors w (Banach), where it is the third central moment of the numbers w, at most
range³/(6√3), and their range is at most √2. Unfolded to an L² × L matrix it is at most √3/2: κ(w,
S) <= |C| |diag(S) - 2Sa| <= |C| √(1 + 4|a|²) for a unit matrix S, where |C| <= 2m(1 - m) and |a|²
<= min(m, m² + (1 - m)²) with m = max a (the second for m >= 1/2). A search finds no more than √6/9
there, too.

**Norms.** LayerNorm has |J| = 1/σ and a known |H|, exactly: see `Normalization`. So the constants
8, 12, 4 of Theorem 1, which are 2, 12, 2 in its proof, are not needed.

**The block.** With B_i = ∂S/∂W_i, ξ_ij = ∂B_i/∂W_j and J_Y, J_Z, h_Y, h_Z the norms of the two
LayerNorms' derivatives

    |B_1| <= |W_2| |Y|   |B_2| <= |Y|_F |W_1|   |B_k| <= (1 + |W_1||W_2|) J_Y |G_k|
    |Y| <= |Y|_F <= √(L d)
    |H_o(i,j)| <= c J_Z² |B_i| |B_j|
    |H_f(i,j)| <= |∂ℓ/∂Z| (J_Z |ξ_ij| + h_Z |B_i| |B_j|)

where |ReLU(M)| <= |M|_F, as it can exceed |M|. Second derivatives are measured in one of two norms.
"unfolded", as in the paper, is that of the matrix with L d n_i rows and n_j columns. "trilinear" is
the largest value at three unit vectors, which is all that a contraction with ∂ℓ/∂Z needs; it is
never more. The unfolded norm depends on which of the two weights is in the rows; the bounds are for
the smaller of the two, which is enough for the loss (rows of W_2 can exceed |Y|_F in ξ_12, rows of
W_1 not).

            trilinear                                            unfolded
    ξ_12    |Y|                                                  |Y|_F
    ξ_1k    |W_2| J_Y |G_k|                                      min(|W_2|_F, √L |W_2|) J_Y |G_k|
    ξ_2k    |W_1| J_Y |G_k|                                      √min(d, L) |W_1| J_Y |G_k|
    ξ_kl    (1 + |W_1||W_2|)(h_Y |G_k||G_l| + J_Y |Φ_kl|)        the same
    Φ_QQ    √6/9 x⁵ |W_K|² |W_V| / dk                            √3/2 for √6/9
    Φ_QK    √6/9 x⁵ |W_Q||W_K||W_V| / dk + ½ x³ |W_V| / √dk      √3/2 for √6/9, and x² |X|_F for x³
    Φ_VQ    ½ x³ |W_K| / √dk                                     √min(d, L) times that

Products of norms are far from the norm of a product: the bounds hold, but on random weights they
are loose by orders of magnitude where attention is involved. `Bound.looseness` says by how much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.checks import Part, check_part
from blockopt.analysis.closed_forms.normalization import Normalization
from blockopt.analysis.closed_forms.output_loss import SquaredError
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from blockopt.analysis.closed_forms.transformer_block import TransformerBlockHessian
from blockopt.checks import check_choice
from blockopt.tables import aligned

SecondDerivativeNorm = Literal["trilinear", "unfolded"]
ATTENTION = ("query", "key", "value")
BLOCK = (*ATTENTION, "mlp_in", "mlp_out")


class Bound(NamedTuple):
    """A bound on the spectral norm of one block of the Hessian, and the norm."""

    row: str
    column: str
    bound: float
    true: float

    @property
    def looseness(self) -> float:
        """The bound over the true norm; 1 if both are 0."""
        if self.true == 0:
            return 1.0 if self.bound == 0 else math.inf
        return self.bound / self.true


def attention_bounds(
    X: Tensor,
    weights: Mapping[str, Tensor],
    target: Tensor,
    *,
    part: Part = "full",
    second: SecondDerivativeNorm = "trilinear",
    mask: Tensor | None = None,
) -> list[Bound]:
    """Bound the blocks of one attention head under the squared error.

    |H_o(k,l)| <= c |G_k||G_l| and |H_f(k,l)| <= |∂ℓ/∂F| |Φ_kl|.

    Args:
        X: Tokens of one sequence, (L, d).
        weights: "query" and "key" (d, dk), "value" (d, d_out).
        target: (L, d_out).
        part: The part of the Hessian: "outer", "functional" or "full".
        second: The norm of second derivatives; "trilinear" is sharper, "unfolded" is the paper's.
        mask: The mask of attention; the bounds hold for any.

    Returns:
        One `Bound` for each pair, in the order query, key, value.

    Example:
        >>> X, ones = torch.tensor([[1.0], [-1.0]]), {r: torch.ones(1, 1) for r in ATTENTION}
        >>> bounds = attention_bounds(X, ones, torch.zeros(2, 1))
        >>> all(entry.true <= entry.bound for entry in bounds)
        True
    """
    check_part(part)
    attention = _Attention(X, weights, second)
    hessian = SelfAttentionHessian(
        X, weights["query"], weights["key"], weights["value"], Y=target, mask=mask
    )
    gradient = float(hessian.gradient_of_output.norm())
    c = 2 / hessian.gradient_of_output.numel()
    bounds = []
    for row, column in _pairs(ATTENTION):
        outer = c * attention.first[row] * attention.first[column]
        functional = gradient * attention.second(row, column)
        parts = {"outer": outer, "functional": functional, "full": outer + functional}
        bounds.append(Bound(row, column, parts[part], _norm(hessian.block(row, column, part))))
    return bounds


def transformer_bounds(
    X: Tensor,
    weights: Mapping[str, Tensor],
    target: Tensor,
    *,
    part: Part = "full",
    second: SecondDerivativeNorm = "trilinear",
    mask: Tensor | None = None,
    epsilon: float = 0.0,
) -> list[Bound]:
    """Bound the blocks of all pairs of the five weights of a post-norm transformer block.

    The block has one head, LayerNorm, ReLU and the squared error. The bounds use norms of X and the
    weights, the smallest standard deviation of a row before each of the two LayerNorms, and the
    norm of the gradient at the output.

    Args:
        X: Tokens of one sequence, (L, d).
        weights: "query" and "key" (d, dk), "value" (d, d), "mlp_in" (d, m), "mlp_out" (m, d).
        target: (L, d).
        part: The part of the Hessian: "outer", "functional" or "full".
        second: The norm of second derivatives; "trilinear" is sharper, "unfolded" is the paper's.
        mask: The mask of attention.
        epsilon: The ε of both LayerNorms.

    Returns:
        One `Bound` for each pair, in the order query, key, value, mlp_in, mlp_out.
    """
    check_part(part)
    extra = sorted(set(weights) - set(BLOCK))
    if extra:
        raise ValueError(
            f"Invalid weights: {', '.join(extra)} not covered by the bounds. Must be "
            f"{', '.join(BLOCK)}."
        )
    attention = _Attention(X, weights, second)
    hessian = TransformerBlockHessian(
        *(X, weights, SquaredError(target)),
        arrangement="post",
        activation="relu",
        epsilon=epsilon,
        mask=mask,
    )
    middle = Normalization(X + hessian.attention.output[0], epsilon=epsilon)
    W_1, W_2 = weights["mlp_in"], weights["mlp_out"]
    summed = _Sum(attention, W_1, W_2, *_derivative_norms(middle, second), second)
    final = Normalization(middle.output + (middle.output @ W_1).relu() @ W_2, epsilon=epsilon)
    J_Z, h_Z = _derivative_norms(final, second)
    gradient = float(hessian.gradient_of_output.norm())
    bounds = []
    for row, column in _pairs(BLOCK):
        product = summed.first[row] * summed.first[column]
        outer = 2 / X.numel() * J_Z**2 * product
        functional = gradient * (J_Z * summed.second(row, column) + h_Z * product)
        parts = {"outer": outer, "functional": functional, "full": outer + functional}
        bounds.append(Bound(row, column, parts[part], _norm(hessian.block(row, column, part))))
    return bounds


def bound_table(bounds: Sequence[Bound]) -> str:
    """Return the bounds as a table.

    Example:
        >>> print(bound_table([Bound("query", "key", 2.0, 0.5)]))
        row    column      bound       true  bound / true
        query     key  2.000e+00  5.000e-01           4.0
    """
    rows = [("row", "column", "bound", "true", "bound / true")]
    for entry in bounds:
        numbers = (f"{entry.bound:.3e}", f"{entry.true:.3e}", f"{entry.looseness:.1f}")
        rows.append((entry.row, entry.column, *numbers))
    return aligned(rows)


class _Attention:
    """Bounds on the first and second derivatives of a head's output F: |G_k| and |Φ_kl|."""

    def __init__(self, X: Tensor, weights: Mapping[str, Tensor], norm: str) -> None:
        if X.ndim != 2 or any(role not in weights or weights[role].ndim != 2 for role in ATTENTION):
            raise ValueError(
                "The bounds are for one sequence X (L, d) and one head with weights query, key, "
                "value of 2 dimensions."
            )
        check_choice("second", norm, get_args(SecondDerivativeNorm))
        unfolded = norm == "unfolded"
        self.tokens = X.shape
        self._x, self._root = _norm(X), math.sqrt(weights["key"].shape[1])
        self._w = {role: _norm(weights[role]) for role in ATTENTION}
        self._cumulant = math.sqrt(3) / 2 if unfolded else math.sqrt(6) / 9
        self._scores = self._x**2 * (float(X.norm()) if unfolded else self._x)
        self._values = math.sqrt(min(X.shape[0], weights["value"].shape[1])) if unfolded else 1.0
        half = 0.5 * self._x**3 / self._root
        self._through = {role: half * self._other(role) for role in ("query", "key")}
        self.first = {role: bound * self._w["value"] for role, bound in self._through.items()}
        self.first["value"] = math.sqrt(X.shape[0]) * self._x

    def second(self, row: str, column: str) -> float:
        """Return the bound on |Φ|."""
        if row == column == "value":
            return 0.0
        if "value" in (row, column):
            return self._values * self._through[row if column == "value" else column]
        others = self._other(row) * self._other(column) * self._w["value"]
        quadratic = self._cumulant * self._x**5 * others / self._root**2
        if row == column:
            return quadratic
        return quadratic + 0.5 * self._scores * self._w["value"] / self._root

    def _other(self, role: str) -> float:
        """Return the norm of the weight that a query or key meets in the scores."""
        return self._w["key" if role == "query" else "query"]


class _Sum:
    """Bounds on the first and second derivatives of S = ReLU(Y W_1) W_2 + Y: |B_i| and |ξ_ij|."""

    def __init__(
        self, attention: _Attention, W_1: Tensor, W_2: Tensor, J_Y: float, h_Y: float, norm: str
    ) -> None:
        L, d = attention.tokens
        w_1, w_2, self._y = _norm(W_1), _norm(W_2), math.sqrt(L * d)
        self._attention, self._J_Y, self._h_Y, self._J_SY = attention, J_Y, h_Y, 1 + w_1 * w_2
        unfolded = norm == "unfolded"
        self._first_weight = min(float(W_2.norm()), math.sqrt(L) * w_2) if unfolded else w_2
        self._last_weight = math.sqrt(min(L, d)) * w_1 if unfolded else w_1
        self.first = {role: self._J_SY * J_Y * bound for role, bound in attention.first.items()}
        self.first |= {"mlp_in": w_2 * self._y, "mlp_out": w_1 * self._y}

    def second(self, row: str, column: str) -> float:
        """Return the bound on |ξ|."""
        of_attention = [role for role in (row, column) if role in ATTENTION]
        first = self._attention.first
        if len(of_attention) == 2:
            curved = self._h_Y * first[row] * first[column]
            return self._J_SY * (curved + self._J_Y * self._attention.second(row, column))
        if len(of_attention) == 1:
            through = self._first_weight if "mlp_in" in (row, column) else self._last_weight
            return through * self._J_Y * first[of_attention[0]]
        return 0.0 if row == column else self._y


def _derivative_norms(norm: Normalization, second: str) -> tuple[float, float]:
    hessian = norm.trilinear_norm() if second == "trilinear" else norm.hessian_norm()
    return float(norm.jacobian_norm().max()), float(hessian.max())


def _norm(matrix: Tensor) -> float:
    """Return the largest singular value, from the smaller Gram matrix, which is much faster."""
    size = float(matrix.abs().max())
    if size == 0:
        return 0.0
    # Divided by its size, so that no square underflows
    short = (matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT) / size
    return size * math.sqrt(torch.linalg.eigvalsh(short @ short.mT)[-1])


def _pairs(roles: Sequence[str]) -> list[tuple[str, str]]:
    return [(row, column) for number, row in enumerate(roles) for column in roles[number:]]
