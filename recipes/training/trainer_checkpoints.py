"""Checkpoints of transformers' Trainer that a run can continue from: intact, and its own.

    checkpoint-200/SHA256SUMS   checksums of its files, for us and for `sha256sum -c`, written last
    settings.json               what decides the outcome of the run, to compare when it is resumed

The Trainer alone takes the newest folder, whatever is in it, with any settings.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback

from blockopt.files import write_whole
from recipes.common.checkpoints import CheckpointError
from recipes.common.files import sha256
from recipes.training.processes import by_rank_0
from recipes.training.run_folder import check_settings

SUMS, SETTINGS = "SHA256SUMS", "settings.json"


class Checksums(TrainerCallback):  # type: ignore[misc]
    """Adds checksums to each checkpoint that the Trainer has written."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer, on every rank."""
        PartialState().wait_for_everyone()  # each has written its part
        if state.is_world_process_zero:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != SUMS)
            sums = [f"{sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in files]
            write_whole(folder / SUMS, "".join(sums))


def check_folder(folder: Path, resume: bool) -> None:
    """Look for what an earlier run has left.

    Raises:
        CheckpointError: If there is a run and `resume` is not set.
    """
    if not resume and (checkpoints(folder) or (folder / "model").exists()):
        raise CheckpointError(
            f"There is a run in {folder}. Go on with it (--resume), or choose another --output."
        )


def start_or_go_on(folder: Path, settings: dict[str, Any]) -> str | None:
    """Return the checkpoint to continue from; or None to start, after writing the settings down.

    Args:
        folder: The folder of the run.
        settings: What decides its outcome, as plain data, with the `data_key`.

    Raises:
        CheckpointError: If no checkpoint is intact, or they are of a run with other settings.
    """

    def decide() -> str | None:
        if not checkpoints(folder):
            write_whole(folder / SETTINGS, json.dumps(settings, indent=1))
            return None
        check_settings(read_settings(folder), settings, folder)
        return str(last_whole(folder))

    return by_rank_0(decide)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, from old to new."""
    found = [p for p in folder.glob("*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings that the run in the folder was started with.

    Raises:
        CheckpointError: If they cannot be read.
    """
    try:
        return json.loads((folder / SETTINGS).read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"Cannot read the settings of the run in {folder}: {error}. Choose another --output."
        ) from error


def last_whole(folder: Path) -> Path:
    """Return the newest intact checkpoint; broken ones are passed over with a warning.

    Raises:
        CheckpointError: If all are broken.
    """
    found = checkpoints(folder)
    for path in reversed(found):
        problem = damage(path)
        if problem is None:
            return path
        warnings.warn(f"The checkpoint {path} is passed over: {problem}.", stacklevel=2)
    raise CheckpointError(
        f"None of the {len(found)} checkpoints in {folder} is whole. Choose another --output."
    )


def damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint, or None."""
    try:
        lines = (checkpoint / SUMS).read_text(encoding="utf-8").splitlines()
        for expected, _, name in (line.partition("  ") for line in lines):
            if sha256(checkpoint / name) != expected:
                return f"{name} is cut off or damaged"
    except FileNotFoundError as error:
        name = Path(error.filename).name
        return "it was not written to its end" if name == SUMS else f"{name} is missing"
    return None if lines else f"{SUMS} is empty"
