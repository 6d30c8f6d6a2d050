"""Many processes: what ranks agree on, and parameters that are sharded over them (`DTensor`)."""

from blockopt.distributed.agreement import (
    are_together,
    forward_together,
    is_same_everywhere,
    meet,
    pass_together,
    together,
    union_over_ranks,
)
from blockopt.distributed.ranks import (
    average_gradients,
    mean_over_ranks,
    num_ranks,
    rank,
    reshard,
)
from blockopt.distributed.shards import (
    Reduced,
    compute_device,
    full,
    is_sharded,
    local,
    local_part,
    placed_like,
    sharers,
    sums_over_ranks,
    widened,
)

__all__ = [
    "Reduced",
    "are_together",
    "average_gradients",
    "compute_device",
    "forward_together",
    "full",
    "is_same_everywhere",
    "is_sharded",
    "local",
    "local_part",
    "mean_over_ranks",
    "meet",
    "num_ranks",
    "pass_together",
    "placed_like",
    "rank",
    "reshard",
    "sharers",
    "sums_over_ranks",
    "together",
    "union_over_ranks",
    "widened",
]
