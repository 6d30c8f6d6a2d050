"""What the blocks of a model are, and how they are grouped and shown."""

from blockopt.blocks.attention import is_attention
from blockopt.blocks.blocks import (
    MATRIX_ROLES,
    ROLES,
    ROW_ROLES,
    Blocks,
    flattened,
    from_plain,
    to_plain,
)
from blockopt.blocks.describe import describe
from blockopt.blocks.find import checked_blocks, find_blocks
from blockopt.blocks.groups import BlockGroup, Level, block_groups, by_name, per_block, sum_groups
from blockopt.blocks.linear_maps import is_named, read_linear
from blockopt.blocks.overrides import UnknownBlocksError, as_text, parse_override, pattern_of
from blockopt.blocks.param_groups import param_groups
from blockopt.blocks.split import (
    Split,
    block_numel,
    block_sum,
    block_sum_along,
    expand,
    expand_along,
)

__all__ = [
    "MATRIX_ROLES",
    "ROLES",
    "ROW_ROLES",
    "BlockGroup",
    "Blocks",
    "Level",
    "Split",
    "UnknownBlocksError",
    "as_text",
    "block_groups",
    "block_numel",
    "block_sum",
    "block_sum_along",
    "by_name",
    "checked_blocks",
    "describe",
    "expand",
    "expand_along",
    "find_blocks",
    "flattened",
    "from_plain",
    "is_attention",
    "is_named",
    "param_groups",
    "parse_override",
    "pattern_of",
    "per_block",
    "read_linear",
    "sum_groups",
    "to_plain",
]
