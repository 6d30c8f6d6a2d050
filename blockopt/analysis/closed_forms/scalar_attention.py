"""Attention on scalar tokens, whose whole Hessian spectrum has a closed form.

The model is that of Singh, Ormaniec and Hofmann (2025): `f_i = w_V Σ_j A_ij x_j` with
`A_i = softmax_j(s x_i x_j)` and `s = w_Q·w_K / √d_K`, under the mean squared error over tokens and
sequences. Small as it is, it shows what attention does to a spectrum: a bulk `±β` that the
query-key product makes, three outliers, and a Gauss-Newton matrix of rank two that misses the bulk.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.checks import check_tensors
from blockopt.checks import check_choice

Sink = Literal["input", "score"]


class ScalarAttention:
    r"""The Hessian of scalar attention in the parameters `(w_Q, w_K, w_V)` and its spectrum.

    With `r = f - y`, `m`, `μ₂`, `μ₃` the mean and the central moments of the tokens under each row
    of attention, and `⟨·⟩` the mean over tokens and sequences:

        β = 2/√d_K ⟨w_V r x μ₂⟩            α = 2/d_K ⟨w_V² x² μ₂² + w_V r x² μ₃⟩
        γ = 2/√d_K ⟨(w_V m + r) x μ₂⟩      ν = 2 ⟨m²⟩

        H = [ βJ + αppᵀ  γp ]    p = (w_K, w_Q),   J = [0 I]
            [ γpᵀ        ν  ]                          [I 0]

    `p` meets each of the two eigenspaces of `J` in one direction. So `+β` and `-β` are eigenvalues
    `d_K - 1` times each, and three others remain. Conditioning depends on the norms of `w_Q` and
    `w_K`, not only on their product: `w_Q c` and `w_K / c` leave the function, `α`, `β`, `γ` and
    `ν` as they are, but change `‖p‖`.

    Args:
        x: (N, L) scalar tokens of N sequences, or (L,) of one.
        y: The targets, of the same shape.
        w_Q: (d_K,) query weights.
        w_K: (d_K,) key weights.
        w_V: The value weight.
        score_bias: Added to every score of the first token, `s x_i x_1 + score_bias`: an attention
            sink, see `with_sink`.

    Attributes:
        alpha: `α`, the size of the rank-one part of query and key.
        beta: `β`, the derivative of the loss by `w_Q·w_K`. At a stationary point it vanishes, and
            the bulk with it.
        gamma: `γ`, between `p` and `w_V`.
        nu: `ν`, the curvature in `w_V`.
        attention: (N, L, L) the rows `A_i`.
        mean: (N, L) the mean token `m_i` under each row.
        second_moment: (N, L) the second central moment `μ₂`.
        third_moment: (N, L) the third central moment `μ₃`.
        residual: (N, L) `f - y`.
        loss: The mean of the squared residuals.

    Raises:
        ValueError: If the shapes do not fit, or a dtype is not floating.

    Example:
        With s = 0, attention is uniform:

        >>> x = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
        >>> w_Q, w_K = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> model = ScalarAttention(x, torch.zeros_like(x), w_Q, w_K, 1.0)
        >>> model.mean, round(model.nu.item(), 6), round(model.beta.item(), 6)
        (tensor([[1., 1., 1.]], dtype=torch.float64), 2.0, 0.942809)
        >>> model.eigenvalues()  # -β, +β and three outliers
        tensor([-1.3264, -0.9428,  0.2971,  0.9428,  4.5108], dtype=torch.float64)
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        w_Q: Tensor,
        w_K: Tensor,
        w_V: Tensor | float,
        *,
        score_bias: Tensor | float = 0.0,
    ) -> None:
        _check(x, y, w_Q, w_K)
        self.x, self.y = (t.detach().reshape(-1, t.shape[-1]) for t in (x, y))
        self.w_Q, self.w_K, self.w_V = w_Q.detach(), w_K.detach(), _scalar(w_V, x)
        self.score_bias = _scalar(score_bias, x)
        x, w, root = self.x, self.w_V, math.sqrt(self.key_width)
        scores = (self.w_Q @ self.w_K) / root * x.unsqueeze(-1) * x.unsqueeze(-2)
        scores[..., 0] += self.score_bias
        self.attention = scores.softmax(-1)
        self.mean = (self.attention * x.unsqueeze(-2)).sum(-1)
        centred = x.unsqueeze(-2) - self.mean.unsqueeze(-1)
        self.second_moment = (self.attention * centred**2).sum(-1)
        self.third_moment = (self.attention * centred**3).sum(-1)
        self.residual = w * self.mean - self.y
        self.loss = self.residual.square().mean()
        slope = x * self.second_moment  # ∂m/∂s; the second derivative is x² μ₃
        self._outer_alpha = 2 / self.key_width * (w * slope).square().mean()
        self._outer_gamma = 2 / root * (w * self.mean * slope).mean()
        functional = (w * self.residual * x**2 * self.third_moment).mean()
        self.alpha = self._outer_alpha + 2 / self.key_width * functional
        self.beta = 2 / root * (w * self.residual * slope).mean()
        self.gamma = self._outer_gamma + 2 / root * (self.residual * slope).mean()
        self.nu = 2 * self.mean.square().mean()

    @property
    def key_width(self) -> int:
        """`d_K`, the number of query weights."""
        return len(self.w_Q)

    @property
    def bulk(self) -> Tensor:
        """The `2 (d_K - 1)` eigenvalues `-|β|` and `+|β|`, ascending; none for `d_K = 1`."""
        ones = torch.ones(self.key_width - 1).to(self.x)
        return torch.cat([-self.beta.abs() * ones, self.beta.abs() * ones])

    @property
    def outliers(self) -> Tensor:
        r"""The three other eigenvalues, ascending: those of H in the directions that meet `p`.

            R = [ β + αa²   αab       γa ]     a = ‖w_Q + w_K‖ / √2
                [ αab      -β + αb²   γb ]     b = ‖w_Q - w_K‖ / √2
                [ γa        γb        ν  ]

        At `w_Q = ±w_K` one of `a` and `b` is zero, and `∓β` is one of the three.
        """
        a, b = ((self.w_Q + sign * self.w_K).norm() / math.sqrt(2) for sign in (1, -1))
        direction = torch.stack([a, b])
        R = self.x.new_zeros(3, 3)
        signs = torch.tensor([1.0, -1.0]).to(self.x)
        R[:2, :2] = self.alpha * torch.outer(direction, direction) + self.beta * signs.diag()
        R[2, :2] = R[:2, 2] = self.gamma * direction
        R[2, 2] = self.nu
        values: Tensor = torch.linalg.eigvalsh(R)
        return values

    def cubic(self) -> Tensor:
        """Return the coefficients `(1, c₂, c₁, c₀)` of the polynomial whose roots are the outliers.

        With `n = ‖w_Q‖² + ‖w_K‖²` and `t = 2 w_Q·w_K`:
        `λ³ - (αn + ν) λ² + (αnν - β² - αβt - γ²n) λ + ν(β² + αβt) - γ²βt`.
        """
        alpha, beta, gamma, nu = self.alpha, self.beta, self.gamma, self.nu
        n, t = self._square_norm(), 2 * self.w_Q @ self.w_K
        middle = alpha * n * nu - beta**2 - alpha * beta * t - gamma**2 * n
        last = nu * (beta**2 + alpha * beta * t) - gamma**2 * beta * t
        return torch.stack([torch.ones_like(nu), -(alpha * n + nu), middle, last])

    def eigenvalues(self) -> Tensor:
        """Return all `2 d_K + 1` eigenvalues of the Hessian, ascending."""
        return torch.cat([self.bulk, self.outliers]).sort().values

    def gauss_newton_eigenvalues(self) -> Tensor:
        """Return all `2 d_K + 1` eigenvalues of the Gauss-Newton matrix, ascending.

        It has rank two: `[[α_o n, γ_o √n], [γ_o √n, ν]]` with the parts `α_o` and `γ_o` of `α` and
        `γ` without the residual. It misses the bulk, and what the residual adds to the outliers.
        """
        n = self._square_norm()
        mixed = self._outer_gamma * n.sqrt()
        G = torch.stack([self._outer_alpha * n, mixed, mixed, self.nu]).view(2, 2)
        zeros = torch.zeros(2 * self.key_width - 1).to(G)
        return torch.cat([zeros, torch.linalg.eigvalsh(G)]).sort().values

    def dense(self) -> Tensor:
        """Return the Hessian, `(2 d_K + 1, 2 d_K + 1)` in the order `(w_Q, w_K, w_V)`."""
        H = self._rank_one(self.alpha, self.gamma)
        swap = self.beta * torch.eye(self.key_width).to(H)
        H[: self.key_width, self.key_width : -1] += swap
        H[self.key_width : -1, : self.key_width] += swap
        return H

    def gauss_newton_dense(self) -> Tensor:
        """Return the Gauss-Newton matrix, in the order `(w_Q, w_K, w_V)`."""
        return self._rank_one(self._outer_alpha, self._outer_gamma)

    def condition_number(self) -> Tensor:
        """Return the largest over the smallest absolute eigenvalue, infinite if one is zero."""
        sizes = self.eigenvalues().abs()
        number: Tensor = sizes.max() / sizes.min()
        return number

    def gauss_newton_condition_number(self) -> Tensor:
        """Return the ratio of the two eigenvalues of the Gauss-Newton matrix of rank two."""
        smaller, larger = self.gauss_newton_eigenvalues()[-2:].clamp(min=0)
        number: Tensor = larger / smaller
        return number

    def with_sink(self, bias: float, kind: Sink = "score") -> ScalarAttention:
        """Return the same model with a bias at the first token of every sequence, a sink.

        The slides say that a larger bias at the first token "shrinks the bulk and grows the
        outliers", but not what the bias is added to. There are two readings, and in general each
        gives one half of that:

        - "score": `b` is added to the scores that all tokens give the first. The bulk always
          shrinks in the end: every row ends up on the first token, and `β`, `α`, `γ` fall like
          `e^-b` once `b` exceeds the other scores. On the way, the bulk may rise first, or pass
          through zero. The largest outlier tends to `2⟨x_1²⟩`, so it grows where that is more than
          it was, as with a first token larger than the mean of the others, and is bounded. The
          other two outliers vanish with the bulk. The largest outlier over the bulk grows without
          bound.
        - "input": the first token becomes `x_1 + b`. The outliers grow, in the end like `b²`, if
          some tokens attend to it. The bulk grows too: a token close to zero is undecided between
          the sink and the others, and its residual and second moment grow with `b`. The bulk
          shrinks, like `e^(-s min(x) b)`, if all tokens lie on one side of zero, away from it, and
          `s x_1 > 0`: then all attend to the sink. With `s x_1 < 0` none does, and neither bulk nor
          outliers move much.

        Args:
            bias: `b`, added to what is there.
            kind: "score" or "input".

        Returns:
            A new model; this one stays as it is.

        Raises:
            ValueError: If `kind` is neither.
        """
        check_choice("kind", kind, get_args(Sink))
        x = self.x.clone()
        x[:, 0] += bias if kind == "input" else 0.0
        score_bias = self.score_bias + (bias if kind == "score" else 0.0)
        return ScalarAttention(x, self.y, self.w_Q, self.w_K, self.w_V, score_bias=score_bias)

    def _square_norm(self) -> Tensor:
        return self.w_Q.square().sum() + self.w_K.square().sum()

    def _rank_one(self, alpha: Tensor, gamma: Tensor) -> Tensor:
        """Return `[[α p pᵀ, γ p], [γ pᵀ, ν]]`."""
        p = torch.cat([self.w_K, self.w_Q])
        upper = torch.cat([alpha * torch.outer(p, p), gamma * p.unsqueeze(1)], 1)
        return torch.cat([upper, torch.cat([gamma * p, self.nu.reshape(1)]).unsqueeze(0)])


def _scalar(value: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).detach().reshape(())


def _check(x: Tensor, y: Tensor, w_Q: Tensor, w_K: Tensor) -> None:
    if x.ndim not in (1, 2) or not x.numel():
        raise ValueError(
            f"Invalid x of shape {tuple(x.shape)}. Must be (sequences, tokens), or (tokens,) of "
            "one sequence."
        )
    if y.shape != x.shape:
        raise ValueError(
            f"Invalid y of shape {tuple(y.shape)}. Must be that of x, {tuple(x.shape)}."
        )
    if w_Q.ndim != 1 or w_Q.shape != w_K.shape or not len(w_Q):
        shapes = f"{tuple(w_Q.shape)}, {tuple(w_K.shape)}"
        raise ValueError(f"Invalid w_Q, w_K of shapes {shapes}. Must be (d_K,) both.")
    if not x.is_floating_point() or any(t.dtype != x.dtype for t in (y, w_Q, w_K)):
        given = ", ".join(str(t.dtype) for t in (x, y, w_Q, w_K))
        raise ValueError(
            f"Invalid dtypes {given} of x, y, w_Q, w_K. Must be one floating dtype, best float64."
        )
    check_tensors({"x": x, "y": y, "w_Q": w_Q, "w_K": w_K})
