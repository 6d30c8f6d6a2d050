"""How the squared Frobenius norm of a Hessian is shared among pairs of blocks, and what a block-diagonal view loses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from blockopt.analysis.progress import progress_bar
from blockopt.analysis.spectral.density import SymmetricOperator
from blockopt.analysis.spectral.products import check_count, product, random_signs, size
from blockopt.analysis.spectral.trace import Estimate
from blockopt.measure.closures import default_generator


class BlockMass(NamedTuple):
    """`matrix[a, b]` is `‖H_ab‖_F²` for the blocks `labels[a]` and `labels[b]`, symmetric, with its standard errors.

    `off_diagonal` is `1 − Σ_b ‖H_bb‖_F² / Σ_ab ‖H_ab‖_F²`: 0 if the matrix is block-diagonal, near
    1 if the diagonal blocks tell next to nothing.
    """

    labels: tuple[str, ...]
    matrix: Tensor
    standard_error: Tensor
    off_diagonal: Estimate

    def shares(self) -> Tensor:
        """`matrix` over its sum."""
        return self.matrix / (self.matrix.sum() or 1.0)


def block_mass(
    operator: SymmetricOperator,
    parts: Mapping[str, Tensor],
    *,
    num_probes: int = 10,
    chunk: int = 10,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> BlockMass:
    """The squared Frobenius norm `‖H_ab‖_F²` of every pair of blocks.

    For a probe `z_b` of random signs on block b and 0 elsewhere, `‖(H z_b)_a‖²` has mean
    `‖H_ab‖_F²`, and one product serves all a. `H_ab` and `H_ba` have the same norm, and the mean of
    both is given. Blocks of no more than `num_probes` entries are measured without noise, by unit
    vectors. A tensor is summed as it is, without probes.

    Args:
        operator: Any symmetric operator; a square tensor is one.
        parts: `{label: indices of the block in the vectors of the operator}`, disjoint. Indices in
            no part are left out. For an operator of a model: `{label: operator.entries(label) for
            label in operator.blocks()}`.
        num_probes: Products a block.
        chunk: Vectors a product.
        generator: Draws the signs; by default one with seed 0.
        progress: Show a progress bar (needs rich).

    Raises:
        ValueError: If an option, a part or the shape of the operator is wrong.
        FloatingPointError: If a product is not finite.

    Example:
        >>> H = torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 2.0], [2.0, 2.0, 4.0]])
        >>> found = block_mass(H, {"first two": torch.tensor([0, 1]), "last": torch.tensor([2])})
        >>> found.matrix
        tensor([[ 2.,  8.],
                [ 8., 16.]], dtype=torch.float64)
        >>> round(found.off_diagonal.value, 4)  # 16 of 34
        0.4706
    """
    check_count("num_probes", num_probes)
    check_count("chunk", chunk)
    where = [part.to(operator.device) for part in _checked(parts, size(operator))]
    group = torch.full(
        (operator.shape[0],), len(where), device=operator.device
    )  # the part of each entry; the last is none
    for number, part in enumerate(where):
        group[part] = number
    if isinstance(operator, Tensor):
        squares = operator.detach().double().square()
        if not torch.isfinite(squares).all():
            raise FloatingPointError(
                f"The tensor of shape {tuple(operator.shape)} is not finite. Check where it comes from."
            )
        columns = _sum_by_group(
            _sum_by_group(squares, group, len(where)).T, group, len(where)
        ).T.cpu()  # (a, b)
        return _collect(
            tuple(parts), [column[None] for column in columns.T], [True] * len(where), 0
        )
    generator = default_generator(generator)
    exact = [len(part) <= num_probes for part in where]
    values = []  # of each block b: (probes, blocks), the squared norms of the pieces of H z_b
    products = sum(min(len(part), num_probes) for part in where)
    with progress_bar(progress, "block mass", products) as advance:
        for part, known in zip(where, exact):
            pieces = []
            for Z in _probes(part, operator, num_probes, chunk, generator):
                pieces.append(
                    _sum_by_group(product(operator, Z).square(), group, len(where)).T.cpu()
                )
                advance(Z.shape[1])
            found = torch.cat(pieces)
            values.append(found.sum(0, keepdim=True) if known else found)
    return _collect(tuple(parts), values, exact, products)


def off_diagonal_mass(
    operator: SymmetricOperator,
    parts: Mapping[str, Tensor],
    *,
    num_probes: int = 10,
    chunk: int = 10,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> Estimate:
    """What a block-diagonal view loses: `1 − Σ_b ‖H_bb‖_F² / ‖H‖_F²`, the off-diagonal share of `block_mass`.

    Both sums come without bias from the same probes; their ratio has a bias that falls as 1 /
    num_probes. The standard error is that of the linearised ratio.

    Example:
        >>> halves = {"first": torch.arange(2), "second": torch.arange(2, 4)}
        >>> off_diagonal_mass(torch.ones(4, 4), halves)
        Estimate(value=0.5, standard_error=0.0, num_products=0)
    """
    return block_mass(
        operator, parts, num_probes=num_probes, chunk=chunk, generator=generator, progress=progress
    ).off_diagonal


def _probes(
    part: Tensor,
    operator: SymmetricOperator,
    num_probes: int,
    chunk: int,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    """Random signs on the entries of `part`, or its unit vectors if there are no more of them than probes."""
    for first in range(0, min(len(part), num_probes), chunk):
        number = min(chunk, min(len(part), num_probes) - first)
        Z = torch.zeros(operator.shape[0], number, dtype=torch.float64, device=operator.device)
        if len(part) <= num_probes:
            Z[part[first : first + number], torch.arange(number, device=part.device)] = 1
        else:
            Z[part] = torch.stack(
                [random_signs(len(part), part.device, generator) for _ in range(number)], dim=1
            )
        yield Z


def _sum_by_group(rows: Tensor, group: Tensor, number: int) -> Tensor:
    """The rows of (n, k) summed by their group: (number, k), without those of group `number`."""
    sums = torch.zeros(number + 1, rows.shape[1], dtype=rows.dtype, device=rows.device)
    return sums.index_add_(0, group, rows)[:number]


def _checked(parts: Mapping[str, Tensor], n: int) -> list[Tensor]:
    if not parts:
        raise ValueError("Invalid parts={}. Must name at least one block.")
    taken = torch.zeros(n, dtype=torch.bool)
    for label, part in parts.items():
        if part.ndim != 1 or len(part) == 0 or part.dtype not in (torch.int64, torch.int32):
            given = f"shape {tuple(part.shape)} and dtype {part.dtype}"
            raise ValueError(
                f"Invalid part {label!r} of {given}. Must be a vector of at least one index, int64."
            )
        if int(part.min()) < 0 or int(part.max()) >= n:
            raise ValueError(
                f"Invalid part {label!r}: indices {int(part.min())} to {int(part.max())}. Must be in [0, {n})."
            )
        part = part.long().cpu()
        if len(part.unique()) < len(part) or bool(taken[part].any()):
            raise ValueError(
                f"Invalid part {label!r}: it shares indices with itself or a part before it. Must be disjoint."
            )
        taken[part] = True
    return [part.long() for part in parts.values()]


def _collect(
    labels: tuple[str, ...], values: list[Tensor], exact: list[bool], num_products: int
) -> BlockMass:
    """Means, errors and the off-diagonal share of `values[b]` (probes, blocks)."""
    number, known = len(values), torch.tensor(exact)
    columns = torch.stack([value.mean(0) for value in values], dim=1)  # (a, b)
    variances = torch.stack([_variance_of_mean(value) for value in values], dim=1)
    for b in range(number):
        if exact[b]:
            variances[:, b] = 0
    # What each estimate of ‖H_ab‖² weighs, from column b: one half, or all if only b is measured
    # without noise.
    weights = 0.5 + 0.5 * (known[None, :].double() - known[:, None].double())
    weights.fill_diagonal_(0.5)
    matrix = weights * columns + (weights * columns).T
    spread = torch.where(weights > 0, weights.square() * variances, 0.0)
    variance = spread + spread.T
    variance.diagonal().copy_(variances.diagonal())  # there, both are the same estimate
    total = float(matrix.sum())
    diagonal = float(matrix.diagonal().sum())
    share = 1 - diagonal / total if total > 0 else 0.0
    # d(share) = (1 − share) / total for off-diagonal mass, −share / total for diagonal mass.
    variance_of_share = 0.0
    for b, value in enumerate(values):
        if exact[b] or total == 0:
            continue
        slopes = 2 * weights[:, b] * (1 - share) / total
        slopes[b] = -share / total
        seen = slopes != 0  # so that an infinite variance of what is not used does not count
        variance_of_share += (
            float(_variance_of_mean((value[:, seen] @ slopes[seen])[:, None]))
            if bool(seen.any())
            else 0.0
        )
    off_diagonal = Estimate(max(share, 0.0), math.sqrt(variance_of_share), num_products)
    return BlockMass(labels, matrix, variance.sqrt(), off_diagonal)


def _variance_of_mean(values: Tensor) -> Tensor:
    """Of each column of (probes, columns); infinite from one probe."""
    return values.var(0) / len(values) if len(values) > 1 else torch.full_like(values[0], math.inf)
