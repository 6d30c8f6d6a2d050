"""Slow, transparent optimizers, one block at a time, which the fast ones must equal."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from blockopt import Blocks

TABLES = ("embedding", "head")
MATRIX_ROLES = {"query", "key", "value", "output", "mlp_in", "mlp_gate", "mlp_out"}


def block_ids(shape: tuple[int, ...], blocks: Blocks) -> Tensor:
    """The number of the block that each entry of a parameter belongs to, counted entry by entry."""
    if blocks.split is None:
        return torch.zeros(shape, dtype=torch.long)
    dim, sizes, parts, repeat, pooled, stack = blocks.split
    along, next_block = [], 0
    for _ in range(repeat):
        if pooled:
            next_block = 0
        for size, count in zip(sizes, parts):
            for _ in range(count):
                along += [next_block] * (size // count)
                next_block += 1
    view = [1] * len(shape)
    view[dim] = shape[dim]
    ids = torch.tensor(along).view(view).expand(shape).clone()
    for number in range(stack) if stack > 1 else ():  # every matrix has blocks of its own
        ids[number] += number * next_block
    return ids


class Reference(ABC):
    """Holds copies of the parameters, the blocks, the scales and the moments of one optimizer."""

    def __init__(
        self,
        parameters: dict[str, Tensor],
        blocks: dict[str, Blocks],
        decays: dict[str, float],
        **options,
    ):
        self.p = {name: p.detach().clone() for name, p in parameters.items()}
        self.blocks, self.decays, self.options = blocks, decays, options
        self.scales = {
            name: torch.ones(b.num_blocks, dtype=torch.float64) for name, b in blocks.items()
        }
        self.m = {name: torch.zeros_like(p) for name, p in self.p.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.p.items()}
        self.covariances: dict[str, Tensor] = {}
        self.t = 0

    def step(self, gradients: dict[str, Tensor], lr: float) -> None:
        self.t += 1
        for name, gradient in gradients.items():
            p = self.p[name]
            scale = self.scales[name][block_ids(tuple(p.shape), self.blocks[name])].to(p.dtype)
            direction = self.direction(name, gradient)
            self.p[name] = p - lr * self.decays[name] * p - lr * scale * direction

    @abstractmethod
    def direction(self, name: str, g: Tensor) -> Tensor:
        """What the learning rate and the block scale multiply."""


class ReferenceAdamW(Reference):
    table_step = 3.0

    def direction(self, name: str, g: Tensor) -> Tensor:
        beta1, beta2 = self.options["betas"]
        squares = g * g
        if self.options["second_moment"] == "block":
            ids = block_ids(tuple(g.shape), self.blocks[name])
            for block in range(self.blocks[name].num_blocks):
                squares[ids == block] = (g * g)[ids == block].mean()
        self.m[name] = beta1 * self.m[name] + (1 - beta1) * g
        self.v[name] = beta2 * self.v[name] + (1 - beta2) * squares
        m_hat = self.m[name] / (1 - beta1**self.t)
        v_hat = self.v[name] / (1 - beta2**self.t)
        step = m_hat / (v_hat.sqrt() + self.options["eps"])
        if (
            self.options["second_moment"] == "coordinate"
            or self.blocks[name].roles[0] not in TABLES
        ):
            return step
        return self.table_step * step @ self.whitening(name, g)

    def whitening(self, name: str, g: Tensor) -> Tensor:
        """The inverse root of the damped second moment of the columns, by its eigenvectors."""
        found, rest = self.approximation(name, g, columns=16)
        values, vectors = torch.linalg.eigh(found)
        return (vectors * (values + rest) ** -0.5) @ vectors.T / math.sqrt(len(found))

    def approximation(self, matrix: str, g: Tensor, columns: int) -> tuple[Tensor, float]:
        """The approximation of Nyström to the second moment of rows, all of it dense, and `μ`."""
        beta, size = self.options["betas"][1], g.shape[1]
        number = min(columns, size) if columns == 16 else columns
        probes = torch.randn(size, number, generator=torch.Generator().manual_seed(0)).double()
        old = self.covariances.get(matrix, torch.zeros(size, size, dtype=torch.float64))
        c = self.covariances[matrix] = beta * old + (1 - beta) * g.T @ g
        c = c / c.trace()
        core = probes.T @ c @ probes
        core = core + 1e-4 * core.diagonal().mean() * torch.eye(number, dtype=torch.float64)
        found = c @ probes @ torch.linalg.inv(core) @ probes.T @ c
        return found, (max(0.0, 1 - found.trace().item()) + 0.1) / size


class ReferenceSGD(Reference):
    def direction(self, name: str, g: Tensor) -> Tensor:
        momentum = self.options["momentum"]
        self.m[name] = momentum * self.m[name] + g
        return g + momentum * self.m[name] if self.options["nesterov"] else self.m[name]


class ReferenceMuon(ReferenceAdamW):
    """Orthogonalizes a contiguous copy of every matrix alone and puts it back."""

    table_step = 1.0

    def direction(self, name: str, g: Tensor) -> Tensor:
        blocks = self.blocks[name]
        if g.ndim != 2 or not set(blocks.roles) <= MATRIX_ROLES:
            return super().direction(name, g)
        momentum = self.options["momentum"]
        self.m[name] = momentum * self.m[name] + (1 - momentum) * g
        u = (
            (1 - momentum) * g + momentum * self.m[name]
            if self.options["nesterov"]
            else self.m[name]
        )
        dim = 0 if blocks.split is None else blocks.split.dim
        ids = block_ids(tuple(g.shape), blocks).movedim(dim, 0)[:, 0]
        rows, out = u.movedim(dim, 0), torch.empty_like(u.movedim(dim, 0))
        rows_of_gradient, roles = g.movedim(dim, 0), blocks.block_roles
        precondition = self.options.get("precondition", True)
        for role in dict.fromkeys(roles):
            members = [block for block, r in enumerate(roles) if r == role]
            chosen = torch.isin(ids, torch.tensor(members))
            matrix = rows[chosen]
            inputs_first = role == "output" and blocks.split is not None
            if precondition:
                pair = [x.T if inputs_first else x for x in (matrix, rows_of_gradient[chosen])]
                matrix = self.damp(f"{name} {role}", *pair)
                matrix = matrix.T if inputs_first else matrix
            found = newton_schulz(matrix)
            if role.startswith("mlp") and precondition:
                found = self.even(f"{name} {role}", found, along=1 if role == "mlp_out" else 0)
            outputs, inputs = reversed(found.shape) if inputs_first else found.shape
            out[chosen] = 0.2 * math.sqrt(128 * max(1, outputs / inputs)) * found
        return out.movedim(0, dim)

    def damp(self, matrix: str, direction: Tensor, g: Tensor) -> Tensor:
        """Multiply by the inverse of the approximation of Nyström."""
        found, rest = self.approximation(matrix, g, columns=8)
        damped = found + rest * torch.eye(len(found), dtype=torch.float64)
        return direction @ torch.linalg.inv(damped) * rest

    def even(self, matrix: str, update: Tensor, along: int) -> Tensor:
        """Divide by the size that the steps of each neuron have had, as a part of their mean."""
        beta = self.options["betas"][1]
        squares = update.square().mean(dim=1 - along, keepdim=True)
        self.v[matrix] = beta * self.v.get(matrix, 0.0) + (1 - beta) * squares
        relative = self.v[matrix] / self.v[matrix].mean()
        return update / relative.clamp(min=0.01).sqrt()


# Of each step: the bound of its singular values, and the polynomial. See test_newton_schulz.py.
STEPS = (
    (1.993900, 4.084624, -2.861395, 0.502888),
    (1.975809, 3.946798, -2.773792, 0.494286),
    (1.907339, 3.498026, -2.482064, 0.465924),
    (1.687115, 2.463033, -1.755185, 0.386864),
)


def newton_schulz(x: Tensor) -> Tensor:
    """Four steps, by their definition, from a bound of the largest singular value."""
    x = x / x.norm().clamp(min=1e-7)
    gram = x @ x.T
    x = x * STEPS[0][0] / (gram @ gram).norm().pow(0.25).clamp(min=1e-3)
    for _, a, b, c in STEPS:
        x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
    return x
