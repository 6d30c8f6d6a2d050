"""When torch's fused kernels can do an update, and the lists they take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

FUSED_DEVICES = ("cpu", "cuda", "xpu")


def fused_kernel_serves(*columns: list[Tensor]) -> bool:
    """Whether a fused kernel can take the columns, whose tensors are on one device.

    It can if the tensors of each row have one dtype and shape, are contiguous, and lie on a device
    that has the kernel.
    """
    if torch.compiler.is_compiling() or columns[0][0].device.type not in FUSED_DEVICES:
        return False
    return all(
        t.dtype == row[0].dtype and t.shape == row[0].shape and t.is_contiguous()
        for row in zip(*columns)
        for t in row
    )


def by_dtype(*columns: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
    """The columns, divided by the dtype of the first."""
    if len({p.dtype for p in columns[0]}) == 1:
        yield [list(column) for column in columns]
        return
    kinds: dict[torch.dtype, list[int]] = {}
    for i, p in enumerate(columns[0]):
        kinds.setdefault(p.dtype, []).append(i)
    for chosen in kinds.values():
        yield [[column[i] for i in chosen] for column in columns]
