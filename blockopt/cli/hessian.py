"""`blockopt hessian gpt2 --text file.txt`: the options, what is printed, and what is written."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import platform
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch

import blockopt
from blockopt.analysis.block_report import Probes
from blockopt.analysis.formatting import plain
from blockopt.analysis.memory import TooLargeError
from blockopt.analysis.report import (
    Cost,
    HessianReport,
    Matrix,
    hessian_report,
    matching_parameters,
)
from blockopt.blocks import Level, find_blocks
from blockopt.cli.configs import import_transformers
from blockopt.cli.errors import UserError, user_mistakes
from blockopt.cli.local_model import Corpus, LocalModel, load_model, load_text, next_token_losses

SMALL = 10**7  # parameters up to which float64 is the default
EXAMPLES = """examples:
  blockopt hessian gpt2 --set n_layer=2 --set n_embd=64 --set n_head=4 --text book.txt
  blockopt hessian ./checkpoint --text book.txt --by head --only 'h.0.attn.*' --out results
  blockopt hessian llama.json --text book.txt --matrix gauss-newton --by layer --top 5
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EXAMPLES

    def add(*names: str, help: str, **options: Any) -> None:
        parser.add_argument(*names, help=help, **options)

    def add_number(name: str, default: int, help: str, **options: Any) -> None:
        add(name, type=int, default=default, help=f"{help} (default {default})", **options)

    def add_list(name: str, metavar: str, help: str) -> None:
        add(name, action="append", default=[], metavar=metavar, help=f"{help}; repeatable")

    def add_flag(name: str, help: str) -> None:
        add(name, action="store_true", help=help)

    def add_choice(name: str, choices: tuple[str, ...], help: str) -> None:
        add(name, choices=choices, default=choices[0], help=f"{help} (default {choices[0]})")

    local = (
        "a transformers model type (gpt2), a config.json, or a folder with one and maybe weights"
    )
    add("model", help=f"{local}; nothing is downloaded")
    add("--text", required=True, metavar="FILE", help="local text, UTF-8")
    add_list("--set", "KEY=VALUE", "replace an entry of the config")
    add_flag("--random", "take random weights although the folder holds a checkpoint")
    add_number("--seed", 0, "the seed of random weights and of all probes")
    add_number("--length", 64, "tokens per sequence")
    add_number("--sequences", 8, "sequences, spread over the text")
    add_number("--batch", 8, "sequences at a time; more are faster, fewer take less memory")
    dtypes, rule = ("float32", "float64"), f"float64 up to {SMALL:,} parameters, float32 beyond"
    add("--dtype", choices=dtypes, help=f"dtype of the model (default {rule})")
    add("--device", default="cpu", help="where to compute (default cpu)")
    add_choice("--matrix", get_args(Matrix), "which matrix; functional is hessian - gauss-newton")
    by = "one block per role of the model, of a layer or of a tensor, or per head"
    add_choice("--by", get_args(Level), by)
    add_list("--only", "PATTERN", "only parameters that fit, such as 'h.0.*'")
    add_number("--top", 1, "eigenvalues per block, the farthest from 0", metavar="K")
    add_number("--probes", 20, "random vectors per block, for traces and norms")
    add_number("--steps", 30, "Lanczos steps per spectrum")
    add_number("--starts", 3, "start vectors per spectrum, 0 for no spectra")
    add_flag("--exact", "build every diagonal block, if it fits into memory")
    files = "report.json, blocks.csv, spectrum.png and blocks.png"
    add("--out", metavar="FOLDER", help=f"write {files} there")


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit code.

    Raises:
        UserError: If an option or a file is wrong, memory does not suffice, or a number is not
            finite.
    """
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            _run(options, caught)
    except (TooLargeError, FloatingPointError) as error:
        raise UserError(str(error)) from None
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise UserError(
            f"Out of memory. Try a smaller --batch or --length.\ntorch says: {error}"
        ) from None
    return 0


def _run(options: argparse.Namespace, caught: list[warnings.WarningMessage]) -> None:
    with user_mistakes(ValueError):
        probes = Probes(
            top=options.top,
            num_probes=options.probes,
            num_steps=options.steps,
            num_starts=options.starts,
            exact=options.exact,
            seed=options.seed,
        )
    if options.batch < 1:
        raise UserError(f"Invalid --batch {options.batch}. Must be an integer >= 1.")
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"Invalid --device {options.device}: {reason}") from None
    folder = None if options.out is None else Path(options.out)
    if folder is not None:
        with user_mistakes(OSError):
            folder.mkdir(parents=True, exist_ok=True)  # now, not after an hour
    overrides, random = _overrides(options.set), options.random
    source = load_model(options.model, overrides, random=random, seed=options.seed)
    where = {"sequences": options.sequences, "length": options.length}
    corpus = load_text(options.text, source.model, source.folder, **where)
    number = sum(p.numel() for p in source.model.parameters())
    dtype = options.dtype or ("float64" if number <= SMALL else "float32")
    model = source.model.to(options.device, getattr(torch, dtype))
    with user_mistakes(ValueError):  # a pattern that fits nothing, or blocks that cannot be told
        matching_parameters(model, options.only)
        blocks = find_blocks(model, per_head=options.by == "head", per_row=())
    size = f"{number:,} parameters in {dtype}"
    print(f"{type(model).__name__} ({options.model}), {size}, {source.weights}")
    print(f"{options.sequences} sequences of {options.length} tokens from {options.text}")
    print(f"tokens: {corpus.tokens}", flush=True)
    report = hessian_report(
        model,
        next_token_losses(model, corpus.ids.to(options.device), options.batch),
        matrix=options.matrix,
        by=options.by,
        only=options.only,
        blocks=blocks,
        probes=probes,
        progress=sys.stderr.isatty() and importlib.util.find_spec("rich") is not None,
        announce=_print_cost,
    )
    print(f"\n{report.table()}\n")
    if options.top > 1:
        print(f"{report.eigenvalue_table()}\n")
    print(report.summary())
    symmetric = f"{report.matrix} symmetric to {report.asymmetry:.0e}"
    print(f"loss            {report.loss:.4f}, {symmetric}, {_duration(report.seconds)}")
    notes = _notes(report, dtype, caught)
    for note in notes:
        print(f"Note: {note}")
    if folder is not None:
        record = _record(options, source, corpus, dtype, number, notes)
        with user_mistakes(OSError):
            written = _write(folder, report, record)
        print(f"wrote {', '.join(map(str, written))}")


def _overrides(settings: list[str]) -> dict[str, Any]:
    """Return `["n_layer=2"]` as `{"n_layer": 2}`: values as JSON, or as text if they are not."""
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise UserError(f"Invalid --set {setting}. Must be KEY=VALUE, such as n_layer=2.")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def _print_cost(cost: Cost) -> None:
    each, longest = cost.seconds_per_product, cost.num_products * cost.seconds_per_product
    products = f"about {cost.num_products:,} products, {each:.2g} s for one"
    print(f"{products}: up to {_duration(longest)}", flush=True)


def _duration(seconds: float) -> str:
    """Return seconds in units that people read.

    Example:
        >>> _duration(3.21), _duration(100), _duration(7300)
        ('3.2 s', '1 min 40 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _notes(report: HessianReport, dtype: str, caught: list[warnings.WarningMessage]) -> list[str]:
    """Return what a reader should know: the warnings, and how far to trust the numbers."""
    ours = (str(w.message) for w in caught if issubclass(w.category, UserWarning))
    notes = list(dict.fromkeys(ours))
    if dtype == "float64" and report.asymmetry > 1e-11:
        notes.append(
            "Parts of this model run in float32 in any dtype, as RMSNorm does in transformers."
        )
    return notes


def _record(
    options: argparse.Namespace,
    source: LocalModel,
    corpus: Corpus,
    dtype: str,
    number: int,
    notes: list[str],
) -> dict[str, Any]:
    """Return how the numbers came about."""
    return {
        "options": {key: value for key, value in vars(options).items() if key != "command"},
        "model": type(source.model).__name__,
        "weights": source.weights,
        "parameters": number,
        "dtype": dtype,
        "tokens": corpus.tokens,
        "config": source.model.config.to_dict(),  # type: ignore[operator, union-attr]
        "versions": {
            "blockopt": blockopt.__version__,
            "torch": torch.__version__,
            "transformers": import_transformers().__version__,
            "python": platform.python_version(),
        },
        "notes": notes,
    }


def _write(folder: Path, report: HessianReport, record: Mapping[str, Any]) -> list[Path]:
    """Write the report and return the paths of the files."""
    paths = [folder / "report.json", folder / "blocks.csv"]
    text = json.dumps({**plain(record), "report": report.to_dict()}, indent=1, allow_nan=False)
    paths[0].write_text(text + "\n", encoding="utf-8")
    rows = report.rows()
    columns = max(rows, key=len)  # small blocks have fewer tops
    with paths[1].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)
    if importlib.util.find_spec("matplotlib") is None:
        print("Note: no plots without matplotlib: pip install 'blockopt[recipes]'.")
        return paths
    from blockopt.cli.hessian_plots import write_plots

    return paths + write_plots(folder, report, f"{record['model']}, {record['weights']}")
