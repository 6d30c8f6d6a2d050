"""How the squared Frobenius norm of a Hessian is shared among pairs of blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from blockopt.analysis.plots.heatmaps import block_mass_heatmap
from blockopt.analysis.progress import progress_bar
from blockopt.analysis.results import Result, figure_of
from blockopt.analysis.spectral.estimate import Estimate, from_probes, root, total
from blockopt.analysis.spectral.products import SymmetricOperator, product, sign_columns, size
from blockopt.checks import check_count
from blockopt.measure.closures import default_generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Label = TypeVar("Label", bound=Hashable)


@dataclass(frozen=True)
class BlockMass(Result):
    """The squared norms `‖H_ab‖_F²` of all pairs of blocks, with their standard errors.

    `matrix[a, b]` is that of the blocks `labels[a]` and `labels[b]`. `off_diagonal` is
    `1 − Σ_b ‖H_bb‖_F² / Σ_ab ‖H_ab‖_F²`: 0 if the matrix is block-diagonal, and near 1 if the
    diagonal blocks hold next to nothing. The same probes give `traces` of the diagonal blocks and
    `frobenius`, the norm of all blocks together.
    """

    labels: tuple[Hashable, ...]
    matrix: Tensor
    standard_error: Tensor
    off_diagonal: Estimate
    traces: tuple[Estimate, ...]
    frobenius: Estimate

    def shares(self) -> Tensor:
        """Return `matrix` divided by its sum."""
        return self.matrix / (self.matrix.sum() or 1.0)

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per pair of blocks, a block with itself among them."""
        pairs = itertools.combinations_with_replacement(range(len(self.labels)), 2)
        shares = self.shares()
        return [
            {
                "block": str(self.labels[a]),
                "other": str(self.labels[b]),
                "squared_norm": float(self.matrix[a, b]),
                "standard_error": float(self.standard_error[a, b]),
                "share": float(shares[a, b]),
            }
            for a, b in pairs
        ]

    def plot(self, *, title: str = "Share of the squared Frobenius norm, %") -> Figure:
        """Draw the share of each pair of blocks (needs matplotlib)."""
        return figure_of(block_mass_heatmap(self.labels, self.matrix, title=title))


