"""The spectrum of a symmetric operator from products alone: Lanczos, and the spectral density."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from blockopt.analysis.plots.distributions import spectral_densities
from blockopt.analysis.progress import progress_bar
from blockopt.analysis.results import Result, figure_of
from blockopt.analysis.spectral.log_axis import smoothed, symmetric_log
from blockopt.analysis.spectral.products import (
    SymmetricOperator,
    orthogonal_product,
    orthogonal_start,
    product,
    random_normal,
    random_signs,
    remainder_norm,
    size,
    unit_start,
)
from blockopt.checks import check_count
from blockopt.measure.closures import default_generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Lanczos(NamedTuple):
    """`A V = V T + remainder · v eᵀ` with m orthonormal columns `V` and a tridiagonal `T`.

    `alphas` (m,) is the diagonal of `T`, `betas` (m - 1,) its off-diagonal, 0 where a new vector
    was drawn. `basis` (n, m) is `V`, `e` the last unit vector, and `remainder` is 0 if the basis
    spans an invariant subspace. All are in float64.
    """

    alphas: Tensor
    betas: Tensor
    basis: Tensor
    remainder: float

    def matrix(self) -> Tensor:
        """Return `T`, (m, m)."""
        return torch.diag(self.alphas) + torch.diag(self.betas, 1) + torch.diag(self.betas, -1)

    def quadrature(self) -> SpectralDensity:
        """Return the Gauss quadrature of the start vector u.

        `u · A^p u = Σ weights · nodes^p · ‖u‖²` holds for every p up to 2 m - 1.
        """
        nodes, vectors = torch.linalg.eigh(self.matrix())
        return SpectralDensity(nodes, vectors[0].square())


@dataclass(frozen=True)
class SpectralDensity(Result):
    """A distribution of eigenvalues: sorted nodes, and weights that sum to 1.

    Both are in float64 on the CPU.
    """

    nodes: Tensor
    weights: Tensor

    def __repr__(self) -> str:
        ends = f"{float(self.nodes[0]):.3g} to {float(self.nodes[-1]):.3g}"
        return f"SpectralDensity({len(self.nodes)} nodes from {ends})"

    @classmethod
    def of_eigenvalues(cls, values: Tensor) -> SpectralDensity:
        """Return the distribution of a vector of eigenvalues, all of equal weight."""
        nodes = values.detach().to("cpu", torch.float64).sort().values
        return cls(nodes, torch.full_like(nodes, 1 / len(nodes)))

    def moment(self, power: int) -> float:
        """Return `Σ weights · nodes^power`, an estimate of `tr(A^power) / n`."""
        return float((self.weights * self.nodes**power).sum())

    def cdf(self, grid: Tensor) -> Tensor:
        """Return the share of eigenvalues at or below each point of `grid`."""
        total = torch.cat([self.weights.new_zeros(1), self.weights.cumsum(0)])
        return total[torch.searchsorted(self.nodes, grid.to(self.nodes), right=True)]

    def density(self, grid: Tensor, width: float) -> Tensor:
        """Return `Σ weights · N(grid; nodes, width²)`: each node as a normal density."""
        return smoothed(self.nodes, self.weights, grid, width)

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per node."""
        pairs = zip(self.nodes.tolist(), self.weights.tolist())
        return [{"eigenvalue": node, "weight": weight} for node, weight in pairs]

    def plot(self, *, title: str = "Spectral density") -> Figure:
        """Draw the smoothed density on a symmetric log axis (needs matplotlib)."""
        return figure_of(spectral_densities({"eigenvalues": self}, title=title))

    def on_log_axis(self, threshold: float) -> SpectralDensity:
        """Return the distribution on the axis of `symmetric_log`."""
        return SpectralDensity(symmetric_log(self.nodes, threshold), self.weights)


def check_symmetric(
    operator: SymmetricOperator,
    *,
    tolerance: float | None = None,
    generator: torch.Generator | None = None,
) -> float:
    """Raise `ValueError` unless `u · A v = v · A u` for two random normal vectors.

    This takes two products. It detects an operator that is not symmetric almost surely: the
    difference has the variance `‖A − Aᵀ‖_F²`.

    Args:
        operator: Any operator.
        tolerance: How large `|u · A v − v · A u| / (‖A u‖ + ‖A v‖)` may be; by default the square
            root of the precision of its dtype.
        generator: Draws the vectors; by default one with seed 0.

    Returns:
        That ratio.

    Example:
        >>> check_symmetric(torch.eye(3))
        0.0
    """
    size(operator, check_tensor=False)
    generator = default_generator(generator)
    # Rounded as the product rounds them: otherwise float32 would look less symmetric than it is.
    u, v = (random_normal(operator, generator).to(operator.dtype).double() for _ in range(2))
    Au, Av = product(operator, u), product(operator, v)
    norms = float(Au.norm() + Av.norm())
    ratio = abs(float(u @ Av - v @ Au)) / norms if norms > 0 else 0.0
    limit = torch.finfo(operator.dtype).eps ** 0.5 if tolerance is None else tolerance
    if not ratio <= limit:
        raise ValueError(
            f"Invalid operator: |u·Av − v·Au| is {ratio:.1e} of ‖Au‖ + ‖Av‖, more than {limit:.1e}."
            " Must be symmetric and deterministic (no dropout, the same data at each product)."
        )
    return ratio


