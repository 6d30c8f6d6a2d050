"""Groups of blocks that share a number: by role, by layer, by tensor, or each block alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from blockopt.blocks.blocks import Blocks
from blockopt.checks import check_choice

Level = Literal["role", "layer", "tensor", "head"]


class BlockGroup(NamedTuple):
    """What the blocks of a group have in common, None where they have nothing.

    Attributes:
        role: Their role.
        layer: The layer that holds them.
        parameter: The parameter that holds them.
        head: The number of a single block among those of its role in its parameter.

    Example:
        >>> print(BlockGroup("query"))
        query
        >>> print(BlockGroup("query", 3))
        layer 3 query
        >>> print(BlockGroup("query", 3, "h.3.attn.weight", 1))
        h.3.attn.weight query head 1
    """

    role: str
    layer: int | None = None
    parameter: str | None = None
    head: int | None = None

    def __str__(self) -> str:
        if self.parameter is None:
            return self.role if self.layer is None else f"layer {self.layer} {self.role}"
        if self.head is None:
            return f"{self.parameter} {self.role}"
        unit = "head" if self.role in ("query", "key", "value", "output") else "block"
        return f"{self.parameter} {self.role} {unit} {self.head}"


def block_groups(
    blocks: Mapping[str, Blocks], by: Level
) -> tuple[list[BlockGroup], dict[str, Tensor]]:
    """Return the groups at a level, and `{parameter name: number of the group of each block}`.

    Args:
        blocks: What `find_blocks(model)` returns.
        by: "role", all blocks of a role; "layer", those of a role in layers of one index; "tensor",
            those of a role in one parameter; "head", each block alone.

    Example:
        >>> from blockopt.blocks import Split
        >>> blocks = {"w": Blocks(("query", "key"), 0, Split(dim=0, sizes=(4, 4), parts=(2, 2)))}
        >>> groups, numbers = block_groups(blocks, "tensor")
        >>> [str(group) for group in groups], numbers["w"]
        (['w query', 'w key'], tensor([0, 0, 1, 1]))
    """
    check_choice("by", by, get_args(Level))
    found: dict[BlockGroup, int] = {}
    numbers = {}
    for name, entry in blocks.items():
        if by == "head":
            seen, several = Counter[str](), Counter(entry.block_roles)
            for role in entry.block_roles:
                head = seen[role] if several[role] > 1 else None
                found[BlockGroup(role, entry.layer, name, head)] = len(found)
                seen[role] += 1
            numbers[name] = torch.arange(len(found) - entry.num_blocks, len(found))
        else:
            layer, parameter = {
                "role": (None, None),
                "layer": (entry.layer, None),
                "tensor": (entry.layer, name),
            }[by]
            groups = [BlockGroup(role, layer, parameter) for role in entry.roles]
            numbers[name] = per_block(
                [found.setdefault(group, len(found)) for group in groups], entry
            )
    return list(found), numbers


def per_block(values: list[Any], entry: Blocks) -> Tensor:
    """One value for each role of a parameter, given to each block of that role."""
    if entry.split is None:
        return torch.tensor(values)
    repeat = 1 if entry.split.pooled else entry.split.repeat
    of_matrices = torch.tensor(values).view(-1, len(entry.split.sizes))
    once = of_matrices.repeat_interleave(torch.tensor(entry.split.parts), dim=1).repeat(1, repeat)
    return once.flatten().repeat(entry.num_blocks // once.numel())


def by_name(values: Tensor, blocks: Mapping[str, Blocks]) -> dict[str, Tensor]:
    """The values of all blocks in a row, as `{parameter name: those of its blocks}`."""
    return dict(zip(blocks, values.split([entry.num_blocks for entry in blocks.values()])))


def sum_groups(values: Mapping[str, Tensor], numbers: Mapping[str, Tensor], count: int) -> Tensor:
    """The sum over the blocks of each group, in float64 on the CPU.

    Args:
        values: `{parameter name: one value per block}`.
        numbers: The group of each block, as `block_groups` returns it.
        count: How many groups there are.
    """
    total = torch.zeros(count, dtype=torch.float64)
    for name, value in values.items():
        total.index_add_(0, numbers[name], value.to("cpu", torch.float64))
    return total
