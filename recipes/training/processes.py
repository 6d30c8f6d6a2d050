"""The processes of a run: what `accelerate launch` and the flags make of them, and that they go on or end alike."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import broadcast_object_list, gather_object

from blockopt.curvature import ESTIMATORS
from recipes.common.checkpoints import CheckpointError, RunIsLockedError

Result = TypeVar("Result")
EXPECTED = (
    CheckpointError,
    RunIsLockedError,
    FloatingPointError,
    ValueError,
    OSError,
    ImportError,
)  # said without a traceback
# What cannot step on shards, or (schedulefree) not be saved: found by trying all of them under
# FSDP2.
WHOLE_OPTIMIZERS = ("soap", "sophia", "schedulefree")
WHOLE_OPTIMIZERS += tuple(
    f"torch_optimizer:{name}"
    for name in [
        "A2GradExp",
        "A2GradInc",
        "A2GradUni",
        "Adafactor",
        "AdamP",
        "MADGRAD",
        "NovoGrad",
        "SGDP",
        "SWATS",
        "Shampoo",
    ]
)


class OtherRankError(RuntimeError):
    """What another rank has run into, and says."""


def make_accelerator(arguments: argparse.Namespace) -> Accelerator:
    """Devices, precision and processes, as the flags and `accelerate launch` say."""
    cpu = arguments.cpu or not torch.accelerator.is_available()
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=arguments.precision,
        gradient_accumulation_steps=arguments.accumulate,
        dynamo_backend=arguments.compile or "no",
        log_with=arguments.track,
        project_dir=arguments.output,
    )
    if (
        cpu
        and accelerator.num_processes > 1
        and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    ):
        # accelerate shards on GPUs only, for no reason that lies in FSDP2: told that it may, it
        # does the same on CPUs.
        for state in (PartialState(), accelerator.state):
            state.distributed_type = DistributedType.FSDP
        plugin = accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
    return accelerator


def check_accelerator(accelerator: Accelerator, arguments: argparse.Namespace) -> None:
    """Look at what accelerate made of the flags.

    Raises:
        ValueError: If that is not what they ask for, or sharding does not go with them.
    """
    made = (accelerator.mixed_precision, accelerator.gradient_accumulation_steps)
    if made != (arguments.precision, arguments.accumulate):
        asked = f"--precision {arguments.precision} --accumulate {arguments.accumulate}"
        raise ValueError(
            f"accelerate is configured for precision {made[0]} and {made[1]} micro-batches, not for {asked}."
        )
    estimator = ESTIMATORS.get(arguments.curvature)
    if accelerator.is_fsdp2 and estimator is not None and not estimator.works_sharded:
        raise ValueError(
            f"--curvature {arguments.curvature} needs whole weights. Take newton or gauss_newton under FSDP2."
        )
    if accelerator.is_fsdp2 and arguments.optimizer in WHOLE_OPTIMIZERS:
        raise ValueError(
            f"--optimizer {arguments.optimizer} needs whole weights. Train with DDP, or take another under FSDP2."
        )


def together(task: Callable[[], Result]) -> Result:
    """Do something on all ranks, without a word between them until all are done; where one fails, all do.

    The first rank that fails raises its error, the others an `OtherRankError` with the same words.
    """
    error: Exception | None = None
    try:
        result = task()
    except EXPECTED as caught:
        error = caught
    told = gather_object([None if error is None else str(error)])
    failed = [rank for rank, message in enumerate(told) if message is not None]
    if not failed:
        return result
    if error is not None and failed[0] == PartialState().process_index:
        raise error
    raise OtherRankError(told[failed[0]])


def by_rank_0(task: Callable[[], Result]) -> Result:
    """Do something on rank 0 alone, and have its result, which must be plain data, on all ranks; where it fails, all do."""
    result = together(lambda: task() if PartialState().is_main_process else None)
    (result,) = broadcast_object_list([result])
    return result  # type: ignore[return-value]


def leave(accelerator: Accelerator, code: int) -> None:
    """End several processes on CPUs at once: a thread of gloo that outlives the statics of C++ can abort what is done."""
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
