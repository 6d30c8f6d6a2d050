"""Trace, squared Frobenius norm and diagonal by random probes, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from blockopt.analysis.progress import progress_bar
from blockopt.analysis.spectral.estimate import Estimate, from_probes, standard_error
from blockopt.analysis.spectral.products import SymmetricOperator, product, sign_columns, size
from blockopt.checks import check_choice, check_count
from blockopt.measure.closures import default_generator

Method = Literal["hutchinson", "hutch++"]
FEWEST_VALUES = 10  # before a standard error is trusted to stop


class DiagonalEstimate(NamedTuple):
    """The diagonal and the standard error of each entry in float64, and the products it took."""

    value: Tensor
    standard_error: Tensor
    num_products: int


def trace(
    operator: SymmetricOperator,
    *,
    method: Method = "hutchinson",
    num_products: int = 100,
    relative_error: float | None = None,
    chunk: int = 10,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Estimate:
    """Estimate the trace without bias: the mean of `z · A z` over random signs z.

    This is Hutchinson's estimator (1990). Its variance per probe is `2 (‖A‖_F² − Σ_i A_ii²)`.
    "hutch++" (Meyer et al., 2021) spends a third of the products to find a subspace `Q` of large
    eigenvalues, a third on its exact share `tr(Qᵀ A Q)`, and the rest on probes outside of it. It
    is much better where few eigenvalues make up most of the norm, as in a Hessian, and never much
    worse.

    As many products as `A` has columns give the exact trace, so no more are used unless
    `relative_error` is given.

    Args:
        operator: Any symmetric operator; a square tensor is one.
        method: "hutchinson" or "hutch++".
        num_products: The most products `A @ v`; at least 3 for "hutch++".
        relative_error: Stop earlier once the standard error is at most this share of the value.
            Stopping depends on the estimate, which costs a little bias.
        chunk: Vectors per product. It changes the result by rounding only, or where it stops.
        generator: Draws the signs; by default one with seed 0.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: If an option or the shape of the operator is wrong.
        FloatingPointError: If a product is not finite.

    Example:
        >>> trace(torch.diag(torch.arange(5.0)), num_products=3)  # no noise from a diagonal matrix
        Estimate(value=10.0, standard_error=0.0, num_products=3)
        >>> trace(torch.ones(4, 4))
        Estimate(value=4.0, standard_error=0.0, num_products=4)
    """
    check_choice("method", method, get_args(Method))
    _check(num_products, relative_error, chunk, smallest=3 if method == "hutch++" else 1)
    n, generator = size(operator), default_generator(generator)
    with progress_bar(progress, "trace", num_products) as advance:
        if (n <= num_products and relative_error is None) or method == "hutchinson":
            return _estimate(
                operator, _quadratic, num_products, relative_error, chunk, generator, advance
            )
        rank = min(num_products // 3, n)
        sketch = sign_columns(n, rank, operator.device, generator)
        Q, _ = torch.linalg.qr(_in_chunks(operator, sketch, chunk, advance))  # (n, rank)
        known = float((Q * _in_chunks(operator, Q, chunk, advance)).sum())
        if rank == n:
            return Estimate(known, 0.0, 2 * rank)
        signs = _signs(operator, num_products - 2 * rank, chunk, generator)
        outside = (z - Q @ (Q.T @ z) for z in signs)
        values = _values(operator, _quadratic, outside, relative_error, known, advance)
        rest = from_probes(values, exact=False)
        return Estimate(known + rest.value, rest.standard_error, 2 * rank + rest.num_products)


def squared_frobenius(
    operator: SymmetricOperator,
    *,
    num_products: int = 100,
    relative_error: float | None = None,
    chunk: int = 10,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Estimate:
    """Estimate `‖A‖_F²` without bias: the mean of `‖A z‖²` over random signs z.

    As many products as `A` has columns give it exactly, so no more are used unless `relative_error`
    is given. Arguments and errors are those of `trace`.

    Example:
        >>> squared_frobenius(2 * torch.eye(50), num_products=2)
        Estimate(value=200.0, standard_error=0.0, num_products=2)
    """
    _check(num_products, relative_error, chunk)
    with progress_bar(progress, "squared Frobenius norm", num_products) as advance:
        generator = default_generator(generator)
        return _estimate(
            operator, _squared_norm, num_products, relative_error, chunk, generator, advance
        )


def diagonal(
    operator: SymmetricOperator,
    *,
    num_products: int = 100,
    chunk: int = 10,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> DiagonalEstimate:
    """Estimate the diagonal without bias: the mean of `z ⊙ A z` over random signs z.

    The method is that of Bekas et al. (2007). Entry i has the variance `Σ_{j ≠ i} A_ij²` per
    probe: good for a matrix that is nearly diagonal, poor for others. As many products as `A` has
    columns give it exactly, so no more are used. Arguments and errors are those of `trace`.

    Example:
        >>> diagonal(torch.tensor([[1.0, 5.0], [5.0, 2.0]])).value
        tensor([1., 2.], dtype=torch.float64)
    """
    _check(num_products, None, chunk)
    n, generator = size(operator), default_generator(generator)
    mean = torch.zeros(n, dtype=torch.float64, device=operator.device)
    squares, count = torch.zeros_like(mean), 0
    exact = n <= num_products
    probes = _units(operator, chunk) if exact else _signs(operator, num_products, chunk, generator)
    with progress_bar(progress, "diagonal", min(n, num_products)) as advance:
        for Z in probes:
            for value in (Z * product(operator, Z)).T:
                count += 1
                step = value - mean
                mean += step / count  # Welford: no cancellation however small the spread
                squares += step * (value - mean)
            advance(Z.shape[1])
    if exact:
        return DiagonalEstimate(mean * count, torch.zeros_like(mean), count)
    error = torch.full_like(mean, math.inf)
    if count > 1:
        error = (squares / (count * (count - 1))).sqrt()
    return DiagonalEstimate(mean, error, count)


def _check(num_products: int, relative_error: float | None, chunk: int, smallest: int = 1) -> None:
    check_count("num_products", num_products, smallest)
    check_count("chunk", chunk)
    if relative_error is not None and not relative_error > 0:
        raise ValueError(
            f"Invalid relative_error={relative_error}. Must be > 0, such as 0.01, or None."
        )


def _quadratic(Z: Tensor, AZ: Tensor) -> Tensor:
    return (Z * AZ).sum(0)


def _squared_norm(Z: Tensor, AZ: Tensor) -> Tensor:
    return AZ.square().sum(0)


def _units(operator: SymmetricOperator, chunk: int) -> Iterator[Tensor]:
    """The columns of the identity: an estimator's values sum to the exact value over them."""
    n = operator.shape[0]
    for first in range(0, n, chunk):
        columns = torch.arange(first, min(first + chunk, n), device=operator.device)
        Z = torch.zeros(n, len(columns), dtype=torch.float64, device=operator.device)
        Z[columns, columns - first] = 1
        yield Z


