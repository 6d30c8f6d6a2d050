"""Attention without a softmax in a forward pass: `(q kᵀ * decay) v`, or `q (kᵀ v)`.

Retention multiplies queries with keys first, linear attention keys with values. Which of them a
product of two activations is, the axis tells along which it sums: features, or tokens.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from blockopt.blocks.watch.attention import AttentionCall, Operand, query_is_left
from blockopt.blocks.watch.forward_graph import ForwardGraph, Op, Value
from blockopt.blocks.watch.linear_maps import LinearMap, walk_back
from blockopt.blocks.watch.probes import Side, pull

_SUMS = ("add", "sub", "cat", "stack", "lerp")


def calls_without_softmax(
    graph: ForwardGraph, maps: dict[Op, LinearMap], calls: Collection[AttentionCall]
) -> list[AttentionCall]:
    """All attention of a pass that has no softmax, in order.

    Args:
        graph: The pass.
        maps: Its linear maps.
        calls: The attention that has one.
    """
    found: list[AttentionCall] = []
    outputs = {call.output.value for call in calls}
    for op in graph.ops:
        if not op.multiplies_activations or op.is_empty or not outputs.isdisjoint(op.outputs):
            continue
        for product, other, product_left in (
            (op.args[-2], op.args[-1], True),
            (op.args[-1], op.args[-2], False),
        ):
            inner = _made_by(product, maps, outputs)
            call = None if inner is None else _read(op, product, other, product_left, inner, maps)
            if call is not None:
                found.append(call)
                outputs.update(op.outputs)
                break
    return found


def _made_by(value: Value, maps: dict[Op, LinearMap], outputs: set[Value]) -> Op | None:
    """The one product of activations that a factor is made of, None if there is more or less.

    It may be multiplied by what maps make, which say how fast the past fades, and added to nothing.
    """
    made_of = list(walk_back(value, maps))
    products = [v for v in made_of if v.op and v.op.multiplies_activations and v.tensor.numel()]
    if len(products) != 1 or products[0].op in maps or not outputs.isdisjoint(products):
        return None
    added = any(v.op and v.op.name in _SUMS and _adds(v.op, products[0], maps) for v in made_of)
    return None if added else products[0].op


def _adds(op: Op, product: Value, maps: dict[Op, LinearMap]) -> bool:
    """Whether an operation adds what is made of a product to what maps make."""
    parts = [set(walk_back(value, maps)) for value in op.activations]
    of_product = [product in part for part in parts]
    of_maps = [any(v.op in maps for v in part) for part in parts]
    return any(of_product) and any(m and not p for m, p in zip(of_maps, of_product))


def _read(
    op: Op,
    product: Value,
    other: Value,
    product_left: bool,
    inner: Op,
    maps: dict[Op, LinearMap],
) -> AttentionCall | None:
    last, inner_last = product.tensor.ndim - 1, inner.outputs[0].tensor.ndim - 1
    left, right = inner.args[-2:]
    sums_tokens = _is_of_tokens(left, inner_last, maps)
    if sums_tokens is None or sums_tokens != _is_of_tokens(right, inner_last - 1, maps):
        return None
    # The axis of the product that stays, and the one that is summed; of the other, the reverse.
    stays, summed = (last - 1, last) if product_left else (last, last - 1)
    is_left = query_is_left(
        product.tensor, summed if sums_tokens else stays, inner.outputs[0].tensor
    )
    if is_left is None:
        return None
    if sums_tokens:  # a matrix of keys and values, times queries
        factors = (Operand(left, inner_last - 1), Operand(right, inner_last))
        key, value = factors if is_left else factors[::-1]
        query, result = Operand(other, stays), Operand(op.outputs[0], stays)
    else:  # scores, times values
        factors = (Operand(left, inner_last), Operand(right, inner_last - 1))
        query, key = factors if is_left else factors[::-1]
        value, result = Operand(other, summed), Operand(op.outputs[0], summed)
        if not _is_of_tokens(other, stays, maps):
            return None
    gates = Operand(product, last)  # of maps that enter it elsewhere than by its factors
    operands = [("query", query), ("key", key), ("value", value), ("gate", gates)]
    return AttentionCall(operands, result)


def _is_of_tokens(value: Value, axis: int, maps: dict[Op, LinearMap]) -> bool | None:
    """Whether an axis of a factor runs over tokens; None if no linear map makes it.

    One index of it then depends on few tokens of the map's output, as a norm over tokens leaves it.
    """
    for made in walk_back(value, maps):
        if made.op not in maps:
            continue
        linear = maps[made.op]
        units = Side(linear.output.tensor, tuple(a for a, _ in linear.out_axes))
        side = Side(value.tensor, ())
        at_one, at_all = (
            _effective_number(units.size(pull(value.tensor, units.tensor, c), units.others))
            for c in (side.at((axis,), (0,)), side.signs())
        )
        if at_all:
            return at_one < at_all / 2
    return None


def _effective_number(sizes: Tensor) -> float:
    """How many entries share the sum of squares: 1 if one has all of it."""
    squares = sizes.square()
    fourth = float(squares.square().sum())
    return float(squares.sum()) ** 2 / fourth if fourth > 0 else 0.0