def lanczos(
    operator: SymmetricOperator,
    num_steps: int,
    *,
    start: Tensor | None = None,
    restart: bool = True,
    generator: torch.Generator | None = None,
) -> Lanczos:
    """Return the tridiagonal matrix and an orthonormal basis of the Krylov space of `start`.

    The recurrence runs in float64 whatever the dtype of the operator. Each new vector is made
    orthogonal to all others twice, so no eigenvalue shows up more often than it should. The basis
    takes 8 n · num_steps bytes.

    One start vector sees each eigenvalue once, however often it is repeated, and the Krylov space
    then ends early. With `restart`, a random vector orthogonal to the basis takes over and finds
    the copies; without it, the result is shorter.

    Args:
        operator: Any symmetric operator; a square tensor is one.
        num_steps: The number of products `A @ v`; at most n are done.
        start: The first vector (n,), of any length but 0; random by default.
        restart: Whether to go on when the Krylov space ends.
        generator: Draws the start and the vectors that take over; by default one with seed 0.

    Raises:
        ValueError: If an option or a shape is wrong.
        FloatingPointError: If a product is not finite.

    Example:
        >>> result = lanczos(torch.diag(torch.tensor([1.0, 2.0, 2.0])), 3)
        >>> torch.linalg.eigvalsh(result.matrix()).round(decimals=6)
        tensor([1., 2., 2.], dtype=torch.float64)
    """
    check_count("num_steps", num_steps)
    n, generator = size(operator), default_generator(generator)
    steps = min(num_steps, n)
    # V transposed, so that its vectors are contiguous
    rows = torch.zeros(steps, n, dtype=torch.float64, device=operator.device)
    rows[0] = unit_start(operator, start, generator)
    alphas, betas, largest, remainder = [], [], 0.0, 0.0
    for step in range(steps):
        coefficients, rest, length = orthogonal_product(operator, rows, step)
        alphas.append(float(coefficients[step]))
        largest = max(largest, length)
        remainder = 0.0 if step + 1 == n else remainder_norm(operator, rest, largest)
        if step + 1 == steps or (remainder == 0 and not restart):
            break
        betas.append(remainder)
        if remainder > 0:
            rows[step + 1] = rest / remainder
        else:
            rows[step + 1] = orthogonal_start(operator, rows[: step + 1], generator)
    made = torch.tensor(alphas, dtype=torch.float64), torch.tensor(betas, dtype=torch.float64)
    return Lanczos(*made, rows[: len(alphas)].T, remainder)


def spectral_density(
    operator: SymmetricOperator,
    *,
    num_steps: int = 50,
    num_probes: int = 10,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> SpectralDensity:
    """Estimate the distribution of the eigenvalues by stochastic Lanczos quadrature.

    Each probe of random signs gives `num_steps` nodes, with weights that integrate polynomials up
    to degree 2 · num_steps - 1 exactly as the probe sees them. The mean over probes has no bias. It
    costs at most num_steps · num_probes products, and fewer where the Krylov space of a probe ends
    early.

    The weight of a single eigenvalue, 1/n, has noise of about its own size per probe. Use
    `top_eigenpairs` for the outermost eigenvalues.

    Args:
        operator: Any symmetric operator; a square tensor is one.
        num_steps: Products per probe; at most n are done.
        num_probes: The number of probes.
        generator: Draws the signs; by default one with seed 0.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If an option or the shape of the operator is wrong.
        FloatingPointError: If a product is not finite.

    Example:
        >>> found = spectral_density(torch.diag(torch.tensor([-1.0, 3.0, 3.0, 3.0])), num_probes=1)
        >>> found.nodes.round(decimals=6), found.weights.round(decimals=6)
        (tensor([-1.,  3.], dtype=torch.float64), tensor([0.2500, 0.7500], dtype=torch.float64))
    """
    check_count("num_steps", num_steps)
    check_count("num_probes", num_probes)
    n, generator = size(operator), default_generator(generator)
    found = []
    with progress_bar(progress, "spectral density", num_probes) as advance:
        for _ in range(num_probes):
            start = random_signs(n, operator.device, generator)
            # What a restart would find has weight 0: the probe does not see it.
            steps = lanczos(operator, num_steps, start=start, restart=False, generator=generator)
            found.append(steps.quadrature())
            advance(1)
    nodes, order = torch.cat([one.nodes for one in found]).sort()
    weights = torch.cat([one.weights for one in found])[order]
    return SpectralDensity(nodes, weights / weights.sum())
