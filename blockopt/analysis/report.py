"""A report on the curvature of a model: each block's trace, norm, eigenvalues and spectrum, and how much the blocks differ."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from blockopt.analysis.operators.dense import GIB, dense, free_memory, memory_needed
from blockopt.analysis.operators.diagonal_blocks import (
    Part,
    Probed,
    Ticker,
    find_parts,
    root,
    total,
)
from blockopt.analysis.operators.model_operators import (
    FunctionalOperator,
    GaussNewtonOperator,
    HessianOperator,
    ModelOperator,
)
from blockopt.analysis.progress import progress_bar
from blockopt.analysis.spectral.block_mass import BlockMass, block_mass
from blockopt.analysis.spectral.density import SpectralDensity, check_symmetric, spectral_density
from blockopt.analysis.spectral.eigenpairs import top_eigenpairs
from blockopt.analysis.spectral.heterogeneity import (
    JensenShannon,
    NegativeShare,
    Spread,
    jensen_shannon,
    negative_share,
    norm_spread,
)
from blockopt.analysis.spectral.products import check_count
from blockopt.analysis.spectral.trace import Estimate
from blockopt.analysis.tables import aligned, number_and_error, plain
from blockopt.blocks import Blocks, find_blocks
from blockopt.blocks.groups import Level
from blockopt.measure.closures import Losses, batch_means, default_generator, trainable

Matrix = Literal["hessian", "gauss-newton", "functional"]
OPERATORS: dict[str, type[ModelOperator]] = {
    "hessian": HessianOperator,
    "gauss-newton": GaussNewtonOperator,
    "functional": FunctionalOperator,
}
TOLERANCE = 1e-4  # of the top eigenvalues, relative to the largest
# Of the symmetric log, relative to the largest eigenvalue. Lanczos puts what is nearer to 0 on
# arbitrary places: with 1e-6, the distance of estimated spectra is 0.81 where that of the true ones
# is 0.64; with 1e-2, it is 0.27 for both.
LOG_THRESHOLD = 1e-2
ENTRIES_A_PRODUCT = 2**25  # of the columns that go into one product: a quarter of a GiB


class Cost(NamedTuple):
    """What a report will take: products `A @ v`, and the measured seconds of one with the whole vector.

    A rough upper guess of the time: products with single blocks, or with several columns at once,
    are faster. How many the top eigenvalues need is not known before, and the eigenvalues of large
    dense blocks come on top.
    """

    num_products: int
    seconds_per_product: float


@dataclass(frozen=True)
class BlockReport:
    """What is known of one block.

    Attributes:
        dimension: Its number of parameters.
        trace: With its standard error, 0 if exact.
        frobenius: The norm, not its square, with its standard error.
        top: The eigenvalues farthest from 0, the farthest first.
        residuals: `‖A u − λ u‖` of each, which bounds its error; 0 if exact.
        spectrum: All eigenvalues, of equal weight, if `exact`; else their estimated distribution,
            or None if not asked for.
        negative: The share of negative curvature in `spectrum`. If not `exact`, `of_mass`, the
            share of `Σ |λ|`, may be off by ten points and more with a few probes (a "~" in tables),
            and `of_count` says nothing: most eigenvalues are next to 0, and the estimate puts them
            on either side of it.
        exact: Whether the block was built, and all of this computed from it.
    """

    dimension: int
    trace: Estimate
    frobenius: Estimate
    top: Tensor
    residuals: Tensor
    spectrum: SpectralDensity | None
    negative: NegativeShare | None
    exact: bool


@dataclass(frozen=True)
class HessianReport:
    """What `hessian_report` measured.

    Attributes:
        matrix: Which matrix.
        by: How it was cut into blocks.
        loss: The mean over all batches.
        whole: The matrix of all chosen parameters.
        blocks: `{label: its diagonal block}`.
        mass: The share of every pair of blocks in the squared Frobenius norm.
        spread: How far the Frobenius norms of the blocks are apart, those aside that are only
            rounding.
        distance: The Jensen-Shannon distances between the spectra of the blocks on a "linear" and a
            "symmetric log" axis, which is linear up to 1 % of the largest eigenvalue; empty for
            fewer than two spectra.
        asymmetry: `|u·Av − v·Au| / (‖Au‖ + ‖Av‖)` for random u and v: the precision of the
            products.
        cost: What was foreseen.
        seconds: What it took.
    """

    matrix: str
    by: str
    loss: float
    whole: BlockReport
    blocks: dict[str, BlockReport]
    mass: BlockMass
    spread: Spread
    distance: dict[str, JensenShannon]
    asymmetry: float
    cost: Cost
    seconds: float

    def rows(self) -> list[dict[str, Any]]:
        """One flat dictionary a block, "whole" last: the lines of a table file; None where something is not known."""
        return [_row(label, block) for label, block in self._all()]

    def table(self, width: int = 100) -> str:
        """Dimension, trace and norm with standard errors, top eigenvalue and negative share of each block, for people."""
        rows = [("block", "dimension", "trace", "±", "Frobenius", "±", "top", "negative")]
        for label, block in self._all(short=True):
            numbers = (
                *number_and_error(block.trace),
                *number_and_error(block.frobenius),
                f"{float(block.top[0]):.2e}",
            )
            share = (
                "-"
                if block.negative is None
                else f"{'' if block.exact else '~'}{block.negative.of_mass:.0%}"
            )
            rows.append((label, f"{block.dimension:,}", *numbers, share))
        return aligned(rows, width)

    def eigenvalue_table(self, width: int = 100) -> str:
        """The top eigenvalues of each block, as many as there is room for."""
        number = min(max(len(block.top) for _, block in self._all()), (width - 30) // 11)
        rows = [("block", *(f"top {i + 1}" for i in range(number)))]
        for label, block in self._all(short=True):
            cells = [f"{value:.2e}" for value in block.top[:number].tolist()]
            rows.append((label, *cells, *["-"] * (number - len(cells))))
        return aligned(rows, width)

    def summary(self) -> str:
        """How much the blocks differ, in a few lines."""
        lines = []
        if len(self.blocks) > 1:
            low, high = (
                pick(self.blocks, key=lambda label: self.blocks[label].frobenius.value)
                for pick in (min, max)
            )
            numbers = f"largest over smallest {self.spread.ratio:.3g}, deviation of log10 {self.spread.log10_deviation:.2f}"
            lines = [
                f"norms           {numbers}",
                f"                largest: {high}",
                f"                smallest: {low}",
            ]
        if self.distance:
            means = ", ".join(
                f"{found.mean:.2f} ({axis} axis)" for axis, found in self.distance.items()
            )
            lines.append(f"spectra         Jensen-Shannon distance between blocks, mean: {means}")
        share = self.mass.off_diagonal
        lines.append(
            f"off the blocks  {share.value:.1%} ± {share.standard_error:.1%} of the squared Frobenius norm"
        )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """All of it as dictionaries, lists, strings and finite numbers, as JSON has them; infinity and NaN become None."""
        return dict(plain(self))

    def short_labels(self) -> dict[str, str]:
        """`{label: what a reader needs of it}`: without the modules that all tensors share."""
        parts = (
            [label.split(".") for label in self.blocks]
            if self.by in ("tensor", "head") and len(self.blocks) > 1
            else []
        )
        shared = 0
        for level in zip(*(names[:-1] for names in parts)):
            if len(set(level)) > 1:
                break
            shared += 1
        return {label: ".".join(label.split(".")[shared:]) for label in self.blocks}

    def _all(self, short: bool = False) -> list[tuple[str, BlockReport]]:
        labels = self.short_labels() if short else {label: label for label in self.blocks}
        return [
            *((labels[label], block) for label, block in self.blocks.items()),
            ("whole", self.whole),
        ]


def hessian_report(
    model: nn.Module,
    losses: Losses,
    *,
    matrix: Matrix = "hessian",
    by: Level = "role",
    only: Sequence[str] = (),
    blocks: Mapping[str, Blocks] | None = None,
    top: int = 1,
    num_probes: int = 20,
    num_steps: int = 30,
    num_starts: int = 3,
    exact: bool = False,
    generator: torch.Generator | None = None,
    progress: bool = False,
    announce: Callable[[Cost], None] | None = None,
) -> HessianReport:
    """Measure the curvature of a model by blocks: traces, norms, top eigenvalues, spectra, and how much the blocks differ.

    The same probes z of random signs on a block b give its trace, `z·H z`, and the norms of all
    pairs, `‖(H z)_a‖²`. Blocks of no more than num_steps · num_starts parameters are built, which
    takes no more products than their spectra would: all that is told of them is exact, but for what
    they share with others.

    Args:
        model: Any module that `find_blocks` can read.
        losses: A closure that returns the mean loss of a batch, or that and its number of tokens,
            or several of them.
        matrix: "hessian", "gauss-newton", or "functional", the rest of the Hessian.
        by: The blocks: one a "role", one a role of a "layer", one a role of a "tensor", or one a
            "head".
        only: Patterns of parameter names, as in `fnmatch`; "h.0.*" fits
            "transformer.h.0.attn.c_attn.weight" too. The other parameters are constants. By default
            all.
        blocks: What `find_blocks(model)` returns, with your own options; by default found without
            cuts by row.
        top: Eigenvalues a block.
        num_probes: Products a block, for traces and norms.
        num_steps: Lanczos steps of a spectrum.
        num_starts: Random vectors that the Lanczos steps start from; 0 for no spectra.
        exact: Build all diagonal blocks, however large. The whole is not built for that.
        generator: Draws all random vectors; by default one with seed 0.
        progress: Show a progress bar (needs rich).
        announce: Called with the `Cost` before the long part.

    Raises:
        ValueError: If an option is wrong, a pattern fits nothing, or the vectors or blocks do not
            fit into memory.
        RuntimeError: If the losses are not deterministic.
        FloatingPointError: If a product is not finite.

    Example:
        Loss `(w·x)²` with x = (3, 4), so that the Hessian is `2 x xᵀ`:

        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> report = hessian_report(model, lambda: model(x).square().sum())
        >>> print(report.table())
        block  dimension     trace  ±  Frobenius  ±       top  negative
        other          2  5.00e+01  0   5.00e+01  0  5.00e+01        0%
        whole          2  5.00e+01  0   5.00e+01  0  5.00e+01        0%
    """
    if matrix not in OPERATORS:
        raise ValueError(
            f"Invalid matrix={matrix!r}. Must be one of {', '.join(map(repr, get_args(Matrix)))}."
        )
    if by not in get_args(Level):
        raise ValueError(
            f"Invalid by={by!r}. Must be one of {', '.join(map(repr, get_args(Level)))}."
        )
    for option, value, smallest in (
        ("top", top, 1),
        ("num_probes", num_probes, 2),
        ("num_steps", num_steps, 2),
    ):
        check_count(option, value, smallest)
    check_count("num_starts", num_starts, smallest=0)
    start, generator = time.perf_counter(), default_generator(generator)
    closures = [losses] if callable(losses) else list(losses)
    ticker = Ticker(len(closures))
    found = find_blocks(model, per_head=by == "head", per_row=()) if blocks is None else blocks
    watched = [ticker.watched(closure) if callable(closure) else closure for closure in closures]
    operator = OPERATORS[matrix](model, watched, names=_matching(model, only), blocks=found)
    parts = find_parts(operator, {name: found[name] for name in operator.names}, by, ticker)
    whole = Part(operator, None, ticker)
    measure = _Measure(top, num_steps, num_starts, generator)
    measure.check_memory([part for part, _ in parts.values()], whole, exact)
    loss = float(batch_means(model, closures, lambda evaluation: {"loss": evaluation()})["loss"])
    with whole.kept_graph():
        measure.asymmetry = check_symmetric(whole, tolerance=1e-3, generator=generator)
        seconds_per_product = _seconds_of_a_product(whole)  # not the first, which makes the graph
    sizes = [part.shape[0] for part, _ in parts.values()]
    num_products = sum(min(size, num_probes) + measure.num_products(size, exact) for size in sizes)
    cost = Cost(
        num_products + (measure.num_products(whole.shape[0], False) if len(parts) > 1 else 0),
        seconds_per_product,
    )
    if announce is not None:
        announce(cost)
    with progress_bar(progress, matrix, cost.num_products * len(closures)) as ticker.advance:
        probed, entries = Probed(whole), {label: where for label, (_, where) in parts.items()}
        chunk = max(1, min(num_probes, ENTRIES_A_PRODUCT // whole.shape[0]))
        with whole.kept_graph():
            mass = block_mass(
                probed, entries, num_probes=num_probes, chunk=chunk, generator=generator
            )
        traces, norm = probed.estimates(sizes, num_probes)
        diagonals = zip(mass.matrix.diagonal().tolist(), mass.standard_error.diagonal().tolist())
        squares = [Estimate(value, error, num_probes) for value, error in diagonals]
        measured = {
            label: measure(part, trace, root(square), exact)
            for (label, (part, _)), trace, square in zip(parts.items(), traces, squares)
        }
        everything = next(iter(measured.values()))
        if len(parts) > 1:
            everything = measure(
                whole, total([block.trace for block in measured.values()]), norm, False
            )
    ticker.advance = lambda _: None  # the bar is gone
    # Softmax does not see the biases of keys, say: what is left of such a block is rounding, and
    # would lead any comparison.
    noise = torch.finfo(operator.dtype).eps * everything.frobenius.value
    lasting = {
        label: block for label, block in measured.items() if block.frobenius.value > noise
    } or measured
    return HessianReport(
        matrix,
        by,
        loss,
        everything,
        measured,
        mass,
        norm_spread({label: block.frobenius.value for label, block in lasting.items()}),
        _distances(lasting),
        measure.asymmetry,
        cost,
        time.perf_counter() - start,
    )


class _Measure:
    """Measures one block, by what was asked for."""

    def __init__(
        self, top: int, num_steps: int, num_starts: int, generator: torch.Generator
    ) -> None:
        self.top, self.num_steps, self.num_starts, self.generator = (
            top,
            num_steps,
            num_starts,
            generator,
        )
        self.asymmetry = 0.0

    def __call__(self, part: Part, trace: Estimate, norm: Estimate, exact: bool) -> BlockReport:
        with part.kept_graph():
            if self.builds(part.shape[0], exact):
                with warnings.catch_warnings():  # the asymmetry of the whole is in the report
                    warnings.filterwarnings("ignore", "The matrix is not symmetric")
                    return self._from_dense(dense(part).double().cpu(), part.dtype)
            pairs = top_eigenpairs(
                part, min(self.top, part.shape[0]), tolerance=TOLERANCE, generator=self.generator
            )
            spectrum, negative = None, None
            if self.num_starts > 0:
                steps, starts = self.num_steps, self.num_starts
                spectrum = spectral_density(
                    part, num_steps=steps, num_probes=starts, generator=self.generator
                )
                negative = negative_share(spectrum, tolerance=self._zero(part.dtype))
        return BlockReport(
            part.shape[0], trace, norm, pairs.values, pairs.residuals, spectrum, negative, False
        )

    def _from_dense(self, matrix: Tensor, dtype: torch.dtype) -> BlockReport:
        n = len(matrix)
        trace, norm = (
            Estimate(float(matrix.trace()), 0.0, n),
            Estimate(float(matrix.norm()), 0.0, n),
        )
        values = torch.linalg.eigvalsh(matrix)
        top = values[values.abs().argsort(descending=True)][: self.top]
        spectrum = SpectralDensity(values, torch.full_like(values, 1 / n))
        negative = negative_share(spectrum, tolerance=self._zero(dtype))
        return BlockReport(n, trace, norm, top, torch.zeros_like(top), spectrum, negative, True)

    def _zero(self, dtype: torch.dtype) -> float:
        """Relative size of what counts as zero: transformers computes some norms in float32 in a float64 model."""
        return max(1e-9 if dtype == torch.float64 else 1e-5, 10 * self.asymmetry)

    def builds(self, dimension: int, exact: bool) -> bool:
        """Whether a block of this dimension is built."""
        return exact or dimension <= self.num_steps * self.num_starts

    def num_products(self, dimension: int, exact: bool) -> int:
        """Without probes; that of the top eigenvalues is a guess."""
        if self.builds(dimension, exact):
            return dimension
        return min(dimension, self.num_steps) * self.num_starts + 25 + 10 * (self.top - 1)

    def check_memory(self, parts: list[Part], whole: Part, exact: bool) -> None:
        """Raise before the long part."""
        free = free_memory(whole.device)
        if free is None:
            return
        largest = max(part.shape[0] for part in parts)
        if (
            exact
            and (needed := memory_needed(largest, largest, torch.float64) + 8 * largest**2) > free
        ):
            raise ValueError(
                f"The largest block has {largest:,} parameters: built, and with its eigenvalues, it needs {needed / GIB:,.1f} "
                f"GiB, and {free / GIB:,.1f} GiB are free. Choose smaller blocks (by head), fewer parameters (only), or not "
                "exact: estimates need products only."
            )
        vectors = max(self.num_steps if self.num_starts else 0, 2 * self.top + 10, 20) + 6
        if (needed := 8 * vectors * whole.shape[0]) > free:
            raise ValueError(
                f"{vectors} vectors of {whole.shape[0]:,} parameters need {needed / GIB:,.1f} GiB, and {free / GIB:,.1f} GiB "
                "are free. Choose fewer parameters (only), steps or top eigenvalues."
            )


def _seconds_of_a_product(operator: Part) -> float:
    v = torch.ones(operator.shape[0], dtype=operator.dtype, device=operator.device)
    start = time.perf_counter()
    float((operator @ v)[0])  # waits for a GPU
    return time.perf_counter() - start


def _matching(model: nn.Module, patterns: Sequence[str]) -> list[str] | None:
    """The names of trainable parameters that fit a pattern, None without patterns."""
    if not patterns:
        return None
    names, chosen = list(trainable(model)), set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        fit = {
            name
            for name in names
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
        }
        if not fit:
            raise ValueError(
                f"Invalid only={pattern!r}. Must fit a trainable parameter, such as {', '.join(names[:4])}."
            )
        chosen |= fit
    return [name for name in names if name in chosen]


def _distances(measured: Mapping[str, BlockReport]) -> dict[str, JensenShannon]:
    spectra = {
        label: block.spectrum for label, block in measured.items() if block.spectrum is not None
    }
    if len(spectra) < max(2, len(measured)):
        return {}
    largest = max(float(spectrum.nodes.abs().max()) for spectrum in spectra.values())
    threshold = LOG_THRESHOLD * largest or 1.0
    return {
        "linear": jensen_shannon(spectra),
        "symmetric log": jensen_shannon(spectra, axis="symmetric log", threshold=threshold),
    }


def _row(label: str, block: BlockReport) -> dict[str, Any]:
    return {
        "block": label,
        "dimension": block.dimension,
        "trace": block.trace.value,
        "trace_error": block.trace.standard_error,
        "frobenius": block.frobenius.value,
        "frobenius_error": block.frobenius.standard_error,
        **{f"top_{i + 1}": value for i, value in enumerate(block.top.tolist())},
        "negative_of_count": block.negative.of_count
        if block.negative is not None and block.exact
        else None,
        "negative_of_mass": None if block.negative is None else block.negative.of_mass,
        "exact": block.exact,
    }
