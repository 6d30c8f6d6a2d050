"""A report on the curvature of a model from products: its blocks, and how much they differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch
from torch import nn

from blockopt.analysis.block_report import DEFAULT, BlockReport, Probes, measure_block
from blockopt.analysis.memory import (
    GIB,
    NOT_COMPARED,
    TooLargeError,
    free_memory,
    memory_needed,
    peak_memory,
    reset_peak_memory,
)
from blockopt.analysis.model_report import Cost, HessianReport, heterogeneity
from blockopt.analysis.operators.base import ModelOperator
from blockopt.analysis.operators.model_operators import (
    FunctionalOperator,
    GaussNewtonOperator,
    HessianOperator,
)
from blockopt.analysis.operators.precision import rounding_error
from blockopt.analysis.partial_results import PartialResults, fingerprint
from blockopt.analysis.progress import progress_bar
from blockopt.analysis.spectral.block_mass import BlockMass, MassColumn, MassProbes
from blockopt.analysis.spectral.density import check_symmetric
from blockopt.analysis.spectral.estimate import total
from blockopt.blocks import BlockGroup, Blocks, Level, find_blocks
from blockopt.checks import check_choice
from blockopt.measure.closures import Losses, trainable_parameters

Matrix = Literal["hessian", "gauss-newton", "functional"]
OPERATORS: dict[str, type[ModelOperator]] = {
    "hessian": HessianOperator,
    "gauss-newton": GaussNewtonOperator,
    "functional": FunctionalOperator,
}
ENTRIES_PER_PRODUCT = 2**25  # of the columns that go into one product: a quarter of a GiB
BYTES_PER_ENTRY = 100  # of a vector that goes through a product, with all copies of it


def hessian_report(
    model: nn.Module,
    losses: Losses,
    *,
    matrix: Matrix = "hessian",
    by: Level = "role",
    only: Sequence[str] = (),
    blocks: Mapping[str, Blocks] | None = None,
    probes: Probes = DEFAULT,
    max_bytes: int | None = None,
    partial: Path | str | None = None,
    progress: bool = False,
    announce: Callable[[Cost], None] | None = None,
) -> HessianReport:
    """Measure the curvature of a model by blocks, and how much the blocks differ.

    The same random signs z on a block b give its trace, `z·H z`, and the norms of all pairs,
    `‖(H z)_a‖²`. Small blocks are built and reported exactly, except for what they share with
    others; see `Probes`.

    Args:
        model: Any module that `find_blocks` can read.
        losses: A closure that returns the mean loss of a batch, or that and its number of tokens,
            or several such closures.
        matrix: "hessian", "gauss-newton", or "functional", the rest of the Hessian.
        by: One block per "role", per role of a "layer", per role of a "tensor", or per "head".
        only: Patterns of parameter names, as in `fnmatch`; "h.0.*" also fits
            "transformer.h.0.attn.c_attn.weight". The other parameters are constants.
        blocks: What `find_blocks(model)` returns with your own options; by default found without
            cuts by row.
        probes: How much to measure. `exact` builds the diagonal blocks, but not the whole.
        max_bytes: Memory that the process may take in all; by default what is free now. What does
            not fit is left out, and `notes` says so: first the spectrum and top eigenvalues of the
            whole, then those of the largest blocks, then the shares of pairs of blocks.
        partial: A file that keeps finished blocks. If it is there, the measurement goes on from it,
            with the same numbers.
        progress: Whether to show progress.
        announce: Called with the `Cost` before the long part.

    Raises:
        ValueError: If an option is wrong, a pattern fits nothing, not even a product fits into
            memory, or `partial` is of another measurement.
        RuntimeError: If the losses are not deterministic.
        FloatingPointError: If a product is not finite.

    Example:
        The loss `(w·x)²` with x = (3, 4) has the Hessian `2 x xᵀ`:

        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> report = hessian_report(model, lambda: model(x).square().sum())
        >>> print(report.table())
        block  dimension     trace  ±  Frobenius  ±       top  negative
        other          2  5.00e+01  0   5.00e+01  0  5.00e+01        0%
        whole          2  5.00e+01  0   5.00e+01  0  5.00e+01        0%
    """
    check_choice("matrix", matrix, OPERATORS)
    check_choice("by", by, get_args(Level))
    start = time.perf_counter()
    found, names = blocks_and_names(model, blocks, by, only)
    reset_peak_memory(next(model.parameters()).device)
    operator = OPERATORS[matrix](model, losses, names=names, blocks=found)
    loss, parts = operator.loss(), operator.blocks(by)
    taken = 0 if max_bytes is None else _memory_of_passes(parts, max_bytes)
    plan = _Plan.fitting(operator, parts, probes, None if max_bytes is None else max_bytes - taken)
    trial = operator if plan.together else parts[plan.trial]
    with _kept_graph(trial, plan.bounded):
        generator = torch.Generator().manual_seed(probes.seed)
        asymmetry = check_symmetric(trial, tolerance=1e-3, generator=generator)
        seconds_per_product = _seconds_of_a_product(trial)  # the first one makes the graph
    # float64 takes twice as much
    in_doubt = max_bytes is not None and 2 * taken > max_bytes and operator.dtype != torch.float64
    rounding = None if in_doubt else rounding_error(trial, model, probes.seed)
    cost = Cost(plan.num_products, seconds_per_product)
    if announce is not None:
        announce(cost)
    cut = [found[name] for name in operator.names]
    settings = (matrix, by, operator.names, cut, probes, plan.together, f"{loss:.9g}")
    kept = PartialResults(partial, fingerprint(model, *settings))
    with progress_bar(progress, matrix, plan.num_products * operator.num_batches) as advance:
        for part in (operator, *parts.values()):
            part.on_batch = advance
        survey = _Survey(operator, parts, plan, probes, asymmetry)
        for number in range(len(parts)):
            if number in kept.pieces:
                advance(plan.products[number] * operator.num_batches)
            else:
                kept.save(number, survey.measure(number))
        pieces = [kept.pieces[number] for number in range(len(parts))]
        measured = {
            group: BlockReport.from_state(piece["block"]) for group, piece in zip(parts, pieces)
        }
        mass = survey.mass([MassColumn(*piece["column"]) for piece in pieces])
        whole = next(iter(measured.values())) if len(parts) == 1 else None
        if mass is not None and len(parts) > 1:
            known = [total([block.trace for block in measured.values()]), mass.frobenius]
            generator = torch.Generator().manual_seed(probes.seed)
            with _kept_graph(operator, plan.bounded):
                whole = measure_block(
                    operator, plan.whole, known=known, asymmetry=asymmetry, generator=generator
                )
    norms = [block.frobenius.value for block in measured.values()]
    norm = max(norms) if whole is None else whole.frobenius.value
    spread, distance = heterogeneity(measured, torch.finfo(operator.dtype).eps * norm)
    return HessianReport(
        matrix=matrix,
        by=by,
        loss=loss,
        whole=whole,
        blocks=measured,
        mass=mass,
        spread=spread,
        distance=distance,
        asymmetry=asymmetry,
        rounding=rounding,
        cost=cost,
        seconds=time.perf_counter() - start,
        notes=plan.notes(measured, whole, probes) + ((NOT_COMPARED,) if in_doubt else ()),
    )


class _Plan(NamedTuple):
    """What fits into memory.

    Attributes:
        together: Whether vectors of all parameters do: for pairs of blocks, and the whole.
        trial: The block that a product is tried with if they do not.
        chunk: Columns per product.
        blocks: How much to measure of each block.
        whole: How much to measure of the whole.
        products: The products of each block.
        num_products: All products.
        bounded: Whether there is a limit on the memory of the process.
    """

    together: bool
    trial: BlockGroup
    chunk: int
    blocks: list[Probes]
    whole: Probes
    products: list[int]
    num_products: int
    bounded: bool

    @classmethod
    def fitting(
        cls,
        operator: ModelOperator,
        parts: Mapping[BlockGroup, ModelOperator],
        probes: Probes,
        max_bytes: int | None,
    ) -> _Plan:
        """Return the plan for the memory that is free, or for a limit on what vectors take.

        Raises:
            TooLargeError: If a product with the largest block does not fit, or a block that must be
                built does not.
        """
        free = free_memory(operator.device)
        room = float("inf") if free is None else float(free)
        if max_bytes is not None:
            room = min(room, max_bytes)
        sizes = {group: part.shape[0] for group, part in parts.items()}
        trial = max(sizes, key=sizes.__getitem__)
        largest, n = sizes[trial], operator.shape[0]
        if BYTES_PER_ENTRY * largest > room:
            raise TooLargeError(
                f"Products with the block '{trial}' of {largest:,} parameters need "
                f"{BYTES_PER_ENTRY * largest / GIB:,.1f} GiB, and {max(room, 0) / GIB:,.1f} GiB "
                "are free. Allow more memory, or choose smaller blocks (by head) or fewer "
                "parameters (only)."
            )
        built = memory_needed(largest, largest, torch.float64) + 8 * largest**2
        if probes.exact and built > room:
            raise TooLargeError(
                f"The largest block has {largest:,} parameters: built, and with its eigenvalues, "
                f"it needs {built / GIB:,.1f} GiB, and {room / GIB:,.1f} GiB are free. Choose "
                "smaller blocks (by head), fewer parameters (only), or estimates (not exact), "
                "which need products only."
            )
        together = BYTES_PER_ENTRY * n <= room
        chunk = int(min(probes.num_probes, ENTRIES_PER_PRODUCT // n, room // (BYTES_PER_ENTRY * n)))
        blocks = [probes.fitting(size, room) for size in sizes.values()]
        products = [
            min(size, own.num_probes) + own.num_products(size)
            for size, own in zip(sizes.values(), blocks)
        ]
        whole = replace(probes, exact=False).fitting(n, room)
        number = sum(products)
        if together and len(parts) > 1:
            number += whole.num_products(n)
        bounded = max_bytes is not None
        return cls(together, trial, max(1, chunk), blocks, whole, products, number, bounded)

    def notes(
        self,
        measured: Mapping[BlockGroup, BlockReport],
        whole: BlockReport | None,
        probes: Probes,
    ) -> tuple[str, ...]:
        """Return what memory did not suffice for."""
        found, labelled = [], [*measured.items()]
        if whole is None:
            found.append(
                "Memory did not suffice for vectors of all parameters: there is nothing on the "
                "whole, nor on pairs of blocks."
            )
        else:
            labelled.append(("whole", whole))  # type: ignore[arg-type]
        for what, lacks in (
            ("top eigenvalues", lambda b: probes.top > 0 and not len(b.top)),
            ("spectra", lambda b: probes.num_starts > 0 and b.spectrum is None),
        ):
            without = [str(label) for label, block in labelled if lacks(block)]
            if without:
                more = f" and {len(without) - 3} more" if len(without) > 3 else ""
                found.append(
                    f"Memory did not suffice for {what} of {', '.join(without[:3])}{more}."
                )
        return tuple(found)


class _Survey:
    """Measures block after block, each with random vectors of its own."""

    def __init__(
        self,
        operator: ModelOperator,
        parts: Mapping[BlockGroup, ModelOperator],
        plan: _Plan,
        probes: Probes,
        asymmetry: float,
    ) -> None:
        self._operator, self._parts, self._plan = operator, list(parts.values()), plan
        self._probes, self._asymmetry = probes, asymmetry
        self._together: MassProbes | None = None
        if plan.together:
            entries = {group: operator.entries(part) for group, part in parts.items()}
            self._together = MassProbes(operator, entries, probes.num_probes)

    def measure(self, number: int) -> dict[str, object]:
        """Return the probes of a block and its report as plain data."""
        part, plan = self._parts[number], self._plan
        generator = torch.Generator().manual_seed(self._probes.seed + 1_000_003 * (number + 1))
        if self._together is not None:
            source, place, whose = self._together, number, self._operator
        else:
            entries = torch.arange(part.shape[0])
            source, place, whose = MassProbes(part, {"": entries}, self._probes.num_probes), 0, part
        with _kept_graph(whose, plan.bounded):
            column = source.column(place, generator, plan.chunk)
        known = source.trace_and_norm(place, column)
        with _kept_graph(part, plan.bounded):
            block = measure_block(
                part,
                plan.blocks[number],
                known=known,
                asymmetry=self._asymmetry,
                generator=generator,
            )
        return {"column": tuple(column), "block": block.state()}

    def mass(self, columns: list[MassColumn]) -> BlockMass | None:
        """Return the shares of pairs of blocks, if vectors of all parameters fit."""
        return None if self._together is None else self._together.collect(columns)


def blocks_and_names(
    model: nn.Module, blocks: Mapping[str, Blocks] | None, by: str, only: Sequence[str]
) -> tuple[Mapping[str, Blocks], list[str]]:
    """Return the blocks of a model, without cuts by row, and the parameters to measure."""
    found = find_blocks(model, per_head=by == "head", per_row=()) if blocks is None else blocks
    return found, matching_parameters(model, only) if only else list(trainable_parameters(model))


def matching_parameters(model: nn.Module, patterns: Iterable[str]) -> list[str]:
    """Return the names of the trainable parameters that fit one of the patterns.

    Raises:
        ValueError: If a pattern fits none.
    """
    names, chosen = list(trainable_parameters(model)), set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        wanted = (pattern, f"*.{pattern}")
        fit = {name for name in names if any(fnmatchcase(name, one) for one in wanted)}
        if not fit:
            raise ValueError(
                f"Invalid only={pattern!r}. Must fit a trainable parameter, such as "
                f"{', '.join(names[:4])}."
            )
        chosen |= fit
    return [name for name in names if name in chosen]


def _kept_graph(operator: ModelOperator, bounded: bool) -> AbstractContextManager[None]:
    """Keep graphs that take no more memory than a product: of one batch, or of small ones.

    Args:
        operator: The operator.
        bounded: Whether memory is, so that only what was measured may be taken.
    """
    most = 1 if bounded or operator.num_batches == 1 else operator.columns_at_once()
    return operator.keep_graph() if operator.num_batches <= most else nullcontext()


def _memory_of_passes(parts: Mapping[BlockGroup, ModelOperator], max_bytes: int) -> int:
    """Return what the process takes in products with the smallest block, whose vectors are short.

    Raises:
        TooLargeError: If that is more than it may take.
    """
    part = min(parts.values(), key=lambda part: part.shape[0])
    float((part @ torch.ones(part.shape[0], 2, dtype=part.dtype, device=part.device)).sum())
    taken = peak_memory(part.device)
    if taken > max_bytes:
        raise TooLargeError(
            f"The model and the passes through one batch take {taken / GIB:,.2f} GiB, and "
            f"{max_bytes / GIB:,.2f} GiB are allowed. Allow more memory, or give smaller batches "
            "or shorter sequences."
        )
    return taken


def _seconds_of_a_product(operator: ModelOperator) -> float:
    v = torch.ones(operator.shape[0], dtype=operator.dtype, device=operator.device)
    start = time.perf_counter()
    float((operator @ v)[0])  # waits for a GPU
    return time.perf_counter() - start
