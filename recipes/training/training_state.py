"""The state of a run on several processes: what a checkpoint holds, and how it is loaded.

A whole model, on one process or replicated by DDP, is saved as its own `state_dict` and the
optimizer's. One that FSDP2 shards is gathered on rank 0, by parameter name. Either can continue on
another number of processes. The position in the data is the number of the step.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
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

from blockopt.block_lr.optimizer_hooks import unwrapped
from blockopt.distributed import reshard
from recipes.common.errors import UsageError
from recipes.common.training import Training

GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)


def training_state(accelerator: Accelerator, training: Training) -> dict[str, Any]:
    """Return all that a run needs to continue. All ranks must call it; rank 0 gets the whole."""
    state = {"sharded": accelerator.is_fsdp2, "random": gather_object([random_state()])}
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

    Raises:
        UsageError: If the state was saved with FSDP2 and this run is without, or vice versa.
    """
    sharded, rank = accelerator.is_fsdp2, accelerator.process_index
    if state["sharded"] != sharded:
        was, now = "FSDP2", "whole weights"
        was, now = (now, was) if sharded else (was, now)
        raise UsageError(
            f"The checkpoint is of a run with {was}, and this one has {now}. "
            "Resume it as it was started."
        )
    if sharded:
        optimizer, options = unwrapped(training.optimizer), StateDictOptions(full_state_dict=True)
        set_model_state_dict(training.model, dict(state["model"]), options=options)
        moments = dict(state["optimizer"])
        set_optimizer_state_dict(training.model, optimizer, moments, options=options)
    else:
        training.load_state_dict(state)
    if rank < len(state["random"]):
        load_random_state(state["random"][rank])
    else:
        torch.manual_seed(seed + rank)


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
