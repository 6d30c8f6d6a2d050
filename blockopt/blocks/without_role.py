"""Warnings of what has no role, and of attention that a forward pass does not show."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakSet

from torch import nn

from blockopt.blocks.blocks import Blocks
from blockopt.blocks.layouts import Ambiguity, Layout, Layouts
from blockopt.blocks.overrides import EXAMPLE_HELPS, pattern_of
from blockopt.blocks.split import block_numel
from blockopt.blocks.watch import SeenInPass

MOST_OTHER = 0.05  # share of the weights that may be `other` without a warning
NO_ATTENTION = " The forward pass on `example` shows no attention, so that names alone decide."
_warned: WeakSet[nn.Module] = WeakSet()
_warned_of_order: WeakSet[nn.Module] = WeakSet()


def warn_of_unseen_attention(
    found: Layouts, seen: SeenInPass, names: Mapping[Any, str], chosen: Collection[str]
) -> None:
    """Say that names alone decide, where they tell of attention that the pass does not show."""
    by_name = [
        names[p]
        for p in seen.multiplied
        if p in names
        and p not in seen.layouts
        and names[p] not in chosen
        and {"query", "key", "value"} & set(_roles_of(found.get(p)))
    ]
    if by_name:
        warnings.warn(
            f"The forward pass on `example` shows no attention that uses {by_name[0]!r}"
            + (f" and {len(by_name) - 1} more" if len(by_name) > 1 else "")
            + ": it is a recurrence, or runs in a kernel of its own. Names alone decide there.",
            stacklevel=3,
        )


def warn_of_unknown_order(
    model: nn.Module, untold: Mapping[str, str], chosen: Collection[str]
) -> None:
    """Say once for a model that nothing tells in which order some of its weights hold roles.

    Args:
        model: The model.
        untold: The names of these weights, and the types of the modules that hold them.
        chosen: The names of parameters that have an override.
    """
    names = [name for name in untold if name not in chosen]
    if names and model not in _warned_of_order:
        _warned_of_order.add(model)
        warnings.warn(
            f"Several roles lie in {names[0]!r}"
            + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            + ". They are taken to follow one another, such as all queries, all keys, all values: "
            f"no name tells, nor does {untold[names[0]]} show it, run alone on random tokens."
            + EXAMPLE_HELPS,
            stacklevel=3,
        )


def _roles_of(layout: Layout | Ambiguity | None) -> tuple[str, ...]:
    return layout.roles if isinstance(layout, Layout) else ()


def _without_role(blocks: Blocks, shape: tuple[int, ...]) -> int:
    """How many entries of a parameter are `other`."""
    if "other" not in blocks.roles:
        return 0
    sizes = block_numel(shape, blocks.split).tolist()
    return sum(size for role, size in zip(blocks.block_roles, sizes) if role == "other")


def warn_of_others(
    model: nn.Module,
    blocks: Mapping[str, Blocks],
    shapes: Mapping[str, tuple[int, ...]],
    chosen: Collection[str],
    seen: SeenInPass | None,
) -> None:
    """Say once for a model that much of it has no role."""
    total = sum(math.prod(shape) for shape in shapes.values())
    sizes = {n: _without_role(b, shapes[n]) for n, b in blocks.items() if n not in chosen}
    others = [name for name, size in sizes.items() if size]
    share = sum(sizes.values()) / max(1, total)
    if share <= MOST_OTHER or model in _warned:
        return
    _warned.add(model)
    alike: dict[str, list[str]] = {}
    for name in others:
        alike.setdefault(pattern_of(name), []).append(name)
    held = {pattern: sum(sizes[name] for name in names) for pattern, names in alike.items()}
    largest = sorted(held, key=held.__getitem__, reverse=True)[:3]
    shown = (f"{p!r} ({_kind(model, alike[p][0])}, {held[p] / total:.0%})" for p in largest)
    named = [name for name in blocks if fnmatchcase(name, largest[0])]
    to_override = largest[0] if named == alike[largest[0]] else alike[largest[0]][0]
    warnings.warn(
        f"{share:.0%} of the weights of {type(model).__name__} have no role in a transformer, most "
        f"of them in {', '.join(shown)}. They are `other`: BlockMuon takes AdamW for them, and "
        "BlockLR gives all of them one scale. If they have a role, say so: "
        f"find_blocks(model, overrides={{{to_override!r}: 'mlp_in'}})."
        + (EXAMPLE_HELPS if seen is None else "")
        + (NO_ATTENTION if seen is not None and not seen.attends else ""),
        stacklevel=3,
    )


def _kind(model: nn.Module, name: str) -> str:
    """The type of the module that holds a parameter."""
    return type(model.get_submodule(name.rpartition(".")[0])).__name__
