"""The squared gradient: a proxy of curvature that is free, since training has computed it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from blockopt.blocks import Blocks, block_numel, checked_blocks
from blockopt.distributed import placed_like
from blockopt.measure.closures import Curvature, block_dots, block_zeros, trainable_parameters


@torch.no_grad()
def gradient(model: nn.Module, *, blocks: Mapping[str, Blocks] | None = None) -> Curvature:
    """Return the mean squared gradient of each block, from the gradients that the model holds.

    Near a minimum of a log-likelihood the mean outer product of per-example gradients is the Fisher
    matrix, and so the Hessian. The squared gradient of a batch is on average the diagonal of that
    matrix over the batch size, plus the squared mean gradient. It orders blocks well where noise
    dominates the gradient. Adam-mini and arXiv 2502.19002 take it for sharpness.

    It works with any attention, FSDP2, DDP, compiled models and gradient scaling, which multiplies
    all values by one constant.

    Args:
        model: Any module, after `backward()` and before `zero_grad()`.
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
    parameters = trainable_parameters(model)
    if all(parameter.grad is None for parameter in parameters.values()):
        raise ValueError(
            "No parameter has a gradient. Call this after loss.backward() and before "
            "optimizer.zero_grad(); for BlockLR, move block_lr.step(...) before zero_grad()."
        )
    means = block_zeros(parameters, blocks)
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            sizes = block_numel(tuple(parameter.shape), blocks[name].split).to(parameter.device)
            g = placed_like(parameter.grad, parameter)
            means[name] = block_dots(g, g, blocks[name]) / sizes
    return means
