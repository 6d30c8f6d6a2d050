"""Parameter groups that carry blocks, for any optimizer, and which parameters decay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from typing import Any, Literal

from torch import Tensor, nn

from blockopt.blocks.blocks import Blocks, to_plain
from blockopt.blocks.ends import is_vector
from blockopt.blocks.find import checked_blocks, find_blocks
from blockopt.blocks.known_modules import TOKEN_WORDS
from blockopt.blocks.linear_maps import words
from blockopt.blocks.recurrent import is_time_constant
from blockopt.checks import check_choice, check_is_model, check_range


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

    Weight decay is for the matrices: it is 0 for norms, biases of any shape, tables of positions,
    learned tokens, whatever has a single dimension longer than 1, the time constants of state-space
    layers (`A_log`, `D`, `dt`), and what the model's own `no_weight_decay()` names, as timm has it.

    Args:
        model: Any module.
        blocks: What `find_blocks(model)` returns, with your own options; found here by default.
        weight_decay: For the matrices. None leaves it to the optimizer.
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
    check_is_model("param_groups", model)
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
    excluded = set(_excluded_by_the_model(model))
    groups: dict[tuple[str, bool], dict[str, Any]] = {}
    for name, entry in blocks.items():
        parameter = parameters[name]
        if parameter not in wanted:
            continue
        role = "+".join(dict.fromkeys(entry.roles))
        decayed = name not in excluded and decays(name, parameter, entry)
        key = (role if by == "role" else name, decayed)
        group = groups.setdefault(key, {"params": [], "blocks": [], "role": role})
        if not decayed:
            group["weight_decay"] = 0.0
        elif weight_decay is not None:
            group["weight_decay"] = weight_decay
        group["params"].append((name, parameter))
        group["blocks"].append(to_plain(entry))
    return list(groups.values())


def decays(name: str, parameter: Tensor, blocks: Blocks) -> bool:
    """Whether weight decay is for a parameter, as far as its name, shape and role tell."""
    attribute = name.rpartition(".")[2]
    is_layer = attribute == "weight" and parameter.ndim > 1  # also one with a single output
    if {"norm", "bias", "position"} & set(blocks.roles) or (is_vector(parameter) and not is_layer):
        return False
    if getattr(parameter, "_no_weight_decay", False):  # as the authors of Mamba mark it
        return False
    if is_time_constant(name):
        return False
    if is_layer:
        return True
    said = set(words(attribute))  # held by a module beside its layers
    is_token = blocks.roles == ("embedding",) and bool(TOKEN_WORDS & said)
    return not is_token and (blocks.roles != ("other",) or "weight" in said)


def _excluded_by_the_model(model: nn.Module) -> Iterator[str]:
    """What `no_weight_decay()` of the model, or of a model inside it, names."""
    for prefix, module in model.named_modules():
        names = getattr(module, "no_weight_decay", None)
        patterns = list(names()) if callable(names) else []
        inside = module.named_parameters() if patterns else ()
        for name, _ in inside:
            if any(fnmatch(name, pattern) for pattern in patterns):
                yield f"{prefix}.{name}" if prefix else name
