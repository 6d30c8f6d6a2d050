"""How the norms of attention's Hessian blocks grow with the scale σ of the data.

Equation 5 of Ormaniec, Dangel and Singh (ICLR 2025): in one softmax attention layer the data enters
the blocks with different powers, outer query blocks with `X⁶` and the value block with `X²`. So
blocks that differ little at σ = 1 differ by orders of magnitude at the σ of an embedding.
"""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import NamedTuple, get_args

import torch

from blockopt.analysis.closed_forms.attention_map import Activation
from blockopt.analysis.closed_forms.checks import Part
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from blockopt.checks import check_choice, check_count

ROLES = ("query", "key", "value")
PARTS: tuple[Part, ...] = ("outer", "functional", "full")


class BlockPart(NamedTuple):
    """The label of a part of a Hessian block.

    Attributes:
        part: "outer", "functional" or "full".
        role: The role of its rows.
        column: The role of its columns, or None where only diagonal blocks are meant.
        layer: The number of its layer, or None if there is one.

    Example:
        >>> print(BlockPart("outer", "query", "key"))
        outer query key
    """

    part: Part
    role: str
    column: str | None = None
    layer: int | None = None

    def __str__(self) -> str:
        layer = None if self.layer is None else f"layer {self.layer}"
        return " ".join(word for word in (self.part, self.role, self.column, layer) if word)


def attention_exponents(
    activation: Activation = "softmax", *, residual: float = 0.0
) -> dict[BlockPart, float]:
    """Return the exponents of one attention layer's blocks for small σ, as in equation 5.

    Equation 5 leaves out the residual `F - Y`, which multiplies every functional block, and gives
    two powers for the functional query-key block, `X⁵ + X³`. For σ → 0 the lowest power leads. So
    with targets that do not shrink with σ, the residual tends to `-Y` and adds nothing; with `Y =
    0`, or targets proportional to X, it is of order σ (σ³ for linear attention) and adds as much.
    The full block follows the lower exponent of its two parts: 5 for the query, as Figure 3a shows.
    The paper attributes that to factors other than the data; for small σ the lower power leads in
    any case. Functional blocks that are zero are left out.

    For softmax the limit is that of uniform attention; for σ ≫ 1 attention saturates and no power
    law holds. For linear attention (Remark 4.1) all powers are exact at any σ, except in the sum of
    two parts and in the residual.

    Args:
        activation: "softmax" or "linear".
        residual: The exponent of the residual, 0 where targets have a scale of their own.

    Example:
        >>> exponents = attention_exponents()
        >>> [exponents[BlockPart(part, "query", "query")] for part in PARTS]
        [6, 5, 5]
    """
    check_choice("activation", activation, get_args(Activation))
    jacobian = {"query": 3, "key": 3, "value": 1 if activation == "softmax" else 3}
    second = {("query", "key"): 3, ("query", "value"): 3, ("key", "value"): 3}
    if activation == "softmax":
        second |= {("query", "query"): 5, ("key", "key"): 5}
    found: dict[BlockPart, float] = {}
    for pair in combinations_with_replacement(ROLES, 2):
        outer = full = float(sum(jacobian[role] for role in pair))
        if pair in second:
            functional = second[pair] + residual
            found[BlockPart("functional", *pair)] = functional
            full = min(outer, functional)
        found[BlockPart("outer", *pair)], found[BlockPart("full", *pair)] = outer, full
    return {label: int(value) if value == int(value) else value for label, value in found.items()}


def linear_attention_exponents(depth: int) -> dict[str, int]:
    """Return the exponents of the diagonal blocks of `depth` linear attention layers.

    A layer uses its input three times, so the output and its derivatives by the weights are
    homogeneous of degree `3^D` in X, at any σ. The outer part of every block of every layer grows
    exactly with `2·3^D`. The functional part has the residual and one second derivative: `3^D`
    while targets of a fixed scale outweigh the output. It is zero in the diagonal blocks of the
    last layer, in which the output is linear in each matrix. In earlier layers it leads for small
    σ, where the full block grows with `3^D` only. That is why those follow `2·3^D` only for large σ
    in the paper's Figure 7.

    Example:
        >>> linear_attention_exponents(2)
        {'outer': 18, 'functional': 9}
    """
    check_count("depth", depth)
    return {"outer": 2 * 3**depth, "functional": 3**depth}


def attention_norms(
    hessian: SelfAttentionHessian, *, mixed: bool = False
) -> dict[BlockPart, float]:
    """Return exact Frobenius norms of the blocks of one attention layer.

    Diagonal blocks are never built, so any width will do. With several heads, only the blocks of
    each head with itself count: `sqrt(Σ_h ‖H(h, h)‖²)`.

    Args:
        hessian: The Hessian of a layer with separate queries and keys.
        mixed: Whether to add the blocks between two roles, which are built with (d · dk)² entries.

    Example:
        >>> X, W = torch.eye(2), torch.eye(2)
        >>> norms = attention_norms(SelfAttentionHessian(X, W, W, W, Y=torch.zeros(2, 2)))
        >>> norms[BlockPart("functional", "value", "value")]
        0.0
    """
    found = {}
    heads = range(hessian.num_heads)
    for part in PARTS:
        for a, b in combinations_with_replacement(ROLES, 2):
            if a == b:
                factored = [hessian.factored(a, head, part) for head in heads]
                squares = [block.squared_frobenius().clamp(min=0) for block in factored]
            elif mixed:
                squares = [hessian.block(a, b, part, (head, head)).square().sum() for head in heads]
            else:
                continue
            found[BlockPart(part, a, b)] = float(torch.stack(squares).sum().sqrt())
    return found
