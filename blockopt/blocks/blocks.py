"""The blocks of one parameter: a role for each section, its layer, and where it is cut."""

from __future__ import annotations

from typing import Any, NamedTuple

from blockopt.blocks.split import Split

ROLES = (
    *("embedding", "position", "query", "key", "value", "output"),
    *("mlp_in", "mlp_gate", "mlp_out", "norm", "bias", "head", "other"),
)
ROW_ROLES = ("embedding", "position", "head", "mlp_in", "mlp_gate", "mlp_out")


class Blocks(NamedTuple):
    """The blocks of one parameter.

    Attributes:
        roles: The role of each section of `split`, or of the whole parameter.
        layer: Index of the layer that holds the parameter, None outside the layers.
        split: Where the parameter is cut, None for one block.
    """

    roles: tuple[str, ...]
    layer: int | None = None
    split: Split | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return 1 if self.split is None else self.split.num_blocks

    @property
    def block_roles(self) -> tuple[str, ...]:
        """The role of each block.

        Example:
            >>> Blocks(("key", "value"), split=Split(dim=0, sizes=(8, 8), parts=(2, 2))).block_roles
            ('key', 'key', 'value', 'value')
        """
        if self.split is None:
            return self.roles
        once = tuple(
            role for role, parts in zip(self.roles, self.split.parts) for _ in range(parts)
        )
        return once * (1 if self.split.pooled else self.split.repeat)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` unless these blocks fit a parameter of `shape`."""
        unknown = [role for role in self.roles if role not in ROLES]
        if unknown or not self.roles:
            raise ValueError(f"Invalid roles={self.roles}. Must be among {', '.join(ROLES)}.")
        sections = 1 if self.split is None else len(self.split.sizes)
        if len(self.roles) != sections:
            raise ValueError(
                f"Invalid roles={self.roles}. Must be one for each of the {sections} sections of "
                "the split."
            )
        if self.split is not None:
            self.split.check(shape)


def to_plain(blocks: Blocks) -> tuple[Any, ...]:
    """`blocks` as nested tuples of strings and numbers, which every checkpoint format takes."""
    return (
        tuple(blocks.roles),
        blocks.layer,
        None if blocks.split is None else tuple(blocks.split),
    )


def from_plain(plain: tuple[Any, ...]) -> Blocks:
    """The inverse of `to_plain`; lists in place of tuples, as JSON gives them, are taken too."""
    roles, layer, split = plain
    if split is None:
        return Blocks(tuple(roles), layer)
    dim, sizes, parts, repeat, pooled = split
    return Blocks(tuple(roles), layer, Split(dim, tuple(sizes), tuple(parts), repeat, pooled))
