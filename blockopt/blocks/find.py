"""The Hessian blocks of a transformer: which role every parameter plays, and where it is cut.

The loss Hessian of a transformer is heterogeneous by block: the embedding, the query, key and value
of each head, the output projection, the MLP, the norms and the head differ in curvature by orders
of magnitude (Ormaniec, Dangel and Singh, ICLR 2025). `find_blocks` names those blocks for a model;
everything else in blockopt works on what it returns.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from blockopt.blocks.adapters import adapter_layouts, peft_config, shared_layout
from blockopt.blocks.attention import attention_layouts, is_attention
from blockopt.blocks.blocks import ROW_ROLES, Blocks
from blockopt.blocks.ends import (
    embedding_layouts,
    free_parameter_layouts,
    head_layouts,
    input_layouts,
    is_vector,
    norm_layouts,
    vocabulary_layouts,
)
from blockopt.blocks.experts import expert_layouts, num_experts, router_layouts
from blockopt.blocks.layouts import Ambiguity, Layout, Layouts, ambiguous, whole_layouts
from blockopt.blocks.linear_maps import (
    WRAPPERS,
    direct_maps,
    is_called_attention,
    type_words,
    unwrapped,
    words,
)
from blockopt.blocks.mlps import mlp_layouts
from blockopt.blocks.overrides import UnknownBlocksError, match_overrides
from blockopt.blocks.recurrent import recurrent_layouts
from blockopt.blocks.tried_modules import try_modules
from blockopt.blocks.watch import SeenInPass, layouts_of_pass, reconcile, warn_of_disagreements
from blockopt.blocks.without_role import (
    warn_of_others,
    warn_of_unknown_order,
    warn_of_unseen_attention,
)
from blockopt.checks import check_is_model


def find_blocks(
    model: nn.Module,
    *,
    per_head: bool = True,
    per_row: Collection[str] = ROW_ROLES,
    overrides: Mapping[str, Blocks | str] | None = None,
    example: Any = None,
) -> dict[str, Blocks]:
    """Assign every trainable parameter of `model` to its Hessian blocks.

    Modules are read by their structure: what their linear maps are called within the module, and
    what follows what by their sizes. `Linear`, `Conv1D`, convolutions over single points, quantized
    and parametrized weights, and the wrappers of DDP, FSDP2, PEFT and `torch.compile` are all
    taken for what they are. The rules:

    - query, key and value: one block per head (per key-value head under grouped-query attention),
      fused or not, in any storage order; the output projection is cut by head on its input side.
      Of a low-rank projection the second factor is cut, and the first is one block. A map whose
      result multiplies that of attention is a `gate`. State-space layers and linear attention have
      the same roles;
    - roles in `per_row`: one block per output unit, that is per row of a `Linear` or `Embedding`
      and per column of a `Conv1D`. The default takes all of them. A row of the embedding or head is
      one token, seen as often as the token occurs, so rows differ in curvature by the token
      frequencies; a row of an MLP is one neuron, and the Hessian of an MLP is nearly block-diagonal
      in its neurons. One number per row costs 1/width of a parameter's memory;
    - experts are cut like MLPs, each for itself, in one parameter or in many; what chooses among
      them is a `router`;
    - adapters (LoRA, DoRA, IA3, prefixes) have the role, the layer and the heads of what they
      adapt;
    - norms: one block per tensor, weight and bias alike. Other learned scales are `norm` too: the
      gain of a branch, and with an `example` every vector or number that multiplies activations;
    - biases have the role `bias` and are cut like the output side of their weight; a bias that
      follows the sum over heads is one block;
    - a parameter shared by several modules counts once, as `embedding` if one of them is one;
    - all else, such as convolutions and the numbered layers of a plain MLP, is `other`, one block
      per tensor. A warning names the modules if that is more than 5 % of the weights;
    - what is inside attention or a gated MLP and cannot be read in one way raises, with the
      overrides that settle it.

    Frozen parameters are left out.

    Where names do not settle what a module of your own does, such as in which order one map holds
    queries, keys and values, a copy of that module is run on random tokens. A warning names what
    does not run alone.

    With an `example` the model runs once, without leaving a trace, and what each weight does is
    seen where it is used: which rows make the queries, keys and values of which head, and what is
    an MLP, a norm, an embedding or the head. No name is needed for that. Where a name says another
    thing than the pass shows, the pass is taken, and a warning tells both readings.

    Args:
        model: Any module.
        per_head: Whether to cut attention by head; otherwise query, key, value and output are one
            block each.
        per_row: The roles cut into one block per output unit, out of `ROW_ROLES`.
        overrides: `{name or pattern: Blocks or role}` that take the place of what would be found;
            patterns are those of `fnmatch`. A role alone stands for one block of it. A layer of
            None is filled in from the name.
        example: What the model is called with: a tensor, a tuple of arguments, a dict of named
            arguments, or a function without arguments that runs the model. Two or more tokens of a
            small batch are enough.

    Returns:
        `{parameter name: Blocks}` in the order of `model.named_parameters()`.

    Raises:
        UnknownBlocksError: If parameters can be read in more than one way. A `ValueError` whose
            message names all of them, and whose `overrides` fit their shapes.
        ValueError: If an override fits no parameter or not its shape, if `per_row` holds a role
            that has no rows, or if the model cannot run on `example`.

    Example:
        >>> model = nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32)
        >>> blocks = find_blocks(model)
        >>> blocks["self_attn.in_proj_weight"].block_roles
        ('query', 'query', 'key', 'key', 'value', 'value')
        >>> blocks["self_attn.out_proj.weight"].split
        Split(dim=1, sizes=(16,), parts=(2,))
    """
    check_is_model("find_blocks", model)
    if isinstance(per_row, str) or not set(per_row) <= set(ROW_ROLES):
        raise ValueError(f"Invalid per_row={per_row!r}. Must be a collection out of {ROW_ROLES}.")
    _refuse_flattened(model)
    names: dict[Tensor, str] = {p: n for n, p in model.named_parameters() if p.requires_grad}
    numbers = {
        f"{name}.{child}".removeprefix("."): _last_number(child)
        for name, module in model.named_modules()
        if _lists_layers(name, module)
        for child in module._modules
    }
    shapes = {name: tuple(parameter.shape) for parameter, name in names.items()}
    chosen = match_overrides(overrides or {}, shapes)
    found = _find_layouts(model, per_head, per_row)
    seen: SeenInPass | None = None
    if example is not None:
        seen = layouts_of_pass(model, example, per_head=per_head, per_row=per_row)
        warn_of_unseen_attention(found, seen, names, chosen)
        found, unlike = reconcile(found, seen.layouts, seen.shared_roles, names, chosen)
        warn_of_disagreements(unlike)
    else:
        tried = try_modules(dict(model.named_modules()), found, per_head, per_row)
        untold = {names[p]: kind for p, kind in tried.by_convention.items() if p in names}
        warn_of_unknown_order(model, untold, chosen)
        found, _ = reconcile(found, tried.layouts, tried.shared_roles, names, chosen)
    blocks: dict[str, Blocks] = {}
    unknown: dict[str, Ambiguity] = {}
    for parameter, name in names.items():
        layout = found.get(parameter)
        if name in chosen:
            entry = chosen[name]
        elif isinstance(layout, Ambiguity):
            unknown[name] = layout
            continue
        else:
            layout = layout or _unexplained(name, parameter)
            entry = Blocks(layout.roles, None, layout.split)
        if entry.layer is None:
            entry = entry._replace(layer=_layer(name, numbers))
        entry.check(shapes[name])
        blocks[name] = entry
    if unknown:
        raise UnknownBlocksError(unknown, shapes, may_watch=example is None)
    warn_of_others(model, blocks, shapes, chosen, seen)
    return blocks


def _refuse_flattened(model: nn.Module) -> None:
    """Raise `ValueError` if an engine has taken the shapes of the parameters away.

    FSDP1 marks what it has flattened; if it shards nothing, the shapes are still there. ZeRO 3 of
    DeepSpeed leaves empty parameters, which know their shapes.
    """
    parameters = list(model.parameters())
    flat = [p for p in parameters if getattr(p, "_fsdp_flattened", False)]
    if flat and all(p.ndim <= 1 for p in flat):
        raise ValueError(
            "FSDP1 (FullyShardedDataParallel) has flattened the parameters, and blocks need their "
            "shapes. Use FSDP2 (torch.distributed.fsdp.fully_shard), which keeps them. Without "
            "blocks, BlockAdamW(model.parameters()) and BlockSGD(model.parameters()) work."
        )
    if any(tuple(getattr(p, "ds_shape", p.shape)) != tuple(p.shape) for p in parameters):
        raise ValueError(
            "DeepSpeed's ZeRO 3 has partitioned the parameters, and blocks need their shapes. Call "
            "find_blocks or param_groups before deepspeed.initialize, and build the model outside "
            "of deepspeed.zero.Init; or use FSDP2 (torch.distributed.fsdp.fully_shard)."
        )


def checked_blocks(model: nn.Module, blocks: Mapping[str, Blocks] | None) -> dict[str, Blocks]:
    """Return the blocks given, in the order of the model's parameters, or those of `find_blocks`.

    Raises:
        ValueError: If the model trains nothing, or the blocks do not fit what it trains.
    """
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    if not shapes:
        raise ValueError(f"{type(model).__name__} has no trainable parameter.")
    if blocks is None:
        return find_blocks(model)
    if blocks.keys() != shapes.keys():
        missing, extra = sorted(shapes.keys() - blocks), sorted(blocks.keys() - shapes)
        raise ValueError(
            f"Invalid blocks: {missing[:3]} are missing, and {extra[:3]} are not trained. Must "
            "have one entry for each trainable parameter."
        )
    for name, shape in shapes.items():
        blocks[name].check(shape)
    return {name: blocks[name] for name in shapes}


def _lists_layers(name: str, module: nn.Module) -> bool:
    """Whether the numbers in a container number layers, and not the heads or experts of one."""
    if isinstance(module, nn.ModuleList):
        return not _numbers_parts(name.rpartition(".")[2])
    numbered = isinstance(module, nn.Sequential) or (
        isinstance(module, nn.ModuleDict) and all(_last_number(key) is not None for key in module)
    )
    children = list(module.children())
    alike = len(children) > 1 and len({type(child) for child in children}) == 1
    return numbered and alike and any(True for _ in children[0].children())


def _numbers_parts(attribute: str) -> bool:
    return bool({"heads", "experts"} & set(words(attribute)))


def _last_number(attribute: str) -> int | None:
    found = re.search(r"[0-9]+$", attribute)
    return None if found is None else int(found[0])


def _layer(name: str, layers: Mapping[str, int | None]) -> int | None:
    """The number of the first layer that a name goes through.

    In a model that lists no layers, it is the first number in the name.

    Args:
        name: Of a parameter.
        layers: The numbers of the layers of the model by their paths.
    """
    parts = name.split(".")
    if layers:
        paths = (".".join(parts[:i]) for i in range(1, len(parts)))
        return next((layers[path] for path in paths if path in layers), None)
    numbers = (
        int(part)
        for before, part in zip(("", *parts), parts)
        if part.isdecimal() and not _numbers_parts(before)
    )
    return next(numbers, None)


def _without_wrappers(name: str) -> str:
    """The path of a module, without the wrappers of PEFT and `torch.compile`."""
    parts = name.split(".")
    if "modules_to_save" in parts[:-1]:
        start = parts.index("modules_to_save")
        parts = parts[:start] + parts[start + 2 :]
    return ".".join(part for part in parts if part not in WRAPPERS)


def _unexplained(name: str, parameter: Tensor) -> Layout:
    attribute = name.rpartition(".")[2]
    if "bias" in words(attribute):
        return Layout(("bias",))
    is_gain = parameter.ndim == 1 and attribute == "weight"
    is_gain |= is_vector(parameter) and attribute in ("gamma", "scale")
    return Layout(("norm",) if is_gain else ("other",))


def _find_layouts(model: nn.Module, per_head: bool, per_row: Collection[str]) -> Layouts:
    """Layouts of all parameters that some module explains; earlier rules outrank later ones."""
    modules = dict(model.named_modules())
    paths = {name: _without_wrappers(name) for name in modules}
    ancestors = {name: _ancestors(name, modules) for name in modules}
    passes: list[Layouts] = [{} for _ in range(5)]
    for name, module in modules.items():
        attribute, around = paths[name].rpartition(".")[2], ancestors[name]
        parent = around[0] if around else None
        passes[0] |= embedding_layouts(module, attribute, parent, per_row)
        passes[1] |= recurrent_layouts(module, per_head)
        passes[2] |= attention_layouts(module, around, per_head)
        passes[3] |= expert_layouts(module, parent, per_head, per_row)
        passes[4] |= router_layouts(module, attribute, _experts_beside(name, around), per_row)
    heads = _declared_heads(model)
    for name, module in modules.items():
        if any(module is head for head in heads):
            passes.append(head_layouts(module, paths[name], None, True, per_row))
    found = _first_of(passes)
    mlps: Layouts = {}
    for name, module in modules.items():
        is_wrapper = unwrapped(module) is not module
        if not is_wrapper:
            inside = mlp_layouts(module, paths[name], found.keys(), per_row)
            mlps = inside | mlps  # of a module and one within it, the outer one is right
    found = _first_of([found, mlps, _ends(modules, paths, ancestors, per_row)])
    config = peft_config(model)
    adapters: Layouts = {}
    for module in modules.values():
        for parameter, layout in adapter_layouts(module, found, config, per_row).items():
            adapters[parameter] = shared_layout(adapters.get(parameter), layout)
    return _unexplained_attention(modules, found) | found | adapters


def _first_of(passes: list[Layouts]) -> Layouts:
    found: Layouts = {}
    for rank in passes:
        found = rank | found
    return found


def _ancestors(name: str, modules: dict[str, nn.Module]) -> tuple[nn.Module, ...]:
    """The modules around a module, the innermost first, without wrappers."""
    parts = name.split(".") if name else []
    names = (".".join(parts[:i]) for i in range(len(parts) - 1, -1, -1))
    around = (modules[n] for n in names if n in modules)
    return tuple(m for m in around if unwrapped(m) is m and not _is_store(m))


def _is_store(module: nn.Module) -> bool:
    """Whether a module is the dictionary in which PEFT keeps what it trains as a whole."""
    return isinstance(module, nn.ModuleDict) and not len(module)


def _experts_beside(name: str, around: tuple[nn.Module, ...]) -> int | None:
    """How many experts stand beside a module, or beside the router or gate that holds it."""
    holder = set(words(name.rpartition(".")[0].rpartition(".")[2]))
    depth = 2 if {"gate", "router", "gating"} & holder else 1
    return next((n for a in around[:depth] if (n := num_experts(a)) is not None), None)


def _declared_heads(model: nn.Module) -> list[nn.Module]:
    """What a model itself says is its head."""
    getters = ("get_output_embeddings", "get_classifier")
    heads = [getattr(model, getter, lambda: None)() for getter in getters]
    return [head for head in heads if isinstance(head, nn.Module)]


def _ends(
    modules: dict[str, nn.Module],
    paths: dict[str, str],
    ancestors: dict[str, tuple[nn.Module, ...]],
    per_row: Collection[str],
) -> Layouts:
    """What stands around the layers."""
    found: Layouts = {}
    norms: Layouts = {}
    inputs: Layouts = {}
    for name, module in modules.items():
        parent = ancestors[name][0] if ancestors[name] else None
        found |= head_layouts(module, paths[name], parent, False, per_row)
        inputs |= input_layouts(module, paths[name], parent, per_row)
        norms |= free_parameter_layouts(module) | norm_layouts(module)
    by_size = vocabulary_layouts({paths[name]: m for name, m in modules.items()}, per_row)
    return inputs | by_size | norms | found


def _unexplained_attention(modules: dict[str, nn.Module], found: Layouts) -> Layouts:
    """Linear maps held by a module named `…Attention` of which no rule explained any."""
    unexplained: Layouts = {}
    for module in modules.values():
        if is_called_attention(module):
            maps = direct_maps(module)
            explained = any(linear.weight in found for linear in maps.values())
            if explained or is_attention(module):
                continue
            for attribute, linear in maps.items():
                if "gated" in type_words(module):
                    unexplained |= whole_layouts(linear, "gate")
                    continue
                reason = f"{type(module).__name__}.{attribute} is a projection we do not know"
                unexplained |= ambiguous(linear, reason, Layout(("other",)))
    return unexplained
