"""The folder of a run: whether a run may start in it, or go on."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from recipes.common.checkpoints import CheckpointError, Checkpoints, load_checkpoint, run_lock
from recipes.data.token_data import TokenData
from recipes.training.processes import by_rank_0, together

# What may differ between a run and its resumption; all else decides what it computes.
FREE = (
    "output",
    "resume",
    "keep",
    "checkpoint_every",
    "eval_every",
    "eval_batches",
    "print_every",
    "track",
    "cache",
    "cpu",
)
# What names the data: these may be written in another way, as long as the data are the same
# (`data_key`).
FREE += (
    "data",
    "tokenizer",
    "vocab_size",
    "max_tokens",
    "validation_fraction",
    "text_column",
    "streaming",
)


@contextmanager
def only_run_in(folder: Path, check: Callable[[], None]) -> Iterator[None]:
    """Rank 0 holds the lock of the folder, and checks what is in it; if it raises, all ranks do."""
    with ExitStack() as stack:

        def enter() -> None:
            stack.enter_context(run_lock(folder))
            check()

        by_rank_0(enter)
        yield


def check_folder(folder: Path, resume: bool) -> None:
    """Look for what an earlier run has left.

    Raises:
        CheckpointError: If there is a run and `resume` is not asked for, or if it has lost its log.
    """
    log, steps = folder / "log.jsonl", Checkpoints(folder / "checkpoints").steps()
    if not resume and (log.exists() or steps):
        raise CheckpointError(
            f"There is a run in {folder}. Go on with it (--resume), or choose another --output."
        )
    if resume and steps and not log.exists():
        raise CheckpointError(
            f"There are checkpoints in {folder}, but no log.jsonl. Put it back, or choose another --output."
        )


def settings_of(arguments: argparse.Namespace, data: TokenData) -> dict[str, Any]:
    """All flags, and the key of the data, as plain data."""
    plain = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(arguments).items()
    }
    return plain | {"data_key": data.key}


def last_state(
    checkpoints: Checkpoints, accelerator: Accelerator, settings: dict[str, Any]
) -> dict[str, Any] | None:
    """The last good checkpoint, chosen by rank 0 and read by all, or None.

    Raises:
        CheckpointError: If there is one that cannot be gone on from.
    """
    found = together(lambda: checkpoints.load_latest() if accelerator.is_main_process else None)
    (step,) = broadcast_object_list([None if found is None else found[0]])
    if step is None:
        return None

    def read() -> dict[str, Any]:
        state = load_checkpoint(checkpoints.path(step)) if found is None else found[1]
        check_settings(state["settings"], settings, checkpoints.folder.parent)
        return state

    return together(read)


def check_settings(saved: dict[str, Any], settings: dict[str, Any], folder: Path) -> None:
    """Compare what a run was started with and what it is to go on with.

    Raises:
        CheckpointError: If something differs that decides what it computes.
    """
    names = [
        name
        for name in settings
        if name not in FREE and saved.get(name, settings[name]) != settings[name]
    ]
    if names:
        shown = ["data" if name == "data_key" else name for name in names]
        was = ", ".join(f"{name} {saved[name]!r}, now {settings[name]!r}" for name in shown)
        other = " (not the same tokens)" if "data_key" in names else ""
        raise CheckpointError(
            f"The run in {folder} had {was}{other}. Give the same, or another --output."
        )
