"""Factors before attention: narrow linear maps whose results only make queries, keys and values.

DeepSeek's latent attention and adapters of low rank make a query by two maps in a row. The last one
has the heads; the one before has the same role, and is one block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockopt.blocks.layouts import Layout, Layouts
from blockopt.blocks.watch.forward_graph import ForwardGraph, Op, Value
from blockopt.blocks.watch.linear_maps import LinearMap, parameters_of, walk_on
from blockopt.blocks.watch.parameter_labels import ParameterLabels
from blockopt.blocks.watch.probes import Side, pull
from blockopt.blocks.watch.storage_order import Fed


def label_factors(
    graph: ForwardGraph, maps: dict[Op, LinearMap], made: Layouts, weights: ParameterLabels
) -> Layouts:
    """Find the maps whose results enter only maps that make queries, keys and values.

    Of several roles, `value` comes first, as for the latent of keys and values.

    Args:
        graph: The pass.
        maps: Its linear maps.
        made: The layouts of the weights that make queries, keys and values.
        weights: Takes the labels of maps of which a part enters others.

    Returns:
        The layouts of maps that enter others as a whole.
    """
    found: Layouts = {}
    for linear in maps.values():
        if linear.out_size >= linear.in_size or _is_added(linear, graph, maps):
            continue
        entered = [maps[op] for op in walk_on(linear.output, maps) if op in maps]
        roles = {role for after in entered for role in _roles(after, graph, made)}
        if not roles or not roles <= {"query", "key", "value"}:
            continue
        role = next(role for role in ("value", "key", "query") if role in roles)
        enters = _entering_units(linear, entered)
        if bool(enters.all()):
            found |= {p: Layout((role,), None) for p in parameters_of(linear.weight, graph)}
            continue
        fed: frozenset[Fed] = frozenset({Fed(role, -1, None)})
        units = [tuple(unit) for unit in torch.ones_like(enters).nonzero().tolist()]
        labels = {unit: fed if enters[unit] else frozenset() for unit in units}
        weights.add(linear.weight, tuple(axis for _, axis in linear.out_axes), labels)
    return found


def _is_added(linear: LinearMap, graph: ForwardGraph, maps: dict[Op, LinearMap]) -> bool:
    """Whether what a linear map returns is added to something else before it enters another."""
    reached: set[Value] = {linear.output}
    for op in graph.ops:
        if op in maps or op.multiplies_activations or reached.isdisjoint(op.inputs):
            continue
        if op.name in ("add", "sub") and not reached.issuperset(op.activations):
            return True
        reached.update(op.outputs)
    return False


def _entering_units(linear: LinearMap, entered: list[LinearMap]) -> Tensor:
    """Which units of a linear map enter one of the others."""
    side = Side(linear.output.tensor, tuple(axis for axis, _ in linear.out_axes))
    enters = torch.zeros([side.tensor.shape[axis] for axis in side.axes], dtype=torch.bool)
    for after in entered:
        tensor = after.input.tensor
        sizes = side.size(pull(tensor, side.tensor, Side(tensor, ()).signs()), side.axes)
        enters |= sizes > 1e-6 * sizes.max()
    return enters


def _roles(linear: LinearMap, graph: ForwardGraph, made: Layouts) -> set[str]:
    """The roles of a map's weight, {"other"} if it makes neither queries, keys nor values."""
    layouts = [made.get(parameter) for parameter in parameters_of(linear.weight, graph)]
    return {
        role
        for layout in layouts
        for role in (layout.roles if isinstance(layout, Layout) else ("other",))
    }
