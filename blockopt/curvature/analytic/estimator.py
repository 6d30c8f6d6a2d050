"""Curvature from closed forms: one forward pass, backward passes to activations only, no derivative of a gradient.

Every trainable map of a transformer is linear in its own weights: projections, MLP, embedding,
norm, head. So the outer (Gauss-Newton) part of its block is made of its input and of the curvature
Λ of the loss in its output, and only the weights inside of the softmax, queries and keys, have a
functional part of their own, which the gradient at the attention output gives exactly
(`_attention_forms`). Λ comes from labels sampled from the model, in one of two ways:

- From the last attention on, nothing mixes positions: Λ is local to a position, and so are the
  forms, `_attention_forms`.
- Below, Λ couples the positions of a sequence: dropping that is off by factors of 0.35 to 1.5 in a
  GPT of three layers. The forms of `_layers` keep it, sequence by sequence, without bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks
from blockopt.curvature.analytic.attention_projections import Site
from blockopt.curvature.analytic.layer_calls import (
    LayerCall,
    Use,
    by_position,
    by_reach,
    capture_layers,
    checked,
    squared_sums,
    uses_of,
)
from blockopt.measure.attention_capture import capture_attention
from blockopt.measure.closures import (
    Curvature,
    Evaluation,
    Losses,
    block_dots,
    check_probes,
    default_generator,
    mean_over_batches,
    refuse_sharded,
    trainable,
)
from blockopt.measure.loss_curvature import CaptureLosses, LossCurvature

Part = Literal["outer", "functional", "full"]


def analytic(
    model: nn.Module,
    losses: Losses,
    *,
    blocks: Mapping[str, Blocks] | None = None,
    part: Part = "outer",
    num_probes: int | None = 1,
    generator: torch.Generator | None = None,
) -> Curvature:
    """Mean curvature of each block from closed forms.

    - "outer": the Gauss-Newton block `tr(J_bᵀ Λ J_b) / dim_b`. Never negative. Unbiased over the
      sampled labels, whatever the depth, mask, grouping of heads, RoPE or QK-norm.
    - "functional": what the softmax adds to queries and keys through its own second derivative.
      Exact; for keys with RoPE unbiased, and exact with `num_probes=None`. With QK-norm, or for
      blocks that are no whole heads, both terms are left out. It is zero for all other blocks:
      their maps are linear in their own weights. (Those of LoRA factors in queries and keys are
      not, and left out too.)
    - "full": the sum. It lacks the curvature of nonlinear layers above a block beyond Gauss-Newton;
      that vanishes as the model fits its data, and is large at initialisation if norms see small
      inputs. `hutchinson` has all of it.

    Weights that are used otherwise than by a linear map, embedding or norm module (the fused
    projections of `nn.MultiheadAttention`, convolutions, stacked experts, class tokens) get
    `gauss_newton`'s estimate from the same passes.

    Args:
        model: Any module with whole parameters (not FSDP2).
        losses: A closure that returns the mean loss of a batch, or that and its number of tokens,
            or several of them; they are averaged by tokens. The loss must call `F.cross_entropy`,
            `F.mse_loss` or `F.binary_cross_entropy_with_logits`.
        blocks: What `find_blocks(model)` returns; found here by default.
        part: Which part of the Hessian.
        num_probes: Samples of labels a batch. None takes all labels of all positions instead, one
            backward pass each: the exact Gauss-Newton trace, for tests and tiny models.
        generator: Draws the labels; by default one with seed 0.

    Returns:
        `{parameter name: mean curvature of each block}`.

    Raises:
        ValueError: If a parameter is sharded, or the loss function or, unless `part="outer"`,
            attention was not seen.

    Example:
        >>> layer, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> analytic(layer, lambda: nn.functional.mse_loss(layer(x), torch.zeros(1, 1)))
        {'weight': tensor([25.0000])}
    """
    if part not in ("outer", "functional", "full"):
        raise ValueError(f"Invalid part={part!r}. Must be 'outer', 'functional' or 'full'.")
    if num_probes is not None:
        check_probes(num_probes)
    refuse_sharded(model, "analytic")
    generator = default_generator(generator)
    parameters = trainable(model)

    def traces_of(evaluation: Evaluation, blocks: Mapping[str, Blocks]) -> Curvature:
        with (
            capture_attention(model, allow_unseen=part == "outer") as attention,
            capture_layers(model, attention) as layers,
            CaptureLosses() as seen,
        ):
            loss = evaluation()
        sites = [
            Site.of(model, call, index, layers, blocks) for index, call in enumerate(attention)
        ]
        wide = {n: torch.promote_types(p.dtype, torch.float32) for n, p in parameters.items()}
        traces = {
            n: torch.zeros(blocks[n].num_blocks, device=p.device, dtype=wide[n])
            for n, p in parameters.items()
        }
        if part != "functional":
            curvature = LossCurvature(loss, seen.calls)
            _add_outer(traces, curvature, parameters, layers, sites, blocks, num_probes, generator)
        if part != "outer" and attention:
            gradients = torch.autograd.grad(
                loss, [call.output for call in attention], retain_graph=True, allow_unused=True
            )
            for site, g in zip(sites, gradients):
                if g is not None:
                    site.add_functional(traces, g, num_probes, generator)
        return traces

    return mean_over_batches(model, losses, blocks, traces_of)


def _add_outer(
    traces: Curvature,
    curvature: LossCurvature,
    parameters: Mapping[str, Tensor],
    layers: list[LayerCall],
    sites: list[Site],
    blocks: Mapping[str, Blocks],
    num_probes: int | None,
    generator: torch.Generator,
) -> None:
    """Add the Gauss-Newton traces."""
    layers = checked(layers, curvature.predictions, {p: name for name, p in parameters.items()})
    layers, local = _independence(curvature, layers, sites)
    known = {name for layer in layers for name in (layer.weight, layer.bias)}
    rest = {name: p for name, p in parameters.items() if name not in known}
    top = sites[-1] if local else None
    inputs: list[Any] = [
        *(layer.edge for layer in layers),
        *rest.values(),
        *([top.call.output] if top else []),
    ]
    factor = 1.0 if num_probes is None else 1 / num_probes
    vectors = (
        curvature.factors()
        if num_probes is None
        else (curvature.sample(generator) for _ in range(num_probes))
    )
    for vector in vectors:
        gradients = torch.autograd.grad(
            curvature.predictions, inputs, vector, retain_graph=True, allow_unused=True
        )
        uses = uses_of(layers, gradients[: len(layers)])
        if top is not None and gradients[-1] is not None:
            top.add_outer(traces, uses, gradients[-1], blocks, factor)
            uses = {name: _apart(some, len(sites)) for name, some in uses.items()}
        for name, some in uses.items():
            traces[name] += factor * squared_sums(some, blocks[name].split).to(traces[name])
        for (name, _), g in zip(rest.items(), gradients[len(layers) :]):
            if g is not None:
                traces[name] += factor * block_dots(g, g, blocks[name]).to(traces[name])


def _independence(
    curvature: LossCurvature, layers: list[LayerCall], sites: list[Site]
) -> tuple[list[LayerCall], bool]:
    """Which gradients labels drawn row by row make independent, tried on the last row of each prediction.

    Labels couple all that one row of predictions depends on: usually one sequence, but all of them
    under a contrastive loss, and above the last attention usually one position, but not if
    positions are pooled.

    Returns:
        The layers, cut into sequences only where these are independent, and whether the outputs of
        the last attention are independent from position to position.
    """
    outputs = [site.call.output for site in sites[-1:]]
    inputs: list[Any] = [*(layer.edge for layer in layers), *outputs]
    local = bool(sites)
    for vector in curvature.last_rows() if inputs else ():
        gradients = torch.autograd.grad(
            curvature.predictions, inputs, vector, retain_graph=True, allow_unused=True
        )
        layers = by_reach(layers, gradients[: len(layers)])
        for gradient in gradients[len(layers) :]:
            positions = (
                0 if gradient is None else int(gradient.ne(0).any(-1).any(1).sum())
            )  # of (B, H, T, dv)
            local = local and positions <= 1
    return layers, local


def _apart(uses: list[Use], attention_calls: int) -> list[Use]:
    """Position by position, if the layer is above all attention, positions are independent and the weight has no other use."""
    call = uses[0][0]
    return (
        [by_position(uses[0])]
        if len(uses) == 1 and call.local and call.attention_calls == attention_calls
        else uses
    )
