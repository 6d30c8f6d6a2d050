"""The processes of a run: what flags and `accelerate launch` make of them; they end alike."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object

from blockopt.curvature import ESTIMATORS
from recipes.common.errors import UsageError, UserError
from recipes.training.restarts import RENDEZVOUS
from recipes.training.roll_call import RollCall, is_lost_exchange
from recipes.training.signals import STOPPED, Preempted

Result = TypeVar("Result")
LET_SPEAK = (
    3  # seconds: the launcher ends all ranks with the first, so the one that speaks leaves first
)
# What cannot step on shards or, like schedulefree, cannot be saved: found by trying all of them.
WHOLE_OPTIMIZERS = {"soap", "sophia", "schedulefree"}
WHOLE_OPTIMIZERS |= {f"torch_optimizer:A2Grad{kind}" for kind in ("Exp", "Inc", "Uni")}
WHOLE_OPTIMIZERS |= {f"torch_optimizer:{name}" for name in ("Adafactor", "AdamP", "MADGRAD")}
WHOLE_OPTIMIZERS |= {f"torch_optimizer:{name}" for name in ("NovoGrad", "SGDP", "SWATS", "Shampoo")}


class OtherRankError(UserError):
    """Another rank has failed; the message is that rank's."""


def make_accelerator(arguments: argparse.Namespace) -> Accelerator:
    """Set up devices, precision and processes, as the flags and `accelerate launch` say."""
    cpu = arguments.cpu or not torch.accelerator.is_available()
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=arguments.precision,
        gradient_accumulation_steps=arguments.accumulate,
        dynamo_backend=arguments.compile or "no",
        log_with=arguments.track,
        project_dir=arguments.output,
        kwargs_handlers=[
            InitProcessGroupKwargs(
                init_method=RENDEZVOUS, timeout=timedelta(seconds=arguments.timeout)
            )
        ],
    )
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if cpu and sharded and accelerator.num_processes > 1:
        # accelerate shards on GPUs only, though FSDP2 works on CPUs as well once it is told so.
        for state in (PartialState(), accelerator.state):
            state.distributed_type = DistributedType.FSDP
        plugin = accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
    return accelerator


def check_accelerator(accelerator: Accelerator, arguments: argparse.Namespace) -> None:
    """Check that accelerate does what the flags ask for, and that they allow sharding.

    Raises:
        UsageError: If not.
    """
    precision, accumulate = accelerator.mixed_precision, accelerator.gradient_accumulation_steps
    if (precision, accumulate) != (arguments.precision, arguments.accumulate):
        raise UsageError(
            f"accelerate is configured for precision {precision} and {accumulate} micro-batches, "
            f"not for --precision {arguments.precision} --accumulate {arguments.accumulate}."
        )
    if not accelerator.is_fsdp2:
        return
    estimator = ESTIMATORS.get(arguments.curvature)
    if estimator is not None and not estimator.works_sharded:
        raise UsageError(
            f"--curvature {arguments.curvature} needs whole weights. "
            "Take newton or gauss_newton under FSDP2."
        )
    if arguments.optimizer in WHOLE_OPTIMIZERS:
        raise UsageError(
            f"--optimizer {arguments.optimizer} needs whole weights. "
            "Train with DDP, or take another under FSDP2."
        )


def together(task: Callable[[], Result]) -> Result:
    """Do something on all ranks, which do not talk to each other meanwhile; if one fails, all do.

    A rank that fails raises its own error, the others an `OtherRankError` with the same words.
    """
    error: Exception | None = None
    try:
        result = task()
    except Exception as caught:
        error = caught
    told = gather_object([None if error is None else str(error)])
    failed = [rank for rank, message in enumerate(told) if message is not None]
    if not failed:
        return result
    first = failed[0] == PartialState().process_index
    if error is not None and (first or not isinstance(error, UserError)):
        raise error
    raise OtherRankError(told[failed[0]])


def by_rank_0(task: Callable[[], Result]) -> Result:
    """Do something on rank 0 and return its result, plain data, on all ranks; or fail on all."""
    result = together(lambda: task() if PartialState().is_main_process else None)
    (result,) = broadcast_object_list([result])
    return result  # type: ignore[return-value]


@contextmanager
def ended_alike(accelerator: Accelerator, last_checkpoint: Callable[[], str]) -> Iterator[None]:
    """End all ranks with one exit code, and say once, without a traceback, what the user can mend.

    Args:
        accelerator: Knows the ranks.
        last_checkpoint: Returns, in words, what a run that has ended early can go on from.
    """
    alone = accelerator.num_processes == 1
    roll = None if alone else RollCall(accelerator.process_index, accelerator.num_processes)
    code = 0
    try:
        yield
        accelerator.end_training()
    except (KeyboardInterrupt, Preempted) as reason:
        code = STOPPED if isinstance(reason, Preempted) else 130
        if accelerator.is_main_process:
            print(f"stopped. {last_checkpoint()}", file=sys.stderr, flush=True)
    except OtherRankError:
        code = 2
        time.sleep(LET_SPEAK)
    except UserError as error:
        code = 2
        print(f"error: {error}", file=sys.stderr, flush=True)
        if roll is not None:
            roll.tell(error)
    except Exception as error:
        if roll is None:
            raise
        code = _explain(error, roll, last_checkpoint)
    if not alone and (code or accelerator.device.type == "cpu"):
        # Not by the way of Python: a thread of gloo that outlives the statics of C++ can abort what
        # is done, and exchanges with a rank that is gone can keep a process from ending.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        raise SystemExit(code)


def _explain(error: Exception, roll: RollCall, last_checkpoint: Callable[[], str]) -> int:
    """Say which rank is gone, once for all ranks; or show a bug, and tell the others of it."""
    if not is_lost_exchange(error):
        traceback.print_exc()
        roll.tell(error)
        return 1
    is_speaker, text = roll.call()
    if is_speaker and text:
        print(f"error: {text} {last_checkpoint()}", file=sys.stderr, flush=True)
    else:
        time.sleep(LET_SPEAK)
    return 1 if text else 2
