"""Adapters take the role of what they adapt: PEFT's methods, and low-rank factors beside a weight.

The adapter of a layer belongs to the layer. Of two factors, W + B·A, A is cut like the inputs of W
and B like its outputs: the heads of a query projection are in B, those of an output projection in
A. A factor that is not cut, such as the A of a fused query, key and value, serves all of them. The
factors of stacked experts lie side by side: A is cut by expert, and B like the outputs of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from blockopt.blocks.layouts import Ambiguity, Layout, Layouts, rows_layouts
from blockopt.blocks.linear_maps import is_named, read_linear, stored_weight, unwrapped, words
from blockopt.blocks.split import Split

# Which side of the adapted weight each tensor of PEFT's methods runs along, and in which dimension.
INPUT_SIDE = {
    **dict.fromkeys(("lora_A", "hada_w1_b", "hada_w2_b", "delora_A", "hira_A", "peanut_A"), 1),
    **dict.fromkeys(("lokr_w1", "lokr_w1_b", "V_low"), 1),
    "oft_R": 0,  # one rotation for each group of inputs
}
OUTPUT_SIDE = {
    **dict.fromkeys(("lora_B", "hada_w1_a", "hada_w2_a", "delora_B", "hira_B", "peanut_B"), 0),
    **dict.fromkeys(("vera_lambda_b", "pvera_lambda_b", "boft_s", "lokr_w1", "lokr_w1_a"), 0),
    **dict.fromkeys(("lora_magnitude_vector", "miss_block", "beft_bias"), -1),
    "U_low": 0,
}
TOKEN_SIDE = {"lora_embedding_A": 1}
NOT_ADAPTERS = {"base_layer", "original_module", "modules_to_save"}


def adapter_layouts(
    module: nn.Module, found: Layouts, config: Any, per_row: Collection[str]
) -> Layouts:
    """Layouts of the adapters that a module adds to a layer; empty if it adds none.

    Args:
        module: Any module.
        found: The layouts of the layers themselves, frozen ones too.
        config: The config of PEFT, if the model has one.
        per_row: The roles that are cut into rows.
    """
    if is_named(module, "PrefixEncoder"):
        return _prefixes(module, config)
    if is_named(module, "PromptEncoder", "MultitaskPromptEmbedding"):
        return _prompts(module, per_row)
    if is_named(module, "XLoraClassifier"):
        return _mixture_of_adapters(module, per_row)
    layer = unwrapped(module)
    if not isinstance(layer, nn.Module):
        return {}
    name = getattr(module, "parameter_name", None)  # of a parameter without a module of its own
    weight = layer._parameters.get(name) if isinstance(name, str) else stored_weight(layer)
    layout = found.get(weight) if weight is not None else None
    if weight is None or layout is None:
        return {}
    added = _companions(module, layer, weight, layout)
    if layer is not module:
        return dict(added)
    return {parameter: companion for parameter, companion in added if parameter not in found}


def _companions(
    module: nn.Module, layer: nn.Module, weight: Tensor, layout: Layout | Ambiguity
) -> Iterator[tuple[Tensor, Layout]]:
    layout = layout if isinstance(layout, Layout) else layout.suggestion
    for name, parameter in module.named_parameters():
        parts = name.split(".")
        inside = parameter is weight or NOT_ADAPTERS & set(parts)
        if inside or (parts[-1] == "bias" and len(parts) == 1):
            continue
        yield parameter, _companion(parts, parameter, layer, layout)


def joint_layout(layout: Layout) -> Layout:
    """One block for all sections: the role nearest to the output."""
    return Layout((next(r for r in ("value", "mlp_in", *layout.roles) if r in layout.roles),))


def _companion(parts: list[str], parameter: Tensor, layer: nn.Module, layout: Layout) -> Layout:
    split = layout.split
    if split is not None and split.stack > 1:
        return _factor_of_experts(parts, parameter, layout, split)
    if "trainable_tokens_delta" in parts and split is not None:  # some of the rows
        tokens = parameter.shape[0]
        return Layout(layout.roles, Split(0, (tokens,), (tokens,)))
    dim = _cut_dim(parts, parameter, layer, layout)
    cut = None if dim is None or split is None else _resized(split, dim, parameter.shape[dim])
    if any("bias" in words(part) for part in parts):
        return Layout(("bias",) * (len(layout.roles) if cut else 1), cut)
    return joint_layout(layout) if cut is None else Layout(layout.roles, cut)


def _factor_of_experts(parts: list[str], parameter: Tensor, layout: Layout, split: Split) -> Layout:
    """A is stored as (experts · rank, inputs), and B as (outputs, rank · experts)."""
    rows = parameter.shape[0]
    if "lora_A" in parts and rows % split.stack == 0:
        return Layout(joint_layout(layout).roles, Split(0, (rows,), (split.stack,)))
    if "lora_B" in parts and rows == split.length and layout.roles != ("output",):
        return Layout(layout.roles, split._replace(dim=0, stack=1))
    return joint_layout(layout)


def _resized(split: Split, dim: int, length: int) -> Split | None:
    """The same blocks along a dimension of another length, of which each entry stands for several.

    None if an entry would stand for entries of two blocks.
    """
    sizes = tuple(size * length // split.length for size in split.sizes)
    exact = all(new * split.length == old * length for new, old in zip(sizes, split.sizes))
    fits = exact and all(size and size % parts == 0 for size, parts in zip(sizes, split.parts))
    return split._replace(dim=dim, sizes=sizes) if fits else None


def _cut_dim(parts: list[str], parameter: Tensor, layer: nn.Module, layout: Layout) -> int | None:
    """The dimension of an adapter's tensor that is cut as the adapted weight is."""
    if layout.split is None or layout.split.stack > 1:
        return None
    if isinstance(layer, nn.Embedding):
        return next((dim for name, dim in TOKEN_SIDE.items() if name in parts), None)
    linear = read_linear(layer)
    if linear is None:
        return None
    at_inputs = layout.split.dim == linear.in_dim
    size = linear.in_size if at_inputs else linear.out_size
    for name, dim in (INPUT_SIDE if at_inputs else OUTPUT_SIDE).items():
        if name in parts and (parameter.shape[dim] == size or not name.startswith("lora")):
            return dim % parameter.ndim
    known = any(name in parts for name in (*INPUT_SIDE, *OUTPUT_SIDE))
    by_hand = not known or {"lora_A", "lora_B"} & set(parts)
    if by_hand and ({"a", "down"} if at_inputs else {"b", "up"}) & _words(parts):
        dims = [dim for dim, length in enumerate(parameter.shape) if length == size]
        return dims[0] if len(dims) == 1 else None  # written by hand, in any order
    if "ia3_l" in parts:  # (1, inputs) or (outputs, 1)
        dim = 1 if parameter.shape[0] == 1 else 0
        return dim if (dim == 1) == at_inputs else None
    vector = sum(size > 1 for size in parameter.shape) == 1
    if vector and parts[-1] in ("original0", "weight_g"):  # the norms of a weight_norm
        dim = max(range(parameter.ndim), key=lambda d: parameter.shape[d])
        return dim if dim == layout.split.dim else None
    same = not known and parameter.shape == linear.weight.shape
    return layout.split.dim if same else None


