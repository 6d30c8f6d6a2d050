"""What the entries of each parameter belong to, collected from all products that use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby

from torch import Tensor

from blockopt.blocks.layouts import Ambiguity, Layout, Layouts
from blockopt.blocks.split import Split
from blockopt.blocks.watch.forward_graph import ForwardGraph, Value
from blockopt.blocks.watch.linear_maps import along_unit_axes, coordinates, parameters_of
from blockopt.blocks.watch.stacked_roles import StackedLabels
from blockopt.blocks.watch.storage_order import Fed, Label, are_equal, layout_of

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
        self._stacks: set[Tensor] = set()
        self._units: dict[Value, dict[tuple[int, ...], frozenset[Fed]]] = {}
        self._by_matrix: dict[Tensor, StackedLabels] = {}

    def add(self, weight: Value, axes: tuple[int, ...], labels: UnitLabels) -> None:
        """Add the labels of the units of a weight, which its `axes` number."""
        units = self._units.setdefault(weight, {})
        units.update({unit: units.get(unit, frozenset()) | fed for unit, fed in labels.items()})
        for parameter in parameters_of(weight, self._graph):
            by_dim = self._sets.setdefault(
                parameter, {d: [set() for _ in range(n)] for d, n in enumerate(parameter.shape)}
            )
            mixed = self._mixed.setdefault(parameter, set())
            sent = coordinates(weight, parameter)
            if parameter.ndim == 3 and parameter.shape[2] > 1 and _is_chosen(sent[0], axes):
                self._stacks.add(parameter)
            alongs = [None if c is None else along_unit_axes(c, axes) for c in sent]
            self._add_by_matrix(parameter, alongs, labels)
            for dim, along in enumerate(alongs):
                if along is None:
                    by_dim.pop(dim, None)
                elif dim in by_dim and not _spread(along, labels, by_dim[dim]):
                    mixed.add(dim)

    def _add_by_matrix(
        self, parameter: Tensor, alongs: list[Tensor | None], labels: UnitLabels
    ) -> None:
        first = alongs[0]
        if parameter.ndim < 3 or first is None:
            return
        stack = self._by_matrix.setdefault(parameter, StackedLabels(parameter))
        fed = [found for _, found in sorted(labels.items())]
        for dim, along in enumerate(alongs):
            if dim > 0 and along is not None:
                stack.add(first, dim, along, fed)

    def units_of(self, weight: Value) -> UnitLabels:
        """The labels of the units of a weight, none if it has no labels."""
        return self._units.get(weight, {})

    def layouts(self) -> Layouts:
        """The layout of every parameter that has labels, an `Ambiguity` if they have no order."""
        found: Layouts = {}
        for parameter, by_dim in self._sets.items():
            stack = self._by_matrix.get(parameter)
            if stack is not None and (stacked := stack.layout(self._label)) is not None:
                found[parameter] = stacked
                continue
            labels = self._along_one_dimension(by_dim, self._mixed[parameter])
            if labels is not None:
                dim, along = labels
                along = _without_gaps(along)
                layout = _stack(along, dim, parameter) or layout_of(along, dim)
                if len({label.role for label in along}) == 1 and not are_equal(along):
                    layout = None
                if layout and layout.split and parameter in self._stacks and dim > 0:
                    layout = layout._replace(split=layout.split._replace(stack=parameter.shape[0]))
                found[parameter] = layout or _no_order(along)
        return found

    def shared_roles(self) -> dict[Tensor, set[str]]:
        """The roles of parameters all of whose entries have several, as if queries were also keys.

        Which one comes first in `layouts` is no more than a choice.
        """
        found = {}
        for parameter, by_dim in self._sets.items():
            entries = [{f.role for f in fed} for sets in by_dim.values() for fed in sets if fed]
            if entries and len(roles := set.intersection(*entries)) > 1:
                found[parameter] = roles
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


def _is_chosen(first: Tensor | None, axes: tuple[int, ...]) -> bool:
    """Whether the first dimension of a parameter numbers matrices, as those of experts.

    The product then sees one of them, or all of them side by side along an axis without units.
    """
    if first is None:
        return False
    return first.ndim == 3 and 0 not in axes if first.ndim > 2 else bool(first.min() == first.max())


def _without_gaps(labels: list[Label]) -> list[Label]:
    """Labels with the gaps filled that activation functions leave, which shut single units.

    A gap within a block belongs to it. One between two blocks belongs to those that it makes as
    long as the longest of their role.
    """
    filled: list[Label] = []
    for before, run, after in _runs(labels):
        within = run[0].role == "other" and before and before[:1] == after[:1]
        filled += before[:1] * len(run) if within else run
    labels, filled = filled, []
    sizes = Counter(labels)
    longest = {
        role: max(n for label, n in sizes.items() if label.role == role) for role, _ in sizes
    }
    for before, run, after in _runs(labels):
        if run[0].role != "other" or not (before or after):
            filled += run
            continue
        gap = len(run)
        left, right = (longest[e[0].role] - sizes[e[0]] if e else 0 for e in (before, after))
        fits = left + right >= gap
        filled += before[:1] * min(left, gap) + after[:1] * (gap - left) if fits else run
    return filled


def _runs(labels: list[Label]) -> list[tuple[list[Label], list[Label], list[Label]]]:
    """Each run of one label, with the runs before and after it."""
    runs = [list(run) for _, run in groupby(labels)]
    return list(zip([[], *runs], runs, [*runs[1:], []]))


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
