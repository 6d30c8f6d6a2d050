"""MLPs, by what follows what: a map from the width to the hidden units, and one back.

Two maps into the hidden units make a gated MLP. Names tell the gate from the input, and nothing
else; where they do not, or where one map holds both in an order that nothing tells, the parameter
becomes an `Ambiguity`.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import combinations
from typing import NamedTuple

from torch import Tensor, nn

from blockopt.blocks.known_modules import (
    ATTENTION_WORDS,
    GATE_AND_INPUT,
    GATE_FIRST_NAMES,
    GATE_FIRST_TYPES,
    GATE_WORDS_OF_MLP,
    HEAD_WORDS,
    INPUT_FIRST_TYPES,
    MLP_TYPE_WORDS,
    OUT_WORDS_OF_MLP,
)
from blockopt.blocks.layouts import Layout, Layouts, ambiguous, rows_layouts
from blockopt.blocks.linear_maps import (
    CONTAINERS,
    Linear,
    is_called_attention,
    is_named,
    outer_maps,
    type_words,
    words,
)


def mlp_layouts(
    module: nn.Module,
    path: str,
    taken: Collection[Tensor],
    per_row: Collection[str],
) -> Layouts:
    """Layouts of the MLP that a module is or holds; empty if there is none.

    Args:
        module: Any module.
        path: Where it is in the model.
        taken: Parameters that are explained already, such as those of attention.
        per_row: The roles that are cut into rows.
    """
    said = type_words(module)
    if isinstance(module, nn.ModuleList) or is_called_attention(module):
        return {}
    maps = {name: m for name, m in outer_maps(module).items() if m.weight not in taken}
    if len({id(m.weight) for m in maps.values()}) < 2:
        return {}
    parts = path.split(".")
    called_so = bool(MLP_TYPE_WORDS & (said | set(words(parts[-1]))))
    in_a_layer = any(part.isdecimal() for part in parts)
    roles: Roles = {}
    if "gate" in said and not called_so:  # a gate of its own, as a low-rank product
        roles = dict.fromkeys(maps, ("gate",))
    roles = (
        roles
        or _one_gate(module, maps, called_so)
        or _fused_gate(module, maps, called_so)
        or _plain(module, maps, taken, called_so, in_a_layer)
        or _several(maps, called_so, is_head=bool(HEAD_WORDS & set(words(parts[-1]))))
    )
    found: Layouts = {}
    for name, role in roles.items():
        linear = maps[name]
        layouts = rows_layouts(linear, role.fitting if isinstance(role, Unknown) else role, per_row)
        if isinstance(role, Unknown):
            suggestion = layouts[linear.weight]
            assert isinstance(suggestion, Layout)
            layouts = ambiguous(linear, role.reason, suggestion)
        found |= layouts
    return found


class Unknown(NamedTuple):
    """Why the roles of a map cannot be told, and some that fit."""

    reason: str
    fitting: tuple[str, ...]


Roles = dict[str, "tuple[str, ...] | Unknown"]


def _leads_back(first: Linear, out: Linear, factor: int = 1) -> bool:
    """Whether `out` leads from the outputs of `first` back to its inputs."""
    return first.out_size == factor * out.in_size and out.out_size == first.in_size


def _sizes(linear: Linear) -> tuple[int, int]:
    return linear.out_size, linear.in_size


def _one_gate(module: nn.Module, maps: dict[str, Linear], called_so: bool) -> Roles:
    """Two maps into the hidden units, one of them the gate, and one back."""
    for out, last in maps.items():
        into = [n for n, m in maps.items() if n != out and _leads_back(m, last)]
        gates = [n for n in maps if GATE_WORDS_OF_MLP & set(words(n)) and n != out]
        if len(into) != 2 and called_so and len(maps) == 3 and gates:
            # A connector between two widths, told by the name of its gate.
            into = [n for n in maps if n != out and maps[n].out_size == last.in_size]
            into = into if len({_sizes(maps[n]) for n in into}) == 1 else []
        if len(into) != 2:
            continue
        back = [n for n, m in maps.items() if _sizes(m) == _sizes(last) and n not in into]
        square = last.in_size == last.out_size
        if (square and not OUT_WORDS_OF_MLP & set(words(out))) or len(back) > 1:
            continue  # all square, or several MLPs side by side
        gate = gate_among(into)
        if gate is not None:
            other = next(n for n in into if n != gate)
            return {gate: ("mlp_gate",), other: ("mlp_in",), out: ("mlp_out",)}
        if square and not called_so:
            continue  # of square maps in a row nothing else says that they are an MLP
        if square:
            return {into[0]: ("mlp_in",), into[1]: ("mlp_in",), out: ("mlp_out",)}
        if not isinstance(module, CONTAINERS):
            return _unknown_gate(module, into, out)
    return _gate_of_outputs(maps)


def gate_among(into: list[str]) -> str | None:
    """Which of two maps into hidden units is the gate; None if their names do not say so."""
    called = {name.rpartition(".")[2]: name for name in into}
    pairs = [pair for pair in GATE_AND_INPUT if set(pair) == called.keys()]
    gates = [n for n in into if GATE_WORDS_OF_MLP & set(words(n))]
    if pairs:
        return called[pairs[0][0]]
    return gates[0] if len(into) == 2 and len(gates) == 1 else None


def _unknown_gate(module: nn.Module, into: list[str], out: str) -> Roles:
    reason = (
        f"{type(module).__name__} has a gated MLP, and nothing says which of {into[0]} and "
        f"{into[1]} is the gate"
    )
    roles = (("mlp_gate",), ("mlp_in",))
    unknown = {name: Unknown(reason, role) for name, role in zip(into, roles)}
    return {**unknown, out: ("mlp_out",)}


def _gate_of_outputs(maps: dict[str, Linear]) -> Roles:
    """A map in, a map out, and a gate on what comes out, as RWKV's channel mixing has it."""
    if len(maps) != 3:
        return {}
    for gate, square in maps.items():
        first, out = (n for n in maps if n != gate)
        if maps[first].out_size < maps[out].out_size:
            first, out = out, first
        fits = square.in_size == square.out_size == maps[first].in_size != maps[first].out_size
        if fits and _leads_back(maps[first], maps[out]) and GATE_WORDS_OF_MLP & set(words(gate)):
            return {first: ("mlp_in",), out: ("mlp_out",), gate: ("mlp_gate",)}
    return {}


