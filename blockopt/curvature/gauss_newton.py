"""The trace of the Gauss-Newton blocks by sampled labels, without second derivatives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from blockopt.blocks import Blocks
from blockopt.checks import check_count
from blockopt.distributed import meet, pass_together
from blockopt.measure.closures import (
    Curvature,
    Evaluation,
    Losses,
    block_dots,
    block_zeros,
    check_reached,
    default_generator,
    gradients_of_all_ranks,
    mean_curvature,
    trainable_parameters,
)
from blockopt.measure.loss_curvature import CaptureLosses, LossCurvature


def gauss_newton(
    model: nn.Module,
    losses: Losses,
    *,
    blocks: Mapping[str, Blocks] | None = None,
    num_probes: int = 1,
    generator: torch.Generator | None = None,
) -> Curvature:
    """Return an unbiased estimate of the mean diagonal of `Jᵀ Λ J`, the Gauss-Newton matrix.

    With `E[s sᵀ] = Λ`, the squared entries of `Jᵀ s` have the diagonal of the Gauss-Newton matrix
    as their mean, and `Jᵀ s` is one backward pass from the predictions. For cross-entropy `s` comes
    from labels sampled from the model itself, so this is also the diagonal of the Fisher matrix.
    There are no second derivatives: any attention kernel, DDP and FSDP2 will do.

    Args:
        model: Any module.
        losses: One or more closures that return the mean loss of a batch, alone or with its number
            of tokens, by which the batches are weighted. The loss must call `F.cross_entropy`,
            `F.mse_loss` or `F.binary_cross_entropy_with_logits`.
        blocks: What `find_blocks(model)` returns; found here by default.
        num_probes: Samples per batch; each is one backward pass.
        generator: Draws the labels; its seed is 0 by default. Ranks that measure together need the
            same seed: each takes the labels of its own rows.

    Returns:
        `{parameter name: mean curvature of each block}`.

    Raises:
        ValueError: If the loss calls none of these functions.

    Example:
        The squared error `(w·x)²` has the Gauss-Newton diagonal `2 x²`, whose mean is 25:

        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> gauss_newton(model, lambda: nn.functional.mse_loss(model(x), torch.zeros(1, 1)))
        {'weight': tensor([25.0000])}
    """
    check_count("num_probes", num_probes)
    generator = default_generator(generator)
    parameters = trainable_parameters(model)

    def measure_traces(evaluation: Evaluation, blocks: Mapping[str, Blocks]) -> Curvature:
        with torch.compiler.set_stance("force_eager"), CaptureLosses() as seen:
            loss = evaluation()
        curvature = LossCurvature(loss, seen.calls)
        traces = block_zeros(parameters, blocks)
        for probe in range(num_probes):
            # backward(), not autograd.grad(): FSDP2 reduces gradients only where they are
            # accumulated. The loss takes part with weight zero, because FSDP2 gathers the weights
            # again when a backward pass reaches what the model returned.
            samples = [s * curvature.share.spread for s in curvature.sample(generator)]
            meet("a probe")
            with pass_together(model):
                torch.autograd.backward(
                    [*curvature.predictions, loss],
                    [*samples, torch.zeros_like(loss)],
                    retain_graph=probe + 1 < num_probes,
                )
            check_reached(p.grad for p in parameters.values())
            gradients = gradients_of_all_ranks(parameters, curvature.share)
            for name, g in gradients.items():
                traces[name] += block_dots(g, g, blocks[name]) / num_probes
        return traces

    return mean_curvature(model, losses, blocks, measure_traces)
