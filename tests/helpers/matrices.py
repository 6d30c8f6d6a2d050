"""Symmetric matrices with known spectra, as tensors and as operators known by their products."""

import itertools

import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vjp, vmap


def with_spectrum(values, seed=0):
    """A symmetric float64 matrix with these eigenvalues and random eigenvectors."""
    values = torch.as_tensor(values, dtype=torch.float64)
    vectors, _ = torch.linalg.qr(normal(len(values), len(values), seed=seed))
    return (vectors * values) @ vectors.T


def normal(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_symmetric(n, seed=0):
    noise = normal(n, n, seed=seed)
    return noise + noise.T


SPECTRA = {
    "indefinite": normal(60),
    "repeated": torch.tensor([5.0] * 4 + [-5.0] * 3 + [1.0] * 30 + [0.0] * 23, dtype=torch.float64),
    "clustered": torch.cat([1 + 1e-6 * normal(30), -3 + 1e-6 * normal(30)]),
    "low rank": torch.cat(
        [torch.tensor([4.0, 2.0, -1.0], dtype=torch.float64), torch.zeros(57, dtype=torch.float64)]
    ),
    "decaying": 10.0 ** -torch.arange(0, 12, 0.2, dtype=torch.float64),
    "equal": torch.full((60,), 2.0, dtype=torch.float64),
    "zero": torch.zeros(60, dtype=torch.float64),
}


class Products:
    """A matrix known by its products alone, which counts them."""

    def __init__(self, matrix):
        self.matrix, self.shape, self.dtype, self.device = (
            matrix,
            tuple(matrix.shape),
            matrix.dtype,
            matrix.device,
        )
        self.count = 0

    def __matmul__(self, v):
        assert v.dtype == self.dtype
        self.count += 1 if v.ndim == 1 else v.shape[1]
        return self.matrix @ v


def all_signs(n):
    """Every vector of n signs, (2 ** n, n): their mean is the exact mean over random signs."""
    return torch.tensor(list(itertools.product([-1.0, 1.0], repeat=n)), dtype=torch.float64)


class TinyAttention(nn.Module):
    """One head of causal attention on 3 tokens of width 3, and a linear head: 45 parameters."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output, self.head = (
            nn.Linear(3, 3, bias=False) for _ in range(5)
        )

    def forward(self, x):
        scores = self.query(x) @ self.key(x).mT / 3**0.5
        weights = scores.masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf).softmax(-1)
        return self.head(x + self.output(weights @ self.value(x)))


class AttentionHessian:
    """The Hessian of the error of `TinyAttention` in float64: products, and the dense matrix."""

    def __init__(self):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = TinyAttention().double()
            x, y = torch.randn(2, 4, 3, 3, dtype=torch.float64)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        sizes = [p.numel() for p in weights.values()]

        def loss(flat):
            pieces = zip(weights.items(), flat.split(sizes))
            return (
                (functional_call(model, {name: v.view_as(p) for (name, p), v in pieces}, (x,)) - y)
                .square()
                .mean()
            )

        self.loss, self.point = loss, torch.cat([p.flatten() for p in weights.values()])
        self.shape, self.dtype, self.device = (
            (sum(sizes), sum(sizes)),
            torch.float64,
            torch.device("cpu"),
        )
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.parts = {
            name: torch.arange(a, a + size) for name, a, size in zip(weights, starts, sizes)
        }

    def __matmul__(self, v):
        def one(v):
            # Forward mode scripts, of which torch warns
            return vjp(grad(self.loss), self.point)[1](v)[0]

        return one(v) if v.ndim == 1 else vmap(one, in_dims=1, out_dims=1)(v)

    def dense(self):
        return jacrev(grad(self.loss))(self.point)
