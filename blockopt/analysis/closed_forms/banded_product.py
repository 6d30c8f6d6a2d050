"""Products with attention weights that leave out tokens which are not seen."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BAND = 128  # positions that are handled together, with all tokens up to the last that they see


def last_seen(visible: Tensor) -> list[int]:
    """Return how many tokens there are up to the last that each position sees in any sequence.

    Args:
        visible: Whether a position sees a token, bool, (B, L, L).
    """
    tokens = torch.arange(1, visible.shape[-1] + 1, device=visible.device)
    last: list[int] = torch.where(visible.any(0), tokens, 0).amax(1).tolist()
    return last


def banded_product(
    weights: Tensor, values: Tensor, last: list[int], first: int = 0, start: int = 0
) -> Tensor:
    """Return `weights @ values`, half the work under a causal mask.

    Args:
        weights: (B, positions, tokens), zero where a position does not see a token.
        values: (B, tokens, n).
        last: From `last_seen`.
        first: The position of the first row.
        start: The token of the first column.
    """
    if weights.shape[1] <= BAND:
        return weights @ values
    result = values.new_empty(*weights.shape[:2], values.shape[-1])
    for rows, end in bands(last, first, start):
        for one, seen, out in zip(weights, values, result):
            torch.mm(one[rows, :end], seen[:end], out=out[rows])
    return result


def bands(last: list[int], first: int = 0, start: int = 0) -> Iterator[tuple[slice, int]]:
    """Yield rows that are handled together, and how many columns they need."""
    for row in range(0, len(last) - first, BAND):
        seen = last[first + row : first + row + BAND]
        yield slice(row, row + len(seen)), max(0, max(seen) - start)
