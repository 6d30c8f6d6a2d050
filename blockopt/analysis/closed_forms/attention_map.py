"""Self-attention of several heads as a function of its weights, in closed form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.attention_head import AttentionHead, HeadWeights, Scoring
from blockopt.analysis.closed_forms.checks import check_number, check_tensors
from blockopt.analysis.memory import check_memory
from blockopt.checks import check_choice

Activation = Literal["softmax", "linear"]
Parametrization = Literal["query_key", "single"]


class AttentionMap:
    """Self-attention as a function of its weights: its output and its first two derivatives.

    Every head has weights of its own. Keys that several heads share (GQA) and rotated ones (RoPE)
    are not covered; a `HessianOperator` takes both.

    Args:
        X: Tokens, (L, d) or (B, L, d).
        W_Q: Query weights, (d, dk), or (H, d, dk) for H heads; for "single" the matrix W_QK, (d, d)
            or (H, d, d).
        W_K: Key weights, of the shape of W_Q; None for "single".
        W_V: Value weights, (d, dv) or (H, d, dv).
        W_U: The output matrix of each head, (dv, d_out) or (H, dv, d_out), or None. The paper's
            Appendix E calls our W_V its W_O, and writes W_V for the product `W_V W_U`.
        mask: Bool, True where a position (row) sees another (column), or numbers to add to the
            scores (softmax only); (L, L) or (B, L, L). Everything is visible by default.
        scale: The factor of the scores; `1 / sqrt(dk)` by default, and 1 for "single". A
            temperature t divides it.
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
        given = {name: weight for name, weight in weights.items() if weight is not None}
        check_tensors({"X": X} | given | named)
        stacked = {name: _stacked(name, weight) for name, weight in given.items()}
        self.num_heads = len(stacked["W_Q"])
        width, out_width = X.shape[-1], stacked["W_U"].shape[-1] if "W_U" in stacked else 0
        key_width, value_width = (stacked[name].shape[-1] for name in ("W_Q", "W_V"))
        expected = {
            "W_Q": (self.num_heads, width, width if single else key_width),
            "W_K": (self.num_heads, width, key_width),
            "W_V": (self.num_heads, width, value_width),
            "W_U": (self.num_heads, value_width, out_width),
        }
        for name, weight in stacked.items():
            if weight.shape != expected[name]:
                shared = ""
                if len(weight) < self.num_heads:
                    shared = " For heads that share keys and values, give the sum over them."
                raise ValueError(
                    f"Invalid {name} of shape {tuple(weight.shape)}. Must be {expected[name]}."
                    f"{shared}"
                )
        scale = (1.0 if single else 1 / math.sqrt(key_width)) if scale is None else float(scale)
        scoring = Scoring(*_read_mask(mask, X, activation), scale, activation == "softmax")
        widths = {"query": key_width, "key": key_width, "value": value_width}
        added = zip(*_read_biases(biases or {}, single, self.num_heads, widths))
        none = [None] * self.num_heads
        by_head = zip(*(stacked.get(name, none) for name in weights), added)
        self.heads = [AttentionHead(X, HeadWeights(*one), scoring) for one in by_head]
        self.scale, self.X, self.biased = scale, X, bool({"query", "key"} & (biases or {}).keys())
        scores = ("query_key",) if single else ("query", "key")
        self.roles = (*scores, "value", *(("output",) if W_U is not None else ()))
        names = {"query_key": "W_Q", "query": "W_Q", "key": "W_K", "value": "W_V", "output": "W_U"}
        self.shapes = {role: tuple(stacked[names[role]].shape[1:]) for role in self.roles}
        self.output = torch.stack([head.output for head in self.heads]).sum(0)

    def size(self, role: str) -> int:
        """Return the number of entries of a weight in one head."""
        check_choice("role", role, self.roles)
        return math.prod(self.shapes[role])

    def jacobian(self, role: str, head: int | None = None) -> Tensor:
        """Return the derivative of the output by a weight, (B L d_out, n), of one head or all."""
        if head is None:
            return torch.cat([self.jacobian(role, number) for number in range(self.num_heads)], 1)
        check_number("head", head, self.num_heads)
        check_memory(self.output.numel(), self.size(role), self.X.dtype, self.X.device)
        factor, W_U = self.heads[head].factor(role), self.heads[head].W_U
        core = factor.core
        positions = factor.vector.shape[:2]
        if factor.projected and W_U is not None:
            core = W_U.mT.expand(*positions, *W_U.mT.shape) if core is None else W_U.mT @ core
        if core is None:
            core = torch.eye(self.output.shape[-1], dtype=self.X.dtype, device=self.X.device)
            core = core.expand(*positions, *core.shape)
        pattern = "na,nob->noab" if factor.vector_first else "nb,noa->noab"
        jacobian = torch.einsum(pattern, factor.vector.flatten(0, 1), core.flatten(0, 1))
        return jacobian.reshape(self.output.numel(), -1)

    def functional(self, row: str, column: str, g: Tensor) -> Tensor:
        """Return `Σ g · ∂²F / ∂W_row ∂W_column`, (H n_row, H n_column).

        It is zero between different heads (Appendix E).
        """
        sizes = self.size(row), self.size(column)
        if g.shape[-2:] != self.output.shape[-2:] or g.numel() != self.output.numel():
            raise ValueError(
                f"Invalid g of shape {tuple(g.shape)}. Must be that of the output, "
                f"{tuple(self.output.shape)}."
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
        fix = "pass W_QK as W_Q, and None for W_K"
        if W_K is None:
            fix = "pass W_K, or parametrization='single' with W_QK as W_Q"
        raise ValueError(f"Invalid W_K for parametrization={parametrization!r}: {fix}.")


def _stacked(name: str, weight: Tensor) -> Tensor:
    if weight.ndim not in (2, 3):
        raise ValueError(
            f"Invalid {name} of shape {tuple(weight.shape)}. Must be a matrix, or one for each "
            "head: (H, rows, columns)."
        )
    return weight.detach().unsqueeze(0) if weight.ndim == 2 else weight.detach()


def _read_biases(
    biases: Mapping[str, Tensor], single: bool, heads: int, widths: Mapping[str, int]
) -> list[list[Tensor | float]]:
    """Return what is added to the queries, keys and values of each head."""
    allowed = ("value",) if single else tuple(widths)
    unknown = sorted(biases.keys() - set(allowed))
    if unknown:
        raise ValueError(f"Invalid biases {unknown}. Must be of {', '.join(allowed)}.")
    found: list[list[Tensor | float]] = []
    for role, width in widths.items():
        bias = biases.get(role)
        if bias is None:
            found.append([0.0] * heads)
            continue
        if bias.shape != (heads, width) and (bias.shape != (width,) or heads > 1):
            given = tuple(bias.shape)
            raise ValueError(f"Invalid bias of {role} of shape {given}. Must be {(heads, width)}.")
        found.append(list(bias.detach().reshape(heads, width)))
    return found


def _read_mask(mask: Tensor | None, X: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    """Return who sees whom, (B, L, L), and what is added to the scores."""
    shape = (X.shape[0], X.shape[1], X.shape[1])
    if mask is None:
        return torch.ones((), dtype=torch.bool, device=X.device).expand(shape), None
    if mask.shape not in (shape, shape[1:]):
        raise ValueError(
            f"Invalid mask of shape {tuple(mask.shape)}. Must be {shape[1:]} or {shape}."
        )
    visible = mask
    if mask.dtype != torch.bool:
        binary = bool((mask == 1).any() and ((mask == 0) | (mask == 1)).all())
        if binary or not mask.is_floating_point():
            raise ValueError(
                f"Invalid mask of {mask.dtype}, all 0 and 1: numbers would be added to the scores. "
                "Use mask.bool()."
            )
        if not bool((mask < math.inf).all()):
            raise ValueError(
                "Invalid mask: numbers that are added to the scores must not be NaN or +inf; -inf "
                "hides a token."
            )
        visible = mask > -math.inf
    if not bool(visible.any(-1).all()):
        raise ValueError(
            "Invalid mask: a position sees no other, not even itself. Let it see itself, or leave "
            "it out."
        )
    if mask.dtype == torch.bool:
        return visible.expand(shape), None
    if activation == "linear":
        raise ValueError(
            "Invalid mask: linear attention has no use for numbers added to the scores. Must be "
            "bool."
        )
    return visible.expand(shape), mask.expand(shape).to(X)
