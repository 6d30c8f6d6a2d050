"""A report on the curvature of a model: its blocks, and how much they differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from blockopt.analysis.block_report import DEFAULT, BlockReport, Probes, measure_block
from blockopt.analysis.formatting import number_and_error, plain
from blockopt.analysis.memory import GIB, TooLargeError, free_memory, memory_needed
from blockopt.analysis.operators.base import ModelOperator
from blockopt.analysis.operators.model_operators import (
    FunctionalOperator,
    GaussNewtonOperator,
    HessianOperator,
)
from blockopt.analysis.progress import progress_bar
from blockopt.analysis.spectral.block_mass import BlockMass, block_mass
from blockopt.analysis.spectral.density import check_symmetric
from blockopt.analysis.spectral.estimate import Estimate, root, total
from blockopt.analysis.spectral.heterogeneity import (
    JensenShannon,
    Spread,
    jensen_shannon,
    norm_spread,
)
from blockopt.blocks import BlockGroup, Blocks, Level, find_blocks
from blockopt.checks import check_choice
from blockopt.measure.closures import Losses, trainable_parameters
from blockopt.tables import aligned

Matrix = Literal["hessian", "gauss-newton", "functional"]
OPERATORS: dict[str, type[ModelOperator]] = {
    "hessian": HessianOperator,
    "gauss-newton": GaussNewtonOperator,
    "functional": FunctionalOperator,
}
# Where the symmetric log ends, relative to the largest eigenvalue. Lanczos puts what is nearer to 0
# on arbitrary places: with 1e-6, the distance of estimated spectra is 0.81 where that of the true
# ones is 0.64; with 1e-2, it is 0.27 for both.
LOG_THRESHOLD = 1e-2
ENTRIES_PER_PRODUCT = 2**25  # of the columns that go into one product: a quarter of a GiB


class Cost(NamedTuple):
    """What a report will take: products `A @ v`, and the measured seconds of a full one.

    Their product is a rough upper guess of the time: products with single blocks, or with several
    columns at once, are faster. The number that the top eigenvalues need is not known beforehand,
    and the eigenvalues of large dense blocks come on top.
    """

    num_products: int
    seconds_per_product: float


@dataclass(frozen=True)
class HessianReport:
    """What `hessian_report` measured.

    Attributes:
        matrix: Which matrix.
        by: How it was cut into blocks.
        loss: The mean loss over all batches.
        whole: The matrix of all chosen parameters.
        blocks: The diagonal block of each group.
        mass: The share of every pair of blocks in the squared Frobenius norm.
        spread: How far the Frobenius norms of the blocks are apart, except for blocks that are only
            rounding.
        distance: The Jensen-Shannon distances between the spectra of the blocks on a "linear" and a
            "symmetric log" axis, which is linear up to 1 % of the largest eigenvalue; empty for
            fewer than two spectra.
        asymmetry: `|u·Av − v·Au| / (‖Au‖ + ‖Av‖)` for random u and v: the precision of the
            products.
        cost: The cost that was foreseen.
        seconds: The time that it took.
    """

    matrix: str
    by: str
    loss: float
    whole: BlockReport
    blocks: dict[BlockGroup, BlockReport]
    mass: BlockMass
    spread: Spread
    distance: dict[str, JensenShannon]
    asymmetry: float
    cost: Cost
    seconds: float

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per block, "whole" last: the lines of a table file."""
        labelled = [*self.blocks.items(), ("whole", self.whole)]
        return [{"block": str(label), **block.row()} for label, block in labelled]

    def table(self, width: int = 100) -> str:
        """Return a table of dimension, trace, norm, top eigenvalue and negative share per block."""
        rows = [("block", "dimension", "trace", "±", "Frobenius", "±", "top", "negative")]
        for label, block in self._labelled():
            numbers = (*number_and_error(block.trace), *number_and_error(block.frobenius))
            share = "-"
            if block.negative is not None:
                share = f"{'' if block.exact else '~'}{block.negative.of_mass:.0%}"
            top = f"{float(block.top[0]):.2e}"
            rows.append((label, f"{block.dimension:,}", *numbers, top, share))
        return aligned(rows, width)

    def eigenvalue_table(self, width: int = 100) -> str:
        """Return a table of the top eigenvalues per block, as many as there is room for."""
        number = min(max(len(block.top) for _, block in self._labelled()), (width - 30) // 11)
        rows = [("block", *(f"top {i + 1}" for i in range(number)))]
        for label, block in self._labelled():
            cells = [f"{value:.2e}" for value in block.top[:number].tolist()]
            rows.append((label, *cells, *["-"] * (number - len(cells))))
        return aligned(rows, width)

    def summary(self) -> str:
        """Return a few lines on how much the blocks differ."""
        lines = []
        if len(self.blocks) > 1:
            norms = {label: block.frobenius.value for label, block in self.blocks.items()}
            low, high = min(norms, key=norms.__getitem__), max(norms, key=norms.__getitem__)
            lines = [
                f"norms           largest over smallest {self.spread.ratio:.3g}, "
                f"deviation of log10 {self.spread.log10_deviation:.2f}",
                f"                largest: {high}",
                f"                smallest: {low}",
            ]
        if self.distance:
            means = [f"{found.mean:.2f} ({axis} axis)" for axis, found in self.distance.items()]
            between = f"Jensen-Shannon distance between blocks, mean: {', '.join(means)}"
            lines.append(f"spectra         {between}")
        share, error = self.mass.off_diagonal[:2]
        lines.append(f"off the blocks  {share:.1%} ± {error:.1%} of the squared Frobenius norm")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it: groups as strings, infinity and NaN as None."""
        return dict(plain(self))

    def short_labels(self) -> dict[BlockGroup, BlockGroup]:
        """Return each group with a short name of its parameter, without shared modules."""
        modules = [g.parameter.split(".")[:-1] for g in self.blocks if g.parameter is not None]
        shared = 0
        for level in zip(*modules) if len(modules) > 1 else ():
            if len(set(level)) > 1:
                break
            shared += 1
        return {group: _without_modules(group, shared) for group in self.blocks}

    def _labelled(self) -> list[tuple[str, BlockReport]]:
        labels = self.short_labels()
        blocks = [(str(labels[group]), block) for group, block in self.blocks.items()]
        return [*blocks, ("whole", self.whole)]


def hessian_report(
    model: nn.Module,
    losses: Losses,
    *,
    matrix: Matrix = "hessian",
    by: Level = "role",
    only: Sequence[str] = (),
    blocks: Mapping[str, Blocks] | None = None,
    probes: Probes = DEFAULT,
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
        progress: Whether to show a progress bar (needs rich).
        announce: Called with the `Cost` before the long part.

    Raises:
        ValueError: If an option is wrong, a pattern fits nothing, or the vectors or blocks do not
            fit into memory.
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
    start, generator = time.perf_counter(), torch.Generator().manual_seed(probes.seed)
    found = find_blocks(model, per_head=by == "head", per_row=()) if blocks is None else blocks
    names = matching_parameters(model, only) if only else None
    operator = OPERATORS[matrix](model, losses, names=names, blocks=found)
    parts = operator.blocks(by)
    sizes = [part.shape[0] for part in parts.values()]
    _check_memory(max(sizes), operator, probes)
    loss = operator.loss()
    with _kept_graph(operator):
        asymmetry = check_symmetric(operator, tolerance=1e-3, generator=generator)
        seconds_per_product = _seconds_of_a_product(operator)  # the first one makes the graph
    whole_probes = replace(probes, exact=False)
    number = sum(min(size, probes.num_probes) + probes.num_products(size) for size in sizes)
    if len(parts) > 1:
        number += whole_probes.num_products(operator.shape[0])
    cost = Cost(number, seconds_per_product)
    if announce is not None:
        announce(cost)
    with progress_bar(progress, matrix, number * operator.num_batches) as advance:
        for part in (operator, *parts.values()):
            part.on_batch = advance
        entries = {group: operator.entries(part) for group, part in parts.items()}
        chunk = max(1, min(probes.num_probes, ENTRIES_PER_PRODUCT // operator.shape[0]))
        with _kept_graph(operator):
            mass = block_mass(
                operator, entries, num_probes=probes.num_probes, chunk=chunk, generator=generator
            )
        diagonals = zip(mass.matrix.diagonal().tolist(), mass.standard_error.diagonal().tolist())
        norms = [root(Estimate(*square, probes.num_probes)) for square in diagonals]
        measured = {}
        options: dict[str, Any] = {"asymmetry": asymmetry, "generator": generator}
        for (group, part), *known in zip(parts.items(), mass.traces, norms):
            with _kept_graph(part):
                measured[group] = measure_block(part, probes, known=known, **options)
        whole = next(iter(measured.values()))
        if len(parts) > 1:
            known = [total([block.trace for block in measured.values()]), mass.frobenius]
            with _kept_graph(operator):
                whole = measure_block(operator, whole_probes, known=known, **options)
    # Softmax does not see the biases of keys, for example: what is left of such a block is
    # rounding, and would lead any comparison.
    noise = torch.finfo(operator.dtype).eps * whole.frobenius.value
    lasting = {g: block for g, block in measured.items() if block.frobenius.value > noise}
    lasting = lasting or measured
    spread = norm_spread({group: block.frobenius.value for group, block in lasting.items()})
    return HessianReport(
        matrix=matrix,
        by=by,
        loss=loss,
        whole=whole,
        blocks=measured,
        mass=mass,
        spread=spread,
        distance=_distances(lasting),
        asymmetry=asymmetry,
        cost=cost,
        seconds=time.perf_counter() - start,
    )


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


def _kept_graph(operator: ModelOperator) -> AbstractContextManager[None]:
    """Keep the graph of a single batch, whose memory every product takes anyway."""
    return operator.keep_graph() if operator.num_batches == 1 else nullcontext()


def _seconds_of_a_product(operator: ModelOperator) -> float:
    v = torch.ones(operator.shape[0], dtype=operator.dtype, device=operator.device)
    start = time.perf_counter()
    float((operator @ v)[0])  # waits for a GPU
    return time.perf_counter() - start


def _check_memory(largest: int, operator: ModelOperator, probes: Probes) -> None:
    """Raise `TooLargeError` before the long part."""
    free, n = free_memory(operator.device), operator.shape[0]
    if free is None:
        return
    built = memory_needed(largest, largest, torch.float64) + 8 * largest**2
    if probes.exact and built > free:
        raise TooLargeError(
            f"The largest block has {largest:,} parameters: built, and with its eigenvalues, it "
            f"needs {built / GIB:,.1f} GiB, and {free / GIB:,.1f} GiB are free. Choose smaller "
            "blocks (by head), fewer parameters (only), or estimates (not exact), which need "
            "products only."
        )
    steps = probes.num_steps if probes.num_starts else 0
    vectors = max(steps, 2 * probes.top + 10, 20) + 6
    if 8 * vectors * n > free:
        raise TooLargeError(
            f"{vectors} vectors of {n:,} parameters need {8 * vectors * n / GIB:,.1f} GiB, and "
            f"{free / GIB:,.1f} GiB are free. Choose fewer parameters (only), steps or top "
            "eigenvalues."
        )


def _without_modules(group: BlockGroup, number: int) -> BlockGroup:
    if group.parameter is None:
        return group
    return group._replace(parameter=".".join(group.parameter.split(".")[number:]))


def _distances(measured: Mapping[BlockGroup, BlockReport]) -> dict[str, JensenShannon]:
    spectra = {g: block.spectrum for g, block in measured.items() if block.spectrum is not None}
    if len(spectra) < max(2, len(measured)):
        return {}
    largest = max(float(spectrum.nodes.abs().max()) for spectrum in spectra.values())
    threshold = LOG_THRESHOLD * largest or 1.0
    return {
        "linear": jensen_shannon(spectra),
        "symmetric log": jensen_shannon(spectra, axis="symmetric log", threshold=threshold),
    }
