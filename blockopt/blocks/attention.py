"""Attention: which linear maps make the queries, keys and values, and how they store the heads.

A module is attention if it holds at least two of them. Their names say which is which, their sizes
how many heads there are, and what is left is told by what it multiplies: the output projection
takes what the values have. What cannot be read in exactly one way becomes an `Ambiguity`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from blockopt.blocks.attention_heads import Heads, read_heads
from blockopt.blocks.attention_kinds import (
    deformable,
    in_a_list,
    one_of_heads,
    one_query,
    stored_by_head,
    torch_attention,
)
from blockopt.blocks.attention_names import (
    attention_letters,
    attention_maps,
    chains,
    is_in_mlp,
    joint_role,
)
from blockopt.blocks.fused_maps import fused_layout, is_of_known_order, pair_layouts, thirds
from blockopt.blocks.known_modules import (
    ATTENTION_ROLES,
    ATTENTION_WORDS,
    GATE_WORDS,
    GATED_QUERY_TYPES,
    OUTPUT_WORDS,
    PLAIN_WORDS,
    POSITION_WORDS,
    UNKNOWN_ORDER_NAMES,
)
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
from blockopt.blocks.linear_maps import (
    Linear,
    is_called_attention,
    is_named,
    only_map,
    read_linear,
    type_words,
    unwrapped,
    words,
)
from blockopt.blocks.split import Split


def attention_layouts(
    module: nn.Module, ancestors: tuple[nn.Module, ...], per_head: bool
) -> Layouts:
    """Layouts of an attention module's parameters; empty if it is none.

    Args:
        module: Any module.
        ancestors: The modules around it, the innermost first.
        per_head: Whether to cut by head.
    """
    if isinstance(module, nn.MultiheadAttention):
        layouts = torch_attention(module)
    else:
        maps = attention_maps(module)
        named = attention_letters(module, maps)
        layouts = stored_by_head(module)
        if named:
            layouts |= _Reader(module, ancestors, maps, named).layouts()
        elif not layouts:
            layouts = deformable(module, maps, ancestors) or in_a_list(module, ancestors)
    return layouts if per_head else without_heads(layouts)


def is_attention(module: nn.Module) -> bool:
    """Whether a module makes queries, keys and values."""
    return bool(attention_layouts(module, (), per_head=False))


class _Reader(NamedTuple):
    """One attention module: its maps by name, and the letters of those that have them."""

    module: nn.Module
    ancestors: tuple[nn.Module, ...]
    maps: dict[str, Linear]
    named: dict[str, str]

    def layouts(self) -> Layouts:
        chained = chains(self.maps, self.named)
        named = {n: s for n, s in self.named.items() if n not in chained.values()}
        query_name = next((n for n, s in named.items() if s == "q"), "")
        query = self.maps.get(query_name)
        output_name, output = self._output(named, query)
        if query and output and "gate" in words(query_name):  # beside queries it makes gates
            query = query._replace(out_size=query.out_size - output.in_size)
        alone = one_of_heads(self.module, self.ancestors, self.maps, named)
        if alone is not None:
            return alone
        heads = read_heads(self.module, self.ancestors, query, output)
        if heads.number is None and not heads.problem and self._has_one_head(output):
            heads = heads._replace(number=1)
        found: Layouts = {}
        for name, letters in named.items():
            second_factor = name in chained
            found |= self._projection(name, letters, heads, output, second_factor)
        for second, first in chained.items():
            found |= _first_factor(self.maps[first], self.maps[second], self.named[first])
        if output is not None:
            found |= self._cut_output(output, output_name, heads)
        for linear in self._other_outputs(output):
            found |= input_cut(linear, "output", heads.number or 1)
        rest = {
            name: linear
            for name, linear in self.maps.items()
            if name not in self.named and name != output_name
        }
        if output is not None:
            for name in self._outputs_of_streams(rest, output_name or "", output):
                found |= input_cut(rest.pop(name), "output", heads.number or 1)
        return self._rest(rest, heads, query) | found

    def _cut_output(self, output: Linear, name: str | None, heads: Heads) -> Layouts:
        holder = self.module._modules.get(name or "")
        if holder is not None and "grouped" in type_words(holder):
            return whole_layouts(output, "output")  # the heads of all groups share its columns
        if not heads.number:
            return self._unknown(output, "output", heads)
        return input_cut(output, "output", heads.number)

    def _other_outputs(self, output: Linear | None) -> list[Linear]:
        """Beside the module, outputs of a second stream, with its words: LiLT's `layout_output`."""
        if output is None or not self.ancestors:
            return []
        streams = [{*words(n)} - ATTENTION_WORDS.keys() for n, s in self.named.items() if s == "q"]
        beside = {n: only_map(child) for n, child in self.ancestors[0].named_children()}
        return [
            linear
            for name, linear in beside.items()
            if linear is not None
            and linear.weight is not output.weight
            and any(stream and {*words(name)} == {*stream, "output"} for stream in streams)
        ]

    def _outputs_of_streams(
        self, rest: dict[str, Linear], output_name: str, output: Linear
    ) -> list[str]:
        """The outputs of further streams, named as their queries are: `txt_qkv`, `txt_proj`."""
        queries = [{*words(n)} for n, s in self.named.items() if "q" in s]
        streams = [said.difference(ATTENTION_WORDS) for said in queries]
        streams = [stream - streams[0].intersection(*streams) for stream in streams]
        plain = {*words(output_name)}.difference(*streams)
        return [
            name
            for name, linear in rest.items()
            if (linear.in_size, linear.out_size) == (output.in_size, output.out_size)
            and any(stream and {*words(name)} - stream == plain for stream in streams)
        ]

    def _has_one_head(self, output: Linear | None) -> bool:
        """Whether attention that declares no heads is of a kind that has none.

        That is RWKV, which mixes each channel alone, additive attention without values, and
        MobileViTv2 with its single query.
        """
        made = set("".join(self.named.values()))
        single = any(one_query(self.maps[n], letters, output) for n, letters in self.named.items())
        return single or "v" not in made or "receptance" in self.maps

    def _output(
        self, named: dict[str, str], query: Linear | None
    ) -> tuple[str | None, Linear | None]:
        """The map that takes what the values have, in the module or right after it."""
        rest = {n: m for n, m in self.maps.items() if n not in self.named}
        width = query.out_size if query is not None else None
        fits = {
            name: linear
            for name, linear in rest.items()
            if not {*(GATE_WORDS - {"a", "b"}), *POSITION_WORDS, "conv"} & set(words(name))
        }
        ranked = sorted(fits, key=lambda name: self._output_rank(name, fits[name], width))
        values = (self.maps[n].out_size for n, letters in named.items() if letters == "v")
        apart = [n for n in ranked if not is_in_mlp(fits[n], list(fits.values()))]
        alone = len(apart) == 1 and (width is None or fits[apart[0]].in_size in (width, *values))
        chosen = [n for n in ranked if OUTPUT_WORDS & set(words(n)) or (alone and n in apart)]
        chosen = [n for n in chosen if not self._is_mlp_in(fits[n], query)]
        if "v" not in "".join(named.values()):  # the indexer of sparse attention returns scores
            widths = {self.maps[n].in_size for n in named}
            chosen = [n for n in chosen if fits[n].out_size in widths]
        if chosen:
            second = chains(fits, dict.fromkeys(chosen, "o"))
            name = next((second[n] for n in chosen if n in second), chosen[0])
            return name, fits[name]
        return None, self._output_beside(query)

    def _output_beside(self, query: Linear | None) -> Linear | None:
        """The output projection in the module around, after this module or called so."""
        if not self.ancestors:
            return None
        beside = [(n, unwrapped(child)) for n, child in self.ancestors[0].named_children()]
        modules = [child for _, child in beside]
        start = modules.index(self.module) + 1 if self.module in modules else len(modules)
        after = [m for _, child in beside[start:] if (m := only_map(child)) is not None]  # type: ignore[arg-type]
        named = [
            m for n, child in beside if {"o", "out"} & set(words(n)) and (m := read_linear(child))
        ]
        for linear in (*after[:1], *named):
            if query is None:
                return linear
            # ConvBERT joins what convolutions make to what attention makes.
            if linear.in_size % query.out_size == 0 and linear.out_size == query.in_size:
                return linear if linear.in_size <= 2 * query.out_size else None
        return None

    def _output_rank(self, name: str, linear: Linear, width: int | None) -> tuple[bool, ...]:
        """Sizes come first, then the words that say so, then those that say that it is a map."""
        said = set(words(name))
        called_so = {"o", "out", "output", "wo"} & said
        other_width = width is not None and linear.in_size != width
        return other_width, not called_so, not OUTPUT_WORDS & said

    def _is_mlp_in(self, linear: Linear, query: Linear | None) -> bool:
        """Whether a map is the first of an MLP that stands beside the attention."""
        return query is not None and any(
            other is not linear
            and other.in_size == linear.out_size
            and other.out_size == linear.in_size
            and linear.out_size > linear.in_size == query.in_size
            for other in self.maps.values()
        )

    def _projection(
        self, name: str, letters: str, heads: Heads, output: Linear | None, second_factor: bool
    ) -> Layouts:
        linear = self.maps[name]
        if (three := one_query(linear, letters, output)) is not None:
            return three
        if heads.number is None:
            return self._unknown(linear, joint_role(letters), heads)
        if letters in ("q", "k", "v"):
            return self._separate(name, letters, heads, output)
        if letters == "kv" and second_factor:
            return self._by_head(linear, "kv", heads, output)
        if letters in ("kv", "qk"):
            return pair_layouts(self.module, name, linear, letters, heads)
        if name in UNKNOWN_ORDER_NAMES and not is_of_known_order(self.module):
            reason = (
                f"{type(self.module).__name__} fuses query, key and value, and may store them one "
                "after another or interleaved by head"
            )
            fused = fused_layout(self.module, linear, heads, output)
            layout = fused or Layout(("query", "key", "value"), thirds(linear))
            return ambiguous(linear, reason, layout)
        return self._fused(linear, heads, output)

    def _unknown(self, linear: Linear, role: str, heads: Heads) -> Layouts:
        reason = heads.problem or f"{type(self.module).__name__} does not say how many heads it has"
        return ambiguous(linear, reason, Layout((role,)))

    def _own_heads(self, name: str, heads: Heads) -> Heads:
        """The heads of the query that a key or value belongs to, and the number of its keys."""
        last = self.named.keys() - chains(self.maps, self.named).values()
        queries = [n for n, s in self.named.items() if s == "q" and n in last]
        alike = {n: len({*words(n)} & {*words(name)}) for n in queries}
        query = max(alike, key=alike.__getitem__, default=None)
        number = heads.number or 1
        if query is not None and len({self.maps[n].out_size for n in alike}) > 1:
            heads = heads._replace(size=self.maps[query].out_size // number)
        keys = [self.maps[n] for n, s in self.named.items() if s == "k"]
        if len(keys) == 1 and heads.size and keys[0].out_size % heads.size == 0:
            heads = heads._replace(key_value_number=keys[0].out_size // heads.size)
        return heads

    def _separate(self, name: str, letters: str, heads: Heads, output: Linear | None) -> Layouts:
        linear = self.maps[name]
        role, number = ATTENTION_ROLES[letters], heads.number or 1
        if letters == "q":
            gated = output is not None and linear.out_size == 2 * output.in_size
            if gated and (heads.size or 0) * number == output.in_size:  # type: ignore[union-attr]
                size = linear.out_size // (2 * number)
                split = Split(0, (size, size), (1, 1), repeat=number)
                if any("Qwen3" in base.__name__ for base in type(self.module).__mro__) or is_named(
                    self.module, *GATED_QUERY_TYPES
                ):
                    return output_cut(linear, ("query", "gate"), split)
                reason = (
                    f"{type(self.module).__name__} makes queries of twice the size that it uses"
                )
                return ambiguous(linear, reason, Layout(("query", "gate"), split))
            if "gate" in words(name) and output is not None:
                return self._queries_and_gates(linear, number, output)
            return heads_cut(linear, role, number)
        fitting = self._own_heads(name, heads).of_keys(linear, value=letters == "v")
        if fitting is None:
            reason = (
                f"{linear.out_size} {role}s of {type(self.module).__name__} cannot be cut into "
                f"heads of {heads.size}"
            )
            return ambiguous(linear, reason, Layout((role,)))
        return heads_cut(linear, role, fitting)

    def _queries_and_gates(self, linear: Linear, heads: int, output: Linear) -> Layouts:
        """Queries, and gates of what the heads return, which have the size of values."""
        gate = output.in_size // heads
        query = linear.out_size // heads - gate
        fits = query > 0 and (query + gate) * heads == linear.out_size
        split = Split(0, (query, gate), (1, 1), repeat=heads) if fits else None
        roles = ("query", "gate") if fits else ("query",)
        reason = f"{type(self.module).__name__} fuses queries and gates in an order not told"
        return ambiguous(linear, reason, Layout(roles, split))

    def _by_head(
        self, linear: Linear, letters: str, heads: Heads, output: Linear | None
    ) -> Layouts:
        """Key and value of each head in turn, as the second factor of a low-rank map has them."""
        number = heads.number or 1
        value = output.in_size // number if output is not None else 0
        key = linear.out_size // number - value
        if linear.out_size % number or value < 1 or key < 1:
            reason = f"{type(self.module).__name__} does not say how keys and values are stored"
            return ambiguous(linear, reason, Layout((joint_role(letters),)))
        return output_cut(linear, ("key", "value"), Split(0, (key, value), (1, 1), repeat=number))

    def _fused(self, linear: Linear, heads: Heads, output: Linear | None) -> Layouts:
        layout = fused_layout(self.module, linear, heads, output)
        if layout is not None:
            return output_cut(linear, layout.roles, layout.split or thirds(linear))
        reason = (
            f"{linear.out_size} outputs are not the queries, keys and values of {heads.number} "
            f"heads of {heads.size} that {type(self.module).__name__} declares"
        )
        even = linear.out_size % 3 == 0
        return ambiguous(
            linear,
            reason,
            Layout(("query", "key", "value"), thirds(linear)) if even else Layout(("value",)),
        )

    def _rest(self, rest: dict[str, Linear], heads: Heads, query: Linear | None) -> Layouts:
        """Gates, maps of positions, factors of the output, and what cannot be told."""
        found: Layouts = {}
        number = heads.number or 1
        largest = max((self.maps[n].weight.numel() for n in self.named), default=0)
        sizes = {self.maps[n].out_size // len(letters) for n, letters in self.named.items()}
        for name, linear in rest.items():
            said = set(words(name))
            if is_in_mlp(linear, list(rest.values())):
                continue
            if _is_gate(said) or linear.out_size == heads.number:  # one number per head
                found |= heads_cut(linear, "gate", number)
            elif POSITION_WORDS & said and (said != {"r"} or linear.out_size in sizes):
                found |= heads_cut(linear, "key", number)
            elif self._is_mlp_in(linear, query):
                continue
            elif {"o", "out", "output", "final", "post"} & said:
                found |= whole_layouts(linear, "output")
            elif linear.weight.numel() * 4 < largest:
                continue
            elif is_called_attention(self.module):
                reason = f"{type(self.module).__name__}.{name} is a projection we do not know"
                found |= ambiguous(linear, reason, Layout(("other",)))
        return found


def _is_gate(said: set[str]) -> bool:
    """Whether the words in the name of a map say that it makes gates.

    A single letter says so only beside words that say nothing: `b_proj`, but not `up_b`.
    """
    if {"gate", "gates"} & said:
        return True
    if {word for word in GATE_WORDS & said if len(word) > 2}:
        return not OUTPUT_WORDS & said - {"proj"}
    return bool(GATE_WORDS & said) and said <= GATE_WORDS | PLAIN_WORDS


def _first_factor(first: Linear, second: Linear, letters: str) -> Layouts:
    """The map into the low-rank space, which all heads share.

    What the second map does not take are keys of their own, as those with positions in DeepSeek's
    multi-head latent attention.
    """
    role, extra = joint_role(letters), first.out_size - second.in_size
    if extra > 0 and "k" in letters:
        return output_cut(first, (role, "key"), Split(0, (second.in_size, extra), (1, 1)))
    return whole_layouts(first, role)
