"""MLPs beside attention that share a linear map with it, into both or out of both.

PaLM and the larger vision transformers make queries, keys, values and hidden units by one map, and
add up what comes out of both by another. What attention leaves free of such maps is the MLP.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby

import torch

from blockopt.blocks.watch.feed_forward import (
    hidden_maps,
    is_activated,
    is_added,
    is_per_token,
    reached_units,
    with_roles,
)
from blockopt.blocks.watch.forward_graph import Op
from blockopt.blocks.watch.linear_maps import LinearMap, walk_back
from blockopt.blocks.watch.parameter_labels import ParameterLabels, UnitLabels
from blockopt.blocks.watch.probes import Side
from blockopt.blocks.watch.storage_order import Fed

Unit = tuple[int, ...]


def label_parallel_mlps(
    maps: dict[Op, LinearMap],
    weights: ParameterLabels,
    outputs: ParameterLabels,
    per_row: Collection[str],
) -> list[LinearMap]:
    """Add labels of hidden units to maps of which a part serves attention.

    Args:
        maps: The linear maps of the pass.
        weights: Labels of the outputs of maps; takes those of hidden units.
        outputs: Labels of the inputs of maps that take what attention returns; takes the others.
        per_row: The roles that are cut into rows.

    Returns:
        The maps out of such units alone.
    """
    own = []
    for out in maps.values():
        labels = outputs.units_of(out.weight)
        free = _side_by_side(labels)
        if not labels and _shares_a_map_in(out, maps, weights):
            own.append(out)
            _label_hidden(_hidden(out, None, maps, weights), weights, per_row)
        if not free or len(free) == len(labels) or not is_activated(out.input, maps):
            continue
        hidden = _hidden(out, free, maps, weights)
        if not hidden:
            continue
        _label_hidden(hidden, weights, per_row)
        entering = frozenset({Fed("mlp_out", -2, None)})
        added = {unit: entering if unit in free else frozenset[Fed]() for unit in labels}
        outputs.add(out.weight, tuple(axis for _, axis in out.in_axes), added)
    return own


def _shares_a_map_in(out: LinearMap, maps: dict[Op, LinearMap], weights: ParameterLabels) -> bool:
    """Whether a map takes hidden units that a map makes beside queries, keys or values."""
    found = hidden_maps(out, maps, {linear: linear for linear in maps.values()})
    labels = [weights.units_of(into.weight) for into in found]
    shared = [any(units.values()) and not all(units.values()) for units in labels]
    fits = any(shared) and all(into.in_size == out.out_size for into in found)
    if not fits or not is_added(out, maps) or not is_per_token(out, found, maps):
        return False
    signs = Side(out.input.tensor, ()).signs()
    for into, units in zip(found, labels):
        side = Side(into.output.tensor, tuple(axis for axis, _ in into.out_axes))
        reached = reached_units(side, out.input.tensor, signs)
        if any(units.get(tuple(unit)) for unit in reached.nonzero().tolist()):
            return False  # it takes what attention is made of
    return True


def _label_hidden(
    hidden: list[tuple[LinearMap, dict[Unit, str]]],
    weights: ParameterLabels,
    per_row: Collection[str],
) -> None:
    for into, roles in hidden:
        known = weights.units_of(into.weight)
        made = {
            unit: frozenset({Fed(role, -2, unit if role in per_row else None)})
            for unit, role in roles.items()
        }
        taken = dict.fromkeys(known, frozenset[Fed]())
        weights.add(into.weight, tuple(axis for _, axis in into.out_axes), taken | made)


def _side_by_side(labels: UnitLabels) -> set[Unit]:
    """The free units if they lie side by side; scattered ones are gates that happen to be shut."""
    runs = [list(run) for _, run in groupby(sorted(labels), key=lambda unit: not labels[unit])]
    free = [run for run in runs if not labels[run[0]]]
    longest = max(free, key=len, default=[])
    return set(longest) if 2 * len(longest) > sum(map(len, free)) else set()


def _hidden(
    out: LinearMap, free: set[Unit] | None, maps: dict[Op, LinearMap], weights: ParameterLabels
) -> list[tuple[LinearMap, dict[Unit, str]]]:
    """The maps that make the free inputs of `out`, each with the role of its hidden units.

    All inputs are free if `free` is None.
    """
    entering = Side(out.input.tensor, tuple(axis for axis, _ in out.in_axes))
    sizes = [entering.tensor.shape[axis] for axis in entering.axes]
    mask = torch.full(sizes, free is None)
    for unit in free or ():
        mask[unit] = True
    shape = [n if a in entering.axes else 1 for a, n in enumerate(entering.tensor.shape)]
    cotangent = entering.signs() * mask.reshape(shape).to(entering.tensor)
    made_by = dict.fromkeys(maps[v.op] for v in walk_back(out.input, maps) if v.op in maps)
    sides = {m: Side(m.output.tensor, tuple(axis for axis, _ in m.out_axes)) for m in made_by}
    feeds = {m: reached_units(side, entering.tensor, cotangent) for m, side in sides.items()}
    found = [m for m in made_by if bool(feeds[m].any())]
    hidden = []
    for into, names in with_roles(out, found, maps) if found else ():
        known = weights.units_of(into.weight)
        units = [tuple(unit) for unit in torch.ones_like(feeds[into]).nonzero().tolist()]
        roles = {u: role for u, role in zip(units, names) if not known.get(u)}
        hidden.append((into, roles))
    return hidden
