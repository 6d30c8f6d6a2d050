"""A report on how well KFAC and EKFAC match the exact Gauss-Newton blocks of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from blockopt.analysis.kronecker.factors import (
    Factors,
    Vectors,
    kronecker_factors,
    linear_maps,
    squares_in_basis,
)
from blockopt.analysis.kronecker.fit import KroneckerFit, built_fit, estimated_fit
from blockopt.analysis.operators.dense import dense
from blockopt.analysis.operators.model_operators import GaussNewtonOperator
from blockopt.analysis.plots.kronecker import kronecker_figure
from blockopt.analysis.report import blocks_and_names
from blockopt.analysis.results import Result
from blockopt.blocks import BlockGroup, Blocks
from blockopt.checks import check_choice, check_count
from blockopt.measure.closures import Losses, refuse_sharded, trainable_parameters
from blockopt.measure.loss_curvature import LossCurvature

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MatrixLevel = Literal["tensor", "head"]


@dataclass(frozen=True)
class KroneckerReport(Result):
    """What `kronecker_report` measured.

    Attributes:
        by: How matrices were cut.
        top: Eigenvectors per overlap.
        blocks: How well the approximations match each block.
        notes: What a reader should know about the numbers.
    """

    by: str
    top: int
    blocks: dict[BlockGroup, KroneckerFit]
    notes: tuple[str, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per block."""
        found = []
        for group, fit in self.blocks.items():
            row: dict[str, Any] = {"block": str(group), "role": group.role, "layer": group.layer}
            row |= {"head": group.head, "rows": fit.shape[0], "columns": fit.shape[1]}
            row |= {"frobenius": fit.norm, "nearest_error": fit.nearest}
            for name in ("kfac", "ekfac"):
                match = getattr(fit, name)._asdict()
                row |= {f"{name}_{key}": value for key, value in match.items()}
            found.append(row)
        return found

    def by_role(self) -> dict[str, dict[str, float]]:
        """Return errors and overlaps of each role.

        Errors are those of all its blocks together, `(Σ‖G - K‖² / Σ‖G‖²)^(1/2)`, in which large
        blocks count most; overlaps are means.
        """
        roles: dict[str, list[KroneckerFit]] = {}
        for group, fit in self.blocks.items():
            roles.setdefault(group.role, []).append(fit)
        found = {}
        for role, fits in roles.items():
            row = {"blocks": float(len(fits))}
            if all(fit.nearest is not None for fit in fits):
                row["nearest_error"] = _together(fits, [fit.nearest or 0.0 for fit in fits])
            for name in ("kfac", "ekfac"):
                matches = [getattr(fit, name) for fit in fits]
                row[f"{name}_error"] = _together(fits, [match.error for match in matches])
                row[f"{name}_overlap"] = sum(match.overlap for match in matches) / len(fits)
            found[role] = row
        return found

    def plot(self) -> Figure:
        """Draw errors and overlaps of all blocks by role (needs matplotlib)."""
        return kronecker_figure(self.blocks, self.top)


def _together(fits: Sequence[KroneckerFit], errors: Sequence[float]) -> float:
    missed = sum((fit.norm * error) ** 2 for fit, error in zip(fits, errors))
    return math.sqrt(missed / sum(fit.norm**2 for fit in fits))


