"""A fair comparison of optimizers: equal tuning budgets, paired test seeds, one report.

    python recipes/compare.py                                   the demo: a few minutes on two cores
    python recipes/compare.py --preset small                    1M and 3M parameters, an hour or two
    python recipes/compare.py --preset full --workers 16        10M and up, for a real machine
    python recipes/compare.py --arms adamw block-muon --seeds 8 --budget 10
    python recipes/compare.py --list                            the arms, and what each is tuned over
    python recipes/compare.py --help

Writes `report.html`, which needs nothing else, plots, and a JSONL file a run to
`results/compare-PRESET`. After a kill or Ctrl-C the same command goes on where it was: finished
runs are read, not run again, and a run that was cut off goes on from its last checkpoint (one every
two minutes).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

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
from recipes.common.optimizers import check_optimizer
from recipes.comparison.arms import ARMS, BASELINE
from recipes.comparison.report import print_comparison, write_plots, write_report
from recipes.comparison.rows import Comparison, compared
from recipes.comparison.run_config import RunConfig
from recipes.comparison.runs import RunResult, provenance
from recipes.comparison.studies import Study, presets
from recipes.comparison.workers import run_study, workers


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
    except (ValueError, OSError) as error:
        parser.error(str(error))
    folder = options.out or Path("results") / f"compare-{options.preset}"
    command = shlex.join(["python", *sys.argv])
    try:
        comparisons = compare(studies, left_out, folder, options.workers, console)
    except KeyboardInterrupt:
        console.print("\nStopped. The same command goes on from here.")
        raise SystemExit(130) from None
    except RuntimeError as error:
        console.print(f"[red]error:[/red] {error}")
        raise SystemExit(1) from error
    about = provenance()
    for comparison in comparisons:
        print_comparison(comparison, console)
        write_plots(comparison, folder)
        other = sum(run.header.get("code") != about["code"] for run in comparison.all_runs())
        if other:
            console.print(
                f"[yellow]{other} of the runs in {folder} were made by other code than this.[/yellow] Choose another --out to "
                "do all of them again."
            )
    write_report(comparisons, folder / "report.html", command, about)
    console.print(f"Report: {folder / 'report.html'}")


def arguments() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=presets(), default="demo", help="default: %(default)s")
    parser.add_argument(
        "--arms",
        nargs="+",
        metavar="ARM",
        help="some of --list; AdamW and what controls are for come too",
    )
    parser.add_argument("--seeds", type=int, help="test seeds (default: that of the preset)")
    parser.add_argument(
        "--budget", type=int, help="tuning runs an arm (default: that of the preset)"
    )
    parser.add_argument(
        "--steps", type=int, help="of the main length (default: that of the preset)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        help="runs at a time, one process each (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=1, help="of each run (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="to train on (default: %(default)s)")
    parser.add_argument(
        "--data", help="as in recipes/data.py (default: that of the preset, stdlib)"
    )
    parser.add_argument(
        "--cache",
        type=Path,
        help="folder for tokens (default: $BLOCKOPT_CACHE or ~/.cache/blockopt)",
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the report (default: results/compare-PRESET)"
    )
    parser.add_argument(
        "--list", action="store_true", help="list the arms and their search spaces, and stop"
    )
    return parser


def chosen_studies(options: argparse.Namespace) -> tuple[list[Study], dict[str, str]]:
    """The studies with what the flags change, and the arms that cannot be run, with the reason.

    Raises:
        ValueError: If a flag is out of range, or names an unknown arm or an arm whose package is
            not installed.
    """
    if options.workers < 1:
        raise ValueError(f"Invalid --workers {options.workers}. Must be >= 1.")
    studies, left_out = [], {}
    for study in presets()[options.preset]:
        changes = {
            name: getattr(options, name)
            for name in ("seeds", "budget", "steps", "threads", "device")
        }
        study = replace(
            study, **{name: value for name, value in changes.items() if value is not None}
        )
        if options.data is not None:
            study = replace(study, data=replace(study.data, source=options.data))
        if options.arms is not None:
            study = replace(study, arms=tuple(dict.fromkeys(options.arms)))
        runnable = []
        for arm in study.arms:
            try:
                check_optimizer(ARMS[arm].optimizer)
                runnable.append(arm)
            except ModuleNotFoundError as error:
                if options.arms is not None:
                    raise ValueError(str(error)) from error
                left_out[arm] = str(error)
        needed = [BASELINE, *(base for arm in runnable if (base := ARMS[arm].base) is not None)]
        runnable = list(dict.fromkeys([*(arm for arm in needed if arm not in runnable), *runnable]))
        studies.append(replace(study, arms=tuple(runnable)).prepared(options.cache))
    return studies, left_out


def compare(
    studies: list[Study], left_out: dict[str, str], folder: Path, number: int, console: Console
) -> list[Comparison]:
    """Run all studies, one after another: each starts tuning at the best of the one before.

    Args:
        studies: Prepared ones.
        left_out: Arms that cannot be run, for the report.
        folder: Where the files of the runs go, under `runs`.
        number: Of workers.
        console: To draw the progress bar on.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    about, comparisons, best = provenance(), [], {}
    with (
        run_lock(folder),
        Progress(*columns, console=console) as progress,
        workers(number, folder / "runs", about) as submit,
    ):
        for study in studies:
            task = progress.add_task(
                f"{study.name} parameters, runs", total=study.runs_per_arm() * len(study.arms)
            )

            def show(config: RunConfig, result: RunResult, task: int = task) -> None:
                progress.update(task, advance=1, description=f"{config.arm} {result.final:.3f}")

            outcomes = run_study(study, submit, best, show)
            progress.update(task, description=f"{study.name} parameters, runs")
            best = {outcome.arm.name: outcome.values for outcome in outcomes}
            comparisons.append(compared(study, outcomes, left_out))
    return comparisons


def list_arms(console: Console) -> None:
    """Print every arm and its search space."""
    table = Table("arm", "what it is", "tuned over: start (factor)")
    for arm in ARMS.values():
        table.add_row(
            arm.name,
            arm.about,
            ", ".join(f"{axis.name} {axis.start:g} (×{axis.factor:g})" for axis in arm.space),
        )
    console.print(table)


if __name__ == "__main__":
    main()
