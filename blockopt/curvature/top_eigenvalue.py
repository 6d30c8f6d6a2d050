"""The largest eigenvalue of each group of blocks, by Lanczos on its own part of the Hessian."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks, Level, block_groups, checked_blocks, expand, sum_groups
from blockopt.checks import check_count
from blockopt.measure.closures import (
    Curvature,
    Evaluation,
    Losses,
    average_over_batches,
    block_dots,
    default_generator,
    refuse_sharded,
    trainable_parameters,
)
from blockopt.measure.second_derivatives import Product, Vectors, hessian_products


def top_eigenvalue(
    model: nn.Module,
    losses: Losses,
    *,
    blocks: Mapping[str, Blocks] | None = None,
    by: Level = "role",
    num_products: int = 8,
    generator: torch.Generator | None = None,
) -> Curvature:
    """Return `λ_max` of the diagonal block of each group, the curvature of its sharpest direction.

    Gradient descent on one group alone is stable only for learning rates below `2 / λ_max`. Lanczos
    starts from a random vector of each group, so estimates are from below, and most precise for
    groups with few large eigenvalues, as transformers have them. Every product takes a forward
    pass, a gradient with its graph, and a backward pass per group: for the ten roles of a GPT and 8
    products about 180 gradients per batch. Refresh rarely. Other entries of the Hessian, between
    groups, play no part. `analysis.top_eigenpairs` has those of any operator, and from a few
    gradients per batch `analysis.sampled_report` has a rough λ_max of all Gauss-Newton blocks.

    Attention runs on the math kernel, and compiled models run eagerly.

    Args:
        model: Any module with whole parameters (not FSDP2).
        losses: One or more closures that return the mean loss of a batch, alone or with its number
            of tokens, by which the batches are weighted. They must use the same data at every call.
        blocks: What `find_blocks(model)` returns; found here by default.
        by: Which blocks form a group: those of a "role", of a role in a "layer" or in a "tensor",
            or each alone, "head".
        num_products: Steps of Lanczos.
        generator: Draws the first vectors; its seed is 0 by default.

    Returns:
        `{parameter name: λ_max of the group of each block}`.

    Raises:
        ValueError: If a parameter is sharded.

    Example:
        The loss `(3 w1 + 4 w2)²` has the Hessian `2 x xᵀ`, whose largest eigenvalue is 50:

        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> top_eigenvalue(model, lambda: model(x).square().sum())
        {'weight': tensor([50.0000])}
    """
    check_count("num_products", num_products)
    refuse_sharded(model, "top_eigenvalue")
    groups = _Groups(checked_blocks(model, blocks), trainable_parameters(model), by)

    def products(vectors: Vectors) -> Vectors:
        def measure(evaluation: Evaluation) -> dict[str, Tensor]:
            _, product = hessian_products(evaluation, groups.parameters)
            return groups.diagonal_products(product, vectors)

        return average_over_batches(model, losses, measure)

    largest = _lanczos(products, groups, num_products, default_generator(generator))
    return groups.spread(largest)


def _lanczos(product: Product, groups: _Groups, steps: int, generator: torch.Generator) -> Tensor:
    """Return the largest Ritz value of every group, (groups,), all advanced together.

    The three-term recurrence keeps two vectors. Lost orthogonality only repeats values that have
    converged, which does not change the largest.
    """
    vector = groups.draw(generator)
    lengths = groups.norms(vector).clamp(min=torch.finfo(torch.float64).tiny)
    vector = groups.scaled(vector, 1 / lengths)
    previous: Vectors = {name: torch.zeros_like(v) for name, v in vector.items()}
    beta = torch.zeros(groups.count, dtype=torch.float64)
    alphas, betas = [], []
    active = torch.ones(groups.count, dtype=torch.bool)
    sizes = torch.zeros(groups.count, dtype=torch.int64)
    for _ in range(steps):
        found = product(vector)
        alpha = groups.dots(found, vector)
        along, before = groups.scaled(vector, alpha), groups.scaled(previous, beta)
        found = {name: v - along[name] - before[name] for name, v in found.items()}
        alphas.append(alpha)
        sizes += active
        beta = groups.norms(found)
        # What is left is rounding: the group has no further directions.
        active &= beta > 1e-6 * torch.stack([a.abs() for a in alphas]).amax(0)
        beta = torch.where(active, beta, 0.0)
        betas.append(beta)
        previous, vector = vector, groups.scaled(found, torch.where(active, 1 / beta, 0.0))
        if not bool(active.any()):
            break
    return torch.stack(
        [
            _largest([float(a[g]) for a in alphas[:n]], [float(b[g]) for b in betas[: n - 1]])
            for g, n in enumerate(sizes.tolist())
        ]
    )


def _largest(diagonal: list[float], beside: list[float]) -> Tensor:
    """Return the largest eigenvalue of a tridiagonal matrix."""
    off = torch.diag(torch.tensor(beside, dtype=torch.float64), 1) if beside else 0.0
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + off
    largest: Tensor = torch.linalg.eigvalsh(matrix, UPLO="U")[-1]
    return largest


class _Groups:
    """The entries of the trainable parameters by group of blocks."""

    def __init__(
        self, blocks: Mapping[str, Blocks], parameters: Mapping[str, Tensor], by: Level
    ) -> None:
        self._blocks = {name: entry for name, entry in blocks.items() if name in parameters}
        self.parameters = {name: parameters[name] for name in self._blocks}
        labels, self._numbers = block_groups(self._blocks, by)
        self.count = len(labels)

    def draw(self, generator: torch.Generator) -> Vectors:
        """Return normal vectors, in float32 at least."""
        return {
            name: torch.randn(p.shape, generator=generator, device=generator.device).to(
                p.device, torch.promote_types(p.dtype, torch.float32)
            )
            for name, p in self.parameters.items()
        }

    def dots(self, x: Vectors, y: Vectors) -> Tensor:
        """Return the inner product over each group, (groups,), in float64 on the CPU."""
        found = {name: block_dots(x[name], y[name], b) for name, b in self._blocks.items()}
        return sum_groups(found, self._numbers, self.count)

    def norms(self, x: Vectors) -> Tensor:
        """Return the norm over each group, (groups,)."""
        return self.dots(x, x).sqrt()

    def scaled(self, x: Vectors, factors: Tensor) -> Vectors:
        """Multiply each group by its factor."""
        return {name: v * self._expanded(name, factors).to(v) for name, v in x.items()}

    def spread(self, values: Tensor) -> Curvature:
        """Return the value of its group for each block."""
        return {
            name: values[self._numbers[name]].to(
                p.device, torch.promote_types(p.dtype, torch.float32)
            )
            for name, p in self.parameters.items()
        }

    def diagonal_products(self, product: Product, vectors: Vectors) -> dict[str, Tensor]:
        """Return the product of each group's diagonal block with its part of the vectors."""
        total = {name: torch.zeros_like(v) for name, v in vectors.items()}
        for group in range(self.count):
            only = torch.zeros(self.count, dtype=torch.float64)
            only[group] = 1.0
            masks = {
                name: self._expanded(name, only).to(self.parameters[name])
                for name, numbers in self._numbers.items()
                if bool((numbers == group).any())
            }
            parts = {n: mask * vectors[n].to(self.parameters[n].dtype) for n, mask in masks.items()}
            for name, found in product(parts).items():
                total[name] += (masks[name] * found).to(total[name])
        return total

    def _expanded(self, name: str, values: Tensor) -> Tensor:
        """Return the value of its group for each entry of a parameter, to be broadcast."""
        entry, p = self._blocks[name], self.parameters[name]
        by_block = values[self._numbers[name]].to(p.device)
        return expand(by_block, entry.split, p.ndim)