def kronecker_report(
    model: nn.Module,
    losses: Losses,
    *,
    by: MatrixLevel = "head",
    only: Sequence[str] = (),
    blocks: Mapping[str, Blocks] | None = None,
    top: int = 8,
    num_samples: int | None = None,
    largest_built: int = 1024,
    num_probes: int = 20,
    seed: int = 0,
) -> KroneckerReport:
    """Compare KFAC and EKFAC with the exact Gauss-Newton block of each matrix, or of each head.

    KFAC takes a block for the Kronecker product of two second moments, that of the inputs and that
    of the derivatives by the outputs (KFAC-expand: every token is a row). EKFAC keeps its
    eigenvectors, and takes for eigenvalues the diagonal of G in their basis, the best there are.
    KFAC of a head is the head's block of KFAC; EKFAC of a head has a basis of its own.

    Args:
        model: Any module with whole parameters that `find_blocks` can read. Matrices that are not
            the weight of a linear map of their own, such as embeddings, are left out, with a note.
        losses: As for `hessian_report`. The loss must call `F.cross_entropy`, `F.mse_loss` or
            `F.binary_cross_entropy_with_logits`.
        by: One block per role of a "tensor", or per "head".
        only: As for `hessian_report`.
        blocks: As for `hessian_report`.
        top: Eigenvectors per overlap.
        num_samples: Sampled vectors per batch for the factors, as KFAC is used in practice. By
            default all classes of all predictions, which is exact, with one backward pass for each.
        largest_built: Blocks of more parameters are not built. Their errors come from random
            vectors, their eigenvectors from Lanczos, and the eigenvalues of EKFAC from the vectors
            of the factors. Several small batches tell more for the same number of vectors.
        num_probes: Random vectors for such a block.
        seed: The seed of all random numbers.

    Raises:
        ValueError: If an option is wrong, the loss calls none of these functions, or the model has
            no linear map.

    Example:
        One row has the Gauss-Newton matrix `2 x xᵀ`, which is a Kronecker product:

        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> zero = torch.zeros(1, 1)
        >>> report = kronecker_report(model, lambda: nn.functional.mse_loss(model(x), zero))
        >>> [f"{row['kfac_error']:.3f}" for row in report.rows()]
        ['0.000']
    """
    check_choice("by", by, get_args(MatrixLevel))
    for name, value, smallest in (("top", top, 1), ("num_probes", num_probes, 2)):
        check_count(name, value, smallest)
    check_count("largest_built", largest_built, 0)
    if num_samples is not None:
        check_count("num_samples", num_samples)
    refuse_sharded(model, "kronecker_report")
    found, names = blocks_and_names(model, blocks, by, only)
    maps = linear_maps(model, names)
    if not maps:
        raise ValueError(
            f"None of the {len(names)} parameters is the weight of a linear map of its own "
            "(nn.Linear or Conv1D), and only those have Kronecker factors."
        )
    closures = [losses] if callable(losses) else list(losses)
    factors = kronecker_factors(model, closures, maps, _vectors(num_samples, seed))
    operator = GaussNewtonOperator(model, closures, names=list(factors), blocks=found)
    tasks = [
        _Task(group, part, factors[part.names[0]], operator.restrict(part.names).entries(part))
        for group, part in operator.blocks(by).items()
    ]
    large: dict[str, list[_Task]] = {}
    for task in tasks:
        if len(task.entries) > largest_built:
            large.setdefault(task.part.names[0], []).append(task)
    corrected: dict[BlockGroup, Tensor] = {}
    if large:
        bases = {
            name: [(task.entries, task.own_factors().eigenbasis()[0]) for task in some]
            for name, some in large.items()
        }
        squares = squares_in_basis(model, closures, maps, _vectors(num_samples, seed), bases)
        for name, some in large.items():
            corrected |= {task.group: square for task, square in zip(some, squares[name])}
    fits = {}
    for task in tasks:
        own = task.own_factors()
        with task.part.keep_graph():
            if task.group in corrected:
                generator = torch.Generator().manual_seed(seed)
                numbers = (top, num_probes, generator)
                fit = estimated_fit(task.part, own, corrected[task.group], *numbers)
            else:
                fit = built_fit(dense(task.part).double(), own, top)
        if fit is not None:
            fits[task.group] = fit
    return KroneckerReport(by, top, fits, _notes(model, names, list(factors), tasks, fits))


class _Task(NamedTuple):
    """A block, and where it lies in its matrix.

    Attributes:
        group: Its label.
        part: The Gauss-Newton operator of the block.
        factors: Those of the whole matrix.
        entries: Where the block lies in the flattened matrix.
    """

    group: BlockGroup
    part: GaussNewtonOperator
    factors: Factors
    entries: Tensor

    def own_factors(self) -> Factors:
        """Return the factors of the block."""
        return self.factors.block(self.entries)


def _vectors(num_samples: int | None, seed: int) -> Vectors:
    """Return what yields the vectors s of each batch, the same ones each time it is made."""
    generator = torch.Generator().manual_seed(seed)

    def sampled(curvature: LossCurvature) -> Iterator[list[Tensor]]:
        root = 1 / math.sqrt(num_samples or 1)
        for _ in range(num_samples or 0):
            yield [root * vector for vector in curvature.sample(generator)]

    return sampled if num_samples is not None else LossCurvature.factors


def _notes(
    model: nn.Module,
    names: Sequence[str],
    used: Sequence[str],
    tasks: Sequence[_Task],
    fits: Mapping[BlockGroup, KroneckerFit],
) -> tuple[str, ...]:
    """Return what was left out."""
    shapes = {name: p.shape for name, p in trainable_parameters(model).items()}
    matrices = [name for name in names if len(shapes[name]) > 1 and name not in used]
    zero = [str(task.group) for task in tasks if task.group not in fits]
    notes = []
    if matrices:
        notes.append(
            f"Left out: {', '.join(matrices)}, which are not the weight of a linear map of their "
            "own that the loss uses."
        )
    if zero:
        notes.append(f"Left out: {', '.join(zero)}, whose Gauss-Newton block is zero.")
    return tuple(notes)