def _signs(
    operator: SymmetricOperator, number: int, chunk: int, generator: torch.Generator
) -> Iterator[Tensor]:
    for first in range(0, number, chunk):
        columns = min(chunk, number - first)
        yield sign_columns(operator.shape[0], columns, operator.device, generator)


def _in_chunks(
    operator: SymmetricOperator, Z: Tensor, chunk: int, advance: Callable[[int], None]
) -> Tensor:
    parts = []
    for part in Z.split(chunk, dim=1):
        parts.append(product(operator, part))
        advance(part.shape[1])
    return torch.cat(parts, dim=1)


def _estimate(
    operator: SymmetricOperator,
    value_of: Callable[[Tensor, Tensor], Tensor],
    num_products: int,
    relative_error: float | None,
    chunk: int,
    generator: torch.Generator,
    advance: Callable[[int], None],
) -> Estimate:
    exact = size(operator) <= num_products and relative_error is None
    probes = _units(operator, chunk) if exact else _signs(operator, num_products, chunk, generator)
    values = _values(operator, value_of, probes, relative_error, 0.0, advance)
    return from_probes(values, exact)


def _values(
    operator: SymmetricOperator,
    value_of: Callable[[Tensor, Tensor], Tensor],
    probes: Iterator[Tensor],
    relative_error: float | None,
    known: float,
    advance: Callable[[int], None],
) -> Tensor:
    """One value per probe, until their standard error is small beside `known` plus their mean."""
    values = torch.empty(0, dtype=torch.float64)
    for Z in probes:
        values = torch.cat([values, value_of(Z, product(operator, Z)).cpu()])
        advance(Z.shape[1])
        if relative_error is not None and len(values) >= FEWEST_VALUES:
            target = relative_error * abs(known + float(values.mean()))
            if standard_error(values) <= target:
                break
    return values
