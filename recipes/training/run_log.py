"""The log of a run: one JSON object per line, each step once, even after a kill and a resumption.

{"kind": "config", "arguments": {"optimizer": "block-adamw", …, "data_key": "1c9f…"},
 "seeds": {…}, "processes": 1, "parameters": 462816, "tokens": 3510044, "command": […],
 "started": "2026-01-31T12:00:00", "git": "6917c69", "versions": {…}}
{"kind": "step", "step": 1, "loss": 6.9315, "lr": 0.0001, "gradient_norm": 1.3,
 "tokens_per_second": 21000.0, "seconds": 0.1}
{"kind": "evaluation", "step": 100, "loss": 4.2}
{"kind": "scales", "step": 101, "scales": {"query": 1.7, …}}
{"kind": "resumed", "step": 200, "command": […], "started": …, "git": …, "versions": {…}}
{"kind": "stopped", "step": 250, "signal": "SIGTERM"}
{"kind": "nonfinite", "step": 300, "message": "Step 300: the loss is nan …"}
{"kind": "end", "step": 1000, "loss": 3.1}
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockopt.files import write_whole
from recipes.common.errors import DiskError
from recipes.common.provenance import git_commit, versions

PACKAGES = ("torch", "accelerate", "transformers", "tokenizers", "datasets", "numpy")


class RunLog:
    """A JSONL file that is written line by line, as a context manager.

    Args:
        path: The file, which is created or continued; None writes nothing, for ranks other than 0.
        after: The step to continue after: later lines are dropped, as their steps are done again.
    """

    def __init__(self, path: Path | None, after: int = 0) -> None:
        self._path, self._file = path, None
        if path is None:
            return
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                lines = read_log(path) if after > 0 else []
                kept = [e for e in lines if e.get("step", 0) <= after and e["kind"] != "end"]
                write_whole(path, b"".join(map(_encoded, kept)))
            self._file = path.open("ab", buffering=0)

    def write(self, kind: str, **values: Any) -> None:
        """Add a line, which stays when the process is killed."""
        if self._file is not None:
            line = _encoded({"kind": kind, **values})
            with self._explained():
                while line:
                    line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Force the log to disk before a checkpoint, so that it is never behind one."""
        if self._file is not None:
            with self._explained():
                os.fsync(self._file.fileno())

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DiskError(
                f"The log {self._path} could not be written ({error.strerror or error}). "
                "Checkpoints are as they were: make room, and --resume."
            ) from error

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _encoded(line: dict[str, Any]) -> bytes:
    return (json.dumps(line) + "\n").encode()


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log, without a last one that a kill has cut off."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def describe_run() -> dict[str, Any]:
    """Return command, time, code and versions of this run."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "git": git_commit(),
        "versions": versions(*PACKAGES),
    }
