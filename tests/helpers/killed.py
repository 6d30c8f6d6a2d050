"""Runs in a process of their own, which is killed as `kill -9` does it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


def in_child(task: Callable[[], object]) -> int:
    """Run in a copy of this process, and return how it ends.

    Returns:
        0 after the task, 1 after an error, or minus the signal that killed it.
    """
    sys.stdout.flush()
    with warnings.catch_warnings():
        # The other threads, if there are any, are those of pytest-xdist.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        gc.freeze()  # the garbage of this process: its destructors may wait for threads
        code: object = 1
        try:
            torch.set_num_threads(1)
            task()
            code = 0
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(code)  # type: ignore[arg-type]
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_step(number: int, train: Callable[[], object]) -> None:
    """Train in a process that is killed when an optimizer begins its step `number`, from 1 on."""

    def task() -> None:
        steps = 0

        def count(*_: object) -> None:
            nonlocal steps
            steps += 1
            if steps == number:
                die()

        register_optimizer_step_pre_hook(count)
        train()

    assert in_child(task) == -signal.SIGKILL
