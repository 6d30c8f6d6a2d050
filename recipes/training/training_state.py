"""The state of a run on several processes: what a checkpoint holds, and how it is loaded.

A checkpoint holds whole tensors, gathered on rank 0 if FSDP2 shards them, so it does not matter how
many processes have written it, nor how they shared the weights: each kind of run continues each
other. The position in the data is the number of the step.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from blockopt.block_lr.wrappers import unwrapped
from blockopt.distributed import reshard
from recipes.common.training import Training

GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)


def training_state(accelerator: Accelerator, training: Training) -> dict[str, Any]:
    """Return all that a run needs to continue. All ranks must call it; rank 0 gets the whole."""
    state = {"random": gather_object([random_state()])}
    if not accelerator.is_fsdp2:
        return state | training.state_dict()
    optimizer = unwrapped(training.optimizer)
    return state | {
        "model": whole_weights(accelerator, training),
        "optimizer": get_optimizer_state_dict(training.model, optimizer, options=GATHERED),
    }


def whole_weights(accelerator: Accelerator, training: Training) -> dict[str, Any]:
    """Return the weights by name. All ranks must call it; under FSDP2 only rank 0 gets them."""
    if not accelerator.is_fsdp2:
        return dict(training.plain.state_dict())
    reshard(training.model)
    return get_model_state_dict(training.model, options=GATHERED)


def load_training_state(
    accelerator: Accelerator, training: Training, state: Mapping[str, Any], seed: int
) -> None:
    """Continue from a state, as if the run had never stopped.

    A rank that the saved run did not have draws random numbers from `seed` and its number.
    """
    optimizer, saved = unwrapped(training.optimizer), state["optimizer"]
    if accelerator.is_fsdp2:
        whole = StateDictOptions(full_state_dict=True)
        set_model_state_dict(training.model, dict(state["model"]), options=whole)
        names = {parameter: name for name, parameter in training.plain.named_parameters()}
        keys = [names[p] for group in optimizer.param_groups for p in group["params"]]
        moments = with_keys(saved, keys)
        set_optimizer_state_dict(training.model, optimizer, moments, options=whole)
    else:
        training.load_state_dict({**state, "optimizer": with_keys(saved, itertools.count())})
    rank = accelerator.process_index
    if rank < len(state["random"]):
        load_random_state(state["random"][rank])
    else:
        torch.manual_seed(seed + rank)


def with_keys(state: Mapping[str, Any], keys: Iterable[str | int]) -> dict[str, Any]:
    """Return an optimizer's state with other keys for its parameters, in the order of its groups.

    Optimizers number their parameters; gathered from shards, they have names.
    """
    new = dict(zip((key for group in state["param_groups"] for key in group["params"]), keys))
    return {
        **state,
        "state": {new.get(key, key): entries for key, entries in state["state"].items()},
        "param_groups": [
            {**group, "params": [new[key] for key in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def random_state() -> dict[str, Any]:
    """Return the state of all random numbers of this process, as plain data and tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def load_random_state(state: Mapping[str, Any]) -> None:
    """Draw the numbers that would have come after `random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
