"""The folder of a run: whether a run may start in it, or continue."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from recipes.common.checkpoints import CheckpointError, Checkpoints, load_checkpoint, run_lock
from recipes.data.token_data import TokenData
from recipes.training.processes import by_rank_0, together

# What may differ between a run and its resumption; everything else decides what it computes.
FREE = {"output", "resume", "keep", "checkpoint_every", "eval_every", "eval_batches"}
FREE |= {"print_every", "track", "cache", "cpu", "timeout"}
# The data may be named in another way, as long as they are the same (`data_key`).
FREE |= {"data", "tokenizer", "vocab_size", "max_tokens", "validation_fraction"}
FREE |= {"text_column", "streaming"}


@contextmanager
def only_run_in(folder: Path, check: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of the folder on rank 0, and check what is in it; if it fails, all ranks do."""
    with ExitStack() as stack:

        def enter() -> None:
            stack.enter_context(run_lock(folder))
            check()

        by_rank_0(enter)
        yield


def check_folder(folder: Path, resume: bool) -> None:
    """Look for what an earlier run has left.

    Raises:
        CheckpointError: If there is a run and `resume` is not set, or if its log is missing.
    """
    log, steps = folder / "log.jsonl", Checkpoints(folder / "checkpoints").steps()
    if not resume and (log.exists() or steps):
        raise CheckpointError(
            f"There is a run in {folder}. Go on with it (--resume), or choose another --output."
        )
    if resume and steps and not log.exists():
        raise CheckpointError(
            f"There are checkpoints in {folder}, but no log.jsonl. "
            "Put it back, or choose another --output."
        )


def settings_of(arguments: argparse.Namespace, data: TokenData) -> dict[str, Any]:
    """Return all flags and the key of the data, as plain data."""
    plain = {n: str(v) if isinstance(v, Path) else v for n, v in vars(arguments).items()}
    return plain | {"data_key": data.key}


def last_state(
    checkpoints: Checkpoints, accelerator: Accelerator, settings: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the last intact checkpoint, chosen by rank 0 and read by all, or None.

    Raises:
        CheckpointError: If the run cannot be continued from it.
    """
    found: list[tuple[int, dict[str, Any]] | None] = [None]  # rank 0 does not read it again

    def choose() -> int | None:
        found[0] = checkpoints.load_latest()
        return None if found[0] is None else found[0][0]

    step = by_rank_0(choose)
    if step is None:
        return None

    def read() -> dict[str, Any]:
        state = load_checkpoint(checkpoints.path(step)) if found[0] is None else found[0][1]
        check_settings(state["settings"], settings, checkpoints.folder.parent)
        return state

    return together(read)


def check_settings(saved: dict[str, Any], settings: dict[str, Any], folder: Path) -> None:
    """Compare what a run was started with and what it is to be continued with.

    Raises:
        CheckpointError: If something differs that decides what it computes.
    """
    names = [n for n in settings if n not in FREE and saved.get(n, settings[n]) != settings[n]]
    if names:
        shown = ["data" if name == "data_key" else name for name in names]
        was = ", ".join(f"{name} {saved[name]!r}, now {settings[name]!r}" for name in shown)
        other = " (not the same tokens)" if "data_key" in names else ""
        raise CheckpointError(
            f"The run in {folder} had {was}{other}. Give the same, or another --output."
        )
