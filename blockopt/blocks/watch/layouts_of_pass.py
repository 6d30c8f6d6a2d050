"""The layout of every parameter that one forward pass explains."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor, nn

from blockopt.blocks.layouts import Ambiguity, Layout, Layouts, merge_heads
from blockopt.blocks.split import Split
from blockopt.blocks.watch import embeddings
from blockopt.blocks.watch.attention import (
    AttentionCall,
    attention_calls,
    biases_of,
    label_attention,
)
from blockopt.blocks.watch.feed_forward import feed_forwards, routers
from blockopt.blocks.watch.forward_graph import ForwardGraph, recorded_pass
from blockopt.blocks.watch.linear_maps import (
    LinearMap,
    along_unit_axes,
    coordinates,
    linear_maps,
    parameters_of,
)
from blockopt.blocks.watch.low_rank import label_factors
from blockopt.blocks.watch.norms import norm_parameters
from blockopt.blocks.watch.parallel_mlps import label_parallel_mlps
from blockopt.blocks.watch.stacked_roles import with_outputs
from blockopt.blocks.watch.storage_order import row_layout
from blockopt.blocks.watch.two_factors import first_factors
from blockopt.blocks.watch.without_softmax import calls_without_softmax


class SeenInPass(NamedTuple):
    """What one pass shows.

    Attributes:
        layouts: The layouts of the parameters that it explains.
        shared_roles: The roles of those that have several, of which layouts tell one.
        multiplied: The parameters that activations are multiplied by, explained or not. Left out
            are those that are a part of an explained weight, such as factors that are merged.
        attends: Whether there was any attention.
    """

    layouts: Layouts
    shared_roles: dict[Tensor, set[str]]
    multiplied: list[Tensor]
    attends: bool


def layouts_of_pass(
    model: nn.Module, example: Any, *, per_head: bool, per_row: Collection[str]
) -> SeenInPass:
    """Run `model` once on `example`, and return the layouts of the parameters that it explains.

    Raises:
        ValueError: If the example does not run the model, or not so that derivatives tell heads.
    """
    with recorded_pass(model, example) as graph:
        if not any(value.kind == "weight" for op in graph.ops for value in op.inputs):
            raise ValueError(
                f"Invalid example: it uses no parameter of {type(model).__name__}. Must be what "
                "this very model is called with, or a function that calls it, not a copy."
            )
        maps = linear_maps(graph)
        calls = attention_calls(graph, maps)
        _check_calls(calls)
        calls += calls_without_softmax(graph, maps, calls)
        weights, biases, outputs = label_attention(graph, maps, calls)
        out_of_parallel = label_parallel_mlps(maps, weights, outputs, per_row)
        factors = label_factors(graph, maps, weights.layouts(), weights)
        made, taking = factors | weights.layouts(), outputs.layouts()
        attention: Layouts = {
            **_as_biases(biases.layouts()),
            **taking,
            **made,
            **with_outputs(made, taking),
        }
        for linear in maps.values():
            attention |= _biases_like(linear, made, graph)
        if not per_head:
            attention = {p: _without_heads(layout) for p, layout in attention.items()}
        found: Layouts = dict(attention)
        users = {linear: parameters_of(linear.weight, graph) for linear in maps.values()}
        for linear in maps.values():
            if not found.keys().isdisjoint(users[linear]) and taking.keys() & users[linear]:
                found = _whole_biases(linear, graph) | found
        taken = {linear for linear, ps in users.items() if not attention.keys().isdisjoint(ps)}
        for second, first in first_factors(maps).items():
            if second not in taken and taking.keys() & users[first]:
                taken.add(second)
                found = _whole(users[second], "output") | found
        for linear in out_of_parallel:
            taken.add(linear)
            found = _row_layouts(linear, ["mlp_out"] * linear.out_size, graph, per_row) | found
        outs = set()
        for mlp in feed_forwards(maps, taken):
            outs.add(mlp.out)
            taken |= {mlp.out, *(linear for linear, _ in mlp.into)}
            for linear, role in mlp.factors:
                taken.add(linear)
                found = _whole(users[linear], role) | found
            for linear, roles in (*mlp.into, (mlp.out, ["mlp_out"] * mlp.out.out_size)):
                found = _row_layouts(linear, roles, graph, per_row) | found
        for linear in routers(graph, maps, outs):
            if linear not in taken:
                taken.add(linear)
                rows = _row_layouts(linear, ["router"] * linear.out_size, graph, per_row)
                found = _whole(users[linear], "router") | rows | found
        biases_at_end: Layouts = {}
        for linear in maps.values():
            biases_at_end |= _whole_biases(linear, graph)
        of_stacks = {bias: layout for bias, layout in biases_at_end.items() if bias.ndim > 1}
        found = _ends(graph, maps, taken, bool(calls), per_row) | of_stacks | found
        found = biases_at_end | found
        for linear in maps.values():
            found = _merged_factors(users[linear], found) | found
        multiplied = {
            parameter: None
            for linear, parameters in users.items()
            for parameter in parameters
            if linear.input.kind == "activation"
            if parameter in found or found.keys().isdisjoint(parameters)
        }
    return SeenInPass(found, weights.shared_roles(), list(multiplied), bool(calls))


def _check_calls(calls: list[AttentionCall]) -> None:
    """Raise `ValueError` if derivatives cannot tell anything about any attention."""
    if calls and not any(call.output.value.tensor.requires_grad for call in calls):
        raise ValueError(
            "The model ran without gradients, by which heads are told apart. Find its blocks "
            "without torch.no_grad in its code, and without use_reentrant=True in activation "
            "checkpointing."
        )
    if calls and not any(role == "query" for call in calls for role, _ in call.operands):
        raise ValueError(
            "Invalid example: attention saw a single token, or weights that do not depend on its "
            "scores. Must have two or more tokens, so that queries and keys can be told apart."
        )


def _ends(
    graph: ForwardGraph,
    maps: dict[Any, LinearMap],
    taken: set[LinearMap],
    attends: bool,
    per_row: Collection[str],
) -> Layouts:
    """Layouts of what stands before the first layer and after the last, and of norms."""
    found: Layouts = {}
    if attends:  # only a transformer's first and last maps are an embedding and a head
        for linear in embeddings.from_inputs(graph, maps, taken):
            if linear not in taken:
                found |= _patch_layouts(linear, graph, per_row)
        for linear in embeddings.logits(maps):
            if linear not in taken:
                found |= _row_layouts(linear, ["head"] * linear.out_size, graph, per_row)
        for roles in (
            embeddings.added_by_position(graph),
            embeddings.put_before_tokens(graph, maps),
        ):
            found |= {parameter: Layout((role,), None) for parameter, role in roles.items()}
    for table, role in embeddings.looked_up(graph, maps).items():
        if table.ndim == 2:
            found[table] = row_layout([role] * table.shape[0], 0, per_row)
    return {p: Layout(("norm",), None) for p in norm_parameters(graph)} | found


def _as_biases(layouts: Layouts) -> Layouts:
    """Layouts of biases that are cut like their weight, whose `Ambiguity` says it for both."""
    return {
        bias: layout._replace(roles=("bias",) * len(layout.roles))
        for bias, layout in layouts.items()
        if isinstance(layout, Layout)
    }


def _biases_like(linear: LinearMap, made: Layouts, graph: ForwardGraph) -> Layouts:
    """Layouts of the biases of one dimension, which are cut like the outputs of their weight."""
    found: Layouts = {}
    for parameter in parameters_of(linear.weight, graph):
        layout = made.get(parameter)
        if isinstance(layout, Layout) and layout.split and layout.split.stack == 1:
            split = layout.split._replace(dim=0)
            for bias in _whole_biases(linear, graph):
                if bias.shape[0] == split.length:
                    found[bias] = Layout(("bias",) * len(layout.roles), split)
    return found


def _without_heads(layout: Layout | Ambiguity) -> Layout | Ambiguity:
    if isinstance(layout, Ambiguity) or layout.split is None:
        return layout
    return layout._replace(split=merge_heads(layout.split))


def _whole(parameters: list[Tensor], role: str) -> Layouts:
    return {parameter: Layout((role,)) for parameter in parameters}


def _whole_biases(linear: LinearMap, graph: ForwardGraph) -> Layouts:
    """Biases that are added after the sum over heads, so that they belong to none of them.

    Those of stacked matrices have the dimensions of these without that of inputs.
    """
    weights = [[n for n in p.shape if n > 1] for p in parameters_of(linear.weight, graph)]
    of_stacks = [shape[:i] + shape[i + 1 :] for shape in weights for i in range(len(shape))]
    return {
        parameter: Layout(("bias",), None)
        for bias, _ in biases_of(linear)
        for parameter in parameters_of(bias, graph)
        if parameter.ndim == 1 or [n for n in parameter.shape if n > 1] in of_stacks
    }


def _merged_factors(parameters: list[Tensor], found: Layouts) -> Layouts:
    """Layouts of the factors that are merged into an explained weight, and have no units of it."""
    roles = {r: None for p in parameters if isinstance(x := found.get(p), Layout) for r in x.roles}
    role = next((role for role in ("value", "mlp_in", *roles) if role in roles), None)
    factors = [p for p in parameters if p.ndim > 1 and p not in found]
    return {} if role is None else _whole(factors, role)


def _patch_layouts(linear: LinearMap, graph: ForwardGraph, per_row: Collection[str]) -> Layouts:
    if linear.op.name != "convolution":
        return _row_layouts(linear, ["embedding"] * linear.out_size, graph, per_row)
    kernel, stride = linear.weight.tensor.shape[2:], linear.op.args[3]
    if list(kernel) != list(stride):
        return {}
    found = {p: Layout(("embedding",), None) for p in parameters_of(linear.weight, graph)}
    return found | _whole_biases(linear, graph)


def _row_layouts(
    linear: LinearMap, roles: list[str], graph: ForwardGraph, per_row: Collection[str]
) -> Layouts:
    """Layouts of a weight with a role for each of its outputs, and of its bias."""
    found: Layouts = {}
    for parameter in parameters_of(linear.weight, graph):
        # Of stacked matrices the first axis numbers the matrices, the last the units.
        axes = tuple(axis for _, axis in linear.out_axes)[-1:]
        sent = coordinates(linear.weight, parameter)
        for dim, coordinate in enumerate(sent):
            along = None if coordinate is None else along_unit_axes(coordinate, axes)
            in_order = None if along is None else _in_order(along.tolist(), roles, dim, parameter)
            if in_order is not None:
                found[parameter] = _stacked(row_layout(in_order, dim, per_row), dim, parameter)
                break
    layout = next(iter(found.values()), None)
    if isinstance(layout, Layout) and (layout.split is None or layout.split.stack == 1):
        split = None if layout.split is None else layout.split._replace(dim=0)
        for bias in _whole_biases(linear, graph):
            if bias.shape[0] == linear.out_size:
                found[bias] = Layout(("bias",) * len(layout.roles), split)
    return found


def _in_order(along: list[int], roles: list[str], dim: int, parameter: Tensor) -> list[str] | None:
    """The role at each coordinate of a dimension, None if units do not lie along it.

    Units of stacked matrices may follow one another, matrix by matrix.
    """
    stacks = (
        parameter.ndim == 3 and dim > 0 and len(along) == parameter.shape[0] * parameter.shape[dim]
    )
    roles_at: list[set[str]] = [set() for _ in range(parameter.shape[dim])]
    for unit, coordinate in enumerate(along):
        if coordinate >= 0:
            roles_at[coordinate].add(roles[unit])
    told = all(len(found) == 1 for found in roles_at)
    if not told or not (stacks or len(along) == parameter.shape[dim]):
        return None
    return [role for found in roles_at for role in found]


def _stacked(layout: Layout, dim: int, parameter: Tensor) -> Layout:
    """The layout of a parameter of three dimensions, which stacks a matrix for each expert."""
    if parameter.ndim != 3 or dim == 0:
        return layout
    split = layout.split or Split(dim, (parameter.shape[dim],), (1,))
    return layout._replace(split=split._replace(stack=parameter.shape[0]))
