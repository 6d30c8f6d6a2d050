"""The squared gradient of each sequence, summed over sequences, from the inputs of layers.

For `y = W x` the gradient of one sequence is `Σ_t d_t x_tᵀ`, with `d` the gradient at `y`. Labels
sampled independently make the gradients of different sequences independent, so the sum over
sequences of the squared gradients estimates the Gauss-Newton trace without the noise that the
products between sequences would add. It needs no weight gradient, only `x` and `d`.

Labels couple all that one row of predictions depends on: usually one sequence, but all of them
under a contrastive loss, and above the last attention usually one position, but not if positions
are pooled. `find_independence` tries this on the last row of each prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockopt.blocks import Split, block_sum, block_sum_along
from blockopt.curvature.analytic.layer_calls import LayerCall
from blockopt.measure.loss_curvature import LossCurvature


class LayerGradient(NamedTuple):
    """A call of a layer and `d`, the gradient at its output, (S, T, D)."""

    layer: LayerCall
    d: Tensor

    def by_position(self) -> LayerGradient:
        """Return the same with every position as a sequence of its own.

        This is for layers above which nothing mixes positions.
        """
        layer, d = self
        if layer.kind == "embedding":
            return self
        x = layer.x.expand(*d.shape[:2], -1)
        x = x.reshape(-1, 1, x.shape[-1])
        return LayerGradient(layer._replace(x=x), d.reshape(-1, 1, d.shape[-1]))


def layer_gradients(
    layers: list[LayerCall], gradients: Sequence[Tensor | None]
) -> dict[str, list[LayerGradient]]:
    """Return `{parameter name: the calls that use it, with the gradients at their outputs}`.

    A bias is treated as the weight of a norm whose input is 1.
    """
    found: dict[str, list[LayerGradient]] = {}
    for layer, gradient in zip(layers, gradients):
        if gradient is None:
            continue
        d = layer.to_sequences(gradient.to(torch.promote_types(gradient.dtype, torch.float32)))
        if layer.padding is not None:
            d = d.masked_fill((layer.x == layer.padding).unsqueeze(-1), 0.0)
        if layer.weight is not None:
            found.setdefault(layer.weight, []).append(LayerGradient(layer, d))
        if layer.bias is not None:
            bias = layer._replace(
                kind="norm", weight=layer.bias, x=torch.ones_like(d[:1, :1]), shape=d.shape[-1:]
            )
            found.setdefault(layer.bias, []).append(LayerGradient(bias, d))
    return found


def squared_sums(gradients: list[LayerGradient], split: Split | None) -> Tensor:
    """Return the sum of the squared gradients of all sequences over each block of a parameter.

    Args:
        gradients: All calls that use the parameter.
        split: How the parameter is cut into blocks.
    """
    if len(gradients) > 1:  # tied or shared: the gradients of all calls add up before the square
        squares = (block_sum(dense.square(), split) for dense in _dense_gradients(gradients))
        return sum(squares, torch.zeros(()))
    row = _squared_row(*gradients[0], dim=0 if split is None else split.dim)
    return row.sum().reshape(1) if split is None else block_sum_along(row, split)


def _squared_row(layer: LayerCall, d: Tensor, dim: int) -> Tensor:
    """Return the squared gradients, summed over sequences and all dimensions but `dim`."""
    if layer.kind == "norm":
        return (layer.x * d).sum(1).square().sum(0)
    if layer.kind == "embedding":
        sequences, vocabulary = layer.x.shape[0], layer.shape[0]
        offsets = vocabulary * torch.arange(sequences, device=layer.x.device).unsqueeze(1)
        # One row for each token of each sequence.
        keys, places = torch.unique(layer.x + offsets, return_inverse=True)
        rows = d.new_zeros(len(keys), d.shape[-1])
        rows = rows.index_add_(0, places.flatten(), d.flatten(0, 1)).square()
        if dim == 1:
            return rows.sum(0)
        return d.new_zeros(vocabulary).index_add_(0, keys % vocabulary, rows.sum(1))
    along_outputs = (dim == 1) == layer.input_first
    return squared_rows(layer.x, d) if along_outputs else squared_rows(d, layer.x)


def squared_rows(x: Tensor, d: Tensor) -> Tensor:
    """Return `Σ_s Σ_i (Σ_t d_sto x_sti)²` for each `o`.

    It is computed by the Gram matrix of the positions where that is cheaper than the sum over t.

    Example:
        >>> x, d = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]), torch.tensor([[[1.0], [2.0]]])
        >>> squared_rows(x, d)  # 3² + (4 + 2)²
        tensor([45.])
    """
    positions, width, outputs = x.shape[1], x.shape[2], d.shape[2]
    if positions * (width + outputs) <= width * outputs:
        return (x @ x.mT @ d).mul_(d).sum((0, 1))
    rows = d.new_zeros(outputs)
    for x_one, d_one in zip(x, d):  # one at a time: a gradient is as large as the weight
        rows += (d_one.mT @ x_one).square_().sum(1)
    return rows


def _dense_gradients(gradients: list[LayerGradient]) -> Iterator[Tensor]:
    """Yield the gradient of a parameter that several calls use, one sequence after another."""
    if len({len(d) if layer.kind == "norm" else len(layer.x) for layer, d in gradients}) > 1:
        gradients = [
            LayerGradient(
                layer._replace(x=layer.x.reshape(1, -1, *layer.x.shape[2:])),
                d.flatten(0, 1).unsqueeze(0),
            )
            for layer, d in gradients
        ]
    for index in range(len(gradients[0].d)):
        total: Any = 0
        for layer, d in gradients:
            x_one, d_one = layer.x[index if len(layer.x) > 1 else 0], d[index]
            if layer.kind == "norm":
                total = total + (x_one * d_one).sum(0)
            elif layer.kind == "embedding":
                total = total + d.new_zeros(layer.shape).index_add_(0, x_one, d_one)
            else:
                total = total + (x_one.mT @ d_one if layer.input_first else d_one.mT @ x_one)
        yield total


def find_independence(
    curvature: LossCurvature,
    layers: list[LayerCall],
    attention_output: Tensor | None,
    known: dict[Any, Any] | None = None,
) -> tuple[list[LayerCall], bool]:
    """Find out which sequences and positions have independent gradients.

    Args:
        curvature: Has the predictions.
        layers: The captured calls.
        attention_output: The output of the last attention, (B, H, T, dv), if there is any.
        known: The answer that an earlier call has left here. It is taken if all shapes are still
            the same, and saves a backward pass.

    Returns:
        The calls, joined into one sequence where sequences are not independent and with `local`
        set, and whether the attention output is independent from position to position.
    """
    known = {} if known is None else known
    question = _shapes(curvature, layers, attention_output)
    if question not in known:
        known.clear()  # the last one is enough
        known[question] = _try_last_rows(curvature, layers, attention_output)
    changes, local = known[question]
    return [layer.changed(*change) for layer, change in zip(layers, changes)], local


def _shapes(
    curvature: LossCurvature, layers: list[LayerCall], attention_output: Tensor | None
) -> tuple[Any, ...]:
    """All that the answer may depend on, short of the loss function itself."""
    calls = tuple((layer.module, layer.kind, tuple(layer.y.shape)) for layer in layers)
    predictions = tuple(tuple(prediction.shape) for prediction in curvature.predictions)
    return calls, predictions, None if attention_output is None else tuple(attention_output.shape)


def _try_last_rows(
    curvature: LossCurvature, layers: list[LayerCall], attention_output: Tensor | None
) -> tuple[list[tuple[bool, bool]], bool]:
    """For each call whether it is joined and local, and whether the attention output is local."""
    outputs = [] if attention_output is None else [attention_output]
    inputs: list[Any] = [*(layer.edge for layer in layers), *outputs]
    changes, local = [(False, True)] * len(layers), bool(outputs)
    for vector in curvature.last_rows() if inputs else ():
        gradients = torch.autograd.grad(
            curvature.predictions, inputs, vector, retain_graph=True, allow_unused=True
        )
        found = [_dependence(layer, d) for layer, d in zip(layers, gradients)]
        changes = [(a or c, b and d) for (a, b), (c, d) in zip(changes, found)]
        for gradient in gradients[len(layers) :]:
            positions = 0 if gradient is None else int(gradient.ne(0).any(-1).any(1).sum())
            local = local and positions <= 1
    return changes, local


def _dependence(layer: LayerCall, d: Tensor | None) -> tuple[bool, bool]:
    """Whether one row of predictions depends on several sequences, and on one position at most."""
    reached = torch.zeros(1, 1) if d is None else layer.to_sequences(d).ne(0).any(-1)  # (S, T)
    return int(reached.any(1).sum()) > 1, int(reached.sum()) <= 1
