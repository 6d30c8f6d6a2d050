"""Restarts by the launcher: `torchrun --max-restarts=2` starts failed ranks again, as they were.

The command has no `--resume` then, and the folder has a run. Whether it is the launcher's own, of
an attempt before this one, or somebody else's, is told by the `job` in the log.

The launcher also keeps the store in which ranks look for each other's addresses. Those of ranks
that are dead are still in it, and torch 2.13 does not tell attempts apart: a rank that looks before
the others have written theirs connects to a port that nobody listens to any more. So each attempt
has keys of its own here.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from recipes.training.run_log import read_log

SCHEME = "blockopt-attempt"
RENDEZVOUS = f"{SCHEME}://"  # for `init_process_group`: `env://` with keys of this attempt's own


def attempt() -> int:
    """How many times the launcher has started this process again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _rendezvous(url: str, timeout: timedelta) -> Iterator[tuple[dist.Store, int, int]]:
    for store, rank, ranks in rendezvous(url.replace(SCHEME, "env", 1), timeout=timeout):
        yield dist.PrefixStore(f"attempt/{attempt()}", store), rank, ranks


register_rendezvous_handler(SCHEME, _rendezvous)


def job() -> str:
    """The name of what has started this process, the same after a restart by it.

    The launcher's `--rdzv-id` if there is one, since rank 0 may move to another machine; otherwise
    the launcher's process.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none":
        return name
    launcher = psutil.Process(os.getppid())
    return f"{platform.node()} {launcher.pid} {launcher.create_time():.2f}"


def is_restarted(folder: Path) -> bool:
    """Whether the launcher has started this process again, for the run in the folder."""
    log = folder / "log.jsonl"
    if attempt() == 0 or not log.exists():
        return False
    jobs = [line.get("job") for line in read_log(log) if line["kind"] in ("config", "resumed")]
    return bool(jobs) and jobs[-1] == job()