def block_mass(
    operator: SymmetricOperator,
    parts: Mapping[Label, Tensor],
    *,
    num_probes: int = 10,
    chunk: int = 10,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> BlockMass:
    """Estimate the squared Frobenius norm `‖H_ab‖_F²` of every pair of blocks.

    For a probe `z_b` of random signs on block b and 0 elsewhere, `‖(H z_b)_a‖²` has the mean
    `‖H_ab‖_F²`, so one product serves all a. `H_ab` and `H_ba` have the same norm, and their mean
    is returned. Blocks of at most `num_probes` entries are measured without noise, by unit vectors.
    A tensor is summed as it is, without probes.

    Args:
        operator: Any symmetric operator; a square tensor is one.
        parts: `{label: indices of the block in the vectors of the operator}`, disjoint. Indices in
            no part are left out. For an operator of a model:
            `{group: operator.entries(group) for group in operator.blocks()}`.
        num_probes: Products per block.
        chunk: Vectors per product.
        generator: Draws the signs; by default one with seed 0.
        progress: Whether to show a progress bar.

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
    if isinstance(operator, Tensor):
        where = _checked(parts, size(operator))
        return _from_tensor(operator.detach().double(), tuple(parts), where)
    probes, generator = MassProbes(operator, parts, num_probes), default_generator(generator)
    with progress_bar(progress, "block mass", probes.num_products) as advance:
        columns = [probes.column(b, generator, chunk, advance) for b in range(len(parts))]
    return probes.collect(columns)


class MassColumn(NamedTuple):
    """What the probes of one block b tell.

    `squares` (probes, blocks) are the squared norms of the pieces of `H z_b`, `forms` (probes,) the
    products `z_b · H z_b`.
    """

    squares: Tensor
    forms: Tensor


class MassProbes:
    """The probes of `block_mass`, block by block, for measurements that are saved in between.

    Args:
        operator: Any symmetric operator but a tensor.
        parts: As for `block_mass`.
        num_probes: Products per block.

    Attributes:
        num_products: The products of all blocks.
    """

    def __init__(
        self, operator: SymmetricOperator, parts: Mapping[Label, Tensor], num_probes: int
    ) -> None:
        self._operator, self._labels, self._num_probes = operator, tuple(parts), num_probes
        self._where = [part.to(operator.device) for part in _checked(parts, size(operator))]
        self._group = _group_of_entries(self._where, operator.shape[0], operator.device)
        self._exact = [len(part) <= num_probes for part in self._where]
        self.num_products = sum(min(len(part), num_probes) for part in self._where)

    def column(
        self,
        b: int,
        generator: torch.Generator,
        chunk: int = 10,
        advance: Callable[[int], None] = lambda number: None,
    ) -> MassColumn:
        """Do the products of block number b, `chunk` vectors at a time."""
        pieces, forms = [], []
        for Z in _probes(self._where[b], self._operator, self._num_probes, chunk, generator):
            HZ = product(self._operator, Z)
            pieces.append(_sum_by_group(HZ.square(), self._group, len(self._where)).T.cpu())
            forms.append((Z * HZ).sum(0).cpu())
            advance(Z.shape[1])
        return MassColumn(torch.cat(pieces), torch.cat(forms))

    def trace_and_norm(self, b: int, column: MassColumn) -> list[Estimate]:
        """Return the trace and the Frobenius norm of the diagonal block b."""
        square = from_probes(column.squares[:, b], self._exact[b])
        return [from_probes(column.forms, self._exact[b]), root(square)]

    def collect(self, columns: Sequence[MassColumn]) -> BlockMass:
        """Return the result of all columns."""
        known = self._exact
        traces = [from_probes(column.forms, exact) for column, exact in zip(columns, known)]
        sums = [from_probes(column.squares.sum(1), exact) for column, exact in zip(columns, known)]
        values = [
            column.squares.sum(0, keepdim=True) if exact else column.squares
            for column, exact in zip(columns, known)
        ]
        return _collect(self._labels, values, known, self.num_products, traces, root(total(sums)))


def _group_of_entries(where: list[Tensor], n: int, device: torch.device) -> Tensor:
    """Return the part of each entry; the number of parts stands for none."""
    group = torch.full((n,), len(where), device=device)
    for number, part in enumerate(where):
        group[part] = number
    return group


def _from_tensor(matrix: Tensor, labels: tuple[Hashable, ...], where: list[Tensor]) -> BlockMass:
    squares = matrix.square()
    if not torch.isfinite(squares).all():
        raise FloatingPointError(
            f"The tensor of shape {tuple(matrix.shape)} is not finite. Check where it comes from."
        )
    where = [part.to(matrix.device) for part in where]
    group = _group_of_entries(where, len(matrix), matrix.device)
    rows = _sum_by_group(squares, group, len(where))
    columns = _sum_by_group(rows.T, group, len(where)).cpu()  # (b, a)
    traces = [Estimate(float(matrix.diagonal()[part].sum()), 0.0, 0) for part in where]
    norm = root(Estimate(float(columns.sum()), 0.0, 0))
    values = [column[None] for column in columns]
    return _collect(labels, values, [True] * len(where), 0, traces, norm)


def _probes(
    part: Tensor,
    operator: SymmetricOperator,
    num_probes: int,
    chunk: int,
    generator: torch.Generator,
) -> Iterator[Tensor]:
    """Random signs on the entries of `part`, or its unit vectors if it has no more of them."""
    wanted = min(len(part), num_probes)
    for first in range(0, wanted, chunk):
        number = min(chunk, wanted - first)
        Z = torch.zeros(operator.shape[0], number, dtype=torch.float64, device=operator.device)
        if len(part) <= num_probes:
            Z[part[first : first + number], torch.arange(number, device=part.device)] = 1
        else:
            Z[part] = sign_columns(len(part), number, part.device, generator)
        yield Z


def _sum_by_group(rows: Tensor, group: Tensor, number: int) -> Tensor:
    """Sum the rows of (n, k) by group: (number, k), without the rows of group `number`."""
    sums = torch.zeros(number + 1, rows.shape[1], dtype=rows.dtype, device=rows.device)
    return sums.index_add_(0, group, rows)[:number]


def _checked(parts: Mapping[Label, Tensor], n: int) -> list[Tensor]:
    if not parts:
        raise ValueError("Invalid parts={}. Must name at least one block.")
    taken = torch.zeros(n, dtype=torch.bool)
    for label, part in parts.items():
        if part.ndim != 1 or len(part) == 0 or part.dtype not in (torch.int64, torch.int32):
            given = f"shape {tuple(part.shape)} and dtype {part.dtype}"
            raise ValueError(
                f"Invalid part '{label}' of {given}. Must be a vector of at least one index, int64."
            )
        if int(part.min()) < 0 or int(part.max()) >= n:
            given = f"{int(part.min())} to {int(part.max())}"
            raise ValueError(f"Invalid part '{label}': indices {given}. Must be in [0, {n}).")
        part = part.long().cpu()
        if len(part.unique()) < len(part) or bool(taken[part].any()):
            raise ValueError(
                f"Invalid part '{label}': it shares indices with itself or a part before it. Must "
                "be disjoint."
            )
        taken[part] = True
    return [part.long() for part in parts.values()]


def _collect(
    labels: tuple[Hashable, ...],
    values: list[Tensor],
    exact: list[bool],
    num_products: int,
    traces: list[Estimate],
    frobenius: Estimate,
) -> BlockMass:
    """Return the means, errors and off-diagonal share of `values[b]` (probes, blocks)."""
    number, known = len(values), torch.tensor(exact)
    columns = torch.stack([value.mean(0) for value in values], dim=1)  # (a, b)
    variances = torch.stack([_variance_of_mean(value) for value in values], dim=1)
    for b in range(number):
        if exact[b]:
            variances[:, b] = 0
    # The weight of the estimate of ‖H_ab‖² from column b: one half, or all of it if only b is
    # measured without noise
    weights = 0.5 + 0.5 * (known[None, :].double() - known[:, None].double())
    weights.fill_diagonal_(0.5)
    matrix = weights * columns + (weights * columns).T
    spread = torch.where(weights > 0, weights.square() * variances, 0.0)
    variance = spread + spread.T
    variance.diagonal().copy_(variances.diagonal())  # there, both are the same estimate
    whole = float(matrix.sum())
    diagonal = float(matrix.diagonal().sum())
    share = 1 - diagonal / whole if whole > 0 else 0.0
    # d(share) = (1 − share) / whole for off-diagonal mass, −share / whole for diagonal mass.
    variance_of_share = 0.0
    for b, value in enumerate(values):
        if exact[b] or whole == 0:
            continue
        slopes = 2 * weights[:, b] * (1 - share) / whole
        slopes[b] = -share / whole
        seen = slopes != 0  # an infinite variance of what is not used must not count
        if bool(seen.any()):
            variance_of_share += float(_variance_of_mean((value[:, seen] @ slopes[seen])[:, None]))
    off_diagonal = Estimate(max(share, 0.0), math.sqrt(variance_of_share), num_products)
    return BlockMass(labels, matrix, variance.sqrt(), off_diagonal, tuple(traces), frobenius)


def _variance_of_mean(values: Tensor) -> Tensor:
    """Return the variance of the mean of each column, infinite for one probe."""
    return values.var(0) / len(values) if len(values) > 1 else torch.full_like(values[0], math.inf)
