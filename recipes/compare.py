"""A fair comparison of optimizers: equal tuning budgets, paired test seeds, one report.

    python recipes/compare.py                              the demo: a few minutes on two cores
    python recipes/compare.py --preset small               as shipped: 1M and 3M parameters, hours
    python recipes/compare.py --preset start               every arm over the first 150 steps
    python recipes/compare.py --preset fine-tune --data corpus/   a checkpoint, on another corpus
    python recipes/compare.py --preset full --workers 16   10M and up, for a real machine
    python recipes/compare.py --arms adamw block-muon --seeds 8 --budget 10
    python recipes/compare.py --list                       the arms, and what each is tuned over

Writes `report.html`, which needs nothing else, plots, and one JSONL file per run to
`results/compare-PRESET`. After a kill or Ctrl-C the same command continues where it was: finished
runs are read, not run again, and a run that was cut off continues from its last checkpoint (one
every two minutes).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from recipes.common.checkpoints import run_lock
from recipes.common.errors import MissingPackageError, UsageError, one_line_errors
from recipes.common.flags import script_parser
from recipes.common.optimizers import check_optimizer
from recipes.comparison.arms import ARMS
from recipes.comparison.report import print_comparison, write_plots, write_report
from recipes.comparison.rows import Comparison, compared
from recipes.comparison.run_config import RunConfig
from recipes.comparison.runs import RunResult, provenance
from recipes.comparison.studies import Study, presets
from recipes.comparison.workers import run_study, workers
from recipes.data.token_data import add_cache_argument

CHANGES = ("seeds", "budget", "steps", "threads", "device")


def main() -> None:
    """Run the comparison that the arguments ask for."""
    parser = arguments()
    options = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=100)  # a file has no width
    if options.list:
        list_arms(console)
        return
    try:
        studies, left_out = chosen_studies(options)
    except ValueError as error:
        parser.error(str(error))
    folder = options.out or Path("results") / f"compare-{options.preset}"
    try:
        with one_line_errors():
            studies = [study.prepared(options.cache) for study in studies]
            comparisons = compare(studies, left_out, folder, options.workers, console)
    except KeyboardInterrupt:
        console.print("\nStopped. The same command goes on from here.")
        raise SystemExit(130) from None
    show(comparisons, folder, console)


def compare(
    studies: list[Study], left_out: dict[str, str], folder: Path, number: int, console: Console
) -> list[Comparison]:
    """Run all studies, one after another: each starts tuning at the best of the one before.

    Args:
        studies: Prepared studies.
        left_out: Arms that cannot be run, for the report.
        folder: Where the files of the runs go, under `runs`.
        number: How many workers to start.
        console: Where to draw the progress bar.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    comparisons, best = [], {}
    with (
        run_lock(folder),
        Progress(*columns, *times, console=console) as progress,
        workers(number, folder / "runs", provenance()) as submit,
    ):
        for study in studies:
            title, total = f"{study.name} parameters, runs", study.runs_per_arm() * len(study.arms)
            task = progress.add_task(title, total=total)

            def count(config: RunConfig, result: RunResult, task: int = task) -> None:
                progress.update(task, advance=1, description=f"{config.arm} {result.final:.3f}")

            outcomes = run_study(study, submit, best, count)
            progress.update(task, description=title)
            best = {outcome.arm.name: outcome.values for outcome in outcomes}
            comparisons.append(compared(study, outcomes, left_out))
    return comparisons


def show(comparisons: list[Comparison], folder: Path, console: Console) -> None:
    """Print tables and sentences; write plots and the report."""
    about = provenance()
    for comparison in comparisons:
        print_comparison(comparison, console)
        write_plots(comparison, folder)
        other = sum(run.header.get("code") != about["code"] for run in comparison.all_runs())
        if other:
            console.print(
                f"[yellow]{other} of the runs in {folder} were made by other code than this.[/] "
                "Choose another --out to do all of them again."
            )
    command = shlex.join(["python", *sys.argv])
    write_report(comparisons, folder / "report.html", command, about)
    console.print(f"Report: {folder / 'report.html'}")


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    parser = script_parser(__doc__)
    parser.add_argument("--preset", choices=presets(), default="demo", help="what to compare")
    arms = "names from --list; the baseline is added, and what the named controls belong to"
    parser.add_argument("--arms", nargs="+", metavar="ARM", help=arms)
    parser.add_argument("--seeds", type=int, help="test seeds (default: the preset's)")
    parser.add_argument("--budget", type=int, help="tuning runs per arm (default: the preset's)")
    parser.add_argument(
        "--steps", type=int, help="steps of the main comparison (default: the preset's)"
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, each in a process")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument("--device", default="cpu", help="where to train")
    data = "named as for recipes/prepare_data.py (default: the preset's, mostly stdlib)"
    parser.add_argument("--data", help=data)
    add_cache_argument(parser)
    parser.add_argument(
        "--out", type=Path, help="folder to write to (default: results/compare-PRESET)"
    )
    parser.add_argument("--list", action="store_true", help="list the arms and their search spaces")
    return parser


def chosen_studies(options: argparse.Namespace) -> tuple[list[Study], dict[str, str]]:
    """Return the studies with what the flags change, and why other arms cannot be run.

    Raises:
        ValueError: If a flag is out of range, or names an unknown arm or one whose package is
            missing.
    """
    if options.workers < 1:
        raise UsageError(f"Invalid --workers {options.workers}. Must be >= 1.")
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:  # what torch raises depends on its build
        reason = str(error).splitlines()[0]
        raise UsageError(f"Invalid --device {options.device}: {reason}") from error
    studies, left_out = [], {}
    for study in presets()[options.preset]:
        changes = {name: getattr(options, name) for name in CHANGES}
        study = replace(study, **{n: value for n, value in changes.items() if value is not None})
        if options.data is not None:
            study = replace(study, data=replace(study.data, source=options.data))
        if options.arms is not None:
            study = replace(study, arms=tuple(dict.fromkeys(options.arms)))
        runnable = []
        for arm in study.arms:
            try:
                check_optimizer(ARMS[arm].optimizer)
                runnable.append(arm)
            except MissingPackageError as error:
                if options.arms is not None:
                    raise UsageError(str(error)) from error
                left_out[arm] = str(error)
        bases = (ARMS[arm].base for arm in runnable)
        needed = [study.baseline, *(base for base in bases if base is not None)]
        needed = [arm for arm in needed if arm not in runnable]
        studies.append(replace(study, arms=tuple(dict.fromkeys([*needed, *runnable]))))
    return studies, left_out


def list_arms(console: Console) -> None:
    """Print every arm and its search space."""
    table = Table("arm", "what it is", "tuned over: start (factor)")
    for arm in ARMS.values():
        table.add_row(arm.name, arm.about, ", ".join(map(str, arm.space)))
    console.print(table)


if __name__ == "__main__":
    main()
