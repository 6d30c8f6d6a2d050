"""MLPs in a forward pass: linear maps into hidden units, an activation function, and one back out.

Two linear maps, or two halves of one, whose results are multiplied are a gated MLP: the gate is the
one that went through the activation function.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from blockopt.blocks.watch.forward_graph import ForwardGraph, Op, Value
from blockopt.blocks.watch.linear_maps import VIEWS, LinearMap, walk_back, walk_on
from blockopt.blocks.watch.probes import Side, pull
from blockopt.blocks.watch.two_factors import first_factors, is_nonlinear

_SUMS = ("add", "sub", "index_add", "index_put", "_index_put_impl", "scatter_add", "addcmul")


class FeedForward(NamedTuple):
    """One MLP.

    Attributes:
        into: The linear maps into hidden units, each with the role of every unit.
        out: The linear map out of them.
        factors: The first factors of those of low rank, with their roles.
    """

    into: list[tuple[LinearMap, list[str]]]
    out: LinearMap
    factors: list[tuple[LinearMap, str]]


def feed_forwards(maps: dict[Op, LinearMap], taken: set[LinearMap]) -> list[FeedForward]:
    """All MLPs of a pass that return to the width they came from and are added to something.

    Args:
        maps: The linear maps of the pass.
        taken: Those that are known to do something else.
    """
    first = {linear: linear for linear in maps.values()} | first_factors(maps)
    waists = {linear for second, linear in first.items() if linear is not second}
    free = [m for m in maps.values() if m not in taken | waists and not m.op.is_empty]
    hidden = {linear: hidden_maps(first[linear], maps, first) for linear in free}
    # A map out of hidden units that enters further ones belongs to a deeper net.
    entered = {into for out, found in hidden.items() for into in found}
    result = []
    for out, found in hidden.items():
        if not found or out in entered or not taken.isdisjoint(found):
            continue
        back_to_width = all(first[into].in_width == out.out_width for into in found)
        fits = (
            back_to_width
            and all(m.is_of_points for m in (out, *found))
            and is_added(out, maps)
            and is_per_token(first[out], found, maps)
        )
        if fits and not any(_enters_elsewhere(into, first[out], maps) for into in found):
            into = list(with_roles(first[out], found, maps))
            roles = {linear: min(names) for linear, names in into} | {out: "mlp_out"}
            factors = [(first[m], role) for m, role in roles.items() if first[m] is not m]
            result.append(FeedForward(into, out, factors))
    return result


def hidden_maps(
    out: LinearMap, maps: dict[Op, LinearMap], first: dict[LinearMap, LinearMap]
) -> list[LinearMap]:
    """The linear maps of one input that alone, through an activation, make what `out` is given.

    Args:
        out: A linear map.
        maps: All maps of the pass.
        first: The first factor of each map, itself if it has but one.
    """
    made_of = list(walk_back(out.input, maps))
    if not any(v.op and v.op not in maps and is_nonlinear(v.op) for v in made_of):
        return []
    ends = [v for v in made_of if v.op is None or v.op in maps or v.op.multiplies_activations]
    found = {maps[v.op]: None for v in ends if v.op in maps}
    if len(found) < len(ends) or len({_source(first[m].input) for m in found}) != 1:
        return []
    return list(found)


def _source(value: Value) -> Value:
    """The value of which another is a view or copy."""
    while value.op is not None and value.op.name in VIEWS and value.op.activations:
        value = value.op.activations[0]
    return value


def is_added(out: LinearMap, maps: dict[Op, LinearMap]) -> bool:
    """Whether what a linear map returns is added to something else, as to a residual stream.

    Before that it may be multiplied by the weights of experts.
    """
    return any(
        op.name in _SUMS and len(set(op.activations)) > 1
        for op in walk_on(out.output, maps, through_products=True)
        if op not in maps
    )


def is_per_token(out: LinearMap, found: list[LinearMap], maps: dict[Op, LinearMap]) -> bool:
    """Whether what enters `out` for one token depends on hidden units of one token alone.

    Beside an activation function, a convolution of each unit may add those of its neighbours.
    """
    if not out.in_axes:
        return False
    made_by = {v.op: None for v in walk_back(out.input, maps) if v.op and v.op not in maps}
    kernels = [op.args[1].tensor.shape[2:].numel() for op in made_by if op.name == "convolution"]
    activated = any(is_nonlinear(op) and op.name not in ("mul", "convolution") for op in made_by)
    most = 1 + sum(size - 1 for size in kernels) if activated else 1
    inputs = Side(out.input.tensor, tuple(axis for axis, _ in out.in_axes))
    hidden = [Side(m.output.tensor, tuple(axis for axis, _ in m.out_axes)) for m in found]
    shape = [inputs.tensor.shape[axis] for axis in inputs.others]
    for token in (tuple(n - 1 for n in shape), tuple(0 for _ in shape)):
        cotangent = inputs.at(inputs.others, token)
        sizes = [s.size(pull(inputs.tensor, s.tensor, cotangent), s.others) for s in hidden]
        reached = [int((size > 1e-6 * size.max()).sum()) for size in sizes]
        if all(reached):  # otherwise an activation function shut all units of this token
            return max(reached) <= most
    return False


def _enters_elsewhere(into: LinearMap, out: LinearMap, maps: dict[Op, LinearMap]) -> bool:
    """Whether units of a map enter other products than `out`, and not `out` itself, as in Mamba."""
    side = Side(into.output.tensor, tuple(axis for axis, _ in into.out_axes))
    products = [op for op in walk_on(into.output, maps) if op in maps or op.multiplies_activations]
    entered = {value.tensor for op in products for value in op.activations}
    units = {tensor: reached_units(side, tensor, Side(tensor, ()).signs()) for tensor in entered}
    inside = units.pop(out.input.tensor)
    return any(bool((other & ~inside).any()) for other in units.values())


def with_roles(
    out: LinearMap, found: list[LinearMap], maps: dict[Op, LinearMap]
) -> Iterator[tuple[LinearMap, list[str]]]:
    """Yield each map into hidden units of `out`, with the role of every unit."""
    sides = [Side(m.output.tensor, tuple(axis for axis, _ in m.out_axes)) for m in found]
    roles = [["mlp_in"] * m.out_size for m in found]
    for factors in _multiplied(out, maps):
        reached = [[reached_units(side, *factor) for side in sides] for factor, _ in factors]
        first, second = (torch.cat([r.flatten() for r in half]) for half in reached)
        if bool((first & second).any()) or not bool(first.any()) or not bool(second.any()):
            continue  # an activation function times its own argument, or a factor from elsewhere
        activated = [is_activated for _, is_activated in factors]
        if activated[0] == activated[1]:
            continue  # neither is the gate of the other
        gate, other = (reached[activated.index(is_gate)] for is_gate in (True, False))
        for i, (units, ungated) in enumerate(zip(gate, other)):
            if bool(units.any()):  # a unit that reaches neither is shut by the activation function
                roles[i] = ["mlp_in" if is_in else "mlp_gate" for is_in in ungated.flatten()]
    yield from zip(found, roles)


Factor = tuple[Tensor, Tensor]  # a tensor, and random signs on the part of it that is the factor


def _multiplied(out: LinearMap, maps: dict[Op, LinearMap]) -> Iterator[list[tuple[Factor, bool]]]:
    """Yield the two factors of each product of activations, and whether each is activated."""
    for op in dict.fromkeys(v.op for v in walk_back(out.input, maps) if v.op is not None):
        if op in maps:
            continue
        if op.name == "mul" and len(op.activations) == 2:
            yield [
                ((v.tensor, Side(v.tensor, ()).signs()), is_activated(v, maps))
                for v in op.activations
            ]
        elif op.name == "glu":  # the second half enters a sigmoid
            tensor = op.args[0].tensor
            dim = op.args[1] if len(op.args) > 1 else -1
            signs = Side(tensor, ()).signs()
            halves = [torch.zeros_like(signs), torch.zeros_like(signs)]
            for number, (half, part) in enumerate(zip(halves, signs.chunk(2, dim))):
                half.chunk(2, dim)[number].copy_(part)
            yield [((tensor, halves[0]), False), ((tensor, halves[1]), True)]


def is_activated(value: Value, maps: dict[Op, LinearMap]) -> bool:
    """Whether an activation function is between linear maps and a value."""
    return any(v.op and v.op not in maps and is_nonlinear(v.op) for v in walk_back(value, maps))


def reached_units(side: Side, tensor: Tensor, cotangent: Tensor) -> Tensor:
    """Which units of a linear map reach a factor."""
    sizes = side.size(pull(tensor, side.tensor, cotangent), side.axes)
    return sizes > 1e-6 * sizes.max()


def routers(
    graph: ForwardGraph, maps: dict[Op, LinearMap], outs: Collection[LinearMap]
) -> list[LinearMap]:
    """Linear maps whose results choose or weigh, as among experts.

    Args:
        graph: The pass.
        maps: Its linear maps.
        outs: Those out of MLPs, whose results a softmax may weigh.
    """
    found: dict[LinearMap, None] = {}
    for op in graph.ops:
        chosen: list[Value] = op.inputs[:1] if op.name == "topk" else []
        if op.multiplies_activations or (op.name == "mul" and len(op.activations) == 2):
            left, right = op.activations[:2] if len(op.activations) > 1 else (None, None)
            for weights, values in ((left, right), (right, left)):
                if weights and values and _is_weighed(weights, values, maps, outs):
                    chosen.append(weights)
        for value in chosen:
            made_by = [v.op for v in walk_back(value, maps) if v.op]
            # Products of activations choose what sparse attention attends to.
            if not any(made.multiplies_activations for made in made_by):
                found |= {maps[made]: None for made in made_by if made in maps}
    return list(found)


def _is_weighed(
    weights: Value, values: Value, maps: dict[Op, LinearMap], outs: Collection[LinearMap]
) -> bool:
    """Whether MLPs made one factor of a product, and a softmax the other, or a number per token."""
    made_of = walk_back(weights, maps)
    softmax = any(v.op and v.op.name in ("_softmax", "softmax") for v in made_of)
    is_number = weights.tensor.shape[-1:] == (1,) != values.tensor.shape[-1:]
    of_mlps = any(v.op in maps and maps[v.op] in outs for v in walk_back(values, maps))
    return (softmax or is_number) and of_mlps
