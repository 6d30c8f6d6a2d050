"""Restarts by the launcher: `torchrun --max-restarts=2` starts failed ranks again, as they were.

The command has no `--resume` then, and the folder has a run. Whether it is the launcher's own, of
an attempt before this one, or somebody else's, is told by the `job` in the log.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from recipes.training.run_log import read_log


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
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0 or not log.exists():
        return False
    jobs = [line.get("job") for line in read_log(log) if line["kind"] in ("config", "resumed")]
    return bool(jobs) and jobs[-1] == job()
