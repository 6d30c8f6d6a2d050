"""Queries, keys and values in one map: in which order it stores them, and how many heads it has."""

from __future__ import annotations

from torch import nn

from blockopt.blocks.attention_heads import Heads
from blockopt.blocks.known_modules import ATTENTION_ROLES, GROUPED_TYPES, UNKNOWN_ORDER_NAMES
from blockopt.blocks.layouts import Layout, Layouts, ambiguous, heads_cut, output_cut
from blockopt.blocks.linear_maps import Linear, is_named
from blockopt.blocks.split import Split


def is_of_known_order(module: nn.Module) -> bool:
    """Whether the order of a fused map is known where its name is in use for several."""
    return is_named(module, *GROUPED_TYPES, "FalconAttention")


def _is_grouped(module: nn.Module) -> bool:
    """Whether the queries that share a key, that key and its value are stored together."""
    if is_named(module, "FalconAttention"):  # multi-query without groups stores them in a row
        in_groups = bool(getattr(module, "new_decoder_architecture", False))
        return in_groups or not getattr(module, "multi_query", False)
    if is_named(module, "GPTBigCodeAttention"):
        return getattr(module, "multi_query", None) is False
    return is_named(module, *GROUPED_TYPES) or getattr(module, "head_first", None) is True


def thirds(linear: Linear) -> Split:
    """Three equal sections, of one block each."""
    return Split(linear.out_dim, (linear.out_size // 3,) * 3, (1, 1, 1))


def fused_layout(
    module: nn.Module, linear: Linear, heads: Heads, output: Linear | None
) -> Layout | None:
    """Query, key and value in one map, one after another or by groups that share a key.

    The result is None if the sizes fit neither.
    """
    if is_named(module, "CodeGenAttention"):  # four slices for four devices: query, value, key
        size, number = linear.out_size // 12, (heads.number or 4) // 4
        split = Split(0, (size,) * 3, (number,) * 3, repeat=4)
        return Layout(("query", "value", "key"), split)
    key, value = getattr(module, "key_dim", None), getattr(module, "val_dim", None)
    if isinstance(key, int) and isinstance(value, int):  # LeViT: by head, with wider values
        split = Split(0, (key, key, value), (1, 1, 1), repeat=heads.number or 1)
        return Layout(("query", "key", "value"), split) if split.length == linear.out_size else None
    grouped = _is_grouped(module)
    roles, number = ("query", "key", "value"), heads.number or 1
    if output is not None:
        query_size = output.in_size
    else:
        query_size = number * heads.size if heads.size else linear.out_size // 3
    size = query_size // number
    if heads.declared_size and heads.declared_size != size:
        return None
    groups, rest = divmod(linear.out_size - query_size, 2 * max(1, size))
    declared = heads.key_value_number or groups
    if (
        query_size != number * size
        or rest
        or groups < 1
        or number % groups
        or (declared != groups and not grouped and heads.key_value_declared_here)
    ):
        return None
    if grouped:
        queries = number // groups
        sizes, parts = (queries * size, size, size), (queries, 1, 1)
        return Layout(roles, Split(0, sizes, parts, repeat=groups))
    sizes = (query_size, groups * size, groups * size)
    return Layout(roles, Split(0, sizes, (number, groups, groups)))


def pair_layouts(
    module: nn.Module, name: str, linear: Linear, letters: str, heads: Heads
) -> Layouts:
    """Two of query, key and value in one map, or one that serves as both.

    They are taken to be stored one after another. Where the name is in use for both orders, that is
    no more than a suggestion.
    """
    roles = tuple(ATTENTION_ROLES[letter] for letter in letters)
    half = linear.out_size // 2
    key, value = (getattr(module, n, None) for n in ("key_dim", "val_dim"))
    if letters == "kv" and isinstance(key, int) and isinstance(value, int):  # LeViT: by head
        by_head = Split(0, (key, value), (1, 1), repeat=heads.number or 1)
        if by_head.length == linear.out_size:
            return output_cut(linear, roles, by_head)
    number = heads.of_half(half, is_query=letters == "qk")
    if linear.out_size % 2 or number is None:  # one map that serves as both
        shared = heads.of_half(linear.out_size, is_query=letters == "qk")
        return heads_cut(linear, roles[0], shared or 1)
    split = Split(linear.out_dim, (half, half), (number, number))
    if name in UNKNOWN_ORDER_NAMES:
        reason = (
            f"{type(module).__name__} fuses key and value, and may store them one after another or "
            "interleaved by head"
        )
        return ambiguous(linear, reason, Layout(roles, split))
    return output_cut(linear, roles, split)
