"""Derivatives along many vectors: one backward pass for all of them where torch can."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PulledBack(NamedTuple):
    """`Σ vectorᵀ ∂output/∂input` for each input, (m, *shape), and whether one pass sufficed."""

    products: list[Tensor]
    at_once: bool


def pull_back(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], vectors: Sequence[Tensor]
) -> PulledBack:
    """Return the products for m vectors of each output; the graph is kept.

    Example:
        >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> pull_back([x.square()], [x], [torch.eye(2)]).products
        [tensor([[6., 0.],
                [0., 8.]])]
    """
    number = len(vectors[0])
    pairs = [pair for pair in zip(outputs, vectors) if pair[0].requires_grad]
    zeros = [x.new_zeros(1).expand(number, *x.shape) for x in inputs]
    if not pairs:
        return PulledBack(zeros, True)
    reached = [output for output, _ in pairs]

    def pulled(along: list[Tensor], batched: bool) -> Any:
        options = {"retain_graph": True, "allow_unused": True, "is_grads_batched": batched}
        return torch.autograd.grad(reached, inputs, along, **options)  # type: ignore[arg-type]

    found, at_once = None, True
    if number > 1:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "There is a performance drop")
                found = pulled([vector for _, vector in pairs], True)
        except (RuntimeError, UserWarning):  # an operation without a rule for batches
            at_once = False
    if found is None:
        each = [pulled([vector[i] for _, vector in pairs], False) for i in range(number)]
        found = [None if parts[0] is None else torch.stack(parts) for parts in zip(*each)]
    products = [zero if product is None else product for zero, product in zip(zeros, found)]
    return PulledBack(products, at_once)
