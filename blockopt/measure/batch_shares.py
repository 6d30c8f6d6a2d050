"""Which rows of the global batch a rank holds, so that samples do not depend on the ranks' number.

Each row of predictions gets the sample that it would get if one process held all batches, one after
another in the order of the ranks. Ranks that hold the same batch, as those of tensor parallelism
do, need the same samples; whether they do is seen from targets and predictions, since the layout of
parameters does not tell (expert-parallel ranks hold other batches, tensor-parallel ones do not).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from blockopt.distributed import are_together, meet, num_ranks, rank

TARGETS, PREDICTIONS = 1 << 16, 64  # how many of each a fingerprint looks at
TOLERANCE = 1e-2  # of the root mean square; ranks with one batch may round differently


class BatchShare(NamedTuple):
    """The place of a rank's rows among those of all ranks.

    Attributes:
        starts: For each loss call, the number of rows before those of this rank.
        totals: For each loss call, the number of rows of all batches.
        spread: What to multiply independent samples by if gradients are then averaged over ranks,
            lest the square of the average be too small: the root of the number of batches.
        holders: For each rank, the first rank that holds the same batch.
    """

    starts: list[int]
    totals: list[int]
    spread: float
    holders: list[int]

    def covered_by(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks hold all batches."""
        return {self.holders[rank] for rank in ranks} == set(self.holders)


class _Fingerprint(NamedTuple):
    """What tells batches apart; single predictions do so better than their means.

    Attributes:
        rows: How many there are.
        targets: A hash.
        predictions: Some of them.
    """

    rows: int
    targets: int
    predictions: list[float]

    def is_same(self, other: _Fingerprint) -> bool:
        if (self.rows, self.targets) != (other.rows, other.targets):
            return False
        size = math.sqrt(sum(p * p for p in self.predictions) / max(1, len(self.predictions)))
        pairs = zip(self.predictions, other.predictions)
        return all(abs(one - two) <= TOLERANCE * size + 1e-30 for one, two in pairs)


def batch_share(rows: list[int], predictions: list[Tensor], targets: list[Tensor]) -> BatchShare:
    """Return the place of this rank's batch; all ranks must ask.

    Args:
        rows: The number of rows of each loss call.
        predictions: What each loss call was given.
        targets: The same.
    """
    if not are_together():
        return BatchShare([0] * len(rows), rows, 1.0, [0])
    own = [_fingerprint(*call) for call in zip(rows, predictions, targets)]
    meet("samples of predictions")
    everyone: list[Any] = [None] * num_ranks()
    dist.all_gather_object(everyone, own)
    if len({len(calls) for calls in everyone}) > 1:
        raise ValueError(
            f"Ranks call loss functions {sorted({len(calls) for calls in everyone})} times in one "
            "closure. Gauss-Newton needs the same number on every rank."
        )
    holders = [_first_like(calls, everyone) for calls in everyone]
    first = holders[rank()]
    batches = [everyone[holder] for holder in sorted(set(holders))]
    before = [everyone[holder] for holder in sorted(set(holders)) if holder < first]
    return BatchShare(
        [sum(calls[i].rows for calls in before) for i in range(len(own))],
        [sum(calls[i].rows for calls in batches) for i in range(len(own))],
        math.sqrt(num_ranks() / holders.count(first)),
        holders,
    )


def _first_like(calls: list[_Fingerprint], everyone: Sequence[list[_Fingerprint]]) -> int:
    """The first rank with the same batch."""
    return next(
        r for r, others in enumerate(everyone) if all(map(_Fingerprint.is_same, calls, others))
    )


def _fingerprint(rows: int, prediction: Tensor, target: Tensor) -> _Fingerprint:
    labels = zlib.crc32(_few(target, TARGETS).numpy().tobytes())
    return _Fingerprint(rows, labels, _few(prediction, PREDICTIONS).tolist())


def _few(tensor: Tensor, number: int) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // number)].to("cpu", torch.float64)
