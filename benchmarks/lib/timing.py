"""The one way in which everything here is timed: in rounds, next to what it is compared with."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.lib.output import progress_bar
from recipes.common.provenance import git_commit, machine, versions


@dataclass(frozen=True)
class Times:
    """The times of several calls.

    Attributes:
        seconds: `{name: one time per round}`.
    """

    seconds: dict[str, list[float]]

    def milliseconds(self, name: str) -> float:
        """Return the median over the rounds."""
        return 1e3 * median(self.seconds[name])

    def ratio(self, name: str, reference: str) -> dict[str, float]:
        """Return the median and the quartiles of the ratio of two calls of the same round."""
        pairs = zip(self.seconds[name], self.seconds[reference])
        ratios = sorted(mine / other for mine, other in pairs)
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        return {"median": median(ratios), "low": low, "high": high}


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call and the seconds that it took."""
    begin = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begin


def time_in_rounds(
    calls: Mapping[str, Callable[[], Any]],
    rounds: int,
    title: str,
    *,
    warm_up: int = 1,
    prepare: Callable[[str], None] | None = None,
) -> Times:
    """Time every call once per round.

    A disturbance of the machine then hits all calls alike. Their order rotates from round to round.

    Args:
        calls: What to time.
        rounds: How often.
        title: A title for the progress bar.
        warm_up: Rounds that come before and do not count.
        prepare: Called with the name before each call, outside the measured time.
    """
    names = list(calls)
    times = Times({name: [] for name in names})
    with progress_bar(title, (warm_up + rounds) * len(names)) as advance:
        for number in range(-warm_up, rounds):
            start = number % len(names)
            for name in names[start:] + names[:start]:
                if prepare is not None:
                    prepare(name)
                _, seconds = timed(calls[name])
                if number >= 0:
                    times.seconds[name].append(seconds)
                advance(name)
    return times


@contextmanager
def conditions() -> Iterator[dict[str, Any]]:
    """Collect what the numbers of a run depend on.

    At the end `waiting` is the share of the run in which some process waited for a core, or None
    where Linux does not count it.
    """
    found = {
        "machine": machine(),
        "threads": torch.get_num_threads(),
        "versions": versions("torch"),
        "git": git_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "waiting": None,
    }
    begin, waited = time.monotonic(), _seconds_of_waiting()
    yield found
    now = _seconds_of_waiting()
    if waited is not None and now is not None:
        found["waiting"] = (now - waited) / (time.monotonic() - begin)


def _seconds_of_waiting() -> float | None:
    """Return the seconds since the start of the machine in which some process waited for a core."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0]) / 1e6
    except (OSError, IndexError):
        return None
