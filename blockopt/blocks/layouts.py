"""How known modules store query, key, value, output, MLP, norm and embedding parameters.

Modules are recognised by their type and by the attributes they hold together, never by substrings
of a parameter's full name; sizes are checked against the weights and head counts come from the
module or its config. What cannot be read in exactly one way becomes an `Ambiguity`, which
`find_blocks` turns into an error that names the override to pass.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor, nn

from blockopt.blocks.known_modules import (
    CONTIGUOUS_PROJECTIONS,
    EXPERT_PROJECTIONS,
    GROUPED_PROJECTIONS,
    HEAD_DIM,
    INTERLEAVED_TYPES,
    MLP_PROJECTIONS,
    NUM_HEADS,
    NUM_KEY_VALUE_HEADS,
    OUTPUT_PROJECTIONS,
    SEPARATE_PROJECTIONS,
    UNKNOWN_ORDER_TYPES,
)
from blockopt.blocks.split import Split


class Layout(NamedTuple):
    """Roles of a parameter's sections, and how it is cut (`None`: one block)."""

    roles: tuple[str, ...]
    split: Split | None


class Ambiguity(NamedTuple):
    """Why a parameter cannot be read in one way, and the `Blocks(...)` that would settle it."""

    reason: str
    suggestion: str


Layouts = dict[Tensor, Layout | Ambiguity]


class Linear(NamedTuple):
    """A linear map inside a module: its parameters, and the output dimension of its weight."""

    weight: Tensor
    bias: Tensor | None
    out_dim: int

    @property
    def out_size(self) -> int:
        """Number of outputs."""
        return self.weight.shape[self.out_dim]

    @property
    def in_size(self) -> int:
        """Number of inputs."""
        return self.weight.shape[1 - self.out_dim]


def find_linear(module: nn.Module | None, attribute: str) -> Linear | None:
    """The linear map at `module.attribute` (dots allowed), or None."""
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    return read_linear(found)


def read_linear(module: object) -> Linear | None:
    """Read a module as a linear map, through PEFT wrappers and `Sequential`; None if it is none."""
    if isinstance(module, (nn.Sequential, nn.ModuleList)) and len(module) > 0:
        module = module[0]
    module = getattr(module, "base_layer", module)
    if not isinstance(getattr(module, "weight", None), Tensor):
        module = getattr(module, "linear", module)
    weight = getattr(module, "weight", None)
    if not isinstance(module, nn.Module) or isinstance(module, nn.Embedding):
        return None
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    stored_input_first = is_named(module, "Conv1D") and hasattr(module, "nf")
    return Linear(weight, getattr(module, "bias", None), 1 if stored_input_first else 0)


def is_named(module: nn.Module, *names: str) -> bool:
    """Whether the module's type has one of the names, or derives from one, as under FSDP2."""
    return any(base.__name__ in names for base in type(module).__mro__)


