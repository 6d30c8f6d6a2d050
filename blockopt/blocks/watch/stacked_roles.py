"""Matrices of different roles in one parameter, numbered by its first dimension.

So research code stores queries, keys and values: (3, width, width), or (3, heads, size, width).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from blockopt.blocks.layouts import Layout, Layouts
from blockopt.blocks.split import Split
from blockopt.blocks.watch.storage_order import Fed, Label, layout_of


class StackedLabels:
    """What each coordinate of each matrix belongs to.

    Args:
        parameter: Of three dimensions or more.
    """

    def __init__(self, parameter: Tensor) -> None:
        self._shape = parameter.shape
        self._sets: dict[tuple[int, int, int], set[Fed]] = {}

    def add(self, first: Tensor, dim: int, along: Tensor, fed: list[frozenset[Fed]]) -> None:
        """Add what units feed, whose coordinates on the first dimension and on `dim` are given."""
        for matrix, coordinate, found in zip(first.flatten(), along.flatten(), fed, strict=True):
            place = int(matrix), dim, int(coordinate)
            self._sets.setdefault(place, set()).update(found)

    def layout(self, label_of: Callable[[set[Fed]], Label]) -> Layout | None:
        """The layout of the parameter, None unless each of its matrices has another role."""
        matrices, dims = range(self._shape[0]), range(1, len(self._shape))
        found = {
            dim: [
                [label_of(self._sets.get((m, dim, i), set())) for i in range(self._shape[dim])]
                for m in matrices
            ]
            for dim in dims
        }
        roles = [{x.role for dim in dims for x in found[dim][m]} - {"other"} for m in matrices]
        named = tuple(next(iter(r), "other") for r in roles)
        if len({*named} - {"other"}) < 2 or len({*named}) < len(named) or max(map(len, roles)) > 1:
            return None
        split = Split(1, (self._shape[1],), (1,), stack=len(matrices))
        for dim, labels in found.items():
            layouts = [layout_of(of_matrix, dim) for of_matrix in labels]
            splits = {None if layout is None else layout.split for layout in layouts}
            one = next(iter(splits)) if len(splits) == 1 else None
            if one is not None and one.num_blocks * len(matrices) > split.num_blocks:
                split = one._replace(stack=len(matrices))
        return Layout(named, split)


def with_outputs(made: Layouts, taking: Layouts) -> Layouts:
    """Stacks that hold output projections beside queries, keys and values, as one block each.

    Heads are on the other side of an output projection, so that no split fits all matrices.

    Args:
        made: The layouts of weights that make queries, keys and values.
        taking: Those of weights that take what attention returns.
    """
    found: Layouts = {}
    for parameter in made.keys() & taking.keys():
        layout, output = made[parameter], taking[parameter]
        if not isinstance(layout, Layout) or not isinstance(output, Layout):
            continue
        stack = 1 if layout.split is None else layout.split.stack
        if len(layout.roles) == stack > 1:
            roles = tuple(output.roles[0] if role == "other" else role for role in layout.roles)
            found[parameter] = Layout(roles, Split(1, (parameter.shape[1],), (1,), stack=stack))
    return found
