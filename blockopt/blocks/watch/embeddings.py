"""Weights at the two ends of a model: looked up, added by position, before tokens, or logits."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor

from blockopt.blocks.watch.forward_graph import PRODUCTS, ForwardGraph, Op, Value
from blockopt.blocks.watch.linear_maps import LinearMap, parameters_of, walk_back, walk_on


def looked_up(graph: ForwardGraph, maps: dict[Op, LinearMap]) -> dict[Tensor, str]:
    """The role of every table that is looked up: `embedding`, or `position`.

    Positions do not depend on the input, or count up by one along the sequence while the indices of
    another table do not.
    """
    lookups = [
        (table, index)
        for table, index in _lookups(graph)
        if not any(v.op and v.op.name == "topk" for v in walk_back(index, maps))  # of an expert
    ]
    free = any(index.kind == "activation" and not _counts(index) for _, index in lookups)
    roles: dict[Tensor, str] = {}
    for table, index in lookups:
        fixed = index.kind == "constant" and index.tensor.unique().numel() > 1
        role = "position" if fixed or (free and _counts(index)) else "embedding"
        for parameter in parameters_of(table, graph):
            if roles.get(parameter) != "embedding":
                roles[parameter] = role
    return roles


def _lookups(graph: ForwardGraph) -> Iterator[tuple[Value, Value]]:
    """Every table of rows, and the indices of the rows that were taken."""
    for op in graph.ops:
        index: Value | None = None
        if op.name in ("embedding", "embedding_bag", "_embedding_bag"):
            index = op.args[1]
        elif op.name == "index" and len(op.args[1]) == 1:
            index = op.args[1][0]
        elif op.name == "index_select" and op.args[1] == 0:
            index = op.args[2]
        is_table = (
            bool(op.inputs) and op.inputs[0].kind == "weight" and op.inputs[0].tensor.ndim == 2
        )
        if index is not None and is_table and not index.tensor.is_floating_point():
            yield op.inputs[0], index


def _counts(index: Value) -> bool:
    values = index.tensor
    return values.ndim > 0 and values.shape[-1] > 2 and bool((values.diff(dim=-1) == 1).all())


def added_by_position(graph: ForwardGraph) -> dict[Tensor, str]:
    """Weights that are added to activations, with their role: vectors are biases.

    What also enters a linear map by itself is no position, but a token, as in a Perceiver. What is
    added to a product with a weight of its shape is the shift to that scale.
    """
    tokens = {
        parameter
        for op in graph.ops
        if op.name in PRODUCTS and not op.activations
        for parameter in parameters_of(op.args[-2 if "mm" in op.name else 0], graph)
    }
    found: dict[Tensor, str] = {}
    for op in graph.ops:
        if op.name != "add" or not op.activations:
            continue
        for value in op.inputs:
            if (scale := _scale_before(op, value)) is not None:
                found |= dict.fromkeys(parameters_of(value, graph), "bias")
                found |= dict.fromkeys(parameters_of(scale, graph), "norm")
            elif value.kind == "weight":
                is_vector = sum(n > 1 for n in value.tensor.shape) < 2
                for parameter in parameters_of(value, graph):
                    if is_vector and parameter.ndim == 1:
                        found.setdefault(parameter, "bias")
                    elif not is_vector and parameter.ndim > 1:
                        found[parameter] = "embedding" if parameter in tokens else "position"
    return found


def _scale_before(add: Op, shift: Value) -> Value | None:
    """The weight by which an activation was multiplied to which one of the same shape is added."""
    before = next((value.op for value in add.activations), None)
    if shift.kind != "weight" or before is None or before.name != "mul":
        return None
    return next(
        (v for v in before.inputs if v.kind == "weight" and v.tensor.shape == shift.tensor.shape),
        None,
    )


def put_before_tokens(graph: ForwardGraph, maps: dict[Op, LinearMap]) -> dict[Tensor, str]:
    """Weights that are concatenated with activations: tokens, or keys and values like `bias_k`."""
    found: dict[Tensor, str] = {}
    for op in graph.ops:
        weights = [value for value in op.inputs if value.kind == "weight"]
        if op.name != "cat" or not weights or not op.activations:
            continue
        entered = [after for after in walk_on(op.outputs[0], maps) if after not in maps]
        is_key = any(after.multiplies_activations for after in entered)
        for value in weights:
            for parameter in parameters_of(value, graph):
                found.setdefault(parameter, "bias" if is_key else "embedding")
    return found


def from_inputs(
    graph: ForwardGraph, maps: dict[Op, LinearMap], taken: Collection[LinearMap]
) -> list[LinearMap]:
    """Linear maps of patches or features of the model's input: those that see nothing else.

    An input that layers take as it is, or add to, is embedded already and has no such maps.

    Args:
        graph: The pass.
        maps: Its linear maps.
        taken: Those of attention and MLPs.
    """
    inputs = {linear: _inputs(linear.input, maps) for linear in maps.values()}
    embedded = {value for linear in taken for value in inputs.get(linear, ())}
    added = (op for linear in taken for op in walk_on(linear.output, maps) if op.name == "add")
    multiplied = (op for op in graph.ops if op.multiplies_activations)
    for op in (*added, *multiplied):
        embedded.update(*(_inputs(value, maps) for value in op.activations))
    return [m for m, values in inputs.items() if values and embedded.isdisjoint(values)]


def _inputs(value: Value, maps: dict[Op, LinearMap]) -> list[Value]:
    """The inputs of the model that alone make a value, none if it is made of anything else."""
    made_of = list(walk_back(value, maps))
    ends = [v for v in made_of if v.op is None or not v.op.activations]
    others = any(v.op and (v.op in maps or v.op.multiplies_activations) for v in made_of)
    is_input = all(v.op is None and v.tensor.is_floating_point() for v in ends)
    return ends if is_input and not others else []


def logits(maps: dict[Op, LinearMap]) -> list[LinearMap]:
    """Linear maps that change the width, and whose results enter neither others nor a residual."""
    found = []
    for linear in maps.values():
        after = list(walk_on(linear.output, maps))
        is_last = not any(op in maps or op.multiplies_activations for op in after)
        fits = linear.in_size != linear.out_size and linear.is_of_points
        if fits and is_last and not _is_residual(linear, after):
            found.append(linear)
    return found


def _is_residual(linear: LinearMap, after: list[Op]) -> bool:
    """Whether the result of a map is added to something that the map itself is made of."""
    stack = [v for op in after if op.name == "add" for v in op.activations]
    added: set[Value] = set()
    while stack:
        value = stack.pop()
        if value not in added:
            added.add(value)
            if value.op is not None and value.op.name == "add":  # of several branches, one by one
                stack += value.op.activations
    return not added.isdisjoint(walk_back(linear.input, {}, through_products=True))
