"""Which gradients are independent if labels are drawn row by row.

Labels couple all that one row of predictions depends on: usually one sequence, but all of them
under a contrastive loss, and above the last attention usually one position, but not if positions
are pooled. This is tried on the last row of each prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockopt.curvature.analytic.layer_calls import LayerCall
from blockopt.measure.loss_curvature import LossCurvature


def find_independence(
    curvature: LossCurvature, layers: list[LayerCall], attention_output: Tensor | None
) -> tuple[list[LayerCall], bool]:
    """Find out which sequences and positions are independent.

    Args:
        curvature: Has the predictions.
        layers: The captured calls.
        attention_output: The output of the last attention, (B, H, T, dv), if there is any.

    Returns:
        The calls, joined into one sequence where sequences are not independent and with `local`
        set, and whether the attention output is independent from position to position.
    """
    outputs = [] if attention_output is None else [attention_output]
    inputs: list[Any] = [*(layer.edge for layer in layers), *outputs]
    local = bool(outputs)
    for vector in curvature.last_rows() if inputs else ():
        gradients = torch.autograd.grad(
            curvature.predictions, inputs, vector, retain_graph=True, allow_unused=True
        )
        layers = _join_dependent(layers, gradients)
        for gradient in gradients[len(layers) :]:
            positions = 0 if gradient is None else int(gradient.ne(0).any(-1).any(1).sum())
            local = local and positions <= 1
    return layers, local


def _join_dependent(layers: list[LayerCall], gradients: Sequence[Tensor | None]) -> list[LayerCall]:
    """Join the sequences of the calls where one row of predictions depends on several."""
    found = []
    for layer, d in zip(layers, gradients):
        reached = torch.zeros(1, 1) if d is None else layer.to_sequences(d).ne(0).any(-1)  # (S, T)
        joined = layer if int(reached.any(1).sum()) <= 1 else layer.as_one_sequence()
        found.append(joined._replace(local=layer.local and int(reached.sum()) <= 1))
    return found
