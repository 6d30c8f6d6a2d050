"""The command lines of the scripts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import NoReturn

import torch

from recipes.common.flags import HelpFormatter
from recipes.common.gpt2 import PRESETS


class Parser(argparse.ArgumentParser):
    """A parser with the options of every benchmark, which reports a mistake in one line.

    Args:
        name: The name of the script, and of the files that it writes.
        description: What it measures.
        threads: How many threads torch gets by default.
    """

    def __init__(self, name: str, description: str | None, threads: int = 2) -> None:
        super().__init__(description=description, formatter_class=HelpFormatter)
        self.add_argument("--threads", type=positive, default=threads, help="threads of torch")
        self.add_argument(
            "--quick", action="store_true", help="tiny sizes, to see in seconds that it works"
        )
        for flag, suffix, what in (("--output", ".json", "JSON"), ("--plot", ".png", "PNG")):
            path = Path(f"results/{name}{suffix}")
            self.add_argument(flag, type=Path, default=path, help=f"{what} file to write")

    def add_preset(self, flag: str, default: str, help: str) -> None:
        """Add an option that takes the name of a preset of `recipes/common/gpt2.py`."""
        self.add_argument(flag, choices=tuple(PRESETS), default=default, help=help)

    def add_problem(self) -> None:
        """Add the options of `make_problem`, and the one that leaves Muon out."""
        self.add_preset("--size", "small", "preset of recipes/common/gpt2.py")
        layouts = "nn.Linear, or transformers' GPT-2 with Conv1D"
        self.add_argument("--layout", choices=("linear", "conv1d"), default="linear", help=layouts)
        self.add_argument(
            "--no-muon", action="store_true", help="leave out Muon, which is slow on a CPU"
        )

    def error(self, message: str) -> NoReturn:
        """Stop with one line and exit code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse(self, *needed: str) -> argparse.Namespace:
        """Parse the command line, set the number of threads, and stop on what would fail later.

        Args:
            needed: The modules that the script cannot do without, besides matplotlib.
        """
        arguments = self.parse_args()
        if getattr(arguments, "layout", "linear") == "conv1d":
            needed += ("transformers",)
        for module in ("matplotlib", *needed):
            try:
                __import__(module)
            except ImportError as error:
                self.error(f"{error}. Install what is missing: pip install -e '.[bench,hf]'.")
        for path, suffix in ((arguments.output, ".json"), (arguments.plot, ".png")):
            self._check_path(path, suffix)
        torch.set_num_threads(1 if arguments.quick else arguments.threads)
        return arguments

    def _check_path(self, path: Path, suffix: str) -> None:
        """Stop if a file has another suffix or cannot be written."""
        if path.suffix != suffix:
            self.error(f"Invalid path {path}. Must end in {suffix}.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.error(f"Cannot write {path}: {error}.")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            self.error(f"Cannot write {path}.")


def positive(text: str) -> int:
    """Return an integer of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"invalid value {number}, must be at least 1")
    return number
