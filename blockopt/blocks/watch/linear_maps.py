"""The linear maps of a forward pass: which parameters they multiply by, and along which axes.

A weight may reach its product through views, casts, slices, concatenations and parametrizations.
Where each entry of a parameter ends up is found by sending its coordinates the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockopt.blocks.watch.forward_graph import PRODUCTS, ForwardGraph, Op, Value, replay

_VIEWS = (
    *("t", "transpose", "permute", "select", "slice", "unsqueeze", "squeeze", "expand", "alias"),
    *("split", "split_with_sizes", "unbind", "chunk", "narrow", "flip", "roll"),
)
_RESHAPES = ("view", "_unsafe_view", "reshape")
_COPIES = ("clone", "_to_copy", "detach", "contiguous", "lift_fresh", "copy")
VIEWS = (*_VIEWS, *_RESHAPES, *_COPIES)

Axes = tuple[tuple[int, int], ...]


class LinearMap(NamedTuple):
    """A product of an activation with a weight.

    Attributes:
        op: The product.
        input: The activation.
        weight: The weight as the product sees it.
        output: The result.
        out_axes: Pairs of an axis of `output` and the axis of `weight` that it is.
        in_axes: Pairs of an axis of `input` and the axis of `weight` that it is, empty if the
            product sees the input in parts (a convolution by groups).
    """

    op: Op
    input: Value
    weight: Value
    output: Value
    out_axes: Axes
    in_axes: Axes

    @property
    def out_size(self) -> int:
        """Number of outputs."""
        return _size(self.weight.tensor, self.out_axes)

    @property
    def in_size(self) -> int:
        """Number of inputs."""
        return _size(self.weight.tensor, self.in_axes)

    @property
    def is_of_points(self) -> bool:
        """Whether it sees one token or point at a time, unlike a convolution over several."""
        return self.op.name != "convolution" or self.weight.tensor.shape[2:].numel() == 1

    @property
    def out_width(self) -> int:
        """Number of outputs of each matrix, if the product sees a stack of them."""
        return _size(self.weight.tensor, self.out_axes[-1:])

    @property
    def in_width(self) -> int:
        """Number of inputs of each matrix."""
        return _size(self.weight.tensor, self.in_axes[-1:])


def _size(weight: Tensor, axes: Axes) -> int:
    return torch.Size(weight.shape[axis] for _, axis in axes).numel()


def linear_maps(graph: ForwardGraph) -> dict[Op, LinearMap]:
    """All products of an activation with a weight, in order."""
    found = {}
    for op in graph.ops:
        linear = _read(op) if op.name in PRODUCTS else None
        if linear is not None:
            found[op] = linear
    return found


def _read(op: Op) -> LinearMap | None:
    output = op.outputs[0]
    if op.name == "convolution":
        x, weight, groups = op.args[0], op.args[1], op.args[8]
        if weight.kind != "weight" or (groups > 1 and groups == x.tensor.shape[1]):
            return None  # a convolution of each channel alone mixes no units
        return LinearMap(op, x, weight, output, ((1, 0),), ((1, 1),) if groups == 1 else ())
    if op.name == "linear":
        x, weight = op.args[:2]
        last = x.tensor.ndim - 1
        if weight.kind != "weight":
            return None
        return LinearMap(op, x, weight, output, ((last, 0),), ((last, 1),))
    if op.name == "_grouped_mm":  # rows of the input, each times the matrix of one expert
        x, weight = op.args[:2]
        if weight.kind != "weight" or weight.tensor.ndim != 3:
            return None
        return LinearMap(op, x, weight, output, ((1, 2),), ((1, 1),))
    left, right = op.args[-2:]
    batch: Axes = ((0, 0),) if "bmm" in op.name else ()
    row, column = len(batch), len(batch) + 1
    if right.kind == "weight":
        x, weight = left, right
        out_axes, in_axes = ((column, column),), ((column, row),)
    elif left.kind == "weight":
        x, weight = right, left
        out_axes, in_axes = ((row, row),), ((row, column),)
    else:
        return None
    return LinearMap(op, x, weight, output, (*batch, *out_axes), (*batch, *in_axes))


def parameters_of(value: Value, graph: ForwardGraph) -> list[Tensor]:
    """The parameters that a weight is made of."""
    found: dict[Tensor, None] = {}
    stack, seen = [value], set()
    while stack:
        value = stack.pop()
        if value in seen or value.kind != "weight":
            continue
        seen.add(value)
        if value.op is None:
            found[value.tensor] = None
        else:
            stack += value.op.inputs
    return list(found)


def coordinates(value: Value, parameter: Tensor) -> list[Tensor | None]:
    """For each dimension of a parameter, the coordinate of every entry of a weight made of it.

    Entries that come from elsewhere have -1. The tensors are expanded, not stored. A dimension that
    cannot be followed has None.
    """
    return [_coordinate(value, parameter, dim) for dim in range(parameter.ndim)]


def _coordinate(value: Value, parameter: Tensor, dim: int) -> Tensor | None:
    shape = [1] * parameter.ndim
    shape[dim] = parameter.shape[dim]
    start = torch.arange(parameter.shape[dim]).view(shape).expand(parameter.shape)
    known: dict[Value, Tensor | None] = {}

    def follow(value: Value) -> Tensor | None:
        if value not in known:
            known[value] = start if value.tensor is parameter else _send(value, follow)
        return known[value]

    try:
        return follow(value)
    except RuntimeError:
        return None  # an operation that takes no integers


def _send(value: Value, follow: Callable[[Value], Tensor | None]) -> Tensor | None:
    """What becomes of coordinates in the operation that makes `value`."""
    op = value.op
    if op is None or value.kind == "constant":
        return None
    sources = {source: sent for source in op.inputs if (sent := follow(source)) is not None}
    if not sources:
        return None
    first = next(iter(sources.values()))
    if op.name in _COPIES:
        return first if first.shape == value.tensor.shape else None
    if op.name in _RESHAPES:
        return first.reshape(value.tensor.shape)
    if op.name == "index":
        indexed: Tensor = replay(op, lambda v: sources.get(v, v.tensor))
        return indexed
    if op.name in PRODUCTS:  # of two narrow weights, which are merged into a wide one
        return _through_product(op, sources)
    if op.name in _VIEWS or op.name in ("cat", "stack"):
        result = replay(op, lambda v: sources.get(v, torch.full(v.tensor.shape, -1)))
        results: Sequence[Tensor] = [result] if isinstance(result, Tensor) else result
        return results[_position(value, op)]
    # Elementwise: scales, normalizations and parametrizations of the weight.
    for sent in sources.values():
        if _expands(sent.shape, value.tensor.shape):
            return sent.expand(value.tensor.shape)
    return None


def _through_product(op: Op, sources: dict[Value, Tensor]) -> Tensor | None:
    """Coordinates of rows of the left factor, or of columns of the right one, or of an addend."""
    if op.name == "addmm" and op.args[0] in sources:
        return sources[op.args[0]]
    for factor, axis in zip(op.args[-2:], (-1, -2)):
        sent = sources.get(factor)
        if sent is not None and torch.equal(sent.amin(axis, True), sent.amax(axis, True)):
            return sent.narrow(axis, 0, 1).expand(op.outputs[0].tensor.shape)
    return None


def _expands(shape: torch.Size, to: torch.Size) -> bool:
    """Whether a tensor of a shape can be expanded to another, unlike a matrix to its norm."""
    ends = list(zip(reversed(shape), reversed(to)))
    return len(shape) <= len(to) and all(n in (1, m) for n, m in ends)


def _position(value: Value, op: Op) -> int:
    return next(i for i, output in enumerate(op.outputs) if output is value)


def along_unit_axes(coordinate: Tensor, axes: tuple[int, ...]) -> Tensor | None:
    """The coordinate as a function of the unit axes of a weight, None if others change it too."""
    others = [axis for axis in range(coordinate.ndim) if axis not in axes]
    first = last = coordinate
    for axis in reversed(others):
        first, last = first.select(axis, 0), last.select(axis, -1)
    return first if torch.equal(first, last) else None


def walk_back(
    value: Value, stops: dict[Op, LinearMap], *, through_products: bool = False
) -> Iterator[Value]:
    """Yield the activations that `value` is made of, up to linear maps and other products."""
    stack, seen = [value], set()
    while stack:
        value = stack.pop()
        if value in seen or value.kind != "activation":
            continue
        seen.add(value)
        yield value
        if value.op is None or value.op in stops:
            continue
        if through_products or not value.op.multiplies_activations:
            stack += value.op.inputs


def walk_on(
    value: Value, stops: dict[Op, LinearMap], *, through_products: bool = False
) -> Iterator[Op]:
    """Yield the operations that `value` enters, up to and with linear maps and other products."""
    stack, seen = [value], set()
    while stack:
        for op in stack.pop().consumers:
            if op in seen:
                continue
            seen.add(op)
            yield op
            if op not in stops and (through_products or not op.multiplies_activations):
                stack += op.outputs
