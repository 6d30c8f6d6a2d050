"""Orthogonalization by Newton and Schulz's iteration, in the device's fastest dtype."""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


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
    """Roughly the nearest (semi-)orthogonal matrix of each, with singular values in [0.7, 1.2].

    Each step maps every singular value by the quintic a σ + b σ³ + c σ⁵ whose coefficients Jordan
    et al. chose for speed.

    Args:
        matrices: (number, rows, columns) with rows <= columns. Overwritten.
        iterations: Number of steps.
    """
    a, b, c = COEFFICIENTS
    norms = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    x = matrices.div_(norms.clamp_min_(1e-7))
    for _ in range(iterations):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x
