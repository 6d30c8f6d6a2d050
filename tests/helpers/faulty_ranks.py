"""Ranks of `recipes/train.py` as a launcher starts them, with a fault in one of them.

They are copies of a process that has imported what they need and has done nothing else. Copies of
the process of the tests would inherit what its tests have left behind: locks that its threads held,
and garbage whose destructors wait for threads that a copy does not have.
"""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import pkgutil
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial, wraps
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from recipes import train
from recipes.training import processes, roll_call
from tests.helpers.training import forget

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
KINDS = {"ddp": {}, "fsdp2": FSDP2}
HUNG = 90  # seconds without a step after which a rank says where it is, and ends
PRELOADED = [
    "tests.helpers.faulty_ranks",
    "torch._dynamo",
    "transformers.models.gpt2.modeling_gpt2",
]
Plan = Callable[[pytest.MonkeyPatch], None]
Fault = Callable[[int, pytest.MonkeyPatch], None]


def at(owner: Any, name: str, number: int, act: Callable[[], None]) -> Plan:
    """Do something when a function is called for a certain time."""
    module = isinstance(owner, ModuleType)
    where = owner.__name__ if module else f"{owner.__module__}.{owner.__qualname__}"
    return partial(_plan, f"{where}.{name}", number, act)


def _plan(function: str, number: int, act: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    calls = itertools.count(1)
    _before(function, lambda: act() if next(calls) == number else None, patch)


def _before(function: str, act: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    original = pkgutil.resolve_name(function)

    @wraps(original)
    def changed(*arguments: Any, **options: Any) -> Any:
        act()
        return original(*arguments, **options)

    patch.setattr(function, changed)


def on_rank(rank: int, plan: Plan) -> Fault:
    """A fault of one rank."""
    return partial(_on_rank, rank, plan)


def _on_rank(rank: int, plan: Plan, own: int, patch: pytest.MonkeyPatch) -> None:
    if own == rank:
        plan(patch)


def send(number: int) -> Callable[[], None]:
    """Send a signal to the process itself."""
    return partial(_send, number)


def _send(number: int) -> None:
    os.kill(os.getpid(), number)


def run_ranks(
    argv: list[str], kind: str, number: int = 2, fault: Fault | None = None
) -> tuple[list[int], str]:
    """Run the script on as many processes; return how each ended, and what they said.

    This process keeps their store, as torchrun does. A rank that is stopped is killed in the end.
    """
    # Its port is free; no rank has to be the master.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = Path(argv[argv.index("--output") + 1]).with_suffix(".txt")
    said.parent.mkdir(parents=True, exist_ok=True)
    said.unlink(missing_ok=True)
    said.touch()
    launcher = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
    }
    environment = {**launcher, **KINDS[kind]} if number > 1 else {}
    clean = multiprocessing.get_context("forkserver")
    clean.set_forkserver_preload(PRELOADED)
    ranks = [
        clean.Process(target=_train, args=(rank, argv, environment, fault, said))
        for rank in range(number)
    ]
    for process in ranks:
        process.start()
    return _endings(ranks, said), said.read_text()


def _train(
    rank: int, argv: list[str], environment: dict[str, str], fault: Fault | None, said: Path
) -> None:
    sys.stdout = sys.stderr = output = said.open("a", buffering=1)
    os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    if environment:
        os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    patch = pytest.MonkeyPatch()
    patch.setattr(roll_call, "PERIOD", 0.1)
    patch.setattr(roll_call, "PATIENCE", 1.0)
    patch.setattr(processes, "LET_SPEAK", 0.5)
    if fault is not None:
        fault(rank, patch)

    def still_at_work() -> None:
        faulthandler.dump_traceback_later(HUNG, exit=True, file=output)

    still_at_work()
    _before("recipes.train.Run.backward", still_at_work, patch)
    forget()
    warnings.simplefilter("ignore")
    train.main(argv)


def _endings(ranks: list[BaseProcess], said: Path, seconds: float = 300) -> list[int]:
    """Return how processes ended; those that are stopped are killed when the others have."""
    deadline = time.monotonic() + seconds
    while alive := [process for process in ranks if process.exitcode is None]:
        late = time.monotonic() > deadline
        if late or all(_is_stopped(process) for process in alive):
            for process in alive:
                process.kill()
                process.join()
            assert not late, f"{len(alive)} ranks did not end.\n{said.read_text()}"
        wait([process.sentinel for process in alive], timeout=0.05)
    return [process.exitcode for process in ranks]  # type: ignore[misc]


def _is_stopped(process: BaseProcess) -> bool:
    try:
        return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:  # it has just ended
        return False
