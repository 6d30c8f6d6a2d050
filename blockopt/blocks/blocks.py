"""The blocks of one parameter: a role for each section, its layer, and where it is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from blockopt.blocks.split import Split

ROLES = (
    *("embedding", "position", "query", "key", "value", "output", "gate"),
    *("mlp_in", "mlp_gate", "mlp_out", "router", "norm", "bias", "head", "other"),
)
ROW_ROLES = ("embedding", "position", "head", "mlp_in", "mlp_gate", "mlp_out", "router")
MATRIX_ROLES = frozenset(
    {"query", "key", "value", "output", "gate", "mlp_in", "mlp_gate", "mlp_out"}
)
TABLE_ROLES = frozenset({"embedding", "head"})


class Blocks(NamedTuple):
    """The blocks of one parameter.

    Attributes:
        roles: The role of each section of `split`, or of the whole parameter. If the matrices of a
            stack have different roles, those of the first matrix, then those of the second, and so
            on.
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
        sections, repeat = len(self.split.sizes), 1 if self.split.pooled else self.split.repeat
        found: tuple[str, ...] = ()
        for start in range(0, len(self.roles), sections):  # matrix by matrix, if they differ
            of_matrix = zip(self.roles[start : start + sections], self.split.parts)
            found += tuple(role for role, parts in of_matrix for _ in range(parts)) * repeat
        return found * (self.split.num_blocks // len(found))

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` unless these blocks fit a parameter of `shape`."""
        unknown = [role for role in self.roles if role not in ROLES]
        if unknown or not self.roles:
            raise ValueError(f"Invalid roles={self.roles}. Must be among {', '.join(ROLES)}.")
        sections = 1 if self.split is None else len(self.split.sizes)
        stack = 1 if self.split is None else self.split.stack
        if len(self.roles) not in (sections, sections * stack):
            raise ValueError(
                f"Invalid roles={self.roles}. Must be one for each of the {sections} sections of "
                "the split" + (f", or for each of its {stack} matrices." if stack > 1 else ".")
            )
        if self.split is not None:
            self.split.check(shape)

    def hidden_matrices(self, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """What a parameter of `shape` is to Muon: `(number, rows, columns)` of hidden matrices.

        A stack of experts is a batch of matrices. What has further dimensions, such as a 1x1
        convolution or heads in a dimension of their own, is a matrix with its first and its last
        dimensions flattened, so that it is as square as can be. The matrices of the sections of a
        split are parts of these. None stands for a parameter that is no hidden matrix, such as an
        embedding, a norm or a vector.

        Example:
            >>> Blocks(("mlp_in",), split=Split(1, (32,), (32,), stack=8)).hidden_matrices(
            ...     (8, 32, 16)
            ... )
            (8, 32, 16)
            >>> Blocks(("query",)).hidden_matrices((64, 64, 1, 1))
            (1, 64, 64)
            >>> Blocks(("query",), split=Split(1, (4,), (4,))).hidden_matrices((64, 4, 16))
            (1, 64, 64)
            >>> Blocks(("norm",)).hidden_matrices((64,)) is None
            True
        """
        if not set(self.roles) <= MATRIX_ROLES or sum(size > 1 for size in shape) < 2:
            return None
        stack = 1 if self.split is None else self.split.stack
        return stack, *flattened(shape[1:] if stack > 1 else shape)

    def is_table(self, shape: tuple[int, ...]) -> bool:
        """Whether a parameter of `shape` is an embedding or a head with a block per token.

        It has enough tokens to tell how its features vary together. Tokens are rows, or columns if
        the weight is stored input first.

        Example:
            >>> Blocks(("embedding",), split=Split(0, (100,), (100,))).is_table((100, 16))
            True
            >>> Blocks(("embedding",), split=Split(0, (8,), (8,))).is_table((8, 16))
            False
        """
        if len(shape) != 2 or not set(self.roles) <= TABLE_ROLES:
            return False
        dim = 0 if self.split is None else self.split.dim
        return shape[dim] == self.num_blocks and shape[dim] >= shape[1 - dim]


def flattened(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of the most nearly square matrix that a tensor of `shape` stores as such.

    Example:
        >>> flattened((64, 16)), flattened((64, 32, 1, 1)), flattened((4, 16, 64))
        ((64, 16), (64, 32), (64, 64))
    """
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(cuts, key=lambda cut: (max(cut), -cut[0]))


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
    dim, sizes, parts, *rest = split  # a checkpoint of an earlier version has no `stack`
    return Blocks(tuple(roles), layer, Split(dim, tuple(sizes), tuple(parts), *rest))
