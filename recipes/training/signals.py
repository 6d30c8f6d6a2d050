"""What a scheduler or a user asks a run for with a signal, and how all ranks hear of it.

    SIGTERM   the job is about to be ended: write a last checkpoint and leave with code 143
    SIGUSR1   write a checkpoint and go on

A handler only notes the signal. The note travels with the loss, which is averaged over ranks in
every step anyway: so it costs no exchange of its own, one rank that hears it is enough, and all
ranks act on it after the same step, the one at hand or the next.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

STOPPED = 128 + signal.SIGTERM  # the exit code that a shell gives to a process ended by SIGTERM
STOP, SAVE = signal.SIGTERM, getattr(signal, "SIGUSR1", None)  # there is no SIGUSR1 on Windows


class Preempted(Exception):
    """The run was asked to stop, and has written its last checkpoint."""


class Requests:
    """The signals that have come; as a context manager, it catches them.

    Attributes:
        save: Whether all ranks are to write a checkpoint after the present step.
        stop: Whether they are to leave after it.

    Example:
        >>> import os
        >>> with Requests() as requests:
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     sent = requests.take()  # by this rank, to all
        ...     requests.agree(*sent)
        >>> requests.save, requests.stop
        (True, True)
    """

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self.save = self.stop = False

    def take(self) -> tuple[float, float]:
        """Return, as numbers to be averaged, whether this rank was asked to save and to stop."""
        save, stop = SAVE in self._noted, STOP in self._noted
        if save:
            self._noted.discard(SAVE)  # one that comes from now on is for the next step
        return float(save), float(stop)

    def agree(self, save: float, stop: float) -> None:
        """Hear the averages over all ranks: what one was asked for, all do."""
        self.stop = stop > 0
        self.save = save > 0 or self.stop

    def __enter__(self) -> Requests:
        caught = [number for number in (STOP, SAVE) if number is not None]
        self._before = {number: signal.signal(number, self._note) for number in caught}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._noted.add(number)
