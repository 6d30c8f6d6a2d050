"""Closed forms of the query, key and value blocks of softmax attention.

They hold for any mask, any scale and grouped heads. With attention probabilities `A`, and `g_i` the
gradient of the loss at the output of query position i, let `s_ij = g_i·v_j - Σ_j A_ij g_i·v_j`, the
derivative of the loss by the score of i and j, over A_ij. Then (Ormaniec, Dangel and Singh, ICLR
2025, in the compact form of sums over positions of a rank-one matrix and an attention-weighted
covariance):

    functional part of the Hessian:  tr H_f(Q,Q) = scale² Σ_i |x_i|² Σ_j A_ij s_ij |k_j - k̄_i|²
                                     tr H_f(K,K) = scale² Σ_i |q_i|² Σ_j A_ij s_ij |x_j - m_i|²

where k̄_i and m_i are the A-weighted means of keys and inputs. This is exact in a network of any
depth, since it needs only the gradient. RoPE leaves the form of the queries as it is, with k the
rotated keys. In that of the keys `q_i ⊗ (x_j - m_i)` becomes `R_jᵀ q_i ⊗ x_j` minus its mean, for
the rotation R_j at position j. The products `q_iᵀ R_j R_lᵀ q_i` that this takes are even in the
angle, so they are the mean of `(q_iᵀ R_jᵀ r) (q_iᵀ R_lᵀ r)` over random vectors r, or its sum over
a basis.

The outer part needs Λ_i, the curvature of the loss in the output of position i. Where nothing above
mixes positions, one factor `δ_i` of `Λ_i = Σ δ_i δ_iᵀ` contributes

    queries: scale² Σ_i |x_i|² |C_iᵀ δ_i|²
    keys:    scale² Σ_i |q_i|² |D_iᵀ δ_i|²
    values:  Σ_i |m_i|² |δ_i|²

with `C_i = Cov(v, k)` and `D_i = Cov(v, x)` under A_i, so that `D_iᵀ δ_i = Σ_j A_ij s_ij x_j` with
s taken at δ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockopt.measure.attention_capture import AttentionCall


class AttentionTensors(NamedTuple):
    """What the forms need of one attention call, in float32 or better.

    Attributes:
        weights: (B, H, T, S), the attention probabilities of H query heads.
        query: (B, H, T, dk).
        key: (B, H, S, dk), repeated for grouped heads.
        value: (B, H, S, dv), repeated for grouped heads.
        scale: What the scores are multiplied by.
        groups: G, the number of key heads.
    """

    weights: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    groups: int

    @staticmethod
    @torch.no_grad()
    def of(call: AttentionCall, groups: int) -> AttentionTensors:
        """Read a captured call."""
        heads = call.query.shape[1]
        weights = call.weights()
        key, value = (
            t.to(weights.dtype).repeat_interleave(heads // t.shape[1], dim=1)
            for t in (call.key, call.value)
        )
        query = call.query.to(weights.dtype)
        return AttentionTensors(weights, query, key, value, call.scale, groups)


def score_derivatives(attention: AttentionTensors, g: Tensor) -> Tensor:
    """Return `A_ij s_ij`, the derivative of the loss by each score, (B, H, T, S).

    Args:
        attention: The call.
        g: The gradient at the output, (B, H, T, dv).
    """
    direct = g @ attention.value.mT
    return attention.weights * (direct - (attention.weights * direct).sum(-1, keepdim=True))


def functional_query(attention: AttentionTensors, scores: Tensor) -> Tensor:
    """Return `scale² Σ_j A_ij s_ij |k_j - k̄_i|²`, (B, H, T).

    Its sum with the weights `|x_i|²` is `tr H_f(Q,Q)`, with RoPE too.

    Args:
        attention: The call.
        scores: `score_derivatives` at the gradient of the loss.
    """
    return attention.scale**2 * _weighted_squares(attention.weights, scores, attention.key)


def functional_key(
    attention: AttentionTensors, scores: Tensor, x: Tensor, rotated: Sequence[Tensor] | None = None
) -> Tensor:
    """Return `tr H_f(K,K)` of each key head, (G,).

    It is exact unless keys are normalised after their projection.

    Args:
        attention: The call.
        scores: `score_derivatives` at the gradient of the loss.
        x: The input of the key projection, (B, S, D), or ones for its bias.
        rotated: For keys that are rotated, `R_jᵀ r`, (B, H, S, dk), for each of some vectors r
            whose `r rᵀ` sum up to the identity, or do so on average.
    """
    x = x.unsqueeze(1)
    norms = attention.query.square().sum(-1)
    if rotated is None:
        squares = norms * _weighted_squares(attention.weights, scores, x)
    else:
        squares = norms * (scores @ x.square().sum(-1, keepdim=True)).squeeze(-1)
        for directions in rotated:
            along = attention.query @ directions.mT
            squares = squares - 2 * _products(attention.weights * along, scores * along, x)
    per_head = attention.scale**2 * squares.sum((0, 2))
    return per_head.view(attention.groups, -1).sum(1)


def _weighted_squares(weights: Tensor, scores: Tensor, y: Tensor) -> Tensor:
    """Return `Σ_j scores_ij |y_j - ȳ_i|²`, (B, H, T), with ȳ the weighted mean.

    As the scores of i sum to 0, `|ȳ_i|²` drops out.
    """
    squares = (scores @ y.square().sum(-1, keepdim=True)).squeeze(-1)
    return squares - 2 * _products(weights, scores, y)


def _products(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Return `Σ_j a_ij y_j · Σ_l b_il y_l`, (B, H, T)."""
    if 2 * y.shape[-1] <= y.shape[-2]:
        return ((a @ y) * (b @ y)).sum(-1)
    return ((a @ (y @ y.mT)) * b).sum(-1)


def outer_key(attention: AttentionTensors, delta: Tensor, x: Tensor) -> Tensor:
    """Return what one factor `δ` of Λ adds to the trace of each key head, (G,)."""
    covariances = score_derivatives(attention, delta) @ x.unsqueeze(1)  # D_iᵀ δ_i, (B, H, T, D)
    return attention.scale**2 * _squared_sums(covariances, attention.query, attention.groups)


def outer_value(attention: AttentionTensors, delta: Tensor, x: Tensor) -> Tensor:
    """Return what one factor `δ` of Λ adds to the trace of each value head, (G,)."""
    return _squared_sums(attention.weights @ x.unsqueeze(1), delta, attention.groups)


def _squared_sums(a: Tensor, b: Tensor, groups: int) -> Tensor:
    """Return `Σ_i |Σ_h a_ih b_ihᵀ|²` over the heads h of each group, (G,), for (B, H, T, ·).

    Heads that share a key or value add their gradients before they are squared.
    """
    a, b = (t.unflatten(1, (groups, -1)).transpose(2, 3) for t in (a, b))  # (B, G, T, H/G, ·)
    return ((a @ a.mT) * (b @ b.mT)).sum((0, 2, 3, 4))
