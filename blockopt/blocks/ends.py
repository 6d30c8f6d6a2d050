"""What stands around the layers: embeddings, positions, learned tokens, heads and norms."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from blockopt.blocks.known_modules import (
    EMBEDDING_WORDS,
    HEAD_NAMES,
    HEAD_WORDS,
    POSITION_WORDS,
    TOKEN_WORDS,
    WIDENED_HEAD_TYPES,
)
from blockopt.blocks.layouts import Layout, Layouts, rows_layouts
from blockopt.blocks.linear_maps import (
    Linear,
    is_named,
    only_map,
    read_linear,
    stored_weight,
    type_words,
    words,
)


def is_vector(parameter: Tensor) -> bool:
    """Whether a parameter has one dimension at most, but for dimensions of length 1."""
    return sum(size > 1 for size in parameter.shape) < 2


def embedding_layouts(
    module: nn.Module, attribute: str, parent: nn.Module | None, per_row: Collection[str]
) -> Layouts:
    """Tables that are looked up, patches and other inputs, and learned tokens and positions."""
    said = set(words(attribute))
    found: Layouts = {}
    weight = stored_weight(module)
    table = isinstance(module, nn.Embedding) or (
        {"embedding", "embeddings"} & type_words(module) and weight is not None and weight.ndim == 2
    )
    if table and weight is not None:
        position = (POSITION_WORDS - {"r", "time", "temporal"}) & said or (
            {"position", "positional"} & type_words(module)
        )
        rows = Linear(weight, None, 0, 1, *weight.shape)
        found |= rows_layouts(rows, ("position" if position else "embedding",), per_row)
    elif weight is not None and hasattr(module, "kernel_size") and weight.ndim > 2:
        around = said | (type_words(parent) if parent is not None else frozenset())
        if EMBEDDING_WORDS & around and "norm" not in type_words(module):
            for name, parameter in module.named_parameters():
                found[parameter] = Layout(("bias" if name == "bias" else "embedding",))
    return found


def free_parameter_layouts(module: nn.Module) -> Layouts:
    """Parameters that a module holds beside its submodules."""
    found: Layouts = {}
    for name, parameter in module.named_parameters(recurse=False):
        said = set(words(name))
        if name in ("weight", "bias") or parameter.ndim == 0:
            continue
        # Attention biases are a table: one number for each distance and head, as of LeViT.
        if (POSITION_WORDS - {"r", "time"}) & said or name in ("rel_pos", "attention_biases"):
            found[parameter] = Layout(("position",))
        elif "bias" in said:
            found[parameter] = Layout(("bias",))
        elif TOKEN_WORDS & said and (parameter.ndim > 1 or {"embedding", "embed", "token"} & said):
            found[parameter] = Layout(("embedding",))
        elif is_vector(parameter) and {"scale", "gamma", "lambda", "ls", "gain"} & said:
            found[parameter] = Layout(("norm",))
    return found


def norm_layouts(module: nn.Module) -> Layouts:
    """Gains and shifts: those of norms, and those that scale the branch of a layer."""
    named = any(word.endswith(("norm", "normalization")) for word in type_words(module))
    scales = "scale" in type_words(module) or "grn" in type_words(module)
    if not (named or scales):
        return {}
    own = module.named_parameters(recurse=False)
    return {p: Layout(("norm",)) for name, p in own if is_vector(p) or name in ("weight", "bias")}


def head_layouts(
    module: nn.Module,
    path: str,
    parent: nn.Module | None,
    is_head: bool,
    per_row: Collection[str],
) -> Layouts:
    """The last linear map of a head.

    Args:
        module: Any module.
        path: Where it is in the model, without wrappers.
        parent: The module around it.
        is_head: Whether the model itself says that it is its head.
        per_row: The roles that are cut into rows.
    """
    parts = path.split(".")
    if isinstance(parent, nn.ModuleList):  # one of several heads
        parts.pop()
    inside_a_layer = any(part.isdecimal() for part in parts)
    attribute = parts[-1] if parts else ""
    named = attribute in HEAD_NAMES or HEAD_WORDS & set(words(attribute))
    if not is_head and (inside_a_layer or not named):
        return {}
    if attribute in HEAD_NAMES and not is_head and read_linear(module) is None:
        return {}
    if isinstance(module, nn.ModuleDict):  # several heads, for as many tasks
        of_tasks = (head_layouts(child, path, module, True, per_row) for child in module.values())
        return {parameter: layout for task in of_tasks for parameter, layout in task.items()}
    maps = {n: m for n, inner in module.named_modules() if (m := read_linear(inner)) is not None}
    if maps:
        named_last = [n for n in maps if {"out", "output"} & set(words(n.rpartition(".")[2]))]
        return rows_layouts(maps[(named_last or list(maps))[-1]], ("head",), per_row)
    weight = stored_weight(module)  # several heads stacked in one parameter
    return {weight: Layout(("head",))} if weight is not None and weight.ndim == 3 else {}


def input_layouts(
    module: nn.Module, path: str, parent: nn.Module | None, per_row: Collection[str]
) -> Layouts:
    """Linear maps that make embeddings of patches, features or other embeddings."""
    alone = stored_weight(module) is not None or type(module) is nn.Sequential
    linear = only_map(module) if alone else None
    if linear is None or any(part.isdecimal() for part in path.split(".")):
        return {}
    said = set(words(path.rpartition(".")[2]))
    if "bias" in said and (POSITION_WORDS - {"r", "time"}) & said:  # a table of one-hot distances
        return rows_layouts(linear, ("position",), per_row)
    around = type_words(parent) if parent is not None else frozenset()
    named = EMBEDDING_WORDS & (said | around)
    features = {"feature", "subsampling"} & around
    return rows_layouts(linear, ("embedding",), per_row) if named or features else {}


def vocabulary_layouts(modules: Mapping[str, nn.Module], per_row: Collection[str]) -> Layouts:
    """Maps outside of the layers that have an output for each row of a table of their width.

    Args:
        modules: The modules of the model by their paths.
        per_row: The roles that are cut into rows.
    """
    outside = {p: m for p, m in modules.items() if not any(map(str.isdecimal, p.split(".")))}
    tables = {
        (module.num_embeddings, module.embedding_dim)
        for path, module in outside.items()
        if isinstance(module, nn.Embedding) and POSITION_WORDS.isdisjoint(words(path))
    }
    found: Layouts = {}
    for module in outside.values():
        if is_named(module, *WIDENED_HEAD_TYPES):
            weight: Tensor = module.dense.weight  # type: ignore[union-attr, assignment]
            columns = Linear(weight, None, 1, 0, weight.shape[1], weight.shape[0])
            found |= rows_layouts(columns, ("head",), per_row)
        linear = read_linear(module)
        if linear is not None and (linear.out_size, linear.in_size) in tables:
            square = linear.out_size == linear.in_size
            found |= {} if square else rows_layouts(linear, ("head",), per_row)
    return found
