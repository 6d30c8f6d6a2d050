"""Mixtures of experts: matrices stacked in one parameter, and the routers that choose among them.

A stack has the shape (experts, out, in) or (experts, in, out). Every expert's matrix is cut by
neuron like that of an MLP, and Muon takes it as a matrix of its own.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from blockopt.blocks.attention_heads import read_heads
from blockopt.blocks.known_modules import ATTENTION_ROLES, ATTENTION_WORDS
from blockopt.blocks.layouts import Ambiguity, Layout, Layouts, rows_layouts
from blockopt.blocks.linear_maps import (
    direct_maps,
    is_called_attention,
    read_linear,
    type_words,
    words,
)
from blockopt.blocks.mlps import gate_among
from blockopt.blocks.split import Split

NUM_EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "num_routed_experts", "n_experts"),
    *("moe_num_experts", "num_total_experts"),
)
OUT_WORDS, OUT_NAMES = {"down", "out", "output", "wo"}, {"w2", "fc2"}


def expert_layouts(
    module: nn.Module, parent: nn.Module | None, per_head: bool, per_row: Collection[str]
) -> Layouts:
    """Layouts of the stacked matrices that a module holds, and of their biases."""
    stacks = _stacks(module)
    if len(stacks) < 2:
        return {}
    if attention := _stacked_attention(module, stacks):
        return attention
    outs = [n for n in stacks if OUT_WORDS & set(words(n)) or n in OUT_NAMES]
    if len(outs) != 1:
        return {}
    out = outs[0]
    if parent is not None and is_called_attention(parent) and len(stacks) == 2:
        return _experts_of_attention(module, parent, stacks, out, per_head)
    found: Layouts = {}
    width = _width(module, parent, stacks[out].shape[0])
    into = {name: stack for name, stack in stacks.items() if name != out}
    gate = gate_among(list(into))
    for name, stack in into.items():
        roles = _roles(name, stack, stacks[out], gate)
        dim = _out_dim(module, stack, stacks[out], len(roles), width)
        fused, alike = len(roles) == 2, len(into) == 2 and gate is None
        if dim is None or (fused and not _is_gate_up(name)) or (alike and not fused):
            reason = (
                f"{type(module).__name__} stacks experts in {name}, and does not say in which order"
            )
            found[stack] = Ambiguity(reason, _cut(stack, 1, (roles[-1],), per_row, False))
            last = _cut(stacks[out], 1, ("mlp_out",), per_row, False)
            found.setdefault(stacks[out], Ambiguity(reason, last))
            continue
        interleaved = len(roles) == 2 and getattr(module, "is_concatenated", True) is False
        found[stack] = _cut(stack, dim, roles, per_row, interleaved)
        found[stacks[out]] = _cut(stacks[out], dim, ("mlp_out",), per_row, False)
    return found | _biases(module, stacks, found)


def _experts_of_attention(
    module: nn.Module, attention: nn.Module, stacks: dict[str, Tensor], out: str, per_head: bool
) -> Layouts:
    """JetMoE: each expert makes queries, and takes what attention makes of them."""
    (query,) = (stack for name, stack in stacks.items() if name != out)
    output, experts = stacks[out], stacks[out].shape[0]
    dim = _out_dim(module, query, output, 1, None) or 1
    size = read_heads(attention, (), None, None).declared_size
    heads = query.shape[dim] // size if per_head and size and query.shape[dim] % size == 0 else 1
    return {
        query: Layout(("query",), Split(dim, (query.shape[dim],), (heads,), stack=experts)),
        output: Layout(("output",), Split(3 - dim, (query.shape[dim],), (heads,), stack=experts)),
    }


def _stacked_attention(module: nn.Module, stacks: dict[str, Tensor]) -> Layouts:
    """Queries, keys and values of three dimensions, of which any may number the heads."""
    letters = {n: "".join(ATTENTION_WORDS.get(w, "") for w in words(n)) for n in stacks}
    if not set("qkv") <= set("".join(letters.values())):
        return {}
    found: Layouts = {}
    for name, stack in stacks.items():
        if not letters[name] and not {"o", "out", "output", "wo"} & set(words(name)):
            continue
        role = ATTENTION_ROLES[letters[name][-1]] if letters[name] else "output"
        reason = f"{type(module).__name__} stores {name} in three dimensions, in an order not told"
        found[stack] = Ambiguity(reason, Layout((role,)))
    return found


def _stacks(module: nn.Module) -> dict[str, Tensor]:
    """Parameters of three dimensions, also the weights of children that hold nothing else."""
    own = {n: p for n, p in module.named_parameters(recurse=False) if p.ndim == 3}
    for name, child in module.named_children():
        weight = child._parameters.get("weight")
        linear = isinstance(weight, Tensor) and weight.ndim == 3 and not hasattr(child, "stride")
        if linear and min(weight.shape) > 1 and "norm" not in type_words(child):  # type: ignore[union-attr]
            own[name] = weight  # type: ignore[assignment]
    return {n: p for n, p in own.items() if min(p.shape[1:]) > 1}


def _is_gate_up(name: str) -> bool:
    said = words(name)
    return "gate" in said or "input" in said or "in" in said or "wi" in said


def _roles(name: str, stack: Tensor, out: Tensor, gate: str | None) -> tuple[str, ...]:
    hidden = out.shape[1] * out.shape[2]
    if stack.shape[1] * stack.shape[2] == 2 * hidden:
        return ("mlp_gate", "mlp_in")
    return ("mlp_gate",) if name == gate else ("mlp_in",)


def _width(module: nn.Module, parent: nn.Module | None, experts: int) -> int | None:
    """The width of what enters experts, as declared there or beside them.

    Or else that of the map that chooses among them.
    """
    around = (module,) if parent is None else (module, parent, *parent.children())
    for holder in around:
        for name in ("hidden_size", "hidden_dim", "d_model", "dim"):
            if isinstance(width := getattr(holder, name, None), int):
                return width
    routers = (m for holder in around[:2] for m in direct_maps(holder).values())
    return next((linear.in_size for linear in routers if linear.out_size == experts), None)


def _out_dim(
    module: nn.Module, stack: Tensor, out: Tensor, sections: int, width: int | None
) -> int | None:
    """The dimension of a stack that runs over outputs; None if sizes allow none or both."""
    transposed = getattr(module, "is_transposed", None)  # transformers says so
    if isinstance(transposed, bool):
        return 2 if transposed else 1
    (_, a, b), (_, c, d) = stack.shape, out.shape
    if sections == 2:
        first, second = a == 2 * d and b == c, b == 2 * c and a == d
    else:  # sizes alone fit both
        fits = a == d and b == c
        first, second = fits and width == b, fits and width == a
    return None if first == second else 1 if first else 2


def _cut(
    stack: Tensor, dim: int, roles: tuple[str, ...], per_row: Collection[str], interleaved: bool
) -> Layout:
    size = stack.shape[dim] // len(roles)
    rows = roles[0] in per_row
    if interleaved:  # gate and input of each neuron side by side
        split = Split(dim, (1, 1), (1, 1), size, not rows, stack.shape[0])
    else:
        parts = (size if rows else 1,) * len(roles)
        split = Split(dim, (size,) * len(roles), parts, stack=stack.shape[0])
    if split.stack == 1:
        split = split._replace(stack=1)
    return Layout(roles, split)


def _biases(module: nn.Module, stacks: dict[str, Tensor], found: Layouts) -> Layouts:
    """Biases of shape (experts, outputs), cut like their matrices."""
    biases: Layouts = {}
    for name, stack in stacks.items():
        layout = found.get(stack)
        held = (module._parameters.get(f"{name}_bias"), module._parameters.get(f"{name}.bias"))
        bias = next((b for b in held if b is not None), None)
        if bias is None or not isinstance(layout, Layout) or layout.split is None:
            continue
        fits = bias.ndim == 2 and bias.shape[1] == layout.split.length
        split = layout.split._replace(dim=1) if fits else None
        roles = ("bias",) * (len(layout.roles) if fits else 1)
        biases[bias] = Layout(roles, split)
    return biases


def router_layouts(
    module: nn.Module, attribute: str, experts: int | None, per_row: Collection[str]
) -> Layouts:
    """Layouts of a module that chooses among experts.

    Args:
        module: Any module.
        attribute: The name under which it is held.
        experts: How many experts there are beside it; None if there are none.
        per_row: The roles that are cut into rows.
    """
    said = set(words(attribute))
    linear = read_linear(module)
    if linear is not None:
        chooses = linear.out_size == experts or (experts is not None and linear.out_size == 1)
        if (experts is not None and chooses and {"gate", "router", "wg", "gating"} & said) or (
            "router" in type_words(module) | said
        ):
            return rows_layouts(linear, ("router",), per_row)
    kind = type_words(module)
    if "router" in kind or ("gating" in kind and experts is not None):
        found: Layouts = {}
        for inner in direct_maps(module).values():
            found |= rows_layouts(inner, ("router",), per_row)
        return found
    return {}


def num_experts(module: nn.Module) -> int | None:
    """How many experts a module holds, or None if it holds none."""
    for name, child in module.named_children():
        if "experts" in words(name) or "experts" in type_words(child):
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                return len(child)
            stacks = _stacks(child)
            if stacks:
                return next(iter(stacks.values())).shape[0]
            declared = (getattr(child, name, None) for name in NUM_EXPERTS)
            number = next((n for n in declared if isinstance(n, int)), None)
            if number is not None:
                return number
    if len(_stacks(module)) > 1:
        return next(iter(_stacks(module).values())).shape[0]
    return None
