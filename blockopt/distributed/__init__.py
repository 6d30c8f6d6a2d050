"""Many processes: what ranks agree on, and parameters that are sharded over them (`DTensor`)."""

from blockopt.distributed.ranks import agreed, mean_over_ranks, num_ranks, rank, reshard
from blockopt.distributed.shards import (
    Reduced,
    full,
    is_sharded,
    largest_over_ranks,
    local,
    local_part,
    placed_like,
    sums_over_ranks,
)

__all__ = [
    "Reduced",
    "agreed",
    "full",
    "is_sharded",
    "largest_over_ranks",
    "local",
    "local_part",
    "mean_over_ranks",
    "num_ranks",
    "placed_like",
    "rank",
    "reshard",
    "sums_over_ranks",
]
