"""How much could block learning rates gain? Multiply one after the other, and train to the end.

    python recipes/sensitivity.py                                       a quarter of an hour
    python recipes/sensitivity.py --optimizers block-adamw --size 1M --steps 1200 --seeds 3
    python recipes/sensitivity.py --by layer                            roles of single layers
    python recipes/sensitivity.py --by token                            rows of the embedding
    python recipes/sensitivity.py --data corpus/                        another corpus
    python recipes/sensitivity.py --signals                             and what predicts it

Writes `sensitivity.json` and `sensitivity.png`, the change of the final loss by each multiplier
against all scales 1. Finished runs are kept and read, so the same command goes on after a kill.
`--signals` also measures every curvature of blockopt, how straight the path of each role is and how
long its steps are beside its weights, and says how well each orders the roles as the truth does.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import Future, as_completed
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from blockopt.checks import check_count
from blockopt.files import write_whole
from recipes.common.checkpoints import run_lock
from recipes.common.errors import UsageError, one_line_errors
from recipes.common.flags import script_parser
from recipes.common.gpt2 import PRESETS
from recipes.comparison import role_scales, role_signals
from recipes.comparison.role_scales import Case, Groups
from recipes.comparison.run_config import DataConfig
from recipes.comparison.runs import RunResult, provenance
from recipes.comparison.studies import Study
from recipes.comparison.workers import workers
from recipes.data.token_data import add_cache_argument


def main() -> None:
    """Run all cases that are not finished yet, print the table, write the data and the picture."""
    parser = arguments()
    options = parser.parse_args()
    console = Console()
    try:
        check_count("workers", options.workers)
        study = chosen_study(options)
    except ValueError as error:
        parser.error(str(error))
    with one_line_errors():
        if options.signals and options.by != "role":
            raise UsageError("--signals is about roles: leave out --by, or --signals.")
        study = replace(study.prepared(options.cache), evaluation=64)
        groups = role_scales.groups_by(options.by, study.model.depth)
        finals = run_all(study, options, groups, console)
    rows = [
        row
        for optimizer in options.optimizers
        for row in role_scales.differences(finals, optimizer, options.seeds, groups)
    ]
    show(rows, console)
    data = study.data.source.rstrip("/").rsplit("/", 1)[-1]
    seeds = "1 seed" if options.seeds == 1 else f"{options.seeds} seeds"
    title = f"GPT-2 of {options.size}, {data}, {study.steps:,} steps, {seeds}"
    about = {"title": title, "learning rates": role_scales.OPTIMIZERS, **provenance()}
    found = {"about": about, "rows": [{n: v for n, v in row.items() if v == v} for row in rows]}
    if options.signals:
        with one_line_errors():
            found["signals"] = all_signals(study, options, rows, console)
    write_whole(options.out / "sensitivity.json", json.dumps(found))
    role_scales.draw(rows, title).savefig(options.out / "sensitivity.png", dpi=130)
    console.print(f"Wrote {options.out / 'sensitivity.json'} and sensitivity.png beside it.")


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    parser = script_parser(__doc__)
    names = list(role_scales.OPTIMIZERS)
    about = f"some of {', '.join(names)}"
    parser.add_argument(
        "--optimizers", nargs="+", choices=names, default=names[:2], metavar="NAME", help=about
    )
    kinds = "what to multiply: a role, a role of one layer, or the embedding's rows of some tokens"
    parser.add_argument("--by", choices=role_scales.KINDS, default="role", help=kinds)
    parser.add_argument("--size", choices=list(PRESETS), default="0.5M", help="size of the model")
    parser.add_argument("--steps", type=int, default=300, help="length of each run")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each case")
    parser.add_argument(
        "--data", default="stdlib", help="the data, named as for recipes/prepare_data.py"
    )
    parser.add_argument(
        "--signals", action="store_true", help="also measure what predicts the gain"
    )
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, each in a process")
    parser.add_argument(
        "--out", type=Path, default=Path("results/sensitivity"), help="folder to write to"
    )
    add_cache_argument(parser)
    return parser


def chosen_study(options: argparse.Namespace) -> Study:
    """Return the protocol that the flags ask for.

    Raises:
        ValueError: If a flag is out of range.
    """
    model = PRESETS[options.size]
    return Study(
        options.size,
        tuple(options.optimizers),
        model,
        DataConfig(options.data, None, model.vocab_size),
        steps=options.steps,
        lengths=(1.0,),
        batch_size=options.batch_size,
        budget=1,
        seeds=options.seeds,
        length_seeds=1,
        baseline=options.optimizers[0],
    )


def run_all(
    study: Study, options: argparse.Namespace, groups: Groups, console: Console
) -> dict[tuple[Case, int], float]:
    """Return the final loss of each case and seed."""
    wanted = [
        (case, seed)
        for seed in range(options.seeds)
        for optimizer in options.optimizers
        for case in role_scales.cases(optimizer, groups)
    ]
    finals: dict[tuple[Case, int], float] = {}
    with (
        run_lock(options.out),
        Progress(console=console) as progress,
        workers(options.workers, options.out / "runs", provenance()) as submit,
    ):
        task = progress.add_task("runs", total=len(wanted))
        places: dict[Future[RunResult], tuple[Case, int]] = {}
        for case, seed in wanted:
            lr = role_scales.OPTIMIZERS[case.optimizer]
            places[submit(role_scales.config(study, case, lr, seed, groups))] = (case, seed)
        for future in as_completed(places):
            finals[places[future]] = future.result().final
            progress.advance(task)
    return finals


def all_signals(
    study: Study,
    options: argparse.Namespace,
    rows: list[dict[str, object]],
    console: Console,
) -> list[dict[str, object]]:
    """Measure every signal with every optimizer, and print how well it predicts the truth."""
    table = Table("optimizer", "signal", "rank correlation", "95 % interval")
    found: list[dict[str, object]] = []
    wanted = [(name, signal) for name in options.optimizers for signal in role_signals.SIGNALS]
    with Progress(console=console) as progress:
        for optimizer, signal in progress.track(wanted, description="signals"):
            lr = role_scales.OPTIMIZERS[optimizer]
            config = role_scales.config(study, Case(optimizer), lr, 0, {})
            asked, paid = role_signals.measured(config, signal), role_signals.truth(rows, optimizer)
            both = [roles for roles in paid if roles in asked]
            value, low, high = role_signals.correlation(
                [asked[r] for r in both], [paid[r] for r in both]
            )
            row = {"optimizer": optimizer, "signal": signal, "by role": asked}
            found.append(row | {"correlation": value, "low": low, "high": high})
            table.add_row(optimizer, signal, f"{value:+.2f}", f"[{low:+.2f}, {high:+.2f}]")
    console.print(table)
    return found


def show(rows: list[dict[str, object]], console: Console) -> None:
    """Print the change of the loss, one row per group of blocks."""
    multipliers = [f"×{multiplier:g}" for multiplier in role_scales.MULTIPLIERS]
    table = Table("optimizer", "blocks", *multipliers, title="Change of the final loss, nats")
    for optimizer, group in dict.fromkeys((row["optimizer"], row["group"]) for row in rows):
        own = [r for r in rows if (r["optimizer"], r["group"]) == (optimizer, group)]
        table.add_row(str(optimizer), str(group), *(f"{row['mean']:+.3f}" for row in own))
    console.print(table)


if __name__ == "__main__":
    main()
