"""What a report on the curvature of a model holds, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from blockopt.analysis.block_report import BlockReport
from blockopt.analysis.formatting import number_and_error
from blockopt.analysis.plots.model_curvature import blocks_figure, heads_figure, spectra_figure
from blockopt.analysis.results import Result
from blockopt.analysis.spectral.block_mass import BlockMass
from blockopt.analysis.spectral.heterogeneity import (
    JensenShannon,
    Spread,
    jensen_shannon,
    norm_spread,
)
from blockopt.blocks import BlockGroup
from blockopt.tables import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["heads", "blocks", "spectra"]
# Where the symmetric log ends, relative to the largest eigenvalue. Lanczos puts what is nearer to 0
# on arbitrary places: with 1e-6, the distance of estimated spectra is 0.81 where that of the true
# ones is 0.64; with 1e-2, it is 0.27 for both.
LOG_THRESHOLD = 1e-2


class Cost(NamedTuple):
    """What a report will take: products `A @ v`, and the measured seconds of a full one.

    Their product is a rough upper guess of the time: products with single blocks, or with several
    columns at once, are faster. The number that the top eigenvalues need is not known beforehand,
    and the eigenvalues of large dense blocks come on top.
    """

    num_products: int
    seconds_per_product: float


@dataclass(frozen=True)
class HessianReport(Result):
    """What `hessian_report` or `sampled_report` measured.

    Attributes:
        matrix: Which matrix.
        by: How it was cut into blocks.
        loss: The mean loss over all batches.
        whole: The matrix of all chosen parameters, or None if memory did not suffice.
        blocks: The diagonal block of each group.
        mass: The share of every pair of blocks in the squared Frobenius norm, or None if memory did
            not suffice.
        spread: How far the Frobenius norms of the blocks are apart, except for blocks that are only
            rounding.
        distance: The Jensen-Shannon distances between the spectra of the blocks on a "linear" and a
            "symmetric log" axis, which is linear up to 1 % of the largest eigenvalue; empty for
            fewer than two spectra.
        asymmetry: `|u·Av − v·Au| / (‖Au‖ + ‖Av‖)` for random u and v: the precision of the
            products. None if there were no products.
        rounding: The relative error of one product, or of one sampled gradient, against the same in
            float64; None for a model in float64.
        cost: The cost that was foreseen.
        seconds: The time that it took, without what an earlier run had finished.
        notes: What a reader should know about the numbers.
    """

    matrix: str
    by: str
    loss: float
    whole: BlockReport | None
    blocks: dict[BlockGroup, BlockReport]
    mass: BlockMass | None
    spread: Spread
    distance: dict[str, JensenShannon]
    asymmetry: float | None
    rounding: float | None
    cost: Cost
    seconds: float
    notes: tuple[str, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per block, "whole" last: the lines of a table file."""
        rows = []
        for group, block in self.blocks.items():
            place = {"role": group.role, "layer": group.layer, "head": group.head}
            rows.append({"block": str(group), **place, **block.row()})
        if self.whole is not None:
            nowhere = dict.fromkeys(("role", "layer", "head"))
            rows.append({"block": "whole", **nowhere, **self.whole.row()})
        return rows

    def table(self, width: int = 100) -> str:
        """Return a table of dimension, trace, norm, top eigenvalue and negative share per block."""
        rows = [("block", "dimension", "trace", "±", "Frobenius", "±", "top", "negative")]
        for label, block in self._labelled():
            numbers = (*number_and_error(block.trace), *number_and_error(block.frobenius))
            share = "-"
            if block.negative is not None:
                share = f"{'' if block.exact else '~'}{block.negative.of_mass:.0%}"
            top = f"{float(block.top[0]):.2e}" if len(block.top) else "-"
            rows.append((label, f"{block.dimension:,}", *numbers, top, share))
        return aligned(rows, width)

    def role_table(self, width: int = 100) -> str:
        """Return a table of each role: blocks, mean curvature with its range, sharpest block."""
        header = ("role", "blocks", "parameters", "trace", "trace / size", "smallest", "largest")
        rows: list[tuple[str, ...]] = [(*header, "sharpest")]
        for role, found in self.by_role().items():
            means = {group: block.trace.value / block.dimension for group, block in found.items()}
            size = sum(block.dimension for block in found.values())
            trace = sum(block.trace.value for block in found.values())
            sharpest = max(means, key=means.__getitem__)
            numbers = (trace, trace / size, min(means.values()), means[sharpest])
            cells = (f"{len(found):,}", f"{size:,}", *(f"{number:.2e}" for number in numbers))
            rows.append((role, *cells, place(sharpest)))
        return aligned(rows, width)

    def by_role(self) -> dict[str, dict[BlockGroup, BlockReport]]:
        """Return the blocks of each role."""
        found: dict[str, dict[BlockGroup, BlockReport]] = {}
        for group, block in self.blocks.items():
            found.setdefault(group.role, {})[group] = block
        return found

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
            # What the spread leaves out is rounding.
            norms = {label: block.frobenius.value for label, block in self.blocks.items()}
            lasting = [label for label, norm in norms.items() if norm >= self.spread.smallest]
            low, high = min(lasting, key=norms.__getitem__), max(norms, key=norms.__getitem__)
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
        if self.mass is not None:
            share, error = self.mass.off_diagonal[:2]
            lines.append(f"off the blocks  {share:.1%} ± {error:.1%} of the squared Frobenius norm")
        return "\n".join(lines)

    def plot(self, kind: Kind | None = None, *, title: str = "") -> Figure:
        """Draw the report (needs matplotlib).

        Args:
            kind: "heads", the mean curvature and top eigenvalue of each head, by layer; "blocks",
                the norm of each block and the share of each pair; "spectra", if there are any. By
                default "heads" if there are heads, otherwise "blocks".
            title: What to write above.

        Raises:
            ValueError: If there is no such plot of this report.
        """
        heads = any(group.head is not None and group.layer is not None for group in self.blocks)
        kind = kind or ("heads" if heads else "blocks")
        if kind == "heads" and heads:
            return heads_figure(self.blocks, title=title or f"{self.matrix} by head")
        if kind == "spectra" and any(block.spectrum for block in self.blocks.values()):
            return spectra_figure(
                self.blocks, self.short_labels(), self.whole, title=f"{self.matrix} blocks{title}"
            )
        if kind == "blocks":
            return blocks_figure(self.blocks, self.short_labels(), self.mass, title=title)
        raise ValueError(
            f"Invalid kind={kind!r}. Must be 'blocks', or 'heads' for a report by head, or "
            "'spectra' for one with spectra."
        )

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
        return blocks if self.whole is None else [*blocks, ("whole", self.whole)]


