"""Orthogonalization by an iteration of Newton and Schulz's kind, in the device's fastest dtype.

Each step maps every singular value by a polynomial a σ + b σ³ + c σ⁵, as in Muon (Jordan et al.,
2024). Here each step has its own, the one that brings an interval of singular values closest to 1
(Amsel et al., "The Polar Express", 2025). Two more savings: the iteration begins at a sharper bound
of the singular values than their root of squares, and for long matrices it runs on the small Gram
matrix (Zhang, Amsel, Chen and Dao, 2026). `tests/optim/test_newton_schulz.py` derives the
coefficients again.

On a CPU symmetric products, two thirds of the work, are computed by one triangle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockopt.optim.symmetric_products import symmetric_product

# The largest singular value that a step takes, then a, b, c; the last row is the last step. Step
# k from the end takes values that the steps before it leave in an interval, widened by 3 % for the
# rounding of bfloat16, and has the smallest error on it. The last brings them to [0.7, 1.2].
COEFFICIENTS = (
    (1.999620, 4.130100, -2.890121, 0.505715),
    (1.998475, 4.120926, -2.884332, 0.505145),
    (1.993900, 4.084624, -2.861395, 0.502888),
    (1.975809, 3.946798, -2.773792, 0.494286),
    (1.907339, 3.498026, -2.482064, 0.465924),
    (1.687115, 2.463033, -1.755185, 0.386864),
)
# Matrices longer than this many times their width iterate on the Gram matrix, where two steps take
# the products of a square matrix that one step takes with long ones.
LONG = 1.5
# Steps on the Gram matrix before it is computed anew. More would be cheaper, but its rounding
# errors grow with the square of the singular values, and in bfloat16 three steps diverge.
STEPS_ON_GRAM = 2


def fastest_cpu_dtype() -> torch.dtype:
    """bfloat16 where the CPU has instructions for it, which are twice as fast, else float32."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    checks = [getattr(torch.cpu, name, None) for name in names]
    supported = any(check is not None and check() for check in checks)
    return torch.bfloat16 if supported else torch.float32


CPU_DTYPE = fastest_cpu_dtype()


def iteration_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to iterate in: what the device multiplies fastest, or float64 for float64."""
    if tensor.dtype == torch.float64:
        return torch.float64
    return CPU_DTYPE if tensor.device.type == "cpu" else torch.bfloat16


def orthogonalize(matrices: Tensor, iterations: int) -> Tensor:
    """Roughly the nearest (semi-)orthogonal matrix of each.

    With 4 iterations singular values from 0.3 % of the largest up end in [0.7, 1.2]; with 3 from
    1.2 %, with 5 from 0.08 %. Smaller ones end below, and a matrix of zeros stays one.

    Args:
        matrices: (number, rows, columns). Overwritten.
        iterations: Number of steps.
    """
    rows, columns = matrices.shape[1:]
    known = len(COEFFICIENTS)
    steps = [COEFFICIENTS[max(0, index)] for index in range(known - iterations, known)]
    square: Tensor | None
    x, gram, square = _normalize(matrices, bound=steps[0][0])
    spare = torch.empty_like(x)  # fresh memory for every step would be slow
    at_once = STEPS_ON_GRAM if max(rows, columns) > LONG * min(rows, columns) else 1
    for first in range(0, iterations, at_once):
        if first > 0:
            gram, square = _gram(x), None
        chosen = [step[1:] for step in steps[first : first + at_once]]
        x, spare = _take_steps(x, gram, square, chosen, spare), x
    return x


def orthogonalization_flops(rows: int, columns: int, iterations: int) -> int:
    """Floating-point operations of `orthogonalize` for one matrix, those of its products.

    Example:
        >>> orthogonalization_flops(768, 768, 4) / 768**3, orthogonalization_flops(8, 32, 4) / 8**3
        (24.0, 52.0)
    """
    short, long = sorted((rows, columns))
    at_once = STEPS_ON_GRAM if long > LONG * short else 1
    rounds = -(-iterations // at_once)
    square = iterations + 3 * (iterations - rounds)
    return 2 * short**2 * (2 * rounds * long + square * short)


def _normalize(x: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """Scale the matrices to singular values of at most `bound`; also return G = XXᵀ and G².

    The fourth root of the norm of G² is the eighth root of the sum of σ⁸: at least the largest
    singular value, and far below the root of the sum of σ² if there are many.
    """
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    gram = _gram(x.div_(norms.clamp_min_(1e-7)))
    square = symmetric_product(gram, gram)
    largest = torch.linalg.vector_norm(square, dim=(1, 2), keepdim=True).sqrt_().sqrt_()
    scale = bound / largest.clamp_min_(1e-3)
    return x.mul_(scale), gram.mul_(scale**2), square.mul_(scale**4)


def _take_steps(
    x: Tensor, gram: Tensor, square: Tensor | None, steps: Sequence[tuple[float, ...]], out: Tensor
) -> Tensor:
    """Take steps X ← p(G) X with p(G) = a + b G + c G², all but the last on G alone, into `out`.

    G ← p(G) G p(G) follows X, and the product of the p(G) is applied to X in the end.
    """
    factor: Tensor | None = None
    for a, b, c in steps[:-1]:
        higher = _higher_terms(gram, square, b, c)
        half = symmetric_product(higher, gram, plus=gram, beta=a)
        gram, square = symmetric_product(higher, half, plus=half, beta=a), None
        if factor is None:
            factor = higher
            factor.diagonal(dim1=1, dim2=2).add_(a)
        else:
            factor = symmetric_product(higher, factor, plus=factor, beta=a)
    a, b, c = steps[-1]
    higher = _higher_terms(gram, square, b, c)
    if factor is None:
        return _times(higher, x, out, plus=a)
    return _times(symmetric_product(higher, factor, plus=factor, beta=a), x, out)


def _higher_terms(gram: Tensor, square: Tensor | None, b: float, c: float) -> Tensor:
    """B G + c G², from G² if it is known already."""
    if square is None:
        return symmetric_product(gram, gram, plus=gram, beta=b, alpha=c)
    return square.mul_(c).add_(gram, alpha=b)


def _gram(x: Tensor) -> Tensor:
    """The smaller of XXᵀ and XᵀX."""
    if x.shape[1] <= x.shape[2]:
        return symmetric_product(x, x.mT)
    return symmetric_product(x.mT, x)


def _times(factor: Tensor, x: Tensor, out: Tensor, plus: float = 0.0) -> Tensor:
    """(F + plus) X, or X (F + plus) for the other Gram matrix, written to `out`."""
    left, right = (factor, x) if x.shape[1] <= x.shape[2] else (x, factor)
    if plus:
        return torch.baddbmm(x, left, right, beta=plus, out=out)
    return torch.bmm(left, right, out=out)
