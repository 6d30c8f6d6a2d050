"""What the entries of each parameter belong to, collected from all products that use it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from torch import Tensor

from blockopt.blocks.layouts import Ambiguity, Layout, Layouts
from blockopt.blocks.split import Split
from blockopt.blocks.watch.forward_graph import ForwardGraph, Value
from blockopt.blocks.watch.linear_maps import along_unit_axes, coordinates, parameters_of
from blockopt.blocks.watch.storage_order import Label, layout_of


class Fed(NamedTuple):
    """Something that a unit feeds, or is fed by: a head of an attention call in a role."""

    role: str
    call: int
    row: Hashable


UnitLabels = Mapping[tuple[int, ...], frozenset[Fed]]


class ParameterLabels:
    """Labels of the entries of parameters, along each of their dimensions.

    Args:
        graph: The pass.
        roles: The roles that can occur; an entry that has several takes the first of them.
    """

    def __init__(self, graph: ForwardGraph, roles: tuple[str, ...]) -> None:
        self._graph, self._roles = graph, roles
        self._sets: dict[Tensor, dict[int, list[set[Fed]]]] = {}
        self._mixed: dict[Tensor, set[int]] = {}

    def add(self, weight: Value, axes: tuple[int, ...], labels: UnitLabels) -> None:
        """Add the labels of the units of a weight, which its `axes` number."""
        for parameter in parameters_of(weight, self._graph):
            by_dim = self._sets.setdefault(
                parameter, {d: [set() for _ in range(n)] for d, n in enumerate(parameter.shape)}
            )
            mixed = self._mixed.setdefault(parameter, set())
            for dim, coordinate in enumerate(coordinates(weight, parameter)):
                along = None if coordinate is None else along_unit_axes(coordinate, axes)
                if along is None:
                    by_dim.pop(dim, None)
                elif dim in by_dim and not _spread(along, labels, by_dim[dim]):
                    mixed.add(dim)

    def layouts(self) -> Layouts:
        """The layout of every parameter that has labels, an `Ambiguity` if they have no order."""
        found: Layouts = {}
        for parameter, by_dim in self._sets.items():
            labels = self._along_one_dimension(by_dim, self._mixed[parameter])
            if labels is not None:
                dim, along = labels
                found[parameter] = (
                    _stack(along, dim, parameter) or layout_of(along, dim) or _no_order(along)
                )
        return found

    def _along_one_dimension(
        self, by_dim: dict[int, list[set[Fed]]], mixed: set[int]
    ) -> tuple[int, list[Label]] | None:
        """The dimension that tells roles and heads apart, with the label of each of its entries."""
        labels = {dim: [self._label(fed) for fed in sets] for dim, sets in by_dim.items()}
        whole = {dim: found for dim, found in labels.items() if dim not in mixed}
        if not whole:  # heads lie along another dimension than roles: keep the roles
            whole = {
                dim: [label._replace(block=None) for label in ls] for dim, ls in labels.items()
            }
        told = {dim: found for dim, found in whole.items() if any(f.role != "other" for f in found)}
        if not told:
            return None
        dim = max(told, key=lambda dim: (len(set(told[dim])), len(told[dim])))
        return dim, told[dim]

    def _label(self, fed: set[Fed]) -> Label:
        for role in self._roles:
            heads = frozenset(f for f in fed if f.role == role)
            if heads:
                return Label(role, heads)
        return Label("other", None)


def _stack(labels: list[Label], dim: int, parameter: Tensor) -> Layout | None:
    """The layout of a parameter that stacks one matrix for each head."""
    roles = {label.role for label in labels}
    if dim != 0 or parameter.ndim != 3 or len(roles) > 1 or len(set(labels)) < len(labels):
        return None
    return Layout((*roles,), Split(1, (parameter.shape[1],), (1,), stack=len(labels)))


def _no_order(labels: list[Label]) -> Ambiguity:
    reason = "in the forward pass on `example`, its heads are of different sizes"
    return Ambiguity(reason, Layout((labels[0].role,)))


def _spread(along: Tensor, labels: UnitLabels, sets: list[set[Fed]]) -> bool:
    """Add the label of each unit at its coordinate; return whether those of a coordinate agree."""
    new: dict[int, frozenset[Fed]] = {}
    agree = True
    positions = along.flatten().tolist()
    for (_, fed), position in zip(sorted(labels.items()), positions, strict=True):
        if position < 0:
            continue
        agree &= new.setdefault(position, fed) == fed
        sets[position] |= fed
    return agree
