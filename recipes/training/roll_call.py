"""Who is missing when ranks have waited in vain: killed, stopped, cut off or too slow.

An exchange that fails says that some rank is gone, but not which. So every rank has a thread that
looks once a second whether the ranks are being called, and answers. The first rank whose exchange
fails calls; whoever has not answered after a while is missing. Questions and answers go through the
store of the launcher (of rank 0, if there is no launcher), not through the exchanges that failed.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from recipes.common.errors import UserError
from recipes.training.restarts import attempt

PERIOD, PATIENCE = 1.0, 5.0  # seconds between two looks, and until a rank counts as missing
ROOT = str(Path(__file__).parents[2])


class RollCall:
    """The ranks of one attempt to run, and the thread that answers for this one.

    Args:
        rank: The number of this process.
        ranks: How many there are.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._main = threading.main_thread().ident
        self._store = _store()
        self._store.set(f"name/{rank}", f"process {os.getpid()} on {platform.node()}")
        threading.Thread(target=self._answer, name="roll call", daemon=True).start()

    def _answer(self) -> None:
        try:
            while not self._store.check(["called"]):
                time.sleep(PERIOD)
            self._store.set(f"present/{self.rank}", _place(sys._current_frames()[self._main]))
        except (KeyError, RuntimeError):
            return  # the store has ended, and with it the run

    def tell(self, error: BaseException) -> None:
        """Say to the other ranks that this one ends with an error of its own."""
        text = "" if isinstance(error, UserError) else f"{type(error).__name__}: {error}."
        try:
            self._store.set(f"failed/{self.rank}", text)
        except RuntimeError:
            return  # nobody is left to hear it

    def call(self) -> tuple[bool, str]:
        """Return whether this rank is to tell the user, and which ranks are missing, in words.

        Without words, a rank has failed by a `UserError`, and has told the user itself.
        """
        # A launcher ends the others as soon as one is gone: not before they have said who it is.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            caller = self._store.compare_set("called", "", str(self.rank))
            if caller == str(self.rank).encode():
                verdict = self._collect()
                self._store.set("verdict", verdict)
                return True, verdict
            end = time.monotonic() + 2 * PATIENCE
            while time.monotonic() < end and not self._store.check(["verdict"]):
                time.sleep(PERIOD / 10)
            return False, self._store.get("verdict").decode()
        except RuntimeError:
            return True, (
                "The store through which the ranks find each other is gone: that of the launcher, "
                "or of rank 0 if there is no launcher."
            )
        finally:
            signal.signal(signal.SIGTERM, before)

    def _collect(self) -> str:
        end = time.monotonic() + PATIENCE
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        while True:
            failed = self._told("failed", others)
            present = self._told("present", others)
            missing = [rank for rank in others if rank not in failed | present]
            if not missing or time.monotonic() > end:
                break
            time.sleep(PERIOD / 10)
        if failed:
            told = [f"Rank {rank} has failed: {text}" for rank, text in failed.items() if text]
            return " ".join(told)
        if missing:
            names = self._told("name", missing)
            listed = ", ".join(f"{rank} ({names.get(rank, 'not started')})" for rank in missing)
            return (
                f"No answer from rank {listed}: it was killed or stopped, or has lost its network."
            )
        places = ", ".join(f"rank {rank} in {place}" for rank, place in present.items())
        return (
            f"All ranks answer, but one is slower than --timeout: rank {self.rank} has waited for "
            f"the others in vain, while they are at work: {places}."
        )

    def _told(self, what: str, ranks: list[int]) -> dict[int, str]:
        keys = {rank: f"{what}/{rank}" for rank in ranks}
        return {
            rank: self._store.get(key).decode()
            for rank, key in keys.items()
            if self._store.check([key])
        }


def is_lost_exchange(error: BaseException | None) -> bool:
    """Whether an error comes from an exchange with a rank that is gone, at any remove."""
    while error is not None:
        if isinstance(error, dist.DistError) or "/gloo/transport/" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _place(frame: object) -> str:
    """Where a thread is: its innermost line in this repository."""
    stack = traceback.extract_stack(frame)  # type: ignore[arg-type]
    ours = [line for line in stack if line.filename.startswith(ROOT)] or stack
    return f"{Path(ours[-1].filename).name}, line {ours[-1].lineno} ({ours[-1].name})"


def _store() -> dist.Store:
    """A connection of our own, which no other thread holds, apart for each restart."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    # Not before: both ends look up each other's names, and a name server may take its time.
    store.set_timeout(timedelta(seconds=PATIENCE))
    return dist.PrefixStore(f"recipes/train.py/{attempt()}", store)
