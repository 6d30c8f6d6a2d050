"""Extreme eigenpairs of a symmetric operator known by its products alone."""

from __future__ import annotations

import warnings
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from blockopt.analysis.progress import progress_bar
from blockopt.analysis.spectral.density import SymmetricOperator
from blockopt.analysis.spectral.products import (
    check_count,
    orthogonal_product,
    orthogonal_start,
    remainder_norm,
    size,
    unit_start,
)
from blockopt.measure.closures import default_generator

Which = Literal["largest magnitude", "largest", "smallest"]
SMALL = 100  # dimension up to which all eigenvalues are found rather than repeated ones searched


class Eigenpairs(NamedTuple):
    """`values` (k,), the best first; `vectors` (n, k), orthonormal; `residuals` `‖A u − λ u‖` (k,); and the products used."""

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    num_products: int


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
    """The k extreme eigenvalues and their vectors, by Lanczos with full re-orthogonalisation and thick restarts.

    A pair is done once `‖A u − λ u‖ <= tolerance · max |λ|`; an eigenvalue is then off by no more
    than that. The residual is that of the recurrence: true up to the precision of the products. The
    basis holds at most max(2 k + 10, 20) float64 vectors, or n if n <= 100: k > 1 pairs then take n
    products and are exact but for rounding.

    One Krylov space holds each eigenvalue once. So when k > 1 pairs are done, a random vector
    orthogonal to them is followed for at least 10 products, until what it finds is told apart from
    the k-th. That finds repeated eigenvalues, one a round.

    Args:
        operator: Any symmetric operator; a square tensor is one.
        k: How many, 1 to n.
        which: "largest magnitude", "largest" or "smallest" (the most negative).
        tolerance: See above.
        max_steps: The most products `A @ v`. A warning tells the residuals if they do not suffice.
        generator: Draws the start vectors; by default one with seed 0.
        progress: Show a progress bar (needs rich).

    Raises:
        ValueError: If an option or the shape of the operator is wrong.
        FloatingPointError: If a product is not finite.

    Example:
        >>> top_eigenpairs(torch.diag(torch.tensor([1.0, -4.0, 2.0, 2.0])), 3).values.round(decimals=6)
        tensor([-4.,  2.,  2.], dtype=torch.float64)
    """
    n, generator = size(operator), default_generator(generator)
    if which not in get_args(Which):
        raise ValueError(
            f"Invalid which={which!r}. Must be one of {', '.join(map(repr, get_args(Which)))}."
        )
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
        cure = (
            f"Raise max_steps or tolerance (now {tolerance}), or ask for fewer pairs (now k={k})."
        )
        warnings.warn(
            f"Eigenpairs not finished after max_steps={max_steps}: {state}. {cure}", stacklevel=2
        )
    return search.best()


class _Search:
    """The state of `top_eigenpairs`: a basis, and `T = Vᵀ A V` with eigenvalues `values`, the best first."""

    def __init__(
        self,
        operator: SymmetricOperator,
        k: int,
        which: Which,
        tolerance: float,
        generator: torch.Generator,
    ) -> None:
        self.operator, self.k, self.which, self.tolerance, self.generator = (
            operator,
            k,
            which,
            tolerance,
            generator,
        )
        n = size(operator)
        self.room = n if n <= SMALL else max(2 * k + 10, 20)
        self.rows = torch.zeros(self.room, n, dtype=torch.float64, device=operator.device)
        self.rows[0] = unit_start(operator, None, generator)
        self.T = torch.zeros(self.room, self.room, dtype=torch.float64)
        self.filled, self.steps, self.largest, self.limit = 0, 0, 0.0, 0.0
        self.known: Tensor | None = (
            None  # by what the k values are sorted, as the present round set out
        )
        self.known_residuals = torch.zeros(k, dtype=torch.float64)
        self.round_steps = 0

    def step(self) -> bool:
        """One product; true if all is done."""
        coefficients, rest, length = orthogonal_product(self.operator, self.rows, self.filled)
        self.T[: self.filled + 1, self.filled] = self.T[self.filled, : self.filled + 1] = (
            coefficients.cpu()
        )
        self.filled, self.steps, self.round_steps = (
            self.filled + 1,
            self.steps + 1,
            self.round_steps + 1,
        )
        self.largest = max(self.largest, length)
        complete = self.filled == self.rows.shape[1]
        remainder = 0.0 if complete else remainder_norm(self.operator, rest, self.largest)
        values, vectors = torch.linalg.eigh(self.T[: self.filled, : self.filled])
        keys = {"largest magnitude": values.abs(), "largest": values, "smallest": -values}[
            self.which
        ]
        keys, order = keys.sort(descending=True)
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
            if self.known is None or float((keys[: self.k] - self.known).abs().max()) > self.limit:
                self.known, self.known_residuals, self.round_steps = (
                    keys[: self.k],
                    self.residuals[: self.k],
                    0,
                )
                self._keep(self.k, None)
                return False
            if self.round_steps >= 10 and self.filled > self.k:
                gap = float(keys[self.k - 1] - keys[self.k])
                if float(self.residuals[self.k]) <= max(self.limit, gap):
                    return True
        following = rest / remainder if remainder > 0 else None
        if self.filled == self.room:
            self._keep((self.room + self.k) // 2, following)
        else:
            self._follow(following)
        return False

    def best(self) -> Eigenpairs:
        """What is known so far."""
        vectors = self.rows[: len(self.vectors)].T @ self.vectors[:, : self.k].to(self.rows.device)
        residuals = torch.hypot(self.residuals[: self.k], self.known_residuals)
        return Eigenpairs(self.values[: self.k], vectors, residuals, self.steps)

    def _keep(self, number: int, following: Tensor | None) -> None:
        """Shrink the basis to its best approximate eigenvectors, and go on from one more vector."""
        self.rows[:number] = (
            self.vectors[:, :number].T.to(self.rows.device) @ self.rows[: self.filled]
        )
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
