"""Curvature from closed forms: one forward pass, and backward passes to activations only.

Every trainable map of a transformer is linear in its own weights: projections, MLP, embedding,
norm and head. So the outer (Gauss-Newton) part of its block consists of its input and of Λ, the
curvature of the loss in its output. Only queries and keys, which are inside the softmax, have a
functional part of their own, which the gradient at the attention output gives exactly
(`attention_forms`). Λ comes from labels sampled from the model, in one of two ways:

- From the last attention on, nothing mixes positions: Λ is local to a position, and so are the
  forms in `attention_forms`.
- Below, Λ couples the positions of a sequence. Dropping that is off by factors of 0.35 to 1.5 in a
  GPT of three layers. `sequence_gradients` keeps it, sequence by sequence, without bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks
from blockopt.checks import check_choice, check_count
from blockopt.curvature.analytic.attention_projections import AttentionProjections
from blockopt.curvature.analytic.layer_calls import (
    LayerCall,
    capture_layers,
    drop_parameters,
    parameters_used_elsewhere,
)
from blockopt.curvature.analytic.sequence_gradients import (
    LayerGradient,
    find_independence,
    layer_gradients,
    squared_sums,
)
from blockopt.distributed import union_over_ranks
from blockopt.measure.attention_capture import capture_attention
from blockopt.measure.closures import (
    Curvature,
    Evaluation,
    Losses,
    averaged_over_ranks,
    block_dots,
    block_zeros,
    check_reached,
    default_generator,
    mean_curvature,
    refuse_sharded,
    trainable_parameters,
)
from blockopt.measure.loss_curvature import CaptureLosses, LossCurvature

HessianPart = Literal["outer", "functional", "full"]


def analytic(
    model: nn.Module,
    losses: Losses,
    *,
    blocks: Mapping[str, Blocks] | None = None,
    part: HessianPart = "outer",
    num_probes: int | None = 1,
    generator: torch.Generator | None = None,
    known: dict[Any, Any] | None = None,
) -> Curvature:
    """Return the mean curvature of each block from closed forms.

    - "outer": the Gauss-Newton block, `tr(J_bᵀ Λ J_b) / dim_b`. It is never negative, and unbiased
      over the sampled labels, whatever the depth, mask, grouping of heads, RoPE or QK-norm.
    - "functional": what the softmax adds to queries and keys through its own second derivative. It
      is exact; for keys with RoPE it is unbiased, and exact with `num_probes=None`. With QK-norm,
      or for blocks that are not whole heads, both terms are left out. It is zero for all other
      blocks, whose maps are linear in their own weights. (LoRA factors in queries and keys are not,
      and their terms are left out too.)
    - "full": the sum. It lacks the curvature of nonlinear layers above a block beyond Gauss-Newton,
      which vanishes as the model fits its data, but is large at initialisation if norms see small
      inputs. `hutchinson` has all of it.

    Weights that are used by anything but a linear map, embedding or norm module get the estimate of
    `gauss_newton` from the same passes: the fused projections of `nn.MultiheadAttention`,
    convolutions, stacked experts, class tokens.

    Args:
        model: Any module with whole parameters (not FSDP2).
        losses: One or more closures that return the mean loss of a batch, alone or with its number
            of tokens, by which the batches are weighted. The loss must call `F.cross_entropy`,
            `F.mse_loss` or `F.binary_cross_entropy_with_logits`.
        blocks: What `find_blocks(model)` returns; found here by default.
        part: Which part of the Hessian.
        num_probes: Samples of labels per batch. None takes all labels of all positions instead, at
            one backward pass each: the exact Gauss-Newton trace, for tests and tiny models.
        generator: Draws the labels; its seed is 0 by default.
        known: A dictionary that keeps from call to call which sequences and positions a prediction
            depends on. It saves a backward pass, a third of a training step. Pass the same one only
            for the same model and loss function.

    Returns:
        `{parameter name: mean curvature of each block}`.

    Raises:
        ValueError: If a parameter is sharded, if the loss calls none of these functions, or, unless
            `part="outer"`, if attention was not seen.

    Example:
        >>> layer, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> analytic(layer, lambda: nn.functional.mse_loss(layer(x), torch.zeros(1, 1)))
        {'weight': tensor([25.0000])}
    """
    check_choice("part", part, get_args(HessianPart))
    if num_probes is not None:
        check_count("num_probes", num_probes)
    refuse_sharded(model, "analytic")
    generator = default_generator(generator)
    parameters = trainable_parameters(model)

    def measure_traces(evaluation: Evaluation, blocks: Mapping[str, Blocks]) -> Curvature:
        with (
            capture_attention(model, allow_unseen=part == "outer") as calls,
            capture_layers(model, calls) as layers,
            CaptureLosses() as seen,
        ):
            loss = evaluation()
        attention = [
            AttentionProjections(model, call, index, layers, blocks)
            for index, call in enumerate(calls)
        ]
        traces = block_zeros(parameters, blocks)
        if part != "functional":
            curvature = LossCurvature(loss, seen.calls)
            probes: Iterable[list[Tensor]] = curvature.factors()
            if num_probes is not None:
                probes = (curvature.sample(generator) for _ in range(num_probes))
            _add_outer(traces, curvature, probes, parameters, layers, attention, blocks, known)
            traces = {name: trace / (num_probes or 1) for name, trace in traces.items()}
        if part != "outer" and calls:
            gradients = torch.autograd.grad(
                loss, [call.output for call in calls], retain_graph=True, allow_unused=True
            )
            for projections, g in zip(attention, gradients):
                if g is not None:
                    projections.add_functional(traces, g, num_probes, generator)
        return traces

    return mean_curvature(model, losses, blocks, measure_traces)


def _add_outer(
    traces: Curvature,
    curvature: LossCurvature,
    probes: Iterable[list[Tensor]],
    parameters: Mapping[str, Tensor],
    layers: list[LayerCall],
    attention: list[AttentionProjections],
    blocks: Mapping[str, Blocks],
    known: dict[Any, Any] | None,
) -> None:
    """Add the Gauss-Newton traces of all probes."""
    names = {p: name for name, p in parameters.items()}
    # Ranks may call different layers, as experts that have tokens; they must exchange the same.
    outside = union_over_ranks(parameters_used_elsewhere(layers, curvature.predictions, names))
    layers = drop_parameters(layers, outside)
    last = attention[-1] if attention else None
    output = last.call.output if last else None
    layers, local = find_independence(curvature, layers, output, known)
    top = last if local else None
    own = {name for layer in layers for name in (layer.weight, layer.bias) if name is not None}
    explained = union_over_ranks(own)
    rest = {name: p for name, p in parameters.items() if name not in explained}
    outputs = [top.call.output] if top else []
    inputs: list[Any] = [*(layer.edge for layer in layers), *rest.values(), *outputs]
    for probe in probes:
        gradients = torch.autograd.grad(
            curvature.predictions, inputs, probe, retain_graph=True, allow_unused=True
        )
        check_reached(gradients)
        by_name = layer_gradients(layers, gradients[: len(layers)])
        found: Curvature = {}
        if top is not None and gradients[-1] is not None:
            found = top.take_outer(by_name, gradients[-1], blocks)
            by_name = {name: _by_position(some, len(attention)) for name, some in by_name.items()}
        found |= {name: squared_sums(some, blocks[name].split) for name, some in by_name.items()}
        # Squares of sums over all sequences: those of other ranks are part of the sum.
        summed = {
            name: None if g is None else g * curvature.share.spread
            for name, g in zip(rest, gradients[len(layers) :])
        }
        for name, g in averaged_over_ranks(summed, rest).items():
            found[name] = block_dots(g, g, blocks[name])
        for name, squares in found.items():
            traces[name] += squares.to(traces[name])


def _by_position(gradients: list[LayerGradient], attention_calls: int) -> list[LayerGradient]:
    """Take the positions of a layer above all attention apart, if they are independent."""
    layer = gradients[0].layer
    alone = len(gradients) == 1 and layer.attention_calls == attention_calls
    return [gradients[0].by_position()] if alone and layer.local else gradients