def _words(parts: list[str]) -> set[str]:
    return {word for part in parts for word in words(part)}


def shared_layout(
    earlier: Layout | Ambiguity | None, layout: Layout | Ambiguity
) -> Layout | Ambiguity:
    """The layout of what several layers may share, as VB-LoRA shares its vectors.

    Layers of one role make one block of what they share.
    """
    if earlier is None or earlier == layout:
        return layout
    if isinstance(earlier, Ambiguity) or isinstance(layout, Ambiguity):
        return earlier
    if earlier.roles == layout.roles:
        return joint_layout(layout)
    roles = " and ".join(sorted({*earlier.roles, *layout.roles}))
    return Ambiguity(f"adapters of {roles} share it", Layout(("other",)))


def _prefixes(module: nn.Module, config: Any) -> Layouts:
    """Prefix tuning: keys and values of all layers, one layer after another."""
    tables = [p for n, p in module.named_parameters() if n == "embedding.weight"]
    maps = [m for child in module.modules() if (m := read_linear(child)) is not None]
    sizes = [getattr(config, name, None) for name in ("num_layers", "num_attention_heads")]
    if not all(isinstance(size, int) for size in sizes):
        return {}
    layers, heads = sizes
    found: Layouts = {}
    last = [(maps[-1].weight, maps[-1].out_dim)] if len(maps) > 1 else [(p, 1) for p in tables]
    for weight, dim in last:
        width, rest = divmod(weight.shape[dim], 2 * layers)  # type: ignore[operator]
        if not rest and width % heads == 0:  # type: ignore[operator]
            split = Split(dim, (width, width), (heads, heads), repeat=layers)  # type: ignore[arg-type]
            found[weight] = Layout(("key", "value"), split)
    for linear in maps[:-1]:
        found[linear.weight] = Layout(("value",))
    return found


def _prompts(module: nn.Module, per_row: Collection[str]) -> Layouts:
    """Learned tokens, and the MLP that p-tuning makes them with."""
    found: Layouts = {p: Layout(("embedding",)) for p in module.parameters(recurse=False)}
    maps = [m for child in module.modules() if (m := read_linear(child)) is not None]
    for linear in maps:
        role = "mlp_out" if linear is maps[-1] else "mlp_in"
        found |= rows_layouts(linear, (role,), per_row)
    return found


def _mixture_of_adapters(module: nn.Module, per_row: Collection[str]) -> Layouts:
    """X-LoRA's net that weighs several adapters, token by token: its last map is a router."""
    maps = [m for child in module.modules() if (m := read_linear(child)) is not None]
    found: Layouts = {}
    for linear in {id(m.weight): m for m in maps}.values():
        role = "router" if linear.weight is maps[-1].weight else "mlp_in"
        found |= rows_layouts(linear, (role,), per_row)
    return found


def peft_config(model: nn.Module) -> Any:
    """The config of the active adapter of a PEFT model, or None."""
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, Mapping) and configs:
            return configs.get(
                getattr(module, "active_adapter", None), next(iter(configs.values()))
            )
    return None
