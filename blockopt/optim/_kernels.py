"""Updates of a matrix in one pass through memory, compiled by torch on first use.

That takes a few seconds, and on a CPU a C++ compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SMALLEST = 1 << 16  # entries; below, calling a compiled function costs more than it saves


def momentum_step(
    p: Tensor, g: Tensor, m: Tensor, size: Tensor, decay: float, weight: float
) -> None:
    """`m ← lerp(m, g)`, `p ← decay·p − size·m`."""
    momentum = torch.lerp(m, g, weight)
    m.copy_(momentum)
    p.copy_(p * decay - size * momentum)


def adam_step(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    size: Tensor,
    decay: float,
    weight: float,
    beta2: float,
    root: float,
    eps: float,
) -> None:
    """AdamW of one matrix; `root` is the square root of the second moment's bias correction."""
    momentum = torch.lerp(m, g, weight)
    square = v * beta2 + g * g * (1 - beta2)
    m.copy_(momentum)
    v.copy_(square)
    p.copy_(p * decay - size * (momentum / (square.sqrt() / root + eps)))


@functools.cache
def _compiled(kernel: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(kernel, dynamic=True)


def run_compiled(
    kernel: Callable[..., None], columns: list[list[Tensor]], *numbers: Any
) -> list[list[Tensor]]:
    """Run a kernel on the rows of `columns` that are large matrices; returns the columns without these."""
    for row in zip(*columns):
        if is_large(row[0]):
            _compiled(kernel)(*row, *numbers)
    return [[t for p, t in zip(columns[0], column) if not is_large(p)] for column in columns]


def is_large(p: Tensor) -> bool:
    """Whether a compiled kernel takes the parameter."""
    return p.ndim == 2 and p.numel() >= SMALLEST