def _fused_gate(module: nn.Module, maps: dict[str, Linear], called_so: bool) -> Roles:
    """One map into gate and input together, and one back."""
    for first, out in combinations(maps, 2):
        if _leads_back(maps[first], maps[out], factor=2):
            halves = _order_of_halves(module, first)
            if halves is not None:
                return {first: halves, out: ("mlp_out",)}
            if called_so or _gated_units(module):
                reason = (
                    f"{type(module).__name__}.{first} fuses the gate with the input, in an order "
                    "that it does not tell"
                )
                return {first: Unknown(reason, ("mlp_gate", "mlp_in")), out: ("mlp_out",)}
    return {}


def _order_of_halves(module: nn.Module, name: str) -> tuple[str, ...] | None:
    gate_last = getattr(module, "gate_last", None)  # timm's GluMlp
    if is_named(module, *INPUT_FIRST_TYPES) or gate_last is True:
        return ("mlp_in", "mlp_gate")
    if name in GATE_FIRST_NAMES or is_named(module, *GATE_FIRST_TYPES) or gate_last is False:
        return ("mlp_gate", "mlp_in")
    # Torch's gated linear unit takes the second half as the gate. So do the units that are modules
    # of their own, and the convolutions of a Conformer; a module called SwiGLU may do either.
    holder = module._modules.get(name)
    units = {"glu", "geglu", "gated"} & (type_words(holder) if holder is not None else frozenset())
    said = _gated_units(module)
    if units or (said and {"swi", "swiglu"}.isdisjoint(said)):
        return ("mlp_in", "mlp_gate")
    return ("mlp_in", "mlp_gate") if {"conv", "convolution"} & type_words(module) else None


def _gated_units(module: nn.Module) -> set[str]:
    """The words in the types of gated linear units that a module holds as activation functions."""
    units = (m for m in module.modules() if not any(True for _ in m.parameters()))
    kinds = (type_words(unit) for unit in units)
    return {word for kind in kinds if any(w.endswith("glu") for w in kind) for word in kind}


def _several(maps: dict[str, Linear], called_so: bool, is_head: bool) -> Roles:
    """Maps between hidden units and one out, as SAM's prediction heads have them.

    The last map of a head is the head itself.
    """
    last = next((n for n in maps if OUT_WORDS_OF_MLP & set(words(n))), None)
    if not called_so or last is None or len(maps) < 3:
        return {}
    around = {"residual", "skip", "shortcut"}
    hidden = [n for n in maps if n != last and not around & set(words(n))]
    if any(maps[n].out_size != maps[last].in_size for n in hidden):
        return {}
    into: Roles = dict.fromkeys(hidden, ("mlp_in",))
    return into if is_head else {**into, last: ("mlp_out",)}


def _stand_apart(module: nn.Module, first: str, second: str, taken: Collection[Tensor]) -> bool:
    """Whether attention stands between two maps, as between those into a model and out of it."""
    children = dict(module.named_children())
    names = list(children)
    start, end = (names.index(name.partition(".")[0]) for name in (first, second))
    between = (children[name] for name in names[start + 1 : end])
    return any(parameter in taken for child in between for parameter in child.parameters())


def _plain(
    module: nn.Module,
    maps: dict[str, Linear],
    taken: Collection[Tensor],
    called_so: bool,
    in_a_layer: bool,
) -> Roles:
    """A map in and a map out, or several such pairs side by side."""
    roles: Roles = {}
    for first in maps:
        if first in roles:
            continue
        later = list(maps)[list(maps).index(first) + 1 :]
        partners = [n for n in later if n not in roles and _leads_back(maps[first], maps[n])]
        if not (called_so or in_a_layer):
            partners = [n for n in partners if not _stand_apart(module, first, n, taken)]
        if not partners or maps[first].in_size == maps[first].out_size:
            continue
        alike = set(words(first))
        second = max(partners, key=lambda n: len(alike & set(words(n))))
        roles |= {first: ("mlp_in",), second: ("mlp_out",)}
    if roles and (called_so or in_a_layer or len(maps) < 4):
        return roles
    if len(maps) == 2:
        first, second = maps
        follow = maps[first].out_size == maps[second].in_size
        # Of numbered square maps nothing says that they are an MLP, and of values another thing.
        named = not first.isdecimal() and ATTENTION_WORDS.keys().isdisjoint(words(first))
        apart = _stand_apart(module, first, second, taken)
        square = maps[first].in_size == maps[first].out_size
        beside_attention = any(parameter in taken for parameter in module.parameters())
        back = _leads_back(maps[first], maps[second]) and not (
            apart or (square and beside_attention)
        )
        if follow and (called_so or (named and back)):
            return {first: ("mlp_in",), second: ("mlp_out",)}
    return {}
