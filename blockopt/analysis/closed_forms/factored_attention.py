"""The diagonal blocks of attention as operators that are never built, by role."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.attention_map import AttentionMap
from blockopt.analysis.closed_forms.factored_block import FactoredBlock
from blockopt.analysis.closed_forms.grouped_keys import GroupedKeys
from blockopt.analysis.closed_forms.grouped_values import GroupedValues
from blockopt.analysis.closed_forms.jacobian_factors import outer_matrices
from blockopt.analysis.closed_forms.key_matrices import KeyMatrices
from blockopt.analysis.closed_forms.kronecker_sum import KroneckerSum, Matrices, SharedMatrix
from blockopt.analysis.closed_forms.output_loss import OutputLoss


def factored_attention(
    attention: AttentionMap,
    loss: OutputLoss,
    score_gradients: Sequence[Tensor],
    role: str,
    number: int,
    part: str,
) -> FactoredBlock:
    """Return the block of one weight.

    Args:
        attention: The layer.
        loss: The loss on its output.
        score_gradients: Derivatives of the loss by the scores of each head, (B, L, L).
        role: The role of the weight.
        number: Which of that role.
        part: "outer", "functional" or "full".
    """
    members = attention.heads_of(role, number)
    heads, gradients = [attention.heads[h] for h in members], [score_gradients[h] for h in members]
    head, w = heads[0], gradients[0]
    if len(heads) > 1 or (role == "key" and attention.transformed):
        curvatures = [
            [loss.curvature(attention.output, g.W_U, h.W_U) for h in heads] for g in heads
        ]
        if role == "value":
            return GroupedValues([h.first_moment for h in heads], curvatures, part)
        return GroupedKeys(heads, curvatures, gradients, part)
    end = None if role == "output" else head.W_U
    curvature = loss.curvature(attention.output, end, end)
    if role == "key":
        of_keys = KeyMatrices(head, curvature, w, part)
        return KroneckerSum(head.query.flatten(0, 1), of_keys, False)
    if role in ("value", "output"):
        vectors = head.factor(role).vector
        assert vectors is not None
        if part == "functional":
            curvature = torch.zeros_like(curvature[:1, :1]).expand_as(curvature)
        return KroneckerSum(vectors.flatten(0, 1), _of_positions(curvature), True)
    matrices = attention.X.new_zeros(())
    if part != "functional":
        factor = head.factor(role)
        matrices = outer_matrices(factor, factor, curvature)
    if part != "outer":
        matrices = matrices + head.functional_matrices(role, role, w)
    return KroneckerSum(head.x.flatten(0, 1), Matrices(matrices), True)


def _of_positions(curvature: Tensor) -> Matrices | SharedMatrix:
    if curvature.stride()[:2] == (0, 0):  # the same for all positions
        return SharedMatrix(curvature[0, 0], curvature.shape[:2].numel())
    return Matrices(curvature)
