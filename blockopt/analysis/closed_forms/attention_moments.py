"""Attention moments, in which the ICLR 2025 paper writes the Hessian.

The paper is Ormaniec, Dangel and Singh, "What does it mean to be a transformer? Insights from a
theoretical Hessian analysis". Each row of the attention matrix A is a distribution over tokens, and
the Hessian depends on its first three moments. They are of one head and one sequence, for reading
and for checks: `self_attention` computes the Hessian without them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention_moment(A: Tensor, X: Tensor, order: int) -> Tensor:
    """Return the mean (order 1) or a central moment of the tokens under each row of A.

    This is Definition 3.1: `M_1 = A X`, `[M_2]_i = Σ_j A_ij x̃ x̃ᵀ` and
    `[M_3]_i = Σ_j A_ij x̃ ⊗ x̃ x̃ᵀ` with `x̃ = x_j - [M_1]_i`. The paper's flat matrices are
    `.flatten(0, -2)` of what is returned.

    Args:
        A: Attention weights, (L, L).
        X: Tokens, (L, d).
        order: 1, 2 or 3.

    Returns:
        (L, d), (L, d, d) or (L, d, d, d).

    Example:
        >>> A, X = torch.full((2, 2), 0.5), torch.tensor([[1.0], [3.0]])
        >>> attention_moment(A, X, 1).flatten(), attention_moment(A, X, 2).flatten()
        (tensor([2., 2.]), tensor([1., 1.]))
    """
    if A.ndim != 2 or X.ndim != 2 or A.shape != (len(X), len(X)):
        raise ValueError(
            f"Invalid shapes A {tuple(A.shape)} and X {tuple(X.shape)}. Must be (L, L) and (L, d): "
            "one head, one sequence."
        )
    mean = A @ X
    centred = X - mean.unsqueeze(1)  # (L, L, d): token j seen from row i
    if order == 1:
        return mean
    if order == 2:
        return torch.einsum("ij,ija,ijb->iab", A, centred, centred)
    if order == 3:
        return torch.einsum("ij,ija,ijb,ijc->iabc", A, centred, centred, centred)
    raise ValueError(f"Invalid order={order}. Must be 1, 2 or 3.")
