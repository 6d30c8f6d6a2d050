"""Checkpoints that survive a kill, a full disk and a broken file; and a lock on a run's folder.

checkpoints/step-00000200.pt          what `torch.save` writes
checkpoints/step-00000200.pt.sha256   its checksum, for us and for `sha256sum -c`
run.lock, run.holder                  held by the process that trains, and who that is
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from blockopt.checks import check_count
from blockopt.files import whole_file, write_whole
from recipes.common.errors import UserError
from recipes.common.files import output_folder, sha256


class CheckpointError(UserError, RuntimeError):
    """A checkpoint could not be written or read; the message says what is left."""


class RunIsLockedError(UserError, RuntimeError):
    """Another process trains in the same folder."""


class Checkpoints:
    """The checkpoints of a run, the newest `keep` of them.

    Args:
        folder: Where they lie; created if needed.
        keep: How many to keep. With two, a broken one has another before it.

    Example:
        >>> import tempfile
        >>> checkpoints = Checkpoints(Path(tempfile.mkdtemp()))
        >>> for step in (10, 20, 30):
        ...     _ = checkpoints.save(step, {"weight": torch.tensor([1.0 * step])})
        >>> checkpoints.steps(), checkpoints.load_latest()
        ([20, 30], (30, {'weight': tensor([30.])}))
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        check_count("keep", keep)
        self.folder, self.keep = Path(folder), keep

    def path(self, step: int) -> Path:
        """Return the file of a step."""
        return self.folder / f"step-{step:08d}.pt"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, from old to new."""
        names = [re.fullmatch(r"step-(\d+)\.pt", path.name) for path in self.folder.glob("*.pt")]
        return sorted(int(match[1]) for match in names if match)

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a step, then delete those that are too old.

        Args:
            step: How many steps are done.
            state: Numbers, strings and tensors, nested; what `torch.load(weights_only=True)` takes.

        Raises:
            CheckpointError: If it cannot be written, for example on a full disk. Earlier ones stay
                as they are.
        """
        path = self.path(step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as file:
                torch.save(dict(state), file)
                file.flush()
                # The checksum comes first, so that no checkpoint is ever without one.
                write_whole(_checksum_path(path), f"{sha256(Path(file.name))}  {path.name}\n")
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError for some disk errors
            raise CheckpointError(
                f"The checkpoint of step {step} could not be written: {error}. {self._left()}"
            ) from error
        for old in self.steps()[: -self.keep]:
            self.path(old).unlink(missing_ok=True)
            _checksum_path(self.path(old)).unlink(missing_ok=True)
        return path

    def load_latest(self) -> tuple[int, dict[str, Any]] | None:
        """Return step and state of the newest intact checkpoint, or None if there is none at all.

        A broken one, such as a copy that was cut off, is skipped with a warning.

        Raises:
            CheckpointError: If there are checkpoints, and all of them are broken.
        """
        for part in self.folder.glob(".step-*.part"):  # of a run that was killed while it wrote
            part.unlink(missing_ok=True)
        steps = self.steps()
        for index in reversed(range(len(steps))):
            try:
                return steps[index], load_checkpoint(self.path(steps[index]))
            except CheckpointError as error:
                then = "There is none before it."
                if index:
                    then = f"Going on from step {steps[index - 1]} instead."
                warnings.warn(f"{error} {then}", stacklevel=2)
        if steps:
            raise CheckpointError(
                f"None of the {len(steps)} checkpoints in {self.folder} is whole. "
                "Start in another folder."
            )
        return None

    def describe_last(self) -> str:
        """Return the newest file and its step, in words."""
        steps = self.steps()
        return f"{self.path(steps[-1])}, of step {steps[-1]}" if steps else "none was written yet"

    def _left(self) -> str:
        steps = self.steps()
        if not steps:
            return f"There is no other in {self.folder}."
        path = self.path(steps[-1])
        return f"That of step {steps[-1]} is as it was, {path}: make room, and resume from it."


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state in a file, after checking its checksum.

    Raises:
        CheckpointError: If the file is missing, or is not what was written.
    """
    try:
        expected = _checksum_path(path).read_text(encoding="ascii").split()[0]
        if sha256(path) != expected:
            size = f"{path.stat().st_size:,} bytes"
            raise CheckpointError(
                f"The checkpoint {path} ({size}) is cut off or damaged: its checksum is wrong."
            )
        return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except (OSError, IndexError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"The checkpoint {path} or its checksum cannot be read: {error}."
        ) from error


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the folder of a run. The system releases the lock of a process that ends, however.

    Raises:
        RunIsLockedError: If another process holds it.
        DiskError: If nothing can be written to it.
    """
    output_folder(folder)
    lock, holder = FileLock(folder / "run.lock"), folder / "run.holder"
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunIsLockedError(
            f"Another run trains in {folder} ({_holder(holder)}). Choose another folder, or end it."
        ) from None
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        about = {"pid": os.getpid(), "host": platform.node(), "since": since}
        write_whole(holder, json.dumps(about))
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _holder(path: Path) -> str:
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (OSError, ValueError, KeyError):
        return "which has not said yet who it is"


def _checksum_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")
