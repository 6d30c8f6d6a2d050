"""Attention in a forward pass: which weights made the queries, keys and values of each head.

Attention is two products of activations with a softmax between them, `softmax(q kᵀ) v`. The units
of a linear map that feed one row of `q` are one head of its weight; so for `k` and `v`, and the
same on the input side of the linear map that takes what attention returns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blockopt.blocks.watch.forward_graph import ForwardGraph, Op, Value
from blockopt.blocks.watch.linear_maps import VIEWS, LinearMap, walk_back, walk_on
from blockopt.blocks.watch.mixed_tokens import is_one_feature
from blockopt.blocks.watch.parameter_labels import ParameterLabels, UnitLabels
from blockopt.blocks.watch.probes import (
    Feeding,
    Side,
    are_heads,
    feeding,
    pull,
    push,
    stopped_at,
    strong,
)
from blockopt.blocks.watch.storage_order import Fed

# A softmax, or what research code puts in its place; a softmax may also be written out.
_BETWEEN = ("_softmax", "_safe_softmax", "softmax", "sigmoid", "relu")
_SUMS = ("add", "sub", "where", "lerp")
_ROLES = ("query", "key", "value", "gate", "mlp_gate", "mlp_in")


class Operand(NamedTuple):
    """A query, key or value as a product sees it, and the axis along which its features lie.

    If attention is among channels, their tokens are its features, and all channels of a head are
    one row.
    """

    value: Value
    feature_axis: int
    is_of_channels: bool = False

    @property
    def rows(self) -> Side:
        """The tensor, whose rows are numbered by all axes but that of features."""
        tensor = self.value.tensor
        inside = {tensor.ndim - 1, tensor.ndim - 2} if self.is_of_channels else {self.feature_axis}
        return Side(tensor, tuple(a for a in range(tensor.ndim) if a not in inside))


class AttentionCall(NamedTuple):
    """What one attention multiplied: `operands` are pairs of a role and an operand."""

    operands: list[tuple[str, Operand]]
    output: Operand


def attention_calls(graph: ForwardGraph, maps: dict[Op, LinearMap]) -> list[AttentionCall]:
    """All attention of a pass, in order."""
    calls: list[AttentionCall] = []
    stops = dict(maps)  # without those that mix the heads of scores
    outputs: set[Value] = set()
    for op in graph.ops:
        if op in stops and _mixes_scores(stops[op], stops, outputs):
            del stops[op]
        if not op.multiplies_activations or op.is_empty:
            continue
        for weights, values, weights_left in (
            (op.args[-2], op.args[-1], True),
            (op.args[-1], op.args[-2], False),
        ):
            scores = _scores(weights, stops)
            if scores:
                calls.append(_read_call(op, weights, values, weights_left, scores, stops))
                outputs.update(op.outputs)
                break
    return calls


def _mixes_scores(linear: LinearMap, stops: dict[Op, LinearMap], outputs: set[Value]) -> bool:
    """Whether a square map takes nothing but scores or attention weights, as of talking heads."""
    if linear.in_size != linear.out_size:
        return False
    made_of = list(walk_back(linear.input, stops))
    products = [value for value in made_of if value.op and value.op.multiplies_activations]
    maps = any(value.op in stops for value in made_of)
    return bool(products) and not maps and outputs.isdisjoint(products)


def _scores(weights: Value, maps: dict[Op, LinearMap]) -> list[Value]:
    """The products that attention weights are made of, none if they are no attention weights."""
    made_of = [value for value in walk_back(weights, maps) if value.op is not None]
    exponentials = any(value.op.name == "exp" for value in made_of if value.op)
    found: dict[Value, None] = {}
    for value in made_of:
        assert value.op is not None
        if value.op.name in _BETWEEN or (exponentials and _divides_by_sum(value.op)):
            before = walk_back(value, maps)
            products = (v for v in before if v.op and v.op.multiplies_activations)
            found |= {v: None for v in products if v.tensor.numel()}
    return list(found)


def _divides_by_sum(op: Op) -> bool:
    below = op.args[1] if op.name == "div" else None
    return isinstance(below, Value) and below.op is not None and below.op.name == "sum"


def _read_call(
    op: Op,
    weights: Value,
    values: Value,
    weights_left: bool,
    scores: list[Value],
    maps: dict[Op, LinearMap],
) -> AttentionCall:
    last = weights.tensor.ndim - 1
    query_axis, feature_axis = (last - 1, last) if weights_left else (last, last - 1)
    operands = []
    for score in scores:
        assert score.op is not None
        left, right = (Operand(v, axis) for v, axis in zip(score.op.args[-2:], (last, last - 1)))
        is_left = query_is_left(weights.tensor, query_axis, score.tensor)
        if is_left is not None:
            query, key = (left, right) if is_left else (right, left)
            operands += [("query", query), ("key", key)]
    operands.append(("value", Operand(values, feature_axis)))
    output = Operand(op.outputs[0], feature_axis)
    queries = [operand for role, operand in operands[:1] if role == "query"]
    pairs = [(maps[v.op], q) for q in queries for v in walk_back(q.value, maps) if v.op in maps]
    if pairs and all(is_one_feature(m, q.value.tensor, q.feature_axis) for m, q in pairs):
        operands = [(role, operand._replace(is_of_channels=True)) for role, operand in operands]
        output = output._replace(is_of_channels=True)
    return AttentionCall(operands, output)


def _projections(operand: Operand, maps: dict[Op, LinearMap]) -> list[LinearMap]:
    """The linear maps that make an operand, before those that only mix its tokens."""
    found, stack = [], [operand.value]
    while stack:
        for value in walk_back(stack.pop(), maps):
            if value.op not in maps:
                continue
            linear, tensor = maps[value.op], operand.value.tensor
            if operand.is_of_channels or not is_one_feature(linear, tensor, operand.feature_axis):
                found.append(linear)
            else:
                stack.append(linear.input)
    return found


def query_is_left(weights: Tensor, query_axis: int, scores: Tensor) -> bool | None:
    """Whether the left factor of `scores` holds the queries; None if derivatives do not tell.

    The weights of one query depend on the scores of one query with several keys. One token does not
    tell, nor do scores without gradients, by which sparse attention chooses what it attends to.
    """
    side, length = Side(weights, (query_axis,)), weights.shape[query_axis]
    for query in dict.fromkeys((length - 1, 0, length // 2, length // 4)):
        derivative = pull(weights, scores, side.at(side.axes, (query,))).abs()
        reached = derivative > 1e-6 * derivative.max()
        by_slice = reached.reshape(-1, *reached.shape[-2:])  # of all heads and sequences
        left, right = (by_slice.any(dim=dim).sum(dim=1) for dim in (2, 1))
        one_query = int(((left == 1) & (right > 1)).sum())
        one_key = int(((left > 1) & (right == 1)).sum())
        if one_query != one_key:
            return one_query > one_key
    return _strongest_is_left(weights, query_axis, scores)


def _strongest_is_left(weights: Tensor, query_axis: int, scores: Tensor) -> bool | None:
    """The same for weights that depend on all scores, each most on its own, as of slot attention.

    There a softmax over queries is followed by a mean over keys.
    """
    key_axis = 2 * weights.ndim - 3 - query_axis  # the other one of the last two
    place = [0] * weights.ndim
    place[query_axis] = weights.shape[query_axis] - 1
    if not place[query_axis] or weights.shape[key_axis] < 2:
        return None
    one = torch.zeros_like(weights)
    one[tuple(place)] = 1
    derivative = pull(weights, scores, one).abs()
    row, column = (derivative == derivative.max()).nonzero()[0, -2:].tolist()
    if not derivative.max() > 0 or 0 not in (row, column) or row == column:
        return None
    return bool(row > column)


def label_attention(
    graph: ForwardGraph, maps: dict[Op, LinearMap], calls: list[AttentionCall]
) -> tuple[ParameterLabels, ParameterLabels, ParameterLabels]:
    """Label weights by what they make for which head, biases likewise, and outputs by head.

    Returns:
        Labels of weights, of their biases, and of output projections.
    """
    weights, biases = ParameterLabels(graph, _ROLES), ParameterLabels(graph, _ROLES)
    outputs = ParameterLabels(graph, ("output", "mlp_out"))
    for number, call in enumerate(calls):
        for role, operand in call.operands:
            projections = _projections(operand, maps)
            for linear in projections:
                others = [o.output.tensor for o in projections if o is not linear]
                with stopped_at(others):  # of two maps in a row, the last one makes the heads
                    _label_projection(number, role, operand, linear, maps, weights, biases)
        for linear in consumers_of(call.output.value, graph, maps, calls):
            _label_output(number, call.output, linear, maps, weights, outputs)
    return weights, biases, outputs


def _label_projection(
    number: int,
    role: str,
    operand: Operand,
    linear: LinearMap,
    maps: dict[Op, LinearMap],
    weights: ParameterLabels,
    biases: ParameterLabels,
) -> None:
    units = Side(linear.output.tensor, tuple(axis for axis, _ in linear.out_axes))
    source, target = units.tensor, operand.value.tensor
    found = feeding(
        units,
        operand.rows,
        units_of=lambda rows: pull(target, source, rows),
        rows_of=lambda tangent: push(source, target, tangent),
    )
    if found is None:
        return
    fed = found.units
    if not are_heads(fed):  # one row for all units
        fed = fed & ~_feeds_linear_maps(linear, units, maps)
    if not fed.any():
        return
    labels = _unit_labels(role, number, found.rows, fed)
    weights.add(linear.weight, tuple(axis for _, axis in linear.out_axes), labels)
    for bias, total in biases_of(linear):
        axes = tuple(axis for axis, size in enumerate(bias.tensor.shape) if size > 1)
        offset = total.tensor.ndim - bias.tensor.ndim
        if all(total.tensor.shape[axis + offset] == bias.tensor.shape[axis] for axis in axes):
            along = Side(total.tensor, tuple(axis + offset for axis in axes))
            biases.add(bias, axes, _bias_labels(role, number, operand.rows, along, found.rows))


def _feeds_linear_maps(linear: LinearMap, units: Side, maps: dict[Op, LinearMap]) -> Tensor:
    """Which units also enter a linear map: then what they feed is no head, but hidden state."""
    result = torch.zeros([units.tensor.shape[a] for a in units.axes], dtype=torch.bool)
    entered = list(walk_on(linear.output, maps))
    products = [op.outputs[0].tensor for op in entered if op.multiplies_activations]
    for op in entered:
        if op in maps and not result.all():
            entering = maps[op].input.tensor
            signs = Side(entering, ()).signs()
            with stopped_at(products):
                sizes = units.size(pull(entering, units.tensor, signs), units.axes)
            result |= sizes > 1e-6 * sizes.max()
    return result


def _bias_labels(
    role: str, number: int, target: Side, total: Side, rows: list[tuple[int, ...]]
) -> UnitLabels:
    """Labels of a bias, from the sum in which it takes part and whose axes it lies along."""

    def squares(draw: int) -> Tensor:
        cotangents = (target.at(target.axes, row, draw) for row in rows)
        pulled = (pull(target.tensor, total.tensor, cotangent) for cotangent in cotangents)
        return torch.stack([total.size(derivative, total.axes) ** 2 for derivative in pulled])

    return _unit_labels(role, number, rows, strong(squares))


def _unit_labels(role: str, number: int, rows: list[tuple[int, ...]], fed: Tensor) -> UnitLabels:
    """The labels of units, from which of them feed which row."""
    rows_of: dict[tuple[int, ...], set[Fed]] = {
        tuple(unit): set() for unit in torch.ones_like(fed[0]).nonzero().tolist()
    }
    for row, *unit in fed.nonzero().tolist():
        rows_of[tuple(unit)].add(Fed(role, number, rows[row]))
    return {unit: frozenset(fed) for unit, fed in rows_of.items()}


def biases_of(linear: LinearMap) -> list[tuple[Value, Value]]:
    """The weights that are added to what a linear map returns, each with the sum."""
    op = linear.op
    position = {"addmm": 0, "baddbmm": 0, "linear": 2, "convolution": 2}.get(op.name)
    given = op.args[position] if position is not None and len(op.args) > position else None
    found: list[tuple[Value, Value]] = []
    if given is not None and given.kind == "weight":
        found.append((given, linear.output))
    stack = [linear.output]
    while stack:
        for consumer in stack.pop().consumers:
            scales = consumer.name in ("mul", "div") and len(consumer.activations) == 1
            if consumer.name in VIEWS or scales:
                stack += consumer.outputs
            elif consumer.name == "add":
                weights = (value for value in consumer.inputs if value.kind == "weight")
                found += [(weight, consumer.outputs[0]) for weight in weights]
    return found


def consumers_of(
    output: Value, graph: ForwardGraph, maps: dict[Op, LinearMap], calls: list[AttentionCall]
) -> list[LinearMap]:
    """The linear maps that take what attention returned, before it is added to anything else.

    Queries do not count as anything else: the Set Transformer adds them, head by head.
    """
    queries = (o.value for call in calls for role, o in call.operands if role == "query")
    reached = {call.output.value for call in calls}.union(*(_rearranged(q, maps) for q in queries))
    of_this = {output}
    found = []
    for op in graph.ops:
        if reached.isdisjoint(op.inputs) or op.multiplies_activations:
            continue
        if op in maps:
            if maps[op].input in of_this:
                found.append(maps[op])
            continue
        if op.name in _SUMS and not reached.issuperset(op.activations):
            continue
        reached.update(op.outputs)
        if not of_this.isdisjoint(op.inputs):
            of_this.update(op.outputs)
    return found


def _rearranged(value: Value, maps: dict[Op, LinearMap]) -> set[Value]:
    """The values of which this is a view, up to a linear map and its bias; none if it is more."""
    found: set[Value] = set()
    stack = [value]
    while stack:
        value = stack.pop()
        if value.op is None:
            return set()
        if value.op in maps or value in found:
            continue
        has_bias = value.op.name == "add" and len(value.op.activations) == 1
        if not has_bias and value.op.name not in (*VIEWS, "cat", "stack"):
            return set()
        found.add(value)
        stack += value.op.activations
    return found


def _label_output(
    number: int,
    output: Operand,
    linear: LinearMap,
    maps: dict[Op, LinearMap],
    weights: ParameterLabels,
    outputs: ParameterLabels,
) -> None:
    if not linear.in_axes:
        return
    units = Side(linear.input.tensor, tuple(axis for axis, _ in linear.in_axes))
    source, target = output.value.tensor, units.tensor
    found = feeding(
        units,
        output.rows,
        units_of=lambda rows: push(source, target, rows),
        rows_of=lambda cotangent: pull(target, source, cotangent),
    )
    if found is None:
        return
    labels = _unit_labels("output", number, found.rows, found.units)
    outputs.add(linear.weight, tuple(axis for _, axis in linear.in_axes), labels)
    for value in walk_back(linear.input, maps):
        if value.op in maps:
            _label_gate(number, maps[value.op], units, found, weights)


def _label_gate(
    number: int, gate: LinearMap, units: Side, found: Feeding, weights: ParameterLabels
) -> None:
    """Label a linear map by the heads whose output it multiplies on the way to `units`."""
    source = Side(gate.output.tensor, tuple(axis for axis, _ in gate.out_axes))
    sizes = []
    for fed in found.units:
        cotangent = units.at(units.others, found.token)
        shape = [cotangent.shape[a] if a in units.axes else 1 for a in range(cotangent.ndim)]
        of_head = cotangent * fed.reshape(shape).to(cotangent)
        sizes.append(source.size(pull(units.tensor, source.tensor, of_head), source.axes))
    stacked = torch.stack(sizes)
    if stacked.max() > 0:
        labels = _unit_labels(
            "gate", number, found.rows, strong(lambda _: stacked.square(), of_one_role=False)
        )
        weights.add(gate.weight, tuple(axis for _, axis in gate.out_axes), labels)
