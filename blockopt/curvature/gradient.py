"""The squared gradient: free, since training has just computed it. A proxy of curvature, not a measurement of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from blockopt.blocks import Blocks
from blockopt.blocks.split import block_numel
from blockopt.measure.closures import Curvature, block_dots, checked_blocks, trainable


@torch.no_grad()
def gradient(model: nn.Module, *, blocks: Mapping[str, Blocks] | None = None) -> Curvature:
    """Mean squared gradient of each block, from the gradients that the model holds.

    Near a minimum of a log-likelihood the mean outer product of per-example gradients is the Fisher
    matrix, and so the Hessian; the square of a batch's gradient is its diagonal, over the batch
    size, plus the squared mean gradient. It orders blocks well where noise dominates the gradient,
    and is what Adam-mini and arXiv 2502.19002 take for sharpness.

    Works with any attention, FSDP2, DDP, compiled models and gradient scaling (all values are off
    by one constant then).

    Args:
        model: After `backward()`, before `zero_grad()`.
        blocks: What `find_blocks(model)` returns; found here by default.

    Returns:
        `{parameter name: mean of the squared gradient over each block}`; zero for a parameter
        without a gradient.

    Raises:
        ValueError: If no parameter has a gradient.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> gradient(model)
        {'weight': tensor([12.5000])}
    """
    blocks = checked_blocks(model, blocks)
    parameters = trainable(model)
    if all(parameter.grad is None for parameter in parameters.values()):
        raise ValueError(
            "No parameter has a gradient. Call this after loss.backward() and before optimizer.zero_grad(); for BlockLR, move "
            "block_lr.step(...) before zero_grad()."
        )
    means: Curvature = {}
    for name, parameter in parameters.items():
        sizes = block_numel(tuple(parameter.shape), blocks[name].split).to(parameter.device)
        if parameter.grad is None:
            means[name] = torch.zeros(blocks[name].num_blocks, device=parameter.device)
        else:
            means[name] = block_dots(parameter.grad, parameter.grad, blocks[name]) / sizes
    return means
