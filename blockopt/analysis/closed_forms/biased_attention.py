"""Attention with biases and with the gain and bias of a norm, as plain attention on [x̂, 1].

With x̂ the normalized token, γ and β the gain and bias of the norm, the query is

    (γ∘x̂ + β) W + b = [x̂, 1] W̃        W̃ = [ diag(γ) W ; βᵀ W + bᵀ ]

and so are keys and values. W̃ is linear in each of W, b, γ and β, so derivatives by them come from
those by W̃ with ∂W̃/∂(·), and the only other term is ∂²W̃ by W and γ or β, contracted with the
gradient by W̃.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.attention_map import AttentionMap
from blockopt.analysis.closed_forms.rotary_positions import RotaryPositions
from blockopt.analysis.closed_forms.score_vectors import HeadNorm

PROJECTIONS = ("query", "key", "value")
ATTENTION_ROLES = (*PROJECTIONS, "output", *(f"{role}_bias" for role in (*PROJECTIONS, "output")))
FIRST_ROLES = ("first_gain", "first_bias")


class BiasedAttention:
    """Self-attention by roles, with the derivatives of its output.

    Heads may share keys and values in groups, as in `AttentionMap`.

    Args:
        X: Tokens (B, L, d); with a norm before attention, normalized, but without its gain and
            bias.
        weights: "query", "key", "value" (d, dk) or (H, d, dk), and optionally "output" (dk, d) or
            (H, dk, d), "query_bias", "key_bias", "value_bias" (dk,) or (H, dk), "output_bias",
            "first_gain", "first_bias" (d,). Others are not read.
        mask: See `AttentionMap`.
        scale: See `AttentionMap`.
        rotary: See `AttentionMap`.
        norms: See `AttentionMap`.
    """

    def __init__(
        self,
        X: Tensor,
        weights: Mapping[str, Tensor],
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
        rotary: RotaryPositions | None = None,
        norms: Mapping[str, HeadNorm] | None = None,
    ) -> None:
        self.roles = tuple(role for role in (*ATTENTION_ROLES, *FIRST_ROLES) if role in weights)
        self._W = {
            role: weights[role].unsqueeze(0) if weights[role].ndim == 2 else weights[role]
            for role in PROJECTIONS
        }
        self._check(weights, X.shape[-1])
        self._sizes = {role: weights[role].numel() for role in self.roles}
        gain, bias = weights.get("first_gain"), weights.get("first_bias")
        # W̃ = fold W, and a bias in its last row; in most cases there is nothing to fold.
        plain = set(self.roles) <= {*PROJECTIONS, "output", "output_bias"}
        self._fold = None
        if not plain:
            X = torch.cat([X, torch.ones_like(X[..., :1])], -1)
            last = torch.zeros_like(X[0, 0, :-1]) if bias is None else bias
            diagonal = torch.ones_like(last) if gain is None else gain
            self._fold = torch.cat([torch.diag(diagonal), last.unsqueeze(0)])
        folded = {role: W if self._fold is None else self._fold @ W for role, W in self._W.items()}
        for role in PROJECTIONS:
            if f"{role}_bias" in weights:
                folded[role][:, -1] += weights[f"{role}_bias"].reshape(len(self._W[role]), -1)
        self._map = AttentionMap(
            *(X, folded["query"], folded["key"], folded["value"]),
            W_U=weights.get("output"),
            mask=mask,
            scale=scale,
            rotary=rotary,
            norms=norms,
        )
        self.output = self._map.output + weights.get("output_bias", 0)
        # Which entries of what enters the map are of X: all but the constant 1
        is_token = torch.ones_like(X, dtype=torch.bool)
        is_token[..., self._W["query"].shape[1] :] = False
        self._tokens = is_token.flatten()

    def jacobian(self, role: str) -> Tensor:
        """Return ∂output/∂weight, (B·L·d, n)."""
        if role == "output_bias":
            width = self.output.shape[-1]
            identity = torch.eye(width, dtype=self.output.dtype, device=self.output.device)
            return identity.repeat(self.output.numel() // width, 1)
        inner = self._inner(role).items()
        parts = [_times(self._map.jacobian(name), matrix) for name, matrix in inner]
        return torch.stack(parts).sum(0)

    def input_jacobian(self) -> Tensor:
        """Return ∂output/∂X, (B·L·d, B·L·d)."""
        return self._map.input_jacobian()[:, self._tokens]

    def input_functional(self, role: str, g: Tensor) -> Tensor:
        """Return Σ g·∂²output by X and a weight, (B·L·d, n), or by X twice for "input"."""
        if role == "input":
            return self._map.input_functional("input", g)[self._tokens][:, self._tokens]
        total = g.new_zeros(int(self._tokens.sum()), self._sizes[role])
        if role == "output_bias":
            return total
        for name, matrix in self._inner(role).items():
            total = total + _times(self._map.input_functional(name, g)[self._tokens], matrix)
        return total

    def functional(self, row: str, column: str, g: Tensor) -> Tensor:
        """Return Σ g·∂²output by two weights, (n_row, n_column)."""
        total = g.new_zeros(self._sizes[row], self._sizes[column])
        if "output_bias" in (row, column):
            return total
        for name, left in self._inner(row).items():
            for other, right in self._inner(column).items():
                block = _times(self._map.functional(name, other, g), right)
                total = total + (block if left is None else left.mT @ block)
        if row in PROJECTIONS and column in FIRST_ROLES:
            total = total + self._products(row, column, g)
        if column in PROJECTIONS and row in FIRST_ROLES:
            total = total + self._products(column, row, g).mT
        return total

    def _inner(self, role: str) -> dict[str, Tensor | None]:
        """Return ∂W̃/∂weight, (n of W̃, n), for each W̃ that has it; None is the identity."""
        if role == "output" or (self._fold is None and role in PROJECTIONS):
            return {role: None}
        assert self._fold is not None
        identity = torch.eye(self._fold.shape[1], dtype=self._fold.dtype, device=self._fold.device)
        if role in PROJECTIONS:
            one = torch.kron(self._fold, self._one(role))
            return {role: torch.block_diag(*[one] * len(self._W[role]))}
        if role.endswith("_bias") and role != "first_bias":
            name = role.removesuffix("_bias")
            last = torch.zeros_like(self._fold[:, :1])
            last[-1] = 1
            one = torch.kron(last, self._one(name))
            return {name: torch.block_diag(*[one] * len(self._W[name]))}
        # The rows of fold but the last, and the last
        by_gain, by_bias = torch.diag_embed(identity), identity.unsqueeze(0)
        if role == "first_gain":
            by_bias = torch.zeros_like(by_bias)
        else:
            by_gain = torch.zeros_like(by_gain)
        fold = torch.cat([by_gain, by_bias])  # its derivative, (d + 1, d, d)
        return {
            name: torch.einsum("jai,hak->hjki", fold, W).flatten(0, 2)
            for name, W in self._W.items()
        }

    def _products(self, role: str, norm: str, g: Tensor) -> Tensor:
        """Return Σ gradient by W̃ · ∂²W̃ by W and γ or β, (n, d).

        Row (h, j, k) has its entry in column j.
        """
        heads, width, size = self._W[role].shape
        gradient = (g.reshape(1, -1) @ self._map.jacobian(role)).reshape(heads, width + 1, size)
        entries = gradient[:, :-1]
        if norm != "first_gain":
            entries = gradient[:, -1:].expand(heads, width, size)
        return torch.diag_embed(entries.movedim(1, 2)).movedim(1, 2).flatten(0, 2)

    def _one(self, role: str) -> Tensor:
        W = self._W[role]
        return torch.eye(W.shape[-1], dtype=W.dtype, device=W.device)

    def _check(self, weights: Mapping[str, Tensor], width: int) -> None:
        def check(role: str, fits: bool, wanted: str) -> None:
            if not fits:
                given = tuple(weights[role].shape)
                raise ValueError(f"Invalid {role} of shape {given}. Must be {wanted}.")

        for role in PROJECTIONS:
            W, bias = self._W[role], weights.get(f"{role}_bias")
            fits = W.ndim == 3 and W.shape[1] == width
            check(role, fits, f"({width}, dk) or (heads, {width}, dk)")
            shape = W.shape[-1:] if weights[role].ndim == 2 else (W.shape[0], W.shape[-1])
            fits = bias is None or bias.shape == tuple(shape)
            check(f"{role}_bias", fits, f"{tuple(shape)} to fit {role}")
        for role in (*FIRST_ROLES, "output_bias"):
            fits = role not in weights or weights[role].shape == (width,)
            check(role, fits, f"({width},), the width of X")


def _times(block: Tensor, matrix: Tensor | None) -> Tensor:
    return block if matrix is None else block @ matrix
