"""The sites of a transformer block's chain: maps of each row, and how derivatives pass them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.biased_attention import BiasedAttention
from blockopt.analysis.closed_forms.normalization import Normalization, NormKind


class Site(Protocol):
    """A map of each row of its input, with weights of its own; N rows of d entries."""

    roles: tuple[str, ...]

    def jacobian(self, role: str) -> Tensor:
        """Return the Jacobian by a weight, (N·d, n)."""

    def input_jacobian(self) -> Tensor:
        """Return the Jacobian by the input, (N, d, d)."""

    def input_pulled(self, g: Tensor) -> Tensor:
        """Return the gradient at the input from the one at the output, (N, d)."""

    def functional(self, row: str, column: str, g: Tensor) -> Tensor:
        """Return Σ g·∂² by two weights, (n_row, n_column)."""

    def mixed_hessian(self, role: str, g: Tensor) -> Tensor:
        """Return Σ g·∂² by a weight and the input, (n, N, d)."""

    def input_hessian(self, g: Tensor) -> Tensor:
        """Return Σ g·∂² by the input twice, (N, d, d)."""


class NormSite:
    """A norm as a site, with its gain and bias as weights if they are given."""

    def __init__(
        self, x: Tensor, kind: NormKind, name: str, weights: Mapping[str, Tensor], epsilon: float
    ) -> None:
        gain, bias = f"{name}_gain", f"{name}_bias"
        self.roles = tuple(role for role in (gain, bias) if role in weights)
        options = {"gain": weights.get(gain), "bias": weights.get(bias)}
        self._norm = Normalization(x.flatten(0, -2), kind=kind, epsilon=epsilon, **options)
        self.output = self._norm.output.reshape(x.shape)

    def jacobian(self, role: str) -> Tensor:
        """Return the Jacobian by the gain or the bias."""
        gain = role.endswith("gain")
        return self._norm.parameter_jacobian("gain" if gain else "bias").flatten(0, 1)

    def input_jacobian(self) -> Tensor:
        """Return the Jacobian by the input."""
        return self._norm.jacobian()

    def input_pulled(self, g: Tensor) -> Tensor:
        """Return the gradient at the input."""
        return self._norm.transposed_product(g.reshape(self._norm.output.shape))

    def functional(self, row: str, column: str, g: Tensor) -> Tensor:
        """Return zeros: a norm is linear in gain and bias together."""
        return g.new_zeros(self._norm.dim, self._norm.dim)

    def mixed_hessian(self, role: str, g: Tensor) -> Tensor:
        """Return Σ g·∂² by the gain or the bias and the input."""
        rows = g.reshape(self._norm.output.shape)
        if not role.endswith("gain"):
            rows = torch.zeros_like(rows)
        return self._norm.gain_input_hessian(rows).movedim(0, 1)

    def input_hessian(self, g: Tensor) -> Tensor:
        """Return Σ g·∂² by the input twice."""
        return self._norm.contracted_hessian(g.reshape(self._norm.output.shape))


class InputSite:
    """`R = X + F(N(X))` as a function of X, with the norm N before attention F, if there is one."""

    def __init__(self, norm: Normalization | None, attention: BiasedAttention) -> None:
        self._norm, self._attention = norm, attention

    def jacobian(self) -> Tensor:
        """Return ∂R/∂X, (B·L·d, B·L·d)."""
        found = self._through_norm(self._attention.input_jacobian().mT).mT
        return found + torch.eye(len(found), dtype=found.dtype, device=found.device)

    def functional(self, role: str, g: Tensor) -> Tensor:
        """Return Σ g·∂²R by X and a weight of attention, or by X twice for "input"."""
        found = self._through_norm(self._attention.input_functional(role, g))
        if role != "input" or self._norm is None:
            return found
        pulled = (g.reshape(1, -1) @ self._attention.input_jacobian()).reshape(g.shape)
        bends: Tensor = torch.block_diag(*self._norm.contracted_hessian(pulled).flatten(0, 1))
        return self._through_norm(found.mT) + bends

    def _through_norm(self, rows: Tensor) -> Tensor:
        """Return J_Nᵀ times a matrix whose rows are derivatives by what the norm returns."""
        if self._norm is None:
            return rows
        return _rowwise(self._norm.jacobian().flatten(0, 1).mT, rows)


class KnownLoss:
    """A loss on the output of a site whose value and derivatives are known at one point."""

    def __init__(self, value: Tensor, gradient: Tensor, curvature: Tensor) -> None:
        self._value, self._gradient, self._curvature = value, gradient, curvature

    def value(self, output: Tensor) -> Tensor:
        """Return the loss."""
        return self._value

    def gradient(self, output: Tensor) -> Tensor:
        """Return its derivative by each output."""
        return self._gradient

    def curvature(
        self, output: Tensor, left: Tensor | None = None, right: Tensor | None = None
    ) -> Tensor:
        """Return `left Λ_i rightᵀ` of each position."""
        half = self._curvature if left is None else left @ self._curvature
        return half if right is None else half @ right.mT


def local_hessian(
    site: Site,
    row: str,
    column: str,
    g: Tensor,
    into_row: Tensor | None,
    into_column: Tensor | None,
) -> Tensor | float:
    """Return Σ g·∂²site between two weights, its own or such as enter with its input."""
    total: Tensor | float = 0.0
    if row in site.roles and column in site.roles:
        total = total + site.functional(row, column, g)
    if row in site.roles and into_column is not None:
        total = total + site.mixed_hessian(row, g).flatten(1) @ into_column
    if column in site.roles and into_row is not None:
        total = total + (site.mixed_hessian(column, g).flatten(1) @ into_row).mT
    if into_row is not None and into_column is not None:
        total = total + between(into_row, site.input_hessian(g), into_column)
    return total


def push(site: Site | None, role: str, into: Tensor | None) -> Tensor | None:
    """Return the Jacobian of a site's output by its own weight, or by one in its input."""
    if site is None:
        return into
    if role in site.roles:
        return site.jacobian(role)
    return None if into is None else _rowwise(site.input_jacobian(), into)


def pull(site: Site | None, g: Tensor) -> Tensor:
    """Return the gradient at a site's input from the one at its output."""
    return g if site is None else site.input_pulled(g).reshape(g.shape)


def _rowwise(matrices: Tensor, into: Tensor) -> Tensor:
    """Multiply block-diagonal matrices (N, r, d) with a matrix (N·d, n)."""
    rows: Tensor = into.unflatten(0, (len(matrices), -1))
    return (matrices @ rows).flatten(0, 1)


def between(left: Tensor, matrices: Tensor, right: Tensor) -> Tensor:
    """Return leftᵀ · block-diagonal matrices (N, d, d) · right, (n_left, n_right)."""
    return left.mT @ _rowwise(matrices, right)
