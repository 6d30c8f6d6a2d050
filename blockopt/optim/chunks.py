"""Work on many tensors in chunks that stay in the cache and bound the memory of temporaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

import torch
from torch import Tensor

# Entries of a chunk. On a CPU four float32 chunks of this size share the last-level cache; on a GPU
# launches should be few.
CPU_CHUNK, GPU_CHUNK = 1 << 20, 1 << 23


def in_chunks(
    *columns: Sequence[Tensor], cpu_chunk: int = CPU_CHUNK
) -> Iterator[tuple[list[Tensor], ...]]:
    """Yield the rows of `columns` in lists of about one chunk; larger tensors are cut by rows.

    The first column holds the tensors to work on, the others tensors that go with them: of the same
    shape, or broadcast against them. Under `torch.compile` all of it is one chunk, since the
    compiler does the fusing.

    Example:
        >>> tensors = [torch.empty(3), torch.empty(5), torch.empty(1200, 1000)]
        >>> [[tuple(t.shape) for t in chunk] for (chunk,) in in_chunks(tensors)]
        [[(3,), (5,)], [(1048, 1000)], [(152, 1000)]]
    """
    rows = list(zip(*columns))
    if torch.compiler.is_compiling():
        if rows:
            yield tuple(list(column) for column in columns)
        return
    pending: list[tuple[Tensor, ...]] = []
    size = 0
    for row in rows:
        first = row[0]
        chunk = cpu_chunk if first.device.type == "cpu" else GPU_CHUNK
        if size + first.numel() > chunk and pending:
            yield tuple(map(list, zip(*pending)))
            pending, size = [], 0
        if first.numel() <= chunk or first.shape[0] == 1:
            pending.append(row)
            size += first.numel()
            continue
        length = first.shape[0]
        rows_at_once = max(1, chunk * length // first.numel())
        pieces = [
            t.split(rows_at_once) if t.ndim and t.shape[0] == length else repeat(t) for t in row
        ]
        for piece in zip(*pieces):
            yield tuple([t] for t in piece)
    if pending:
        yield tuple(map(list, zip(*pending)))


class Scratch:
    """Memory for the temporaries of one chunk, used again for the next: fresh pages are slow."""

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, Tensor] = {}

    def zeros(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Return zeros for tensors of one dtype and device."""
        needed = sum(t.numel() for t in like)
        memory = self._memory.get(like[0].dtype)
        if memory is None or memory.numel() < needed:
            memory = self._memory[like[0].dtype] = like[0].new_empty(needed)
        pieces = memory[:needed].zero_().split([t.numel() for t in like])
        return [piece.view(t.shape) for piece, t in zip(pieces, like)]
