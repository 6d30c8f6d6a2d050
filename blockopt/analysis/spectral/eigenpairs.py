"""The outermost eigenpairs of a symmetric operator, from products alone."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from blockopt.analysis.plots.distributions import top_eigenvalues
from blockopt.analysis.progress import progress_bar
from blockopt.analysis.results import Result, figure_of
from blockopt.analysis.spectral.products import (
    SymmetricOperator,
    orthogonal_product,
    orthogonal_start,
    remainder_norm,
    size,
    unit_start,
)
from blockopt.checks import check_choice, check_count
from blockopt.measure.closures import default_generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Which = Literal["largest magnitude", "largest", "smallest"]
SMALL = 100  # dimension up to which all eigenvalues are found rather than repeated ones searched


@dataclass(frozen=True)
class Eigenpairs(Result):
    """The pairs found, the best first, and the number of products that they took.

    `values` (k,), orthonormal `vectors` (n, k), and `residuals` `‖A u − λ u‖` (k,).
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    num_products: int

    def __repr__(self) -> str:
        listed = ", ".join(f"{value:.4g}" for value in self.values.tolist())
        return f"Eigenpairs(values=[{listed}], num_products={self.num_products})"

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per pair, without its vector."""
        pairs = zip(self.values.tolist(), self.residuals.tolist())
        return [{"eigenvalue": value, "residual": residual} for value, residual in pairs]

    def to_dict(self) -> dict[str, Any]:
        """Return all but the vectors as JSON has it: these are for `torch.save`."""
        values, residuals = self.values.tolist(), self.residuals.tolist()
        return {"values": values, "residuals": residuals, "num_products": self.num_products}

    def plot(self, *, title: str = "Top eigenvalues") -> Figure:
        """Draw the eigenvalues with their residuals (needs matplotlib)."""
        return figure_of(top_eigenvalues(self.values, self.residuals, title=title))


def top_eigenpairs(
    operator: SymmetricOperator,
    k: int = 1,
    *,
    which: Which = "largest magnitude",
    tolerance: float = 1e-6,
    max_steps: int = 1000,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Eigenpairs:
    """Find the k outermost eigenvalues and their vectors by Lanczos with thick restarts.

    A pair is done once `‖A u − λ u‖ <= tolerance · max |λ|`; its eigenvalue is then off by no more
    than that. The residual is that of the recurrence, true up to the precision of the products. The
    basis is re-orthogonalised fully. It holds at most max(2 k + 10, 20) float64 vectors, or n if
    n <= 100: k > 1 pairs then take n products and are exact up to rounding.

    One Krylov space holds each eigenvalue once. So when k > 1 pairs are done, a random vector
    orthogonal to them is followed for at least 10 products, until what it finds is told apart from
    the k-th. Each such round finds one more copy of a repeated eigenvalue.

    Args:
        operator: Any symmetric operator; a square tensor is one.
        k: The number of pairs, 1 to n.
        which: "largest magnitude", "largest" or "smallest" (the most negative).
        tolerance: See above.
        max_steps: The most products `A @ v`. If they do not suffice, a warning gives the residuals.
        generator: Draws the start vectors; by default one with seed 0.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If an option or the shape of the operator is wrong.
        FloatingPointError: If a product is not finite.

    Example:
        >>> A = torch.diag(torch.tensor([1.0, -4.0, 2.0, 2.0]))
        >>> top_eigenpairs(A, 3).values.round(decimals=6)
        tensor([-4.,  2.,  2.], dtype=torch.float64)
    """
    n, generator = size(operator), default_generator(generator)
    check_choice("which", which, get_args(Which))
    if not isinstance(k, int) or not 1 <= k <= n:
        raise ValueError(
            f"Invalid k={k}. Must be an integer from 1 to {n}, the dimension of the operator."
        )
    if not tolerance > 0:
        raise ValueError(f"Invalid tolerance={tolerance}. Must be > 0.")
    check_count("max_steps", max_steps, smallest=k)
    with progress_bar(progress, f"{k} eigenpairs", max_steps) as advance:
        search, finished = _Search(operator, k, which, tolerance, generator), False
        while search.steps < max_steps and not finished:
            finished = search.step()
            advance(1)
    if not finished:
        worst = float(search.residuals[:k].max())
        state = f"a residual is {worst:.1e} and must be <= {search.limit:.1e}"
        if worst <= search.limit:
            state = "repeated eigenvalues are not ruled out yet"
        warnings.warn(
            f"Eigenpairs not finished after max_steps={max_steps}: {state}. Raise max_steps or "
            f"tolerance (now {tolerance}), or ask for fewer pairs (now k={k}).",
            stacklevel=2,
        )
    return search.best()


class _Search:
    """The state of `top_eigenpairs`: a basis V, and the eigenvalues of `Vᵀ A V`, the best first."""

    def __init__(
        self,
        operator: SymmetricOperator,
        k: int,
        which: Which,
        tolerance: float,
        generator: torch.Generator,
    ) -> None:
        self.operator, self.k, self.which = operator, k, which
        self.tolerance, self.generator = tolerance, generator
        n = size(operator)
        self.room = n if n <= SMALL else max(2 * k + 10, 20)
        self.rows = torch.zeros(self.room, n, dtype=torch.float64, device=operator.device)
        self.rows[0] = unit_start(operator, None, generator)
        self.T = torch.zeros(self.room, self.room, dtype=torch.float64)
        self.filled, self.steps, self.largest, self.limit = 0, 0, 0.0, 0.0
        self.known: Tensor | None = None  # what sorts the k values, at the start of this round
        self.known_residuals = torch.zeros(k, dtype=torch.float64)
        self.round_steps = 0

    def step(self) -> bool:
        """Do one product; return whether all pairs are done."""
        coefficients, rest, length = orthogonal_product(self.operator, self.rows, self.filled)
        self.T[: self.filled + 1, self.filled] = coefficients.cpu()
        self.T[self.filled, : self.filled + 1] = coefficients.cpu()
        self.filled += 1
        self.steps += 1
        self.round_steps += 1
        self.largest = max(self.largest, length)
        complete = self.filled == self.rows.shape[1]
        remainder = 0.0 if complete else remainder_norm(self.operator, rest, self.largest)
        values, vectors = torch.linalg.eigh(self.T[: self.filled, : self.filled])
        keys = {"largest magnitude": values.abs(), "largest": values, "smallest": -values}
        sorted_keys, order = keys[self.which].sort(descending=True)
        self.values, self.vectors = values[order], vectors[:, order]
        self.residuals = remainder * self.vectors[-1].abs()
        self.limit = self.tolerance * float(values.abs().max())
        if complete:
            self.known_residuals = torch.zeros(self.k, dtype=torch.float64)
            return True
        settled = self.filled >= self.k and bool((self.residuals[: self.k] <= self.limit).all())
        if settled and self.k == 1:
            return True
        if settled and self.room < self.rows.shape[1]:
            best = sorted_keys[: self.k]
            if self.known is None or float((best - self.known).abs().max()) > self.limit:
                self.known, self.known_residuals = best, self.residuals[: self.k]
                self.round_steps = 0
                self._keep(self.k, None)
                return False
            if self.round_steps >= 10 and self.filled > self.k:
                gap = float(best[-1] - sorted_keys[self.k])
                if float(self.residuals[self.k]) <= max(self.limit, gap):
                    return True
        following = rest / remainder if remainder > 0 else None
        if self.filled == self.room:
            self._keep((self.room + self.k) // 2, following)
        else:
            self._follow(following)
        return False

    def best(self) -> Eigenpairs:
        """Return what is known so far."""
        vectors = self.rows[: len(self.vectors)].T @ self.vectors[:, : self.k].to(self.rows.device)
        residuals = torch.hypot(self.residuals[: self.k], self.known_residuals)
        return Eigenpairs(self.values[: self.k], vectors, residuals, self.steps)

    def _keep(self, number: int, following: Tensor | None) -> None:
        """Shrink the basis to its best approximate eigenvectors, and go on from one more vector."""
        kept = self.vectors[:, :number].T.to(self.rows.device)
        self.rows[:number] = kept @ self.rows[: self.filled]
        self.values, self.residuals = self.values[:number], self.residuals[:number]
        self.vectors = torch.eye(number, dtype=torch.float64)
        self.T.zero_()
        self.T.diagonal()[:number] = self.values
        self.filled = number
        self._follow(following)

    def _follow(self, following: Tensor | None) -> None:
        if following is None:
            following = orthogonal_start(self.operator, self.rows[: self.filled], self.generator)
        self.rows[self.filled] = following
