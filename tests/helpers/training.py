"""Runs of `recipes/train.py` inside a process, on a tiny model."""

from __future__ import annotations

import warnings
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

from recipes import train
from recipes.training.arguments import parse
from recipes.training.run_log import read_log
from tests.helpers.killed import die, in_child

OURS = ("block-adamw", "block-adamw-block", "block-sgd", "block-muon")
SIZES = "--data addition:1 --max-tokens 900 --width 16 --depth 2 --heads 2 --batch-size 8"
QUIET = "--eval-batches 2 --eval-every 3 --print-every 1000 --cpu --lr 1e-2"


def flags(output: Path, cache: Path, *more: str | float) -> list[str]:
    """Return the flags of a tiny run; several may stand in one string."""
    words = (SIZES, QUIET, f"--output {output} --cache {cache}", *more)
    return " ".join(map(str, words)).split()


def sized(arguments: list[str], *more: str | float) -> list[str]:
    """Return the flags without the sizes of our GPT-2, for models of transformers."""
    first = arguments.index("--width")
    return [*arguments[:first], *arguments[first + 6 :], *" ".join(map(str, more)).split()]


def forget(partial: bool = True) -> None:
    """Accelerate keeps its state in classes: a second run in a process must start without it."""
    AcceleratorState._reset_state(reset_partial_state=partial)
    GradientState._reset_state()


def losses_of(log: Path) -> dict[int, float]:
    """Return the training loss of each step."""
    return {line["step"]: line["loss"] for line in read_log(log) if line["kind"] == "step"}


def run(argv: list[str], partial: bool = True) -> Path:
    """Train, and return the log."""
    forget(partial)
    arguments = parse(argv)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No block had a positive|The (refresh|curvature) of")
            train.train(arguments, train.make_accelerator(arguments))
    finally:
        forget(partial)
    return arguments.output / "log.jsonl"


__all__ = ["OURS", "die", "flags", "forget", "in_child", "losses_of", "read_log", "run", "sized"]