def read_int(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """The first of `names` that the module, or else its `config`, holds as a positive integer."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def merge_heads(split: Split) -> Split | None:
    """The same sections with one block each."""
    if len(split.sizes) == 1:
        return None
    return split._replace(parts=(1,) * len(split.sizes), pooled=split.repeat > 1)


def attention_layouts(module: nn.Module, parent: nn.Module | None, per_head: bool) -> Layouts:
    """Layouts of an attention module's parameters; empty if it is not one that we know."""
    layouts = _attention_layouts(module, parent)
    if per_head:
        return layouts
    return {
        p: a._replace(split=merge_heads(a.split))
        if isinstance(a, Layout) and a.split is not None
        else a
        for p, a in layouts.items()
    }


def _attention_layouts(module: nn.Module, parent: nn.Module | None) -> Layouts:
    if isinstance(module, nn.MultiheadAttention):
        return _torch_attention_layouts(module)
    output = next((o for name in OUTPUT_PROJECTIONS if (o := find_linear(module, name))), None)
    for names in SEPARATE_PROJECTIONS:
        query, key, value = (find_linear(module, name) for name in names)
        if query and key and value:
            beside = find_linear(parent, "output.dense")  # BERT's, unless it is that of an MLP
            if output is None and beside and beside.in_size == query.out_size:
                output = beside
            return _separate_layouts(module, query, key, value, output)
    for name in (*CONTIGUOUS_PROJECTIONS, *GROUPED_PROJECTIONS):
        fused = find_linear(module, name)
        if fused:
            known_types = GROUPED_PROJECTIONS.get(name)
            # In GPT-2's cross-attention c_attn holds key and value only.
            query = find_linear(module, "q_attn")
            if query and output:
                return _cross_attention_layouts(module, query, fused, output)
            unknown = known_types is not None and not is_named(module, *known_types)
            if unknown or is_named(module, *UNKNOWN_ORDER_TYPES):
                num_heads = read_int(module, NUM_HEADS)
                return _unknown_order(module, fused) | (
                    _output_layouts(output, num_heads) if num_heads else {}
                )
            return _fused_layouts(
                module, fused, output, grouped=known_types is not None or _is_interleaved(module)
            )
    return {}


def _is_interleaved(module: nn.Module) -> bool:
    """Whether a module with a fused attribute that is usually contiguous stores it head by head."""
    by_option = getattr(module, "head_first", None) is True  # timm's MaxViT
    by_option |= (
        is_named(module, "GPTBigCodeAttention") and getattr(module, "multi_query", None) is False
    )
    return by_option or is_named(module, *INTERLEAVED_TYPES)


def _weight_and_bias(linear: Linear, roles: tuple[str, ...], split: Split) -> Layouts:
    layouts: Layouts = {linear.weight: Layout(roles, split)}
    if linear.bias is not None:
        layouts[linear.bias] = Layout(("bias",) * len(roles), split._replace(dim=0))
    return layouts


def _output_layouts(output: Linear | None, num_heads: int) -> Layouts:
    if output is None:
        return {}
    if output.in_size % num_heads:
        reason = f"its {output.in_size} inputs cannot be cut into {num_heads} heads"
        return _ambiguous(output, ("output",), reason, dim=1 - output.out_dim)
    layouts: Layouts = {
        output.weight: Layout(
            ("output",), Split(1 - output.out_dim, (output.in_size,), (num_heads,))
        )
    }
    if output.bias is not None:  # added after the heads are summed: it belongs to none of them
        layouts[output.bias] = Layout(("bias",), None)
    return layouts


def _ambiguous(
    linear: Linear, roles: tuple[str, ...], reason: str, dim: int | None = None
) -> Layouts:
    dim = linear.out_dim if dim is None else dim
    sizes = "(...)" if len(roles) > 1 else f"({linear.weight.shape[dim]},)"
    suggestion = f"Blocks(roles={roles}, split=Split(dim={dim}, sizes={sizes}, parts=(...)))"
    return {linear.weight: Ambiguity(reason, suggestion)}


def _unknown_order(module: nn.Module, fused: Linear) -> Layouts:
    reason = (
        f"{type(module).__name__} fuses query, key and value, and may store them one after another "
        "or interleaved by head"
    )
    return _ambiguous(fused, ("query", "key", "value"), reason)


def _separate_layouts(
    module: nn.Module, query: Linear, key: Linear, value: Linear, output: Linear | None
) -> Layouts:
    num_heads, head_dim = read_int(module, NUM_HEADS), read_int(module, HEAD_DIM)
    if num_heads is None and head_dim is None:
        reason = f"{type(module).__name__} does not say how many heads it has"
        return (
            _ambiguous(query, ("query",), reason)
            | _ambiguous(key, ("key",), reason)
            | _ambiguous(value, ("value",), reason)
        )
    num_heads = num_heads or query.out_size // head_dim  # type: ignore[operator]
    head_dim = head_dim or query.out_size // num_heads
    if num_heads * head_dim != query.out_size:
        reason = (
            f"{query.out_size} outputs are not the {num_heads} heads of {head_dim} that "
            f"{type(module).__name__} declares"
        )
        return _ambiguous(query, ("query",), reason)
    if key.out_size % head_dim or value.out_size % (key.out_size // head_dim):
        reason = (
            f"{key.out_size} keys and {value.out_size} values cannot be cut into heads of "
            f"{head_dim}"
        )
        return _ambiguous(key, ("key",), reason) | _ambiguous(value, ("value",), reason)
    num_key_value_heads = key.out_size // head_dim
    layouts = _output_layouts(output, num_heads)
    heads = {
        "query": (query, num_heads),
        "key": (key, num_key_value_heads),
        "value": (value, num_key_value_heads),
    }
    for role, (linear, count) in heads.items():
        layouts |= _weight_and_bias(
            linear, (role,), Split(linear.out_dim, (linear.out_size,), (count,))
        )
    return layouts


def _cross_attention_layouts(
    module: nn.Module, query: Linear, fused: Linear, output: Linear
) -> Layouts:
    num_heads = read_int(module, NUM_HEADS)
    if num_heads is None or query.out_size % num_heads or fused.out_size != 2 * query.out_size:
        return _ambiguous(
            fused,
            ("key", "value"),
            f"{type(module).__name__} does not say how its heads are stored",
        )
    return (
        _output_layouts(output, num_heads)
        | _weight_and_bias(query, ("query",), Split(query.out_dim, (query.out_size,), (num_heads,)))
        | _weight_and_bias(
            fused, ("key", "value"), Split(fused.out_dim, (query.out_size,) * 2, (num_heads,) * 2)
        )
    )


def _fused_layouts(
    module: nn.Module, fused: Linear, output: Linear | None, grouped: bool
) -> Layouts:
    roles = ("query", "key", "value")
    num_heads, head_dim = read_int(module, NUM_HEADS), read_int(module, HEAD_DIM)
    if num_heads is None:
        return _ambiguous(
            fused, roles, f"{type(module).__name__} does not say how many heads it has"
        )
    query_size = (
        output.in_size if output else num_heads * head_dim if head_dim else fused.out_size // 3
    )
    head_dim = head_dim or query_size // num_heads
    num_key_value_heads, rest = divmod(fused.out_size - query_size, 2 * head_dim)
    declared = read_int(module, NUM_KEY_VALUE_HEADS) or num_key_value_heads
    if (
        query_size != num_heads * head_dim
        or rest
        or num_key_value_heads < 1
        or num_heads % num_key_value_heads
        or (declared != num_key_value_heads and not grouped)
    ):
        reason = (
            f"{fused.out_size} outputs are not the queries, keys and values of {num_heads} heads "
            f"of {head_dim} and {declared} key-value heads that {type(module).__name__} declares"
        )
        return _ambiguous(fused, roles, reason)
    if grouped:
        queries = num_heads // num_key_value_heads
        sizes, parts = (queries * head_dim, head_dim, head_dim), (queries, 1, 1)
        split = Split(fused.out_dim, sizes, parts, repeat=num_key_value_heads)
    else:
        key_value_size = num_key_value_heads * head_dim
        parts = (num_heads, num_key_value_heads, num_key_value_heads)
        split = Split(fused.out_dim, (query_size, key_value_size, key_value_size), parts)
    return _output_layouts(output, num_heads) | _weight_and_bias(fused, roles, split)


def _torch_attention_layouts(module: nn.MultiheadAttention) -> Layouts:
    heads, size = module.num_heads, module.embed_dim
    roles, sizes, parts = ("query", "key", "value"), (size,) * 3, (heads,) * 3
    layouts = _output_layouts(find_linear(module, "out_proj"), heads)
    if module.in_proj_weight is not None:
        layouts[module.in_proj_weight] = Layout(roles, Split(0, sizes, parts))
    else:
        for role, name in zip(roles, ("q_proj_weight", "k_proj_weight", "v_proj_weight")):
            layouts[getattr(module, name)] = Layout((role,), Split(0, (size,), (heads,)))
    if module.in_proj_bias is not None:
        layouts[module.in_proj_bias] = Layout(("bias",) * 3, Split(0, sizes, parts))
    for bias in (module.bias_k, module.bias_v):
        if bias is not None:
            layouts[bias] = Layout(("bias",), Split(2, (size,), (heads,)))
    return layouts


def rows_layouts(linear: Linear, roles: tuple[str, ...], per_row: Collection[str]) -> Layouts:
    """Layouts of a linear map with one section per role, cut into units for roles in `per_row`."""
    sizes = (linear.out_size // len(roles),) * len(roles)
    parts = tuple(size if role in per_row else 1 for size, role in zip(sizes, roles))
    if parts == (1,):
        bias: Layouts = {} if linear.bias is None else {linear.bias: Layout(("bias",), None)}
        return {linear.weight: Layout(roles, None)} | bias
    return _weight_and_bias(linear, roles, Split(linear.out_dim, sizes, parts))


def mlp_layouts(module: nn.Module, per_row: Collection[str]) -> Layouts:
    """Layouts of an MLP's parameters; empty if it is not one that we know."""
    for family in MLP_PROJECTIONS:
        linears = {name: linear for name in family if (linear := find_linear(module, name))}
        if len(linears) < len(family):
            continue
        layouts: Layouts = {}
        first, *_, out = linears.values()
        fused = len(next(iter(family.values()))) == 2
        if out.out_size != first.in_size or (fused and first.out_size != 2 * out.in_size):
            continue  # not back to the width it came from: not the MLP of a transformer block
        for name, linear in linears.items():
            roles = family[name]
            if len(roles) == 1 and linear is not out and linear.out_size == 2 * out.in_size:
                reason = (
                    f"{type(module).__name__}.{name} fuses the gate with the input, in an order "
                    "that it does not tell"
                )
                layouts |= _ambiguous(linear, ("mlp_gate", "mlp_in"), reason)
            else:
                layouts |= rows_layouts(linear, roles, per_row)
        return layouts
    return {
        parameter: Layout(
            (EXPERT_PROJECTIONS[name],), Split(0, (parameter.shape[0],), (parameter.shape[0],))
        )
        for name, parameter in module.named_parameters(recurse=False)
        if name in EXPERT_PROJECTIONS and parameter.ndim == 3
    }
