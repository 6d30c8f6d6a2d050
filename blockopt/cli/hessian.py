"""`blockopt hessian gpt2 --text file.txt`: the options, the measurement, and what is printed."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from blockopt.analysis.block_report import Probes
from blockopt.analysis.formatting import duration
from blockopt.analysis.memory import GIB, TooLargeError
from blockopt.analysis.model_report import Cost, HessianReport
from blockopt.analysis.partial_results import PartialResultsError
from blockopt.analysis.report import Matrix, hessian_report, matching_parameters
from blockopt.analysis.report_from_samples import sampled_report
from blockopt.blocks import Level
from blockopt.cli.configs import add_set_option, parse_settings
from blockopt.cli.errors import UserError, user_mistakes
from blockopt.cli.hessian_files import describe_measurement, write_report
from blockopt.cli.local_model import load_model, load_text, next_token_losses
from blockopt.cli.override_option import add_override_option, blocks_with_overrides

MOST_ROWS = 60  # of a table on the terminal
LONG = 3600.0  # seconds after which a shorter way is suggested
SMALL = 10**7  # parameters up to which float64 is the default
EXAMPLES = """examples:
  blockopt hessian gpt2 --set n_layer=2 --set n_embd=64 --set n_head=4 --text book.txt
  blockopt hessian ./checkpoint --text book.txt --by head --only 'h.0.attn.*' --out results
  blockopt hessian llama.json --text book.txt --matrix gauss-newton --by layer --top 5
  blockopt hessian ./gpt2-small --text book.txt --by head --samples 16 --batch 1 --memory 8 \\
    --out results        (124M parameters: minutes)
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
    add("--text", required=True, metavar="FILE", help="a text file, in UTF-8")
    add_set_option(parser)
    add_flag("--random", "take random weights even if the folder holds a checkpoint")
    add_number("--seed", 0, "the seed of random weights and of all probes")
    add_number("--length", 64, "tokens per sequence")
    add_number("--sequences", 8, "sequences, spread over the text")
    add_number("--batch", 8, "sequences at a time; more are faster, fewer take less memory")
    dtypes, rule = ("float32", "float64"), f"float64 up to {SMALL:,} parameters, float32 beyond"
    add("--dtype", choices=dtypes, help=f"dtype of the model (default {rule})")
    add("--device", default="cpu", help="where to compute (default cpu)")
    which = "which matrix; functional is the hessian minus gauss-newton (default hessian)"
    add("--matrix", choices=get_args(Matrix), help=which)
    by = "one block per role of the model, of a layer or of a tensor, or per head"
    add_choice("--by", get_args(Level), by)
    add_list("--only", "PATTERN", "only parameters that fit, such as 'h.0.*'")
    add_override_option(parser)
    add_number("--top", 1, "eigenvalues per block, those farthest from 0", metavar="K")
    add_number("--probes", 20, "random vectors per block, for traces and norms")
    add_number("--steps", 30, "Lanczos steps per spectrum")
    add_number("--starts", 3, "start vectors per spectrum, 0 for no spectra")
    add_flag("--exact", "build every diagonal block, if it fits into memory")
    samples = (
        "for large models: all gauss-newton blocks at once, from N sampled gradients per batch"
    )
    add("--samples", type=int, metavar="N", help=samples)
    limit = "the most memory that the process may take; the report says what is left out for that"
    add("--memory", type=float, metavar="GIB", help=f"{limit} (default: what is free)")
    files = "write report.html, the page to read, report.json, blocks.csv and the plots to this "
    files += "folder, and pairs.pt for more than 100 blocks; a run that was killed continues"
    add("--out", metavar="FOLDER", help=files)


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
    except (TooLargeError, PartialResultsError, FloatingPointError) as error:
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
    if options.samples is not None:
        _check_samples(options, probes)
    options.matrix = options.matrix or "hessian"
    if options.memory is not None and not options.memory > 0:
        raise UserError(f"Invalid --memory {options.memory:g}. Must be > 0, in GiB.")
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
    overrides, random = parse_settings(options.set), options.random
    source = load_model(options.model, overrides, random=random, seed=options.seed)
    where = {"sequences": options.sequences, "length": options.length}
    corpus = load_text(options.text, source.model, source.folder, **where)
    number = sum(p.numel() for p in source.model.parameters())
    dtype = options.dtype or ("float64" if number <= SMALL else "float32")
    model = source.model.to(options.device, getattr(torch, dtype))
    with user_mistakes(ValueError):  # a pattern that fits nothing
        matching_parameters(model, options.only)
    per_head = options.by == "head"
    blocks = blocks_with_overrides(model, options.override, per_head=per_head, per_row=())
    size = f"{number:,} parameters in {dtype}"
    print(f"{type(model).__name__} ({options.model}), {size}, {source.weights}")
    print(f"{options.sequences} sequences of {options.length} tokens from {options.text}")
    print(f"tokens: {corpus.tokens}", flush=True)
    losses = next_token_losses(model, corpus.ids.to(options.device), options.batch)
    report = _measure(model, losses, blocks, probes, options, folder)
    if len(report.blocks) <= MOST_ROWS:
        print(f"\n{report.table()}\n")
    else:
        print(f"\n{len(report.blocks):,} blocks by role:\n{report.role_table()}\n")
    if options.top > 1:
        print(f"{report.eigenvalue_table()}\n")
    print(report.summary())
    print(
        f"loss            {report.loss:.4f}, {_precision(report, dtype)}, "
        f"{duration(report.seconds)}"
    )
    notes = _notes(report, dtype, caught)
    for note in notes:
        print(f"Note: {note}")
    if folder is not None:
        record = describe_measurement(options, source, corpus, dtype, notes)
        with user_mistakes(OSError):
            written = write_report(folder, report, record, model, blocks)
        print(f"wrote {', '.join(map(str, written))}")


