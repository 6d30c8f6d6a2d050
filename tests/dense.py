"""Exact traces of Hessian and Gauss-Newton blocks in float64 from autograd alone, entry by entry: they judge the estimators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockopt import find_blocks
from blockopt.curvature._losses import CaptureLosses
from tests.models import block_index


def means_by_block(model: nn.Module, diagonal: dict[str, Tensor]) -> dict[str, Tensor]:
    """The mean of a diagonal over the blocks of each parameter."""
    means = {}
    for name, blocks in find_blocks(model).items():
        index = block_index(tuple(diagonal[name].shape), blocks.split)
        means[name] = torch.stack([diagonal[name][index == block].mean() for block in range(blocks.num_blocks)])
    return means


def hessian_means(model: nn.Module, loss_of: Callable[[], Tensor]) -> dict[str, Tensor]:
    """tr(H_bb) / dim_b: one row of the Hessian an entry of the parameters."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    tensors = list(parameters.values())
    with sdpa_kernel(SDPBackend.MATH):
        gradients = torch.autograd.grad(loss_of(), tensors, create_graph=True, materialize_grads=True)
        diagonal = {}
        for (name, p), gradient in zip(parameters.items(), gradients):
            rows = []
            for k, entry in enumerate(gradient.flatten()):
                row = torch.autograd.grad(entry, p, retain_graph=True, allow_unused=True)[0] if entry.requires_grad else None
                rows.append(p.new_zeros(()) if row is None else row.flatten()[k])
            diagonal[name] = torch.stack(rows).view_as(p)
    return means_by_block(model, diagonal)


def gauss_newton_means(model: nn.Module, loss_of: Callable[[], Tensor]) -> dict[str, Tensor]:
    """tr(J_bᵀ Λ J_b) / dim_b, with J row by row and Λ as the second derivative of the loss in the predictions by autograd."""
    with CaptureLosses() as seen:
        loss = loss_of()
    (call,) = seen.calls
    prediction, parameters = call.prediction, {n: p for n, p in model.named_parameters() if p.requires_grad}
    first = torch.autograd.grad(loss, prediction, create_graph=True)[0].flatten()
    curvature = [torch.autograd.grad(entry, prediction, retain_graph=True)[0].flatten() for entry in first]
    tensors = list(parameters.values())
    rows = []
    for entry in prediction.flatten():
        gradients = torch.autograd.grad(entry, tensors, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    jacobian = torch.stack(rows)
    diagonal = (jacobian * (torch.stack(curvature).to(jacobian) @ jacobian)).sum(0)
    parts = diagonal.split([p.numel() for p in tensors])
    return means_by_block(model, {name: part.view_as(p) for (name, p), part in zip(parameters.items(), parts)})
