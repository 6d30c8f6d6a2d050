"""Squared gradients of each sequence, from the inputs of layers, against autograd."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from blockopt import Split
from blockopt.curvature.analytic.layer_calls import capture_layers
from blockopt.curvature.analytic.sequence_gradients import (
    layer_gradients,
    squared_rows,
    squared_sums,
)


@pytest.mark.parametrize(("positions", "width", "outputs"), [(2, 9, 8), (30, 3, 4), (4, 6, 12)])
def test_squared_rows(positions, width, outputs):
    """By the Gram matrix of few positions, or by the gradient itself."""
    generator = torch.Generator().manual_seed(0)
    x, d = (
        torch.randn(3, positions, n, generator=generator, dtype=torch.float64)
        for n in (width, outputs)
    )
    expected = sum((d[s].T @ x[s]).square().sum(1) for s in range(3))
    torch.testing.assert_close(squared_rows(x, d), expected, rtol=1e-12, atol=0.0)


TOKENS = torch.tensor([[0, 3, 3, 1], [3, 0, 0, 4]])  # some in both sequences
LAYERS = {
    "linear": lambda: nn.Linear(3, 6),
    "conv1d": lambda: Conv1D(6, 3),
    "embedding": lambda: nn.Embedding(5, 6),
    "padded": lambda: nn.Embedding(5, 6, padding_idx=3),
    "norm": lambda: nn.LayerNorm(3),
}


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("kind", LAYERS)
def test_squares_of_the_gradient_of_each_sequence(kind, dim):
    model = nn.Sequential(LAYERS[kind]()).double()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    x = TOKENS if kind in ("embedding", "padded") else x
    with capture_layers(model, []) as layers:
        y = model(x)
    d = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    found = layer_gradients(layers, [d])
    assert set(found) == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        gradients = [torch.autograd.grad(y[s], p, d[s], retain_graph=True)[0] for s in range(2)]
        squares = sum(g.square() for g in gradients)
        if dim is None or p.ndim <= dim:
            split, expected = None, squares.sum().reshape(1)
        else:
            split = Split(dim, (p.shape[dim],), (p.shape[dim],))
            expected = squares.sum(1 - dim) if p.ndim == 2 else squares
        torch.testing.assert_close(squared_sums(found[name], split), expected)