def _measure(
    model: torch.nn.Module,
    losses: list[Any],
    blocks: Mapping[str, Any],
    probes: Probes,
    options: argparse.Namespace,
    folder: Path | None,
) -> HessianReport:
    """Measure by products, or by sampled gradients, going on where a killed run has stopped."""
    partial = None if folder is None else folder / "partial.pt"
    if partial is not None and partial.exists():
        print(f"continues from {partial}", flush=True)
    shared: dict[str, Any] = {
        "by": options.by,
        "only": options.only,
        "blocks": blocks,
        "max_bytes": None if options.memory is None else int(options.memory * GIB),
        "partial": partial,
        "progress": True,
        "announce": _print_cost,
    }
    if options.samples is not None:
        return sampled_report(
            model, losses, num_samples=options.samples, seed=options.seed, **shared
        )
    return hessian_report(model, losses, matrix=options.matrix, probes=probes, **shared)


def _check_samples(options: argparse.Namespace, probes: Probes) -> None:
    """Refuse what sampled gradients cannot measure, rather than to ignore it."""
    if options.samples < 2:
        raise UserError(f"Invalid --samples {options.samples}. Must be an integer >= 2.")
    if options.matrix not in (None, "gauss-newton"):
        raise UserError("--samples measures --matrix gauss-newton. Leave out one of the two.")
    if probes != Probes(seed=options.seed):
        raise UserError(
            "--samples has no use for --top, --probes, --steps, --starts and --exact. Leave them "
            "out."
        )
    options.matrix = "gauss-newton"


def _precision(report: HessianReport, dtype: str) -> str:
    """Return what is known of the precision, in words."""
    known = []
    if report.asymmetry is not None:
        known.append(f"{report.matrix} symmetric to {report.asymmetry:.0e}")
    if report.rounding is not None:
        what = "product" if report.asymmetry is not None else "gradient"
        known.append(f"a {what} off by {report.rounding:.0e} from float64")
    return ", ".join(known) or f"in {dtype}"


def _print_cost(cost: Cost) -> None:
    each, longest = cost.seconds_per_product, cost.num_products * cost.seconds_per_product
    products = f"about {cost.num_products:,} products of {each:.2g} s each"
    print(f"{products}: up to {duration(longest)}", flush=True)
    if longest > LONG:
        print(
            "Note: --samples 16 measures all gauss-newton blocks in 16 backward passes per batch. "
            "--only, --by layer, or --starts 0 with fewer --probes shorten this measurement.",
            flush=True,
        )


def _notes(report: HessianReport, dtype: str, caught: list[warnings.WarningMessage]) -> list[str]:
    """Return what a reader should know: the warnings, and how far to trust the numbers."""
    ours = (str(w.message) for w in caught if issubclass(w.category, UserWarning))
    notes = list(dict.fromkeys(ours))
    notes += report.notes
    if dtype == "float64" and (report.asymmetry or 0) > 1e-11:
        notes.append(
            "Parts of this model run in float32 in any dtype, as RMSNorm does in transformers."
        )
    return notes
