"""The Hessian blocks of a transformer: which role every parameter plays, and where it is cut.

The loss Hessian of a transformer is heterogeneous by block: the embedding, the query, key and value
of each head, the output projection, the MLP, the norms and the head differ in curvature by orders
of magnitude (Ormaniec, Dangel and Singh, ICLR 2025). `find_blocks` names those blocks for a model;
everything else in blockopt works on what it returns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn

from blockopt.blocks import layouts
from blockopt.blocks.blocks import ROW_ROLES, Blocks, to_plain
from blockopt.blocks.known_modules import HEAD_NAMES, POSITION_NAMES, TOKEN_NAMES
from blockopt.blocks.layouts import Ambiguity, Layout, Linear
from blockopt.blocks.watch import layouts_of_pass, reconcile
from blockopt.checks import check_choice, check_range

_EXAMPLE_HELPS = (
    " Or pass example=batch, what the model is called with, to see it in one forward pass."
)


def find_blocks(
    model: nn.Module,
    *,
    per_head: bool = True,
    per_row: Collection[str] = ROW_ROLES,
    overrides: Mapping[str, Blocks | str] | None = None,
    example: Any = None,
) -> dict[str, Blocks]:
    """Assign every trainable parameter of `model` to its Hessian blocks.

    Knows nanoGPT, GPT-2, Llama, Mistral, Qwen, Phi-3, GPT-NeoX, Bloom, Falcon, BERT, ViT
    (transformers and timm), T5, OPT, `nn.MultiheadAttention` and the `nn.Transformer` layers, also
    under DDP, FSDP2, PEFT and `torch.compile` wrappers. The rules:

    - query, key and value: one block per head (per key-value head under grouped-query attention),
      fused or not, in any storage order; the output projection is cut by head on its input side;
    - roles in `per_row`: one block per output unit, that is per row of a `Linear` or `Embedding`
      and per column of a `Conv1D`. The default takes all of them. A row of the embedding or head is
      one token, seen as often as the token occurs, so rows differ in curvature by the token
      frequencies; a row of an MLP is one neuron, and the Hessian of an MLP is nearly block-diagonal
      in its neurons. One number per row costs 1/width of a parameter's memory;
    - norms: one block per tensor, weight and bias alike;
    - biases have the role `bias` and are cut like the output side of their weight; a bias that
      follows the sum over heads is one block;
    - a parameter shared by several modules counts once, as `embedding` if one of them is one;
    - all else, such as convolutions, LoRA factors and the numbered layers of a plain MLP, is
      `other`, one block per tensor;
    - a linear map inside a module whose type is named `…Attention` is never `other`: if it is not
      understood, it raises.

    Frozen parameters are left out.

    With an `example` the model runs once, without leaving a trace, and what each weight does is
    seen where it is used: which rows make the queries, keys and values of which head, and what is
    an MLP, a norm, an embedding or the head. No name is needed for that. Where a name says another
    thing than the pass, it raises.

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
            small batch are enough. By default nothing runs.

    Returns:
        `{parameter name: Blocks}` in the order of `model.named_parameters()`.

    Raises:
        ValueError: If a parameter can be read in more than one way, if an override fits no
            parameter or not its shape, if `per_row` holds a role that has no rows, or if the pass
            on `example` and the names disagree.

    Example:
        >>> model = nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32)
        >>> blocks = find_blocks(model)
        >>> blocks["self_attn.in_proj_weight"].block_roles
        ('query', 'query', 'key', 'key', 'value', 'value')
        >>> blocks["self_attn.out_proj.weight"].split
        Split(dim=1, sizes=(16,), parts=(2,))
    """
    if isinstance(per_row, str) or not set(per_row) <= set(ROW_ROLES):
        raise ValueError(f"Invalid per_row={per_row!r}. Must be a collection out of {ROW_ROLES}.")
    _refuse_flattened(model)
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    shapes = {name: tuple(parameter.shape) for parameter, name in names.items()}
    chosen = _match_overrides(overrides or {}, shapes)
    found = _find_layouts(model, per_head, per_row)
    if example is not None:
        seen = layouts_of_pass(model, example, per_head=per_head, per_row=per_row)
        found = reconcile(found, seen, names, chosen)
    blocks: dict[str, Blocks] = {}
    for parameter, name in names.items():
        layout = found.get(parameter)
        if name in chosen:
            entry = chosen[name]
        elif isinstance(layout, Ambiguity):
            pattern = _pattern(name)
            raise ValueError(
                f"Cannot tell the blocks of {name!r} of shape {shapes[name]}: {layout.reason}. "
                f"Pass overrides={{{pattern!r}: {layout.suggestion}}}, or a single role such as "
                f"{{{pattern!r}: 'other'}}.{'' if example is not None else _EXAMPLE_HELPS}"
            )
        elif layout is None:
            entry = Blocks(("bias",) if name.rsplit(".", 1)[-1] == "bias" else ("other",))
        else:
            entry = Blocks(layout.roles, None, layout.split)
        if entry.layer is None:
            entry = entry._replace(layer=_layer(name, lists))
        entry.check(shapes[name])
        blocks[name] = entry
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


def _layer(name: str, lists: Collection[str]) -> int | None:
    """The first index into a module list that a name goes through, or else its first number."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    inside = [i for i in numbers if ".".join(parts[:i]) in lists]
    return next((int(parts[i]) for i in (*inside, *numbers)), None)


