"""Which linear maps of a module make queries, keys and values, by their names.

Several words add up, and maps of one letter that follow one another are the factors of one.
"""

from __future__ import annotations

from itertools import combinations

from torch import nn

from blockopt.blocks.known_modules import (
    ATTENTION_ROLES,
    ATTENTION_TYPE_WORDS,
    ATTENTION_WORDS,
    FUSED_NAMES,
    OUTPUT_WORDS,
)
from blockopt.blocks.linear_maps import (
    Linear,
    direct_maps,
    is_called_attention,
    only_map,
    read_linear,
    type_words,
    words,
)


def attention_maps(module: nn.Module) -> dict[str, Linear]:
    """The direct maps, and those of children that name them and also hold norms, gates and such."""
    maps = direct_maps(module)
    for name, child in module.named_children():
        said = set(words(name))
        if name in maps:
            continue
        if ATTENTION_WORDS.keys() & said:
            inside = [m for c in child.modules() if (m := read_linear(c)) is not None]
            if len({id(m.weight) for m in inside}) == 1:
                maps[name] = inside[0]
        elif (OUTPUT_WORDS - {"final", "linear"}) & said:
            if (linear := only_map(child)) is not None:
                maps[name] = linear
            elif len(inner := direct_maps(child)) > 1 and "gated" in type_words(child):
                maps |= {f"{name}.{n}": linear for n, linear in inner.items()}
    return maps


def attention_letters(module: nn.Module, maps: dict[str, Linear]) -> dict[str, str]:
    """What each map of an attention module makes, as letters of `qkv`; empty if it is none.

    Example:
        >>> module = nn.ModuleDict({n: nn.Linear(4, 4) for n in ("to_q", "to_kv", "out")})
        >>> attention_letters(module, direct_maps(module))
        {'to_q': 'q', 'to_kv': 'kv'}
    """
    named = {name: "".join(ATTENTION_WORDS.get(word, "") for word in words(name)) for name in maps}
    named = {name: letters for name, letters in named.items() if letters}
    fused = next((name for name in FUSED_NAMES if name in maps and name not in named), None)
    made = set("".join(named.values()))
    if fused is not None and ATTENTION_TYPE_WORDS & type_words(module):
        if made == {"q"}:  # GPT-2's cross-attention: c_attn holds key and value only
            named[fused] = "kv"
        elif not made:
            named[fused] = "qkv"
        made = set("".join(named.values()))
    called_so = is_called_attention(module) or bool({"attn", "mha"} & type_words(module))
    shares_keys = "q" in made and called_so  # keys and values of another layer
    # Learned queries, as in attention pooling, need no map.
    lacks_queries = "q" not in made and not ATTENTION_TYPE_WORDS & type_words(module)
    too_few = len(made & set("qkv")) < 2 and not shares_keys
    if too_few or lacks_queries or _is_feed_forward(maps, named):
        return {}
    return named


def _is_feed_forward(maps: dict[str, Linear], named: dict[str, str]) -> bool:
    """Whether the values are made from the keys: RWKV's names for the halves of an MLP."""
    by_letters = {letters: maps[name] for name, letters in named.items()}
    key, value = by_letters.get("k"), by_letters.get("v")
    if key is None or value is None:
        return False
    return (key.out_size, key.in_size) == (value.in_size, value.out_size) and (
        key.out_size != key.in_size
    )


def joint_role(letters: str) -> str:
    """The role of a map that feeds several: the one nearest to the output."""
    return next(ATTENTION_ROLES[letter] for letter in "vkq" if letter in letters)


def chains(maps: dict[str, Linear], named: dict[str, str]) -> dict[str, str]:
    """Maps that follow one another in a low-rank projection, as {name of the second: first}."""
    found = {}
    for first, second in combinations(named, 2):  # the first is defined first
        a, b = maps[first], maps[second]
        marked = {"a", "down", "d"} & set(words(first)) and (
            {"b", "up", "u"} & set(words(second))
            or b.in_size == 2 * a.out_size  # with and without norm
        )
        narrow = b.in_size <= a.out_size and a.in_size != b.in_size
        follows = b.in_size == a.out_size or marked
        within = named[first] == named[second] or (
            named[second] in named[first] and b.in_size == a.out_size < a.in_size
        )
        side_by_side = a.in_size == b.in_size != a.out_size  # two streams, not two factors
        if within and (narrow or marked) and follows and not side_by_side:
            found[second] = first
    return {second: first for second, first in found.items() if first not in found}


def is_in_mlp(linear: Linear, beside: list[Linear]) -> bool:
    """Whether a map leads to the hidden units of an MLP, or back, by maps of which none attends."""
    return any(
        other.in_size == linear.out_size
        and other.out_size == linear.in_size
        and linear.out_size != linear.in_size
        for other in beside
    )
