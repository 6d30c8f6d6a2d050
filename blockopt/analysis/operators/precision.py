"""The same computation in float64, to measure what rounding does to it in the model's dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from blockopt.analysis.operators.base import ModelOperator


@contextmanager
def in_float64(model: nn.Module) -> Iterator[None]:
    """Hold all parameters and buffers in float64, then put back the very tensors of before."""
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    saved = [tensor.data for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.data = tensor.data.double()
        yield
    finally:
        for tensor, data in zip(tensors, saved):
            tensor.data = data


def measured_in_float64(model: nn.Module, measure: Callable[[], float]) -> float | None:
    """Return what `measure` finds with the model in float64, None if the losses do not run in it.

    Token ids run in any dtype; images and embeddings that a closure holds in float32 do not.
    """
    try:
        with in_float64(model):
            return measure()
    except RuntimeError as error:
        if "dtype" not in str(error) and "type" not in str(error):
            raise
        return None


def rounding_error(operator: ModelOperator, model: nn.Module, seed: int = 0) -> float | None:
    """Return the relative error of one product against the same in float64.

    It is None for a model in float64, and for losses that do not run in float64.

    Example:
        >>> model, x = nn.Linear(2, 1), torch.tensor([[3.0, 4.0]])
        >>> from blockopt.analysis.operators.model_operators import HessianOperator
        >>> H = HessianOperator(model, lambda: model(x.to(model.weight)).square().sum())
        >>> rounding_error(H, model) < 1e-6
        True
    """
    if operator.dtype == torch.float64:
        return None
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(operator.shape[0], generator=generator).to(operator.device, operator.dtype)
    found = (operator @ v).double()

    def error() -> float:
        exact = operator @ v.double()
        return float((found - exact).norm() / exact.norm()) if float(exact.norm()) > 0 else 0.0

    return measured_in_float64(model, error)
