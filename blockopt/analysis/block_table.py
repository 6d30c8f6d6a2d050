"""A table of the curvature of each block, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from blockopt.analysis.progress import progress_bar
from blockopt.analysis.spectral.density import SpectralDensity, SymmetricOperator, spectral_density
from blockopt.analysis.spectral.eigenpairs import top_eigenpairs
from blockopt.analysis.spectral.heterogeneity import NegativeShare, negative_share
from blockopt.analysis.spectral.products import check_count, product, size
from blockopt.analysis.spectral.trace import Estimate, squared_frobenius, trace
from blockopt.measure.closures import default_generator

WIDTH = 128


class BlockCurvature(NamedTuple):
    """What is measured of one block; `frobenius` is the norm, not its square, `top` the eigenvalue farthest from 0."""

    dimension: int
    trace: Estimate
    frobenius: Estimate
    top: float
    negative: NegativeShare
    spectrum: SpectralDensity


def measure_blocks(
    blocks: Mapping[str, SymmetricOperator],
    *,
    num_products: int = 100,
    num_steps: int = 30,
    num_probes: int = 5,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> dict[str, BlockCurvature]:
    """Trace, Frobenius norm, top eigenvalue, spectrum and negative share of each block.

    A block of no more than `num_products` entries is built by as many products, and all is exact
    but for rounding. For others it takes 2 · num_products for trace and norm, num_steps ·
    num_probes for the spectrum, and what the top eigenvalue takes to be right to 1e-4.

    Args:
        blocks: `{label: operator}`, such as the `blocks()` of an operator of a model.
        num_products: For the trace, and again for the norm.
        num_steps: Of `spectral_density`.
        num_probes: Of `spectral_density`.
        generator: Draws the probes; by default one with seed 0.
        progress: Show a progress bar (needs rich).

    Raises:
        ValueError: If an option or the shape of an operator is wrong.
        FloatingPointError: If a product is not finite.

    Example:
        >>> found = measure_blocks({"a": torch.diag(torch.tensor([3.0, -1.0])), "b": torch.eye(400)})
        >>> print(block_table(found))
        block  dimension      trace  ±  Frobenius  ±        top  negative  of mass
        a              2  2.000e+00  0  3.162e+00  0  3.000e+00     50.0%    25.0%
        b            400  4.000e+02  0  2.000e+01  0  1.000e+00      0.0%     0.0%
    """
    check_count("num_products", num_products)
    generator = default_generator(generator)
    found = {}
    with progress_bar(progress, "blocks", len(blocks)) as advance:
        for label, operator in blocks.items():
            n = size(operator)
            if n <= num_products:
                found[label] = _from_dense(operator)
            else:
                squared = squared_frobenius(
                    operator, num_products=num_products, generator=generator
                )
                norm = squared.value**0.5
                error = squared.standard_error / (2 * norm) if norm > 0 else 0.0
                density = spectral_density(
                    operator, num_steps=num_steps, num_probes=num_probes, generator=generator
                )
                tolerance = 1e-9 if operator.dtype == torch.float64 else 1e-5
                found[label] = BlockCurvature(
                    n,
                    trace(operator, num_products=num_products, generator=generator),
                    Estimate(norm, error, squared.num_products),
                    float(top_eigenpairs(operator, tolerance=1e-4, generator=generator).values[0]),
                    negative_share(density, tolerance=tolerance),
                    density,
                )
            advance(1)
    return found


def block_table(measured: Mapping[str, BlockCurvature]) -> str:
    """What `measure_blocks` returned as a table of at most 128 columns; long labels lose their beginning."""
    rows = [("block", "dimension", "trace", "±", "Frobenius", "±", "top", "negative", "of mass")]
    for label, block in measured.items():
        numbers = (
            f"{block.trace.value:.3e}",
            _error(block.trace),
            f"{block.frobenius.value:.3e}",
            _error(block.frobenius),
        )
        shares = (f"{block.negative.of_count:.1%}", f"{block.negative.of_mass:.1%}")
        rows.append((label, f"{block.dimension:,}", *numbers, f"{block.top:.3e}", *shares))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    widths[0] = min(widths[0], WIDTH - sum(width + 2 for width in widths[1:]))
    lines = []
    for row in rows:
        label = row[0] if len(row[0]) <= widths[0] else "…" + row[0][len(row[0]) - widths[0] + 1 :]
        lines.append(
            "  ".join(
                [
                    label.ljust(widths[0]),
                    *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:])),
                ]
            )
        )
    return "\n".join(lines)


def _error(estimate: Estimate) -> str:
    return f"{estimate.standard_error:.0e}" if estimate.standard_error > 0 else "0"


def _from_dense(operator: SymmetricOperator) -> BlockCurvature:
    n = size(operator)
    dense = product(operator, torch.eye(n, dtype=torch.float64, device=operator.device)).cpu()
    values = torch.linalg.eigvalsh((dense + dense.T) / 2)
    density = SpectralDensity(values, torch.full_like(values, 1 / n))
    return BlockCurvature(
        n,
        Estimate(float(dense.trace()), 0.0, n),
        Estimate(float(dense.norm()), 0.0, n),
        float(values[values.abs().argmax()]),
        negative_share(density, tolerance=1e-9 if operator.dtype == torch.float64 else 1e-5),
        density,
    )
