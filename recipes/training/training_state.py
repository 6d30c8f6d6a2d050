"""What a checkpoint of a training run holds: weights, moments, block scales, random numbers. The data's position is the step.

A whole model, on one process or replicated by DDP, is saved as its own `state_dict` and the
optimizer's; one that FSDP2 shards is gathered on rank 0, by parameter name. Either can go on with
another number of processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from blockopt import BlockLR
from blockopt.distributed import reshard
from recipes.common.optimizers import unwrapped


def training_state(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, block_lr: BlockLR | None
) -> dict[str, Any]:
    """All that a run needs to go on as if it had never stopped. All ranks must call it; rank 0 gets the whole."""
    if accelerator.is_fsdp2:
        reshard(model)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        moments = get_optimizer_state_dict(model, unwrapped(optimizer), options=options)
    else:
        moments = unwrapped(optimizer).state_dict()
    return {
        "model": whole_weights(accelerator, model),
        "optimizer": moments,
        "sharded": accelerator.is_fsdp2,
        "block_lr": None if block_lr is None else block_lr.state_dict(),
        "random": gather_object([random_state()]),
    }


def whole_weights(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    """The weights by name. All ranks must call it; under FSDP2 only rank 0 gets them."""
    if accelerator.is_fsdp2:
        reshard(model)
        return get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
        )
    return dict(accelerator.unwrap_model(model, keep_torch_compile=False).state_dict())


@contextmanager
def averaged_weights(optimizer: Any) -> Iterator[None]:
    """With an optimizer of schedulefree, put the average of the weights in their place for a while."""
    inner = unwrapped(optimizer)
    switches = callable(getattr(inner, "eval", None)) and callable(getattr(inner, "train", None))
    if switches:
        inner.eval()
    try:
        yield
    finally:
        if switches:
            inner.train()


def load_training_state(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, state: Mapping[str, Any]
) -> None:
    """Go on from a state, except for `block_lr`, which is attached after this, and `random`, which comes last.

    Raises:
        ValueError: If it was saved with FSDP2 and this run is without, or the other way round.
    """
    if state["sharded"] != accelerator.is_fsdp2:
        was, now = (
            ("FSDP2" if sharded else "whole weights")
            for sharded in (state["sharded"], accelerator.is_fsdp2)
        )
        raise ValueError(
            f"The checkpoint is of a run with {was}, and this one has {now}. Resume it as it was started."
        )
    if accelerator.is_fsdp2:
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, dict(state["model"]), options=options)
        set_optimizer_state_dict(
            model, unwrapped(optimizer), dict(state["optimizer"]), options=options
        )
    else:
        accelerator.unwrap_model(model, keep_torch_compile=False).load_state_dict(state["model"])
        unwrapped(optimizer).load_state_dict(state["optimizer"])


def random_state() -> dict[str, Any]:
    """The state of all random numbers of this process, as `torch.load(weights_only=True)` takes it."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def load_random_state(states: list[dict[str, Any]], rank: int, seed: int) -> None:
    """Draw the numbers that this rank would have drawn; a rank that the saved run did not have starts from its seed."""
    if rank >= len(states):
        torch.manual_seed(seed + rank)
        return
    state = states[rank]
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
