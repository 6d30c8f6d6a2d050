"""Two linear maps in a row with nothing but a narrow waist between them: one map of low rank.

Adapters written by hand and factored MLPs have them. The first factor takes what the whole map
takes, the second returns what it returns.
"""

from __future__ import annotations

from blockopt.blocks.watch.forward_graph import Op
from blockopt.blocks.watch.linear_maps import VIEWS, LinearMap, walk_back, walk_on

# Operations that keep a hidden unit what it is; everything else is an activation function.
_LINEAR = (
    *VIEWS,
    *("add", "sub", "cat", "stack", "neg", "clamp", "native_dropout", "constant_pad_nd", "index"),
)
_SCALES = ("mul", "div")


def is_nonlinear(op: Op) -> bool:
    """Whether an operation is an activation function, or a product of two activations."""
    if op.name in _SCALES:
        return len(op.activations) > 1
    return op.name not in _LINEAR


def first_factors(maps: dict[Op, LinearMap]) -> dict[LinearMap, LinearMap]:
    """The first factor of every second one, as {second: first}."""
    found = {}
    for second in maps.values():
        made_of = list(walk_back(second.input, maps))
        ends = [v for v in made_of if v.op is None or v.op in maps or v.op.multiplies_activations]
        between = [v.op for v in made_of if v.op is not None and v not in ends]
        first = maps.get(ends[0].op) if len(ends) == 1 and ends[0].op is not None else None
        if first is None or any(is_nonlinear(op) for op in between):
            continue
        entered = [op for op in walk_on(first.output, maps) if op in maps]
        narrow = first.out_size < min(first.in_size, second.out_size)
        if narrow and entered == [second.op]:
            found[second] = first
    return found
