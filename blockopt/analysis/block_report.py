"""What is measured of one symmetric operator: trace, norm, top eigenvalues and spectrum."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockopt.analysis.operators.dense import dense
from blockopt.analysis.results import Result
from blockopt.analysis.spectral.block_mass import block_mass
from blockopt.analysis.spectral.density import SpectralDensity, spectral_density
from blockopt.analysis.spectral.eigenpairs import top_eigenpairs
from blockopt.analysis.spectral.estimate import Estimate
from blockopt.analysis.spectral.heterogeneity import NegativeShare, negative_share
from blockopt.analysis.spectral.products import SymmetricOperator, size
from blockopt.checks import check_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOLERANCE = 1e-4  # of the top eigenvalues, relative to the largest


@dataclass(frozen=True)
class Probes:
    """How much is measured of each block.

    A block of at most num_steps · num_starts parameters is built, which takes no more products than
    its spectrum would. All that is reported of it is then exact.

    Attributes:
        top: Eigenvalues per block, the farthest from 0; 0 for none.
        num_probes: Random vectors per block, for traces and norms.
        num_steps: Lanczos steps of a spectrum.
        num_starts: Random vectors that the Lanczos steps start from; 0 for no spectra.
        exact: Whether to build every block, however large.
        seed: The seed of all random vectors.

    Raises:
        ValueError: If a number is too small.
    """

    top: int = 1
    num_probes: int = 20
    num_steps: int = 30
    num_starts: int = 3
    exact: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, smallest in (("top", 0), ("num_probes", 2), ("num_steps", 2), ("num_starts", 0)):
            check_count(name, getattr(self, name), smallest)

    def builds(self, dimension: int) -> bool:
        """Whether a block of this dimension is built."""
        return self.exact or dimension <= self.num_steps * self.num_starts

    def num_products(self, dimension: int) -> int:
        """Return the products without probes; those for the top eigenvalues are a guess."""
        if self.builds(dimension):
            return dimension
        spectrum = min(dimension, self.num_steps) * self.num_starts
        return spectrum + (25 + 10 * (self.top - 1) if self.top else 0)

    def fitting(self, dimension: int, max_bytes: float) -> Probes:
        """Return the same without what a memory of so many bytes has no room for.

        The eigenvalues of a block that is built, or the vectors of Lanczos, are in float64.
        """
        vectors = max_bytes / (8 * dimension)
        if self.builds(dimension):
            return self
        starts = self.num_starts if self.num_steps + 6 <= vectors else 0
        top = self.top if max(2 * self.top + 10, 20) + 6 <= vectors else 0
        return replace(self, num_starts=starts, top=top)


DEFAULT = Probes()


@dataclass(frozen=True)
class BlockReport(Result):
    """What is known of one block.

    Attributes:
        dimension: Its number of parameters.
        trace: The trace with its standard error, which is 0 if it is exact.
        frobenius: The Frobenius norm, not its square, with its standard error.
        top: The eigenvalues farthest from 0, the farthest first; none if memory did not suffice.
        residuals: `‖A u − λ u‖` of each, which bounds its error; 0 if exact. In a report from
            sampled gradients, half of the range in which it lies.
        spectrum: All eigenvalues with equal weight if `exact`, otherwise their estimated
            distribution, or None if it was not asked for.
        negative: The share of negative curvature in `spectrum`. If not `exact`, `of_mass`, the
            share of `Σ |λ|`, may be off by ten points and more with a few probes (a "~" in tables),
            and `of_count` means nothing: most eigenvalues are next to 0, and the estimate puts them
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

    def row(self) -> dict[str, Any]:
        """Return one flat dictionary, the line of a table file; None where nothing is known."""
        counted = self.negative.of_count if self.negative is not None and self.exact else None
        return {
            "dimension": self.dimension,
            "trace": self.trace.value,
            "trace_error": self.trace.standard_error,
            "frobenius": self.frobenius.value,
            "frobenius_error": self.frobenius.standard_error,
            **{f"top_{i + 1}": value for i, value in enumerate(self.top.tolist())},
            "negative_of_count": counted,
            "negative_of_mass": None if self.negative is None else self.negative.of_mass,
            "exact": self.exact,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return `row()` alone."""
        return [self.row()]

    def plot(self, *, title: str = "Spectral density") -> Figure:
        """Draw the spectrum (needs matplotlib).

        Raises:
            ValueError: If there is none.
        """
        if self.spectrum is None:
            raise ValueError("This block has no spectrum to plot. Measure it with num_starts > 0.")
        return self.spectrum.plot(title=title)

    def state(self) -> dict[str, Any]:
        """Return it as tensors and plain values, for a file that `torch.load` takes as data."""
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        spectrum = self.spectrum and (self.spectrum.nodes, self.spectrum.weights)
        plain = {k: tuple(v) if isinstance(v, tuple) else v for k, v in state.items()}
        return plain | {"spectrum": spectrum}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> BlockReport:
        """Return what `state()` was called on."""
        kinds = {"trace": Estimate, "frobenius": Estimate, "spectrum": SpectralDensity}
        kinds["negative"] = NegativeShare
        made = {k: kinds[k](*v) for k, v in state.items() if k in kinds and v is not None}
        return cls(**{**state, **made})


def measure_block(
    operator: SymmetricOperator,
    probes: Probes = DEFAULT,
    *,
    known: Sequence[Estimate] | None = None,
    asymmetry: float = 0.0,
    generator: torch.Generator | None = None,
) -> BlockReport:
    """Measure the trace, Frobenius norm, top eigenvalues and spectrum of a symmetric operator.

    Args:
        operator: Any symmetric operator; a square tensor is one.
        probes: How much to measure.
        known: The trace and the Frobenius norm, if they have been estimated already.
        asymmetry: What `check_symmetric` returned, the precision of the products: ten times that,
            relative to the largest eigenvalue, counts as zero curvature.
        generator: Draws the random vectors; by default one with the seed of `probes`.

    Raises:
        ValueError: If the shape of the operator is wrong, or it does not fit into memory.
        FloatingPointError: If a product is not finite.

    Example:
        >>> block = measure_block(torch.diag(torch.tensor([3.0, -1.0])))
        >>> block.trace.value, float(block.top[0]), block.negative.of_mass
        (2.0, 3.0, 0.25)
    """
    generator = torch.Generator().manual_seed(probes.seed) if generator is None else generator
    n, zero = size(operator), 1e-9 if operator.dtype == torch.float64 else 1e-5
    zero = max(zero, 10 * asymmetry)  # transformers computes some norms in float32 in any model
    if probes.builds(n):
        with warnings.catch_warnings():  # the caller knows the asymmetry
            warnings.filterwarnings("ignore", "The matrix is not symmetric")
            matrix = dense(operator).double().cpu()
        spectrum = SpectralDensity.of_eigenvalues(torch.linalg.eigvalsh(matrix))
        order = spectrum.nodes.abs().argsort(descending=True)
        top = spectrum.nodes[order][: probes.top]
        negative = negative_share(spectrum, tolerance=zero)
        trace, frobenius = (Estimate(float(x), 0.0, n) for x in (matrix.trace(), matrix.norm()))
        measured = n, trace, frobenius, top, torch.zeros_like(top)
        return BlockReport(*measured, spectrum, negative, exact=True)
    if known is None:
        parts = {"all": torch.arange(n)}
        mass = block_mass(operator, parts, num_probes=probes.num_probes, generator=generator)
        known = [mass.traces[0], mass.frobenius]
    trace, frobenius = known
    top = residuals = torch.empty(0, dtype=torch.float64)
    if probes.top:
        number = min(probes.top, n)
        pairs = top_eigenpairs(operator, number, tolerance=TOLERANCE, generator=generator)
        top, residuals = pairs.values, pairs.residuals
    measured = n, trace, frobenius, top, residuals
    if probes.num_starts == 0:
        return BlockReport(*measured, None, None, exact=False)
    estimated = spectral_density(
        operator, num_steps=probes.num_steps, num_probes=probes.num_starts, generator=generator
    )
    negative = negative_share(estimated, tolerance=zero)
    return BlockReport(*measured, estimated, negative, exact=False)
