"""Stochastic rounding to bfloat16, so that a momentum kept in 16 bits does not lose small gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def lerp_momentum(
    momenta: list[Tensor], gradients: list[Tensor], weight: float, *noise: list[Tensor]
) -> list[Tensor]:
    """`m ← m + weight·(g − m)` in place; returns the new momenta before they are rounded to the dtype they are stored in.

    Args:
        momenta: The stored momenta.
        gradients: The gradients, of any floating dtype.
        weight: Of the gradients.
        *noise: Rows and columns of `rounding_noise`, for momenta in bfloat16; without them they
            round to the nearest.
    """
    if not noise:
        torch._foreach_lerp_(momenta, [g.to(m.dtype) for g, m in zip(gradients, momenta)], weight)
        return momenta
    wide = [m.to(torch.float32) for m in momenta]
    torch._foreach_lerp_(wide, [g.to(torch.float32) for g in gradients], weight)
    for stored, exact, rows, columns in zip(momenta, wide, *noise):
        stored.copy_(round_to_bfloat16(exact, rows, columns))
    return wide


def rounding_noise(
    tensors: list[Tensor], step: Tensor | float
) -> tuple[list[Tensor], list[Tensor]]:
    """The row and column noise of `round_to_bfloat16` for each tensor; tensors share it, which leaves it unbiased."""
    lengths: dict[torch.device, list[int]] = {}
    for t in tensors:
        longest = lengths.setdefault(t.device, [1, 1])
        length = t.shape[0] if t.ndim else 1
        longest[0], longest[1] = (
            max(longest[0], length),
            max(longest[1], t.numel() // max(length, 1)),
        )
    bases = {
        d: tuple(_hash(step, n, stream, d) for stream, n in enumerate(longest))
        for d, longest in lengths.items()
    }
    row_noise, column_noise = [], []
    for t in tensors:
        rows, columns = bases[t.device]
        if t.ndim == 0:
            row_noise.append(rows[0])
            column_noise.append(columns[0])
        else:
            row_noise.append(rows[: t.shape[0]].view(-1, *(1,) * (t.ndim - 1)))
            column_noise.append(columns[: t.shape[1:].numel()].view(1, *t.shape[1:]))
    return row_noise, column_noise


def _hash(step: Tensor | float, length: int, stream: int, device: torch.device) -> Tensor:
    """Pseudo-random integers in [0, 2^16), a function of step, stream and position alone.

    They do not draw from the user's random state, and a resumed run draws the same. The mixing is
    that of a 32-bit integer hash of two multiply-xorshift rounds, in int64 so that nothing
    overflows.
    """
    mask = 0xFFFFFFFF
    bits = torch.arange(length, device=device, dtype=torch.int64)
    seed = torch.as_tensor(step, device=device).to(torch.int64) * 0x9E3779B1 + stream * 0x85EBCA6B
    bits = (bits * 0xC2B2AE35 + seed) & mask
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = ((bits ^ (bits >> shift)) * multiplier) & mask
    return ((bits ^ (bits >> 16)) & 0xFFFF).to(torch.int32)


def round_to_bfloat16(source: Tensor, row_noise: Tensor, column_noise: Tensor) -> Tensor:
    """`source` (float32) rounded to one of its two neighbours in bfloat16, as float32, with the mean of `source`.

    The entry at (i, j) rounds up if its lower 16 bits plus `(row_noise[i] + column_noise[j]) mod
    2^16` overflow. Such sums of independent uniform numbers are themselves uniform and pairwise
    independent, so every linear function of the result has the mean and the variance of fully
    independent rounding. The relative error of an entry is below 2^-7, its mean is 0.
    """
    bits = (row_noise + column_noise).bitwise_and_(0xFFFF)
    bits.add_(source.view(torch.int32)).bitwise_and_(-0x10000)
    return bits.view(torch.float32)
