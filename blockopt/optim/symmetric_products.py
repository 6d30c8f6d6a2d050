"""Products of matrices that are known to be symmetric, of which a CPU computes one triangle."""

from __future__ import annotations

import torch
from torch import Tensor

# Rows of a strip, of which only what is right of the diagonal is computed. Narrower ones would
# save more products, but a CPU multiplies them more slowly.
STRIP = 256


def symmetric_product(
    left: Tensor, right: Tensor, plus: Tensor | None = None, beta: float = 1.0, alpha: float = 1.0
) -> Tensor:
    """Return `beta · plus + alpha · left @ right` for each matrix of a stack.

    Without `plus` it is `left @ right`.

    Args:
        left: (number, n, k).
        right: (number, k, n).
        plus: (number, n, n), symmetric, or None for nothing.
        beta: Its factor.
        alpha: The factor of the product.
    """
    size = left.shape[1]
    if torch.compiler.is_compiling() or left.device.type != "cpu" or size < 2 * STRIP:
        if plus is None:
            return torch.bmm(left, right)
        return torch.baddbmm(plus, left, right, beta=beta, alpha=alpha)
    out = left.new_empty(len(left), size, size)
    for index, (a, b, result) in enumerate(zip(left, right, out)):
        for start in range(0, size, STRIP):
            strip = slice(start, start + STRIP)
            target = result[strip, start:]
            if plus is None:
                torch.mm(a[strip], b[:, start:], out=target)
            else:
                added = plus[index, strip, start:]
                torch.addmm(added, a[strip], b[:, start:], beta=beta, alpha=alpha, out=target)
            result[start + STRIP :, strip].copy_(target[:, STRIP:].mT)
    return out