def _pattern(name: str) -> str:
    """The name with its layer index replaced by `*`, so that one override serves all layers."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _without_wrappers(name: str) -> str:
    """The attribute that holds a module, without the wrappers of PEFT and `torch.compile`."""
    parts = name.split(".")
    if len(parts) > 2 and parts[-2] == "modules_to_save":
        parts = parts[:-2]
    wrappers = ("original_module", "base_layer", "_orig_mod")
    return next((part for part in reversed(parts) if part not in wrappers), "")


def _match_overrides(
    overrides: Mapping[str, Blocks | str], shapes: dict[str, tuple[int, ...]]
) -> dict[str, Blocks]:
    chosen: dict[str, Blocks] = {}
    for pattern, value in overrides.items():
        matched = [name for name in shapes if fnmatchcase(name, pattern)]
        if not matched:
            raise ValueError(
                f"Invalid overrides key {pattern!r}: it matches no trainable parameter, such as "
                f"{next(iter(shapes), None)!r}."
            )
        for name in matched:
            blocks = Blocks((value,)) if isinstance(value, str) else Blocks(*value)
            try:
                blocks.check(shapes[name])
            except ValueError as error:
                raise ValueError(
                    f"Invalid overrides[{pattern!r}] for {name!r} of shape {shapes[name]}: {error}"
                ) from None
            chosen[name] = blocks
    return chosen


def _find_layouts(model: nn.Module, per_head: bool, per_row: Collection[str]) -> layouts.Layouts:
    """Layouts of all parameters that some module explains; earlier rules outrank later ones."""
    modules = dict(model.named_modules())
    head = getattr(model, "get_output_embeddings", lambda: None)()
    passes: list[layouts.Layouts] = [{}, {}, {}, {}]
    for name, module in modules.items():
        attribute = _without_wrappers(name)
        parent = modules.get(name.rpartition(".")[0]) if name else None
        passes[0] |= _embedding_layouts(module, attribute, parent, per_row)
        passes[1] |= layouts.attention_layouts(module, parent, per_head)
        passes[2] |= layouts.mlp_layouts(module, per_row)
        passes[3] |= _norm_layouts(module)
        in_layer = any(part.isdecimal() for part in name.split("."))
        if module is head or (attribute in HEAD_NAMES and not in_layer):
            linear = layouts.read_linear(module)
            if linear:
                passes[3] |= layouts.rows_layouts(linear, ("head",), per_row)
    found: layouts.Layouts = {}
    for rank in passes:
        found = rank | found
    return _unexplained_attention(modules, found) | found


def _embedding_layouts(
    module: nn.Module, attribute: str, parent: nn.Module | None, per_row: Collection[str]
) -> layouts.Layouts:
    found: layouts.Layouts = {}
    if isinstance(module, nn.Embedding):
        role = "position" if attribute in POSITION_NAMES else "embedding"
        rows = Linear(module.weight, None, 0)
        found |= layouts.rows_layouts(rows, (role,), per_row)
    elif "PatchEmbed" in type(parent).__name__ and hasattr(module, "kernel_size"):
        for parameter_name, parameter in module.named_parameters(recurse=False):
            role = "bias" if parameter_name == "bias" else "embedding"
            found[parameter] = Layout((role,), None)
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if parameter_name in POSITION_NAMES:
            found[parameter] = Layout(("position",), None)
        elif parameter_name in TOKEN_NAMES:
            found[parameter] = Layout(("embedding",), None)
    return found


def _norm_layouts(module: nn.Module) -> layouts.Layouts:
    if "Norm" not in type(module).__name__:
        return {}
    return {p: Layout(("norm",), None) for p in module.parameters(recurse=False) if p.ndim == 1}


def _unexplained_attention(
    modules: dict[str, nn.Module], found: layouts.Layouts
) -> layouts.Layouts:
    """Linear maps held by a module named `…Attention` that no rule explained."""
    unexplained: layouts.Layouts = {}
    for module in modules.values():
        if "Attention" in type(module).__name__:
            for attribute, _ in module.named_children():
                linear = layouts.find_linear(module, attribute)
                if linear and linear.weight not in found:
                    reason = f"{type(module).__name__}.{attribute} is a projection we do not know"
                    unexplained[linear.weight] = Ambiguity(reason, "Blocks(roles=(...), split=...)")
    return unexplained


def param_groups(
    model: nn.Module,
    blocks: Mapping[str, Blocks] | None = None,
    *,
    weight_decay: float | None = None,
    by: Literal["role", "parameter"] = "role",
    only: Iterable[Tensor] | None = None,
    example: Any = None,
) -> list[dict[str, Any]]:
    """Return parameter groups that carry the blocks of `model`, for any optimizer.

    Every group holds plain data only, so that `torch.load(weights_only=True)`, `accelerate` and
    FSDP2 take it.

    Args:
        model: Any module.
        blocks: What `find_blocks(model)` returns, with your own options; found here by default.
        weight_decay: For tensors of two or more dimensions other than norms and biases, which get
            0. None leaves it to the optimizer.
        by: "role" for one group per role (a fused matrix is a role of its own), or "parameter" for
            one group per parameter, which optimizers other than blockopt's need.
        only: Leave out all other parameters, as for those that start to train later; see
            `add_param_group` of the optimizers.
        example: What the model is called with, as for `find_blocks`: the blocks are then found with
            the help of one forward pass. Not together with `blocks`.

    Returns:
        Groups with `params` as `(name, parameter)` pairs, `blocks` as nested tuples, `role`, and
        `weight_decay` where set.

    Raises:
        ValueError: If `blocks` does not cover the trainable parameters exactly, or if both `blocks`
            and `example` are given.

    Example:
        >>> model = nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32)
        >>> [group["role"] for group in param_groups(model)]
        ['query+key+value', 'bias', 'output', 'mlp_in', 'mlp_out', 'norm']
    """
    check_choice("by", by, ("role", "parameter"))
    if weight_decay is not None:
        check_range("weight_decay", weight_decay)
    if blocks is not None and example is not None:
        raise ValueError("Got both blocks and example. Pass find_blocks(model, example=…) alone.")
    if example is not None:
        blocks = find_blocks(model, example=example)
    blocks = checked_blocks(model, blocks)
    parameters = dict(model.named_parameters())
    wanted = set(parameters.values() if only is None else only)
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, entry in blocks.items():
        parameter = parameters[name]
        if parameter not in wanted:
            continue
        role = "+".join(dict.fromkeys(entry.roles))
        decayed = parameter.ndim >= 2 and not {"norm", "bias"} & set(entry.roles)
        key = (role if by == "role" else name, decayed)
        group = groups.setdefault(key, {"params": [], "blocks": [], "role": role})
        if not decayed:
            group["weight_decay"] = 0.0
        elif weight_decay is not None:
            group["weight_decay"] = weight_decay
        group["params"].append((name, parameter))
        group["blocks"].append(to_plain(entry))
    return list(groups.values())
