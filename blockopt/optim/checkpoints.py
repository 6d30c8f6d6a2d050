"""Checkpoints of the optimizers: whether one fits, and what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blockopt.blocks import Blocks
from blockopt.distributed import is_sharded
from blockopt.optim.groups import blocks_of, names_of

Groups = list[dict[str, Any]]
PLACED_LIKE_PARAMETER = ("exp_avg", "momentum_buffer")
NewState = Callable[[Tensor, Blocks, dict[str, Any]], dict[str, Any]]


def check_checkpoint(
    checkpoint: dict[str, Any], groups: Groups, new_state: NewState, optimizer: str
) -> None:
    """Raise `ValueError` for a state that does not fit.

    A fused kernel would read beyond the end of one that is too small.

    Args:
        checkpoint: What `load_state_dict` is given.
        groups: Those of the optimizer that loads it.
        new_state: Returns the state of a parameter before its first step.
        optimizer: Its name.
    """
    sizes = [[len(g["params"]) for g in some] for some in (groups, checkpoint["param_groups"])]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"The checkpoint has groups of {sizes[1]} parameters, and this optimizer of "
            f"{sizes[0]}. If it is of the same model, load it with optimizer.load_state_dict("
            "blockopt.regroup_state_dict(checkpoint, optimizer, model))."
        )
    for mine, saved in zip(groups, checkpoint["param_groups"]):
        kinds = [g.get("second_moment", "coordinate") for g in (saved, mine)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"The checkpoint is of second_moment={kinds[0]!r}, and this optimizer has "
                f"{kinds[1]!r}. Build it with that of the checkpoint."
            )
        group = {**mine, **saved, "params": mine["params"]}
        rows = zip(saved["params"], names_of(mine), mine["params"], blocks_of(group))
        for index, name, parameter, blocks in rows:
            expected = new_state(_without_memory(parameter), blocks, group)
            for key, value in checkpoint["state"].get(index, {}).items():
                if value is None:
                    continue
                if key not in expected:
                    raise ValueError(
                        f"The checkpoint has a state {key!r} for {name!r}, which {optimizer} does "
                        "not know."
                    )
                if isinstance(value, Tensor) and value.shape != expected[key].shape:
                    raise ValueError(
                        f"The checkpoint's {key!r} of {name!r} has shape {tuple(value.shape)}. "
                        f"Must be {tuple(expected[key].shape)} for the options it was saved with."
                    )
                if key in PLACED_LIKE_PARAMETER and is_sharded(value) != is_sharded(parameter):
                    kinds = ["a DTensor" if is_sharded(t) else "plain" for t in (value, parameter)]
                    raise ValueError(
                        f"The checkpoint's {key!r} of {name!r} is {kinds[0]}, and the parameter is "
                        f"{kinds[1]}. Save and load with get_optimizer_state_dict and "
                        "set_optimizer_state_dict of torch.distributed.checkpoint.state_dict, with "
                        "StateDictOptions(full_state_dict=True) for whole tensors."
                    )


def complete_states(
    states: dict[Tensor, Any], checkpoint: dict[str, Any], groups: Groups, new_state: NewState
) -> None:
    """Fill in what a checkpoint lacks, and give states back the dtype they were saved in."""
    for group, saved in zip(groups, checkpoint["param_groups"]):
        for index, parameter, blocks in zip(saved["params"], group["params"], blocks_of(group)):
            if index not in checkpoint["state"]:
                continue
            state = states[parameter]
            for key, value in checkpoint["state"][index].items():
                cast = isinstance(value, Tensor) and value.dtype != state[key].dtype
                if cast and key != "step":
                    state[key] = value.to(device=parameter.device, copy=True)
            if "step" in state:  # where the kernels look for it
                step, device = state["step"], parameter.device
                state["step"] = torch.as_tensor(step, dtype=torch.float32, device=device)
            if new_state(_without_memory(parameter), blocks, group).keys() - state.keys():
                states[parameter] = {**new_state(parameter, blocks, group), **state}


def _without_memory(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
