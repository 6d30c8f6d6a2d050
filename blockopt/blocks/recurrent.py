"""State-space layers and linear attention, whose maps play the roles of attention.

A selective state-space layer adds up B·x, fading with time, and reads the sum with C: B is a key, x
the value and C the query of attention without a softmax (Dao and Gu, ICML 2024). What multiplies
the result, and what sets how fast it fades, are gates.
"""

from __future__ import annotations

from torch import nn

from blockopt.blocks.known_modules import GATED_CONVOLUTION_TYPES, TIME_CONSTANTS
from blockopt.blocks.layouts import (
    Layout,
    Layouts,
    ambiguous,
    heads_cut,
    input_cut,
    output_cut,
    whole_layouts,
    without_heads,
)
from blockopt.blocks.linear_maps import Linear, direct_maps, is_named, type_words, words
from blockopt.blocks.split import Split


def recurrent_layouts(module: nn.Module, per_head: bool) -> Layouts:
    """Layouts of a state-space or linear-attention module; empty if it is none."""
    maps = direct_maps(module)
    into, out = maps.get("in_proj"), maps.get("out_proj")
    layouts = _stacked_gates(module)
    if into is not None and out is not None and _has_time_constants(module):
        layouts |= _state_space(module, maps, into, out)
    elif into is not None and out is not None and is_named(module, *GATED_CONVOLUTION_TYPES):
        roles, sizes = ("gate", "gate", "value"), (out.in_size,) * 3
        layouts |= output_cut(into, roles, Split(0, sizes, (1, 1, 1)))
        layouts |= whole_layouts(out, "output")
    elif out is not None and "in_proj_qkv" in maps:
        layouts |= _delta_net(module, maps, maps["in_proj_qkv"], out)
    elif out is not None and "in_proj_qkvz" in maps:
        layouts |= _delta_net_by_keys(module, maps, maps["in_proj_qkvz"], out)
    return layouts if per_head else without_heads(layouts)


def is_time_constant(name: str) -> bool:
    """Whether a parameter says how fast a state fades, by its last names."""
    return bool(TIME_CONSTANTS & set(name.split(".")[-2:]))


def _has_time_constants(module: nn.Module) -> bool:
    return module._parameters.get("A_log") is not None or bool(
        {"mamba", "ssm"} & type_words(module)
    )


def _state_space(module: nn.Module, maps: dict[str, Linear], into: Linear, out: Linear) -> Layouts:
    width, decay = out.in_size, module._parameters.get("A_log")
    if "x_proj" in maps or "x_proj_weight" in module._parameters:
        return _first_generation(module, maps, into, out)
    heads = 0 if decay is None or decay.ndim != 1 else decay.numel()
    states, rest = divmod(into.out_size - 2 * width - heads, 2)
    if not heads or rest or states < 1 or width % heads:
        reason = f"{type(module).__name__} does not say what its in_proj holds"
        return ambiguous(into, reason, Layout(("value",))) | whole_layouts(out, "output")
    groups = next(
        (g for n in ("n_groups", "ngroups") if isinstance(g := getattr(module, n, None), int)), 1
    )
    groups = groups if states % groups == 0 else 1
    split = Split(
        0,
        (width, width, states, states, heads),
        (heads, heads, groups, groups, heads),
    )
    roles = ("gate", "value", "key", "query", "gate")
    return output_cut(into, roles, split) | input_cut(out, "output", heads)


def _first_generation(
    module: nn.Module, maps: dict[str, Linear], into: Linear, out: Linear
) -> Layouts:
    """Mamba: values and gates; then step sizes, keys and queries from the values."""
    width = out.in_size
    layouts = whole_layouts(out, "output")
    if into.out_size != 2 * width:
        reason = f"{type(module).__name__} does not say what its in_proj holds"
        return layouts | ambiguous(into, reason, Layout(("value",)))
    if is_named(module, "ZambaMambaMixer"):  # value and gate of each channel side by side
        split = Split(0, (1, 1), (1, 1), repeat=width, pooled=True)
    else:
        split = Split(0, (width, width), (1, 1))
    layouts |= output_cut(into, ("value", "gate"), split)
    roles = ("gate", "key", "query")
    selects, steps = maps.get("x_proj"), maps.get("dt_proj")
    if selects is not None and steps is not None:
        states = (selects.out_size - steps.in_size) // 2
        sizes = (steps.in_size, states, states)
        layouts |= output_cut(selects, roles, Split(0, sizes, (1, 1, 1)))
        layouts |= whole_layouts(steps, "gate")
    held = module._parameters
    stacked, stacked_steps = held.get("x_proj_weight"), held.get("dt_proj_weight")
    if stacked is not None and stacked_steps is not None:
        number, rows, rank = stacked_steps.shape
        states = (stacked.shape[1] - rank) // 2
        sizes = (rank, states, states)
        layouts[stacked] = Layout(roles, Split(1, sizes, (1, 1, 1), stack=number))
        layouts[stacked_steps] = Layout(("gate",), Split(1, (rows,), (1,), stack=number))
    return layouts


def _delta_net(module: nn.Module, maps: dict[str, Linear], fused: Linear, out: Linear) -> Layouts:
    """Queries, keys and values in a row, with fewer heads of keys than of values."""
    keys, values = (getattr(module, name, None) for name in ("num_k_heads", "num_v_heads"))
    size, rest = divmod(fused.out_size - out.in_size, 2)
    if not isinstance(keys, int) or not isinstance(values, int) or rest or size % keys:
        reason = f"{type(module).__name__} does not say how queries, keys and values are stored"
        return ambiguous(fused, reason, Layout(("value",)))
    split = Split(0, (size, size, out.in_size), (keys, keys, values))
    layouts = output_cut(fused, ("query", "key", "value"), split)
    layouts |= input_cut(out, "output", values)
    for linear in maps.values():
        if linear is not fused and linear is not out:
            layouts |= heads_cut(linear, "gate", values)
    return layouts


def _delta_net_by_keys(
    module: nn.Module, maps: dict[str, Linear], fused: Linear, out: Linear
) -> Layouts:
    """Qwen3-Next: for each key head its query, key, values and gates; the other gates alike."""
    names = ("num_k_heads", "num_v_heads", "head_k_dim")
    keys, values, size = (getattr(module, name, None) for name in names)
    if isinstance(keys, int) and isinstance(values, int) and isinstance(size, int):
        ratio, wide = values // keys, out.in_size // keys
        split = Split(0, (size, size, wide, wide), (1, 1, ratio, ratio), repeat=keys)
        if split.length == fused.out_size:
            layouts = output_cut(fused, ("query", "key", "value", "gate"), split)
            layouts |= input_cut(out, "output", values)
            for linear in maps.values():
                if linear.out_size == 2 * values:
                    pair = Split(0, (ratio, ratio), (ratio, ratio), repeat=keys)
                    layouts |= output_cut(linear, ("gate", "gate"), pair)
            return layouts
    reason = f"{type(module).__name__} does not say how queries, keys, values and gates are stored"
    return ambiguous(fused, reason, Layout(("value",)))


def _stacked_gates(module: nn.Module) -> Layouts:
    """Gates of a recurrent layer as one square matrix per head, as RecurrentGemma has them."""
    stacks = {n: p for n, p in module.named_parameters(recurse=False) if p.ndim == 3}
    if not all("gate" in words(name) for name in stacks):  # experts have other matrices too
        return {}
    return {
        p: Layout(("gate",), Split(1, (p.shape[1],), (1,), stack=p.shape[0]))
        for p in stacks.values()
        if p.shape[1] == p.shape[2] > 1 < p.shape[0]
    }
