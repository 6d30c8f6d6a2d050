r"""Exact first and second derivatives of LayerNorm and RMSNorm, row by row.

With Π = I - 11ᵀ/d for LayerNorm and Π = I for RMSNorm, σ = sqrt(|Πx|²/d + ε) and y = Πx/σ, the
output is γ∘y + β and

    J_ab  = γ_a/σ (Π_ab - y_a y_b / d)
    H_abc = -γ_a/(dσ²) (Π_ab y_c + Π_ac y_b + Π_bc y_a - 3 y_a y_b y_c / d)

for any ε. Without γ the second derivative is totally symmetric, so a product with it costs O(d) per
row.

Petrov et al. (arXiv 2510.16927) write LN(X) = P M with the centred rows M = XΠ and P = diag(σ)⁻¹,
and both derivatives as Kronecker products. Their Theorem 2 (Jacobian) is right as printed:

    ∂LN = (P ⊗ I_d) G + (I_L ⊗ Mᵀ) ∂P,    G = I_L ⊗ Π

Their Theorem 3 (Hessian) has the right structure

    ∂²LN = (I ⊗ Gᵀ) ∂(P ⊗ I_d) + ((I_L ⊗ Mᵀ) ⊗ I) ∂²P + (I ⊗ (∂P)ᵀ) ∂(I_L ⊗ Mᵀ)

and three errors in its pieces. ∂(P ⊗ I_d) is (I_L ⊗ K_{d,L} ⊗ I_d)(I_{L²} ⊗ vec I_d) ∂P; printed
are K_{L,L} and I_L. ∂²P has 1/√d on both of its terms; printed is one on the first alone. And
∂diag(σ) has 1/√d; printed is none. Their lemma on the norms takes the smallest norm of a centred
row for σ_min, and is violated. With the standard deviation it holds, but is loose: `jacobian_norm`
and `hessian_norm` have the exact values.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.checks import check_tensors
from blockopt.checks import check_choice

NormKind = Literal["layer", "rms"]


class Normalization:
    """LayerNorm or RMSNorm of the rows of `x`, with what its derivatives need.

    Args:
        x: The input, any shape with the normalized dimension last (..., d).
        kind: "layer" subtracts the mean of each row, "rms" does not.
        gain: γ of shape (d,), by default ones.
        bias: β of shape (d,), by default zeros.
        epsilon: ε, added to the variance (to the mean square for "rms").

    Attributes:
        output: γ∘y + β (..., d).
        normalized: y (..., d).
        sigma: σ (..., 1).

    Raises:
        ValueError: If a shape or an option is wrong, or a row has σ = 0.

    Example:
        >>> norm = Normalization(torch.tensor([1.0, 2.0, 3.0]), epsilon=0.0)
        >>> norm.jacobian()
        tensor([[ 0.2041, -0.4082,  0.2041],
                [-0.4082,  0.8165, -0.4082],
                [ 0.2041, -0.4082,  0.2041]])
        >>> norm.jacobian_norm()  # 1/σ
        tensor(1.2247)
    """

    def __init__(
        self,
        x: Tensor,
        *,
        kind: NormKind = "layer",
        gain: Tensor | None = None,
        bias: Tensor | None = None,
        epsilon: float = 1e-5,
    ) -> None:
        check_choice("kind", kind, get_args(NormKind))
        if x.ndim == 0:
            raise ValueError("Invalid x of shape (). Must have at least one row.")
        pairs = {"gain": gain, "bias": bias}
        given = {name: value for name, value in pairs.items() if value is not None}
        check_tensors({"x": x, **given})
        for name, value in given.items():
            if value.shape != x.shape[-1:]:
                raise ValueError(
                    f"Invalid {name} of shape {tuple(value.shape)}. Must be "
                    f"{tuple(x.shape[-1:])}, the last of x."
                )
        if not epsilon >= 0:
            raise ValueError(f"Invalid epsilon={epsilon}. Must be >= 0.")
        self.kind, self.epsilon = kind, epsilon
        self.dim = x.shape[-1]
        x = x.detach()
        self.gain = x.new_ones(self.dim) if gain is None else gain.detach()
        self.bias = x.new_zeros(self.dim) if bias is None else bias.detach()
        self._has_gain = gain is not None
        centred = self.project(x)
        self.sigma = (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
        if not bool((self.sigma > 0).all()):
            raise ValueError(
                "A row of x has no variance, and epsilon=0. There is no derivative; use "
                "epsilon > 0."
            )
        if not bool(torch.isfinite(self.sigma).all()):
            raise ValueError(
                f"The squares of x are too large for {x.dtype}. Use x.float() or x.double()."
            )
        self.normalized = centred / self.sigma
        self.output = self.gain * self.normalized + self.bias

    def project(self, v: Tensor) -> Tensor:
        """Return Πv: v minus the mean of each row for LayerNorm, v itself for RMSNorm."""
        return v - v.mean(-1, keepdim=True) if self.kind == "layer" else v

    def jacobian_product(self, v: Tensor) -> Tensor:
        """Return J v for each row: γ∘(Πv - y (y·v)/d)/σ."""
        return self.gain * self._plain_product(v)

    def transposed_product(self, g: Tensor) -> Tensor:
        """Return Jᵀ g for each row, the gradient at the input for a gradient g at the output."""
        return self._plain_product(self.gain * g)  # without γ, J is symmetric

    def hessian_product(self, g: Tensor, v: Tensor) -> Tensor:
        """Return (Σ_a g_a H_a··) v for each row, in O(d).

        With p = Π(γ∘g) and Πv: -[(p·v) y + (y·v) p + (y·p) Πv - 3/d (y·p)(y·v) y] / (dσ²).
        """
        y, p, projected = self.normalized, self.project(self.gain * g), self.project(v)
        yp, yv, pv = ((a * b).sum(-1, keepdim=True) for a, b in ((y, p), (y, v), (p, v)))
        return -(pv * y + yv * p + yp * projected - 3 / self.dim * yp * yv * y) / (
            self.dim * self.sigma.square()
        )

    def jacobian(self) -> Tensor:
        """Return J of each row (..., d, d), output index first."""
        y = self.normalized
        plain = self._projector() - y.unsqueeze(-1) * y.unsqueeze(-2) / self.dim
        return self.gain.unsqueeze(-1) * plain / self.sigma.unsqueeze(-1)

    def hessian(self) -> Tensor:
        """Return H_abc of each row (..., d, d, d), output index a first. For small d."""
        y, projector = self.normalized, self._projector()
        a, b, c = y[..., :, None, None], y[..., None, :, None], y[..., None, None, :]
        ab, ac, bc = projector[:, :, None], projector[:, None, :], projector[None, :, :]
        plain = ab * c + ac * b + bc * a - 3 / self.dim * a * b * c
        return -self.gain[:, None, None] * plain / (self.dim * self.sigma[..., None, None].square())

    def contracted_hessian(self, g: Tensor) -> Tensor:
        """Return Σ_a g_a H_a·· of each row (..., d, d), symmetric."""
        y, p = self.normalized, self.project(self.gain * g)
        yp = (y * p).sum(-1)[..., None, None]
        mixed = p.unsqueeze(-1) * y.unsqueeze(-2)
        outer = y.unsqueeze(-1) * y.unsqueeze(-2)
        plain = mixed + mixed.mT + yp * (self._projector() - 3 / self.dim * outer)
        return -plain / (self.dim * self.sigma.unsqueeze(-1).square())

    def parameter_jacobian(self, role: Literal["gain", "bias"]) -> Tensor:
        """Return ∂output/∂γ = diag(y), or ∂output/∂β = I, of each row (..., d, d)."""
        check_choice("role", role, ("gain", "bias"))
        y = self.normalized
        return torch.diag_embed(y if role == "gain" else torch.ones_like(y))

    def gain_input_hessian(self, g: Tensor) -> Tensor:
        """Return Σ_a g_a ∂²output_a/∂γ_b∂x_c = g_b/σ (Π_bc - y_b y_c/d) of each row (..., d, d).

        The other second derivatives by γ and β are zero.
        """
        y = self.normalized
        plain = self._projector() - y.unsqueeze(-1) * y.unsqueeze(-2) / self.dim
        return g.unsqueeze(-1) * plain / self.sigma.unsqueeze(-1)

    def jacobian_norm(self) -> Tensor:
        """Return the exact spectral norm of each row's Jacobian (...).

        Without γ it is 1/σ for any ε: J/σ⁻¹ is a projector except in the direction of y, if another
        direction is left (d >= 3 for LayerNorm, 2 for RMSNorm). The Jacobian of all rows together
        is block-diagonal, so its norm is the largest of them. With γ it comes from a singular value
        decomposition.
        """
        if self._has_gain or self._rank() < 2:
            largest: Tensor = torch.linalg.matrix_norm(self.jacobian(), ord=2)
            return largest
        return 1 / self.sigma.squeeze(-1)

    def hessian_norm(self) -> Tensor:
        """Return the exact spectral norm of each row's Hessian as a d² × d matrix (...).

        Without γ, with s² = |y|²/d and r = d - 1 for LayerNorm, d for RMSNorm, it is
        s/(√d σ²) sqrt(max(r - 1 + 9(1 - s²)², 2)). For ε = 0 and LayerNorm that is
        sqrt(max(d - 2, 2)/d)/σ². With γ it comes from the d × d Gram matrix.
        """
        if self._has_gain or self._rank() < 2:
            hessian = self.hessian()
            gram = torch.einsum("...abc,...abe->...ce", hessian, hessian)
            eigenvalues: Tensor = torch.linalg.eigvalsh(gram)
            return eigenvalues[..., -1].clamp(min=0).sqrt()
        share = self._share()
        largest = (self._rank() - 1 + 9 * (1 - share).square()).clamp(min=2)
        return (share * largest / self.dim).sqrt() / self.sigma.squeeze(-1).square()

    def trilinear_norm(self) -> Tensor:
        """Return the largest |Σ H_abc u_a v_b w_c| of each row over unit vectors (...).

        It is exact without γ, and an upper bound with it. |g| times it bounds the Hessian
        contracted with g, and it is about √d times less than `hessian_norm`. A symmetric tensor
        takes its largest value at u = v = w (Banach). With c the cosine of u and y that is the
        largest 3c - 3s²c³, times s/(√d σ²): 2/(√(3d) σ²) for s² >= 1/3, and 3s(1 - s²)/(√d σ²)
        otherwise. With γ it is multiplied by the largest |γ|.
        """
        share = self._share()
        largest = torch.where(share >= 1 / 3, 2 / math.sqrt(3), 3 * share.sqrt() * (1 - share))
        if self._rank() < 2:  # no direction but that of y is left
            largest = 3 * share.sqrt() * (1 - share)
        scale = math.sqrt(self.dim) * self.sigma.squeeze(-1).square()
        return self.gain.abs().max() * largest / scale

    def _plain_product(self, v: Tensor) -> Tensor:
        y = self.normalized
        return (self.project(v) - y * (y * v).sum(-1, keepdim=True) / self.dim) / self.sigma

    def _projector(self) -> Tensor:
        return self.project(torch.eye(self.dim, dtype=self.sigma.dtype, device=self.sigma.device))

    def _rank(self) -> int:
        return self.dim - 1 if self.kind == "layer" else self.dim

    def _share(self) -> Tensor:
        """Return s² = |y|²/d, the share of the variance in σ²: 1 for ε = 0."""
        return self.normalized.square().mean(-1)
