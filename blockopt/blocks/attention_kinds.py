"""Kinds of attention that hold their maps otherwise than as query, key and value of their own."""

from __future__ import annotations

from torch import nn

from blockopt.blocks.attention_heads import read_heads
from blockopt.blocks.known_modules import ATTENTION_ROLES, ATTENTION_TYPE_WORDS
from blockopt.blocks.layouts import Layout, Layouts, ambiguous, heads_cut, input_cut, output_cut
from blockopt.blocks.linear_maps import Linear, direct_maps, read_linear, type_words, words
from blockopt.blocks.split import Split


def one_query(linear: Linear, letters: str, output: Linear | None) -> Layouts | None:
    """MobileViTv2: a single score, keys and values, without heads."""
    width = 0 if output is None else output.in_size
    if letters == "qkv" and linear.out_size == 1 + 2 * width:
        return output_cut(linear, ("query", "key", "value"), Split(0, (1, width, width), (1, 1, 1)))
    return None


def one_of_heads(
    module: nn.Module,
    ancestors: tuple[nn.Module, ...],
    maps: dict[str, Linear],
    named: dict[str, str],
) -> Layouts | None:
    """A head that is a module of its own, in a list of heads whose results are put side by side.

    What is around the list may say how many heads there are; each module has one of them all the
    same.
    """
    if len(ancestors) < 2 or not isinstance(ancestors[0], nn.ModuleList):
        return None
    number = sum(type(child) is type(module) for child in ancestors[0])
    values = [maps[name].out_size for name, letters in named.items() if letters == "v"]
    apart = sorted(named.values()) == ["k", "q", "v"] and len(maps) == 3
    if not apart or number != len(ancestors[0]) or number < 2:
        return None
    outputs = [m for m in direct_maps(ancestors[1]).values() if m.in_size == number * values[0]]
    if len(outputs) != 1:
        return None
    found = input_cut(outputs[0], "output", number)
    for name, letter in named.items():
        found |= heads_cut(maps[name], ATTENTION_ROLES[letter], 1)
    return found


def in_a_list(module: nn.Module, ancestors: tuple[nn.Module, ...]) -> Layouts:
    """Four maps of one size in a list, as in the Annotated Transformer: their order is not told."""
    lists = [c for c in module.children() if isinstance(c, nn.ModuleList) and len(c) == 4]
    maps = [[read_linear(child) for child in holder] for holder in lists]
    if len(maps) != 1 or not ATTENTION_TYPE_WORDS & type_words(module):
        return {}
    linears = [linear for linear in maps[0] if linear is not None]
    if len(linears) < 4 or len({(m.in_size, m.out_size) for m in linears}) > 1:
        return {}
    heads = read_heads(module, ancestors, linears[0], linears[3]).number or 1
    reason = f"{type(module).__name__} keeps its projections in a list, which does not name them"
    found: Layouts = {}
    for role, linear in zip(("query", "key", "value", "output"), linears):
        cut = input_cut if role == "output" else heads_cut
        layout = cut(linear, role, heads)[linear.weight]
        if isinstance(layout, Layout):
            found |= ambiguous(linear, reason, layout)
    return found


def torch_attention(module: nn.MultiheadAttention) -> Layouts:
    """Torch's own module, fused or with keys and values of other widths."""
    heads, size = module.num_heads, module.embed_dim
    roles, sizes, parts = ("query", "key", "value"), (size,) * 3, (heads,) * 3
    output = direct_maps(module).get("out_proj")
    found: Layouts = {} if output is None else input_cut(output, "output", heads)
    if module.in_proj_weight is not None:
        found[module.in_proj_weight] = Layout(roles, Split(0, sizes, parts))
    else:
        for role, name in zip(roles, ("q_proj_weight", "k_proj_weight", "v_proj_weight")):
            found[getattr(module, name)] = Layout((role,), Split(0, (size,), (heads,)))
    if module.in_proj_bias is not None:
        found[module.in_proj_bias] = Layout(("bias",) * 3, Split(0, sizes, parts))
    for bias in (module.bias_k, module.bias_v):
        if bias is not None:
            found[bias] = Layout(("bias",), Split(2, (size,), (heads,)))
    return found


def stored_by_head(module: nn.Module) -> Layouts:
    """XLNet: parameters of shape (width, heads, size of a head), without modules for them."""
    named = {"q": "query", "k": "key", "v": "value", "o": "output", "r": "key"}
    held = {n: p for n, p in module.named_parameters(recurse=False) if n in named and p.ndim == 3}
    if not {"q", "k", "v"} <= held.keys():  # Funnel has maps, and a table for positions
        held = {n: p for n, p in module._parameters.items() if n == "r_kernel" and p is not None}
        named = {"r_kernel": "key"}
    return {p: Layout((named[n],), Split(1, (p.shape[1],), (p.shape[1],))) for n, p in held.items()}


def deformable(
    module: nn.Module, maps: dict[str, Linear], ancestors: tuple[nn.Module, ...]
) -> Layouts:
    """Deformable attention: the query chooses where to look and how much, head by head."""
    value = next((m for n, m in maps.items() if "value" in words(n)), None)
    scores = [m for n, m in maps.items() if n in ("sampling_offsets", "attention_weights")]
    if not scores:
        return {}
    output = next((m for n, m in maps.items() if {"output", "out"} & set(words(n))), None)
    heads = read_heads(module, ancestors, value, output).number or 1
    found = {} if value is None else heads_cut(value, "value", heads)
    for linear in scores:
        found |= heads_cut(linear, "query", heads)
    return found if output is None else found | input_cut(output, "output", heads)
