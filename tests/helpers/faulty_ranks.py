"""Ranks of `recipes/train.py` as a launcher starts them, with a fault in one of them."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from recipes import train
from recipes.training import processes, roll_call
from tests.helpers.killed import ending, start_child
from tests.helpers.training import forget

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}
KINDS = {"ddp": {}, "fsdp2": FSDP2}
Plan = Callable[[pytest.MonkeyPatch], None]
Fault = Callable[[int, pytest.MonkeyPatch], None]


def at(owner: Any, name: str, number: int, act: Callable[[], None]) -> Plan:
    """Do something when a function is called for a certain time."""

    def plan(patch: pytest.MonkeyPatch) -> None:
        function, count = getattr(owner, name), iter(range(1, 1000))

        def faulty(*arguments: Any, **options: Any) -> Any:
            if next(count) == number:
                act()
            return function(*arguments, **options)

        patch.setattr(owner, name, faulty)

    return plan


def on_rank(rank: int, plan: Plan) -> Fault:
    """A fault of one rank."""
    return lambda own, patch: plan(patch) if own == rank else None


def send(number: int) -> Callable[[], None]:
    """Send a signal to the process itself."""
    return lambda: os.kill(os.getpid(), number)


def run_ranks(
    argv: list[str], kind: str, number: int = 2, fault: Fault | None = None
) -> tuple[list[int], str]:
    """Run the script on as many copies of this process; return how each ended, and what they said.

    This process keeps their store, as torchrun does. A rank that is stopped is killed in the end.
    """
    # Its port is free; no rank has to be the master.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    said = Path(argv[argv.index("--output") + 1]).with_suffix(".txt")
    said.parent.mkdir(parents=True, exist_ok=True)
    said.unlink(missing_ok=True)

    def rank_of(rank: int) -> Callable[[], None]:
        def task() -> None:
            sys.stdout = sys.stderr = output = said.open("a", buffering=1)
            os.dup2(output.fileno(), 2)
            faulthandler.register(signal.SIGUSR1, output)  # says where a rank hangs
            if number > 1:
                os.environ.update(
                    {
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(store.port),
                        "TORCHELASTIC_USE_AGENT_STORE": "True",
                        "RANK": str(rank),
                        "WORLD_SIZE": str(number),
                        "LOCAL_RANK": str(rank),
                        "LOCAL_WORLD_SIZE": str(number),
                        **KINDS[kind],
                    }
                )
            patch = pytest.MonkeyPatch()
            patch.setattr(roll_call, "PERIOD", 0.1)
            patch.setattr(roll_call, "PATIENCE", 1.0)
            patch.setattr(processes, "LET_SPEAK", 0.5)
            if fault is not None:
                fault(rank, patch)
            forget()
            warnings.simplefilter("ignore")
            train.main(argv)

        return task

    pids = [start_child(rank_of(rank)) for rank in range(number)]
    endings = wait_for(pids, said)
    return endings, said.read_text()


def wait_for(pids: list[int], said: Path, seconds: float = 120) -> list[int]:
    """Return how processes ended; those that are stopped are killed when the others have."""
    endings: dict[int, int] = {}
    stopped: set[int] = set()
    deadline = time.monotonic() + seconds
    while len(endings) < len(pids):
        for pid in set(pids) - set(endings):
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                stopped.add(pid)
            elif found:
                endings[pid] = os.waitstatus_to_exitcode(status)
        late = time.monotonic() > deadline
        if late or len(endings) + len(stopped) == len(pids):
            if late:
                for pid in set(pids) - set(endings):
                    os.kill(pid, signal.SIGUSR1)
                time.sleep(1.0)
            for pid in set(pids) - set(endings):
                os.kill(pid, signal.SIGKILL)
                endings[pid] = ending(pid)
            assert not late, f"some ranks did not end: {endings}\n{said.read_text()}"
        time.sleep(0.01)
    return [endings[pid] for pid in pids]
