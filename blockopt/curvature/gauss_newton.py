"""The trace of the Gauss-Newton blocks by sampled labels: one backward pass, no second derivatives of the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from blockopt.blocks import Blocks
from blockopt.distributed import is_sharded
from blockopt.measure.closures import (
    Curvature,
    Evaluation,
    Losses,
    block_dots,
    check_probes,
    default_generator,
    mean_over_batches,
    trainable,
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
    """Mean curvature of each block of the Gauss-Newton matrix `Jᵀ Λ J`, without bias.

    With `E[s sᵀ] = Λ`, the squared entries of `Jᵀ s`, one backward pass from the predictions, have
    the diagonal of the Gauss-Newton matrix as their mean. For cross-entropy `s` comes from labels
    sampled from the model itself, so this is also the diagonal of the Fisher matrix. No second
    derivatives: any attention kernel, DDP and FSDP2 will do.

    Args:
        model: Any module.
        losses: A closure that returns the mean loss of a batch, or that and its number of tokens,
            or several of them; they are averaged by tokens. The loss must call `F.cross_entropy`,
            `F.mse_loss` or `F.binary_cross_entropy_with_logits`.
        blocks: What `find_blocks(model)` returns; found here by default.
        num_probes: Samples a batch, one backward pass each.
        generator: Draws the labels; by default one with seed 0. Under FSDP2 each rank needs a seed
            of its own.

    Returns:
        `{parameter name: mean curvature of each block}`.

    Raises:
        ValueError: If the loss function was not seen.

    Example:
        Squared error of one output, loss `(w·x)²`: the Gauss-Newton diagonal is `2 x²`, its mean
        25.

        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> gauss_newton(model, lambda: nn.functional.mse_loss(model(x), torch.zeros(1, 1)))
        {'weight': tensor([25.0000])}
    """
    check_probes(num_probes)
    generator = default_generator(generator)
    parameters = trainable(model)

    def traces_of(evaluation: Evaluation, blocks: Mapping[str, Blocks]) -> Curvature:
        with torch.compiler.set_stance("force_eager"), CaptureLosses() as seen:
            loss = evaluation()
        curvature = LossCurvature(loss, seen.calls)
        traces = {
            name: torch.zeros(blocks[name].num_blocks, device=p.device)
            for name, p in parameters.items()
        }
        for probe in range(num_probes):
            # backward() and not autograd.grad(): FSDP2 reduces gradients only where they are
            # accumulated. From the loss too, with a weight of zero: FSDP2 gathers the weights again
            # when a backward pass reaches what the model returned.
            outputs, vectors = (
                [*curvature.predictions, loss],
                [*curvature.sample(generator), torch.zeros_like(loss)],
            )
            torch.autograd.backward(outputs, vectors, retain_graph=probe + 1 < num_probes)
            for name, p in parameters.items():
                if p.grad is not None:
                    # FSDP2 has averaged over independent samples of all ranks, whose square is
                    # smaller by their number.
                    ranks = p.device_mesh.size() if is_sharded(p) else 1  # type: ignore[attr-defined]
                    traces[name] = traces[name] + block_dots(p.grad, p.grad, blocks[name]) * (
                        ranks / num_probes
                    )
                    p.grad = None
        return traces

    return mean_over_batches(model, losses, blocks, traces_of)
