"""The layout of one parameter, what cannot be told about it, and the layouts of a linear map."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor

from blockopt.blocks.linear_maps import Linear
from blockopt.blocks.split import Split


class Layout(NamedTuple):
    """Roles of a parameter's sections, and how it is cut (`None`: one block)."""

    roles: tuple[str, ...]
    split: Split | None = None


class Ambiguity(NamedTuple):
    """Why a parameter cannot be read in one way, and a layout that fits its shape."""

    reason: str
    suggestion: Layout


Layouts = dict[Tensor, Layout | Ambiguity]


def merge_heads(split: Split) -> Split | None:
    """The same sections with one block each."""
    if len(split.sizes) == 1 and split.stack == 1:
        return None
    return split._replace(parts=(1,) * len(split.sizes), pooled=split.repeat > 1)


def without_heads(layouts: Layouts) -> Layouts:
    """The same layouts with one block for each of their sections."""
    return {
        parameter: Layout(layout.roles, _merged(layout.roles, layout.split))
        if isinstance(layout, Layout) and layout.split is not None
        else layout
        for parameter, layout in layouts.items()
    }


def _merged(roles: tuple[str, ...], split: Split) -> Split | None:
    """One block per section, with a split even for one if it tells that inputs are stored first."""
    merged = merge_heads(split)
    usual = 1 if "output" in roles else 0  # the dimension of `nn.Linear` that has the heads
    if merged is None and split.dim != usual:
        return Split(split.dim, (split.length,), (1,))
    return merged


def bias_layout(layout: Layout) -> Layout:
    """The layout of the bias of a map that is cut on its output side."""
    split = None if layout.split is None else layout.split._replace(dim=0)
    return Layout(("bias",) * len(layout.roles), split)


def whole_layouts(linear: Linear, role: str) -> Layouts:
    """A linear map of one block."""
    bias: Layouts = {} if linear.bias is None else {linear.bias: Layout(("bias",))}
    return {linear.weight: Layout((role,)), **bias}


def output_cut(linear: Linear, roles: tuple[str, ...], split: Split) -> Layouts:
    """A linear map cut on its output side, and its bias cut alike."""
    layout = Layout(roles, split._replace(dim=linear.out_dim))
    bias: Layouts = {} if linear.bias is None else {linear.bias: bias_layout(layout)}
    return {linear.weight: layout, **bias}


def input_cut(linear: Linear, role: str, parts: int) -> Layouts:
    """A linear map cut into equal parts on its input side.

    Its bias is added after the sum over them and belongs to none. A convolution in groups stores
    the inputs of all groups in one place, and is not cut.
    """
    if (
        not linear.in_size
        or linear.in_size % parts
        or linear.weight.shape[linear.in_dim] != linear.in_size
    ):
        return whole_layouts(linear, role)
    split = Split(linear.in_dim, (linear.in_size,), (parts,))
    return whole_layouts(linear, role) | {linear.weight: Layout((role,), split)}


def heads_cut(linear: Linear, role: str, heads: int) -> Layouts:
    """A linear map with as many equal heads on its output side, or whole if it has not."""
    if heads < 2 or linear.out_size < heads or linear.out_size % heads:
        return whole_layouts(linear, role)
    return output_cut(linear, (role,), Split(0, (linear.out_size,), (heads,)))


def rows_layouts(linear: Linear, roles: tuple[str, ...], per_row: Collection[str]) -> Layouts:
    """Layouts of a linear map with one section per role, cut into units for roles in `per_row`."""
    sizes = (linear.out_size // len(roles),) * len(roles)
    parts = tuple(size if role in per_row else 1 for size, role in zip(sizes, roles))
    if parts == (1,) or linear.out_size < len(roles):
        return whole_layouts(linear, roles[0])
    return output_cut(linear, roles, Split(0, sizes, parts))


def ambiguous(linear: Linear, reason: str, suggestion: Layout) -> Layouts:
    """A linear map that cannot be read in one way; its bias is one all the same."""
    bias: Layouts = {} if linear.bias is None else {linear.bias: Layout(("bias",))}
    return {linear.weight: Ambiguity(reason, suggestion), **bias}