def place(group: BlockGroup) -> str:
    """Return where a block is, in a few letters.

    Example:
        >>> place(BlockGroup("query", 3, "h.3.attn.weight", 1)), place(BlockGroup("embedding"))
        ('layer 3 head 1', '-')
    """
    layer = "" if group.layer is None else f"layer {group.layer}"
    head = "" if group.head is None else f"head {group.head}"
    return f"{layer} {head}".strip() or "-"


def _without_modules(group: BlockGroup, number: int) -> BlockGroup:
    if group.parameter is None:
        return group
    return group._replace(parameter=".".join(group.parameter.split(".")[number:]))


def heterogeneity(
    blocks: Mapping[BlockGroup, BlockReport], noise: float
) -> tuple[Spread, dict[str, JensenShannon]]:
    """Return how far norms and spectra of blocks are apart.

    Softmax does not see the biases of keys, for example: what is left of such a block is rounding,
    and would lead any comparison. So blocks with a norm of at most `noise` are left out.
    """
    lasting = {g: block for g, block in blocks.items() if block.frobenius.value > noise} or blocks
    spread = norm_spread({group: block.frobenius.value for group, block in lasting.items()})
    return spread, _distances(lasting)


def _distances(blocks: Mapping[BlockGroup, BlockReport]) -> dict[str, JensenShannon]:
    spectra = {g: block.spectrum for g, block in blocks.items() if block.spectrum is not None}
    if len(spectra) < max(2, len(blocks)):
        return {}
    largest = max(float(spectrum.nodes.abs().max()) for spectrum in spectra.values())
    threshold = LOG_THRESHOLD * largest or 1.0
    return {
        "linear": jensen_shannon(spectra),
        "symmetric log": jensen_shannon(spectra, axis="symmetric log", threshold=threshold),
    }
