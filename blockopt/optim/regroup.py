"""Checkpoints of one optimizer for another one that groups the same parameters otherwise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blockopt.optim.base import BLOCK_LR, BlockOptimizer
from blockopt.optim.groups import blocks_of

GROUP_ONLY = {"params", "param_names", "blocks", "role", BLOCK_LR}  # no options of the update


def regroup_state_dict(
    state_dict: dict[str, Any], optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, Any]:
    """Return a checkpoint of another optimizer of the same model in the groups of this one.

    So a run with `torch.optim.AdamW(model.parameters())` goes on with
    `BlockAdamW(param_groups(model))`, and back; their states have the same names and meaning:

        checkpoint = torch.load("optimizer.pt")
        optimizer.load_state_dict(blockopt.regroup_state_dict(checkpoint, optimizer, model))

    Parameters are matched by the names in the checkpoint if it has some, else by order: a single
    group must hold the parameters in the order of `model.parameters()`, all of them or those that
    train; several groups must each hold those of certain numbers of dimensions in that order, as in
    nanoGPT and the Trainer, whose first group has the matrices and whose second has the vectors.

    What `torch.distributed.checkpoint`'s `get_optimizer_state_dict` returned, sharded or full, goes
    by names, and so does the result, for `set_optimizer_state_dict`.

    Options such as `lr`, `betas` or `weight_decay` come from the checkpoint where all parameters of
    a group agree on them, and stay those of the optimizer elsewhere.

    Args:
        state_dict: What the other optimizer's `state_dict` returned.
        optimizer: The optimizer that will load it.
        model: The model that both train.

    Raises:
        ValueError: If the parameters cannot be matched, or a state does not fit the optimizer.

    Example:
        >>> import blockopt
        >>> model = nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32)
        >>> old = torch.optim.AdamW(model.parameters(), lr=2e-3)
        >>> new = blockopt.BlockAdamW(blockopt.param_groups(model))
        >>> new.load_state_dict(regroup_state_dict(old.state_dict(), new, model))
        >>> {group["lr"] for group in new.param_groups}
        {0.002}
    """
    saved_groups = state_dict["param_groups"]
    saved = [(index, group) for group in saved_groups for index in group["params"]]
    by_name = all(isinstance(index, str) for index, _ in saved)
    entry_of = dict(zip(_saved_names(state_dict, model), saved))
    names = {parameter: unwrapped_name(name) for name, parameter in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    state: dict[int | str, Any] = {}
    numbers = itertools.count()
    for group in optimizer.param_groups:
        own = [names[p] if by_name else next(numbers) for p in group["params"]]
        sources = []
        for number, parameter in zip(own, group["params"]):
            name = names.get(parameter)
            if name not in entry_of and not parameter.requires_grad:
                continue
            if name not in entry_of:
                raise ValueError(
                    f"The checkpoint has no parameter {name!r} of shape {tuple(parameter.shape)}. "
                    "Must be that of an optimizer of the same model."
                )
            index, source = entry_of[name]
            sources.append(source)
            if index in state_dict["state"]:
                entries = state_dict["state"][index]
                state[number] = _for_optimizer(entries, parameter, name, optimizer)
                if by_name and isinstance(optimizer, BlockOptimizer):  # DCP asks for all keys
                    state[number] = {"scale": _scale_of(group, parameter), **state[number]}
        kept = {key: value for key, value in group.items() if key != "params"}
        groups.append({**kept, **_agreed_options(kept, sources), "params": own})
    if BLOCK_LR in saved_groups[0]:
        groups[0][BLOCK_LR] = saved_groups[0][BLOCK_LR]
    elif by_name and BLOCK_LR in optimizer.state_dict()["param_groups"][0]:
        groups[0][BLOCK_LR] = ""
    return {"state": state, "param_groups": groups}


def unwrapped_name(name: str) -> str:
    """The name without what DDP and `torch.compile` put before it: checkpoints fit any wrapper."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _saved_names(state_dict: dict[str, Any], model: nn.Module) -> list[str]:
    """The names of the saved parameters, group by group."""
    groups = state_dict["param_groups"]
    if all(isinstance(index, str) for group in groups for index in group["params"]):
        return [name for group in groups for name in group["params"]]
    if all("param_names" in group for group in groups):
        return [unwrapped_name(name) for group in groups for name in group["param_names"]]
    everything = list(model.named_parameters())
    for candidates in (everything, [(n, p) for n, p in everything if p.requires_grad]):
        names = _names_by_order(state_dict, candidates)
        if names is not None:
            return [unwrapped_name(name) for name in names]
    sizes = [len(group["params"]) for group in groups]
    raise ValueError(
        f"The checkpoint has groups of {sizes} parameters without names, and they do not follow "
        f"the order of the model's {len(everything)}. Load it into its own kind of optimizer, "
        "built with (name, parameter) pairs in its groups, and save that again."
    )


def _names_by_order(
    state_dict: dict[str, Any], candidates: Sequence[tuple[str, Tensor]]
) -> list[str] | None:
    """The names if the saved states have the shapes of these parameters in order, else None."""
    groups = [group["params"] for group in state_dict["param_groups"]]
    shapes = {index: _largest_shape(state) for index, state in state_dict["state"].items()}
    ordered = candidates
    if len(groups) > 1:
        ndims = [{len(shapes[i]) for i in indices if i in shapes} for indices in groups]
        if sum(map(len, ndims)) > len(set().union(*ndims)):  # the same in two groups
            return None
        ordered = [pair for found in ndims for pair in candidates if pair[1].ndim in found]
    indices = [index for group in groups for index in group]
    if len(indices) != len(ordered):
        return None
    pairs = zip(indices, ordered)
    if any(i in shapes and shapes[i] != tuple(parameter.shape) for i, (_, parameter) in pairs):
        return None
    return [name for name, _ in ordered]


def _largest_shape(state: dict[str, Any]) -> tuple[int, ...]:
    shapes = [tuple(value.shape) for value in state.values() if isinstance(value, Tensor)]
    return max(shapes, key=lambda shape: (len(shape), math.prod(shape)), default=())


def _for_optimizer(
    state: dict[str, Any], parameter: Tensor, name: str, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """The state of a parameter without what an optimizer other than blockopt's cannot use.

    Blockopt's own check what they load.
    """
    if isinstance(optimizer, BlockOptimizer):
        return state
    for key, value in state.items():
        fits = not isinstance(value, Tensor) or value.shape in ((), parameter.shape)
        if key != "scale" and not fits:
            raise ValueError(
                f"The checkpoint's {key!r} of {name!r} has shape {tuple(value.shape)}, one value "
                f"per block, which {type(optimizer).__name__} cannot use. Must be "
                f"{tuple(parameter.shape)}."
            )
    return {key: value for key, value in state.items() if key != "scale"}


def _scale_of(group: dict[str, Any], parameter: Tensor) -> Tensor:
    """The scales of a parameter that the checkpoint has none for."""
    index = next(i for i, p in enumerate(group["params"]) if p is parameter)
    return torch.ones(blocks_of(group)[index].num_blocks, device=parameter.device)


def _agreed_options(group: dict[str, Any], sources: list[dict[str, Any]]) -> dict[str, Any]:
    """The saved options that a group knows and that all its parameters had in common."""
    agreed = {}
    for key in (group.keys() | {"initial_lr"}) - GROUP_ONLY:
        if sources and all(key in source for source in sources):
            values = [source[key] for source in sources]
            if all(value is values[0] or bool(value == values[0]) for value in values):
                agreed[key] = values[0]
    return agreed
