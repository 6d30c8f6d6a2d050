"""Progress for callers that ask for it: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from blockopt.analysis.formatting import duration

SECONDS = 30.0  # between lines where there is no terminal


@contextmanager
def progress_bar(shown: bool, description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show progress with the time that is left, and give the function that moves it on.

    That function takes a number of units of work; if nothing is to be shown, it does nothing. The
    bar is drawn by rich, if it is installed.
    """
    if not shown:
        yield lambda _: None
    elif sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(description, total=total)
            yield lambda number: bar.advance(task, number)
    else:
        yield _Lines(description, total)


class _Lines:
    """Writes a line every so many seconds, such as "hessian: 25%, 3 min 20 s left"."""

    def __init__(self, description: str, total: int) -> None:
        self._description, self._total, self._done = description, max(1, total), 0
        self._begun = self._told = time.monotonic()

    def __call__(self, number: int) -> None:
        self._done += number
        now = time.monotonic()
        if now - self._told < SECONDS or self._done <= 0:
            return
        self._told = now
        left = (now - self._begun) / self._done * max(0, self._total - self._done)
        share = min(1.0, self._done / self._total)
        line = f"{self._description}: {share:.0%}, {duration(left)} left"
        print(line, file=sys.stderr, flush=True)
