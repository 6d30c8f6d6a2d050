"""From what each entry along a dimension belongs to, to the `Layout` that says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from itertools import groupby
from typing import NamedTuple

from blockopt.blocks.layouts import Layout
from blockopt.blocks.split import Split


class Fed(NamedTuple):
    """Something that a unit feeds, or is fed by: a head of an attention call in a role."""

    role: str
    call: int
    row: Hashable


class Label(NamedTuple):
    """The role of an entry along a dimension, and the block of that role that it belongs to."""

    role: str
    block: Hashable


class _Section(NamedTuple):
    role: str
    size: int
    parts: int


def layout_of(labels: Sequence[Label], dim: int) -> Layout | None:
    """The layout of a parameter whose entries along `dim` have these labels.

    A pattern that comes back with other blocks (heads stored interleaved) or with the same ones
    (heads stored last) is a repeat. Where blocks of equal size have no `Split`, those of a role
    become one. None stands for labels without any order.

    Example:
        >>> labels = [Label(role, 0) for role in ("query", "query", "key")]
        >>> layout_of(labels, dim=0).split
        Split(dim=0, sizes=(2, 1), parts=(1, 1))
        >>> last = [Label("query", head) for _ in range(8) for head in range(2)]
        >>> layout_of(last, dim=0).split
        Split(dim=0, sizes=(2,), parts=(2,), repeat=8, pooled=True)
    """
    found = _fit(labels, dim)
    if found is None and are_equal(labels):
        found = _fit([label._replace(block=None) for label in labels], dim)
    return found


def are_equal(labels: Sequence[Label]) -> bool:
    """Whether the blocks of each role have one size."""
    sizes = Counter(labels)
    return len({(label.role, size) for label, size in sizes.items()}) == len(
        {label.role for label in sizes}
    )


def _fit(labels: Sequence[Label], dim: int) -> Layout | None:
    runs = [(label, len(list(run))) for label, run in groupby(labels)]
    if len({label for label, _ in runs}) == len(runs):  # no block comes back
        sections = _sections(runs)
        period = next(
            p
            for p in range(1, len(sections) + 1)
            if len(sections) % p == 0 and sections == sections[:p] * (len(sections) // p)
        )
        return _layout(sections[:period], dim, len(sections) // period, pooled=False)
    for period in range(1, len(runs) // 2 + 1):
        if len(runs) % period == 0 and runs == runs[:period] * (len(runs) // period):
            return _layout(_sections(runs[:period]), dim, len(runs) // period, pooled=True)
    return None


def _sections(runs: Sequence[tuple[Label, int]]) -> list[_Section]:
    """Neighbouring runs of one role and length as one section with several parts."""
    sections = []
    for (role, length), same in groupby(runs, key=lambda run: (run[0].role, run[1])):
        parts = len(list(same))
        sections.append(_Section(role, length * parts, parts))
    return sections


def _layout(sections: Sequence[_Section], dim: int, repeat: int, pooled: bool) -> Layout:
    roles, sizes, parts = zip(*sections)
    return Layout(roles, Split(dim, sizes, parts, repeat, pooled))


def row_layout(roles: Sequence[str], dim: int, per_row: Collection[str]) -> Layout:
    """The layout of a parameter with one unit per entry along `dim`, of these roles.

    Example:
        >>> row_layout(["mlp_gate", "mlp_in"] * 3, 0, ("mlp_gate", "mlp_in")).split
        Split(dim=0, sizes=(1, 1), parts=(1, 1), repeat=3)
    """
    labels = [Label(role, i if role in per_row else None) for i, role in enumerate(roles)]
    layout = layout_of(labels, dim) or Layout(tuple(dict.fromkeys(roles))[:1], None)
    whole = layout.split is not None and layout.split.num_blocks == 1
    return layout._replace(split=None) if whole else layout
