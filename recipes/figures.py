"""Reproduce the figures of papers on Hessians of transformers: plots, predictions, measurements.

    python recipes/figures.py --figure 3a --quick      seconds to a minute
    python recipes/figures.py --figure all --quick     minutes on one core
    python recipes/figures.py --figure all             the papers' sizes and 20 repeats: hours

Figures 1 and 3 to 8 are those of Ormaniec, Dangel and Singh, "What Does It Mean to Be a
Transformer?" (ICLR 2025); `weights` is about its Section 3.3, `outer-heads` about its Appendix E.
`sink` is that of Singh, Ormaniec and Hofmann, "Cracking the Hessian" (2025), and `top-eigenvalue` a
claim of slides on it. `block-spectra` is a comparison of Zhang et al., "Why Transformers need Adam"
(2024), on tiny models. `kronecker` compares KFAC and EKFAC with exact blocks. The last five are
those of Petrov et al., arXiv 2510.16927, on synthetic images. Where a figure shows no numbers, the
paper's statements about it are checked, by criteria in the tables.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from blockopt.files import write_whole
from recipes.common.errors import one_line_errors
from recipes.common.files import output_folder
from recipes.common.flags import script_parser
from recipes.paper_figures import (
    block_spectra,
    growth,
    heads,
    hessians,
    kronecker,
    top_eigenvalue,
    vision,
    vision_training,
    weight_norms,
)
from recipes.paper_figures.kept_norms import KeptNorms
from recipes.paper_figures.outcome import FULL, HEADER, QUICK, TINY, Effort, Outcome, Run

FIGURES: dict[str, Callable[[Run], Outcome]] = {
    "1": hessians.figure_1,
    "3a": growth.figure_3a,
    "3b": growth.figure_3b,
    "4": hessians.figure_4,
    "5": growth.figure_5,
    "6": growth.figure_6,
    "7": growth.figure_7,
    "8": growth.figure_8,
    "weights": weight_norms.figure_weights,
    "outer-heads": heads.figure_outer_heads,
    "sink": hessians.figure_sink,
    "top-eigenvalue": top_eigenvalue.figure_top_eigenvalue,
    "block-spectra": block_spectra.figure_block_spectra,
    "kronecker": kronecker.figure_kronecker,
    "curvature-gap-heatmap": vision.figure_gap_heatmap,
    "curvature-gap-norms": vision.figure_gap_norms,
    "loss-difference": vision.figure_loss_difference,
    "entries": vision_training.figure_entries,
    "shared-minimiser": vision_training.figure_shared_minimiser,
}
EFFORTS = {"full": FULL, "quick": QUICK, "tiny": TINY}


def make(
    name: str,
    effort: Effort,
    mode: str,
    out: Path,
    console: Console,
    kept: KeptNorms | None = None,
) -> Outcome:
    """Make one figure, write `figure_<name>.png` and `figure_<name>.json`, and print its table."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    start = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as progress:
        outcome = FIGURES[name](Run(effort, progress, kept))
    seconds = time.perf_counter() - start
    outcome.figure.savefig(out / f"figure_{name}.png", dpi=110)
    record = {"figure": name, "mode": mode, "seconds": round(seconds, 1), **outcome.as_dict()}
    text = json.dumps(record, indent=1, ensure_ascii=False)
    write_whole(out / f"figure_{name}.json", f"{text}\n")
    text = f"**{outcome.title}** ({mode}; {outcome.setting})\n\n{outcome.markdown()}\n"
    write_whole(out / f"figure_{name}.md", text)
    table = Table(
        title=f"Figure {name}: {outcome.title}\n{outcome.setting}; {mode}, {seconds:.0f} s",
        title_justify="left",
    )
    for column in HEADER:
        table.add_column(column)
    for check in outcome.checks:
        table.add_row(*check.row(), style=None if check.holds else "bold red")
    console.print(table)
    console.print(f"Figure {name}: [bold]{outcome.verdict}[/bold]\n", highlight=False)
    return outcome


def main() -> None:
    """Make the figures that are asked for."""
    parser = script_parser(__doc__)
    parser.add_argument("--figure", choices=[*FIGURES, "all"], default="all", help="which figure")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and few repeats")
    tiny = "smallest sizes, to see that it runs; the numbers mean nothing"
    parser.add_argument("--tiny", action="store_true", help=tiny)
    repeats = "repeats of each measurement (default: 20, 3 with --quick)"
    parser.add_argument("--repeats", type=int, help=repeats)
    folder = Path("results/figures")
    parser.add_argument("--out", type=Path, default=folder, help="folder to write to")
    norms = "file that keeps what growth figures, block-spectra and curvature-gap-heatmap measure; "
    norms += "what it holds is not measured again"
    parser.add_argument("--keep", type=Path, help=norms)
    arguments = parser.parse_args()
    mode = "tiny" if arguments.tiny else "quick" if arguments.quick else "full"
    if arguments.repeats is not None and arguments.repeats < 1:
        parser.error(f"Invalid --repeats {arguments.repeats}. Must be an integer >= 1.")
    effort = replace(EFFORTS[mode], repeats=arguments.repeats or EFFORTS[mode].repeats)
    with one_line_errors():
        output_folder(arguments.out)
    console = Console(width=None if sys.stdout.isatty() else 128)
    names = list(FIGURES) if arguments.figure == "all" else [arguments.figure]
    kept = None if arguments.keep is None else KeptNorms(arguments.keep)
    outcomes = {name: make(name, effort, mode, arguments.out, console, kept) for name in names}
    if len(outcomes) > 1:
        table = Table(title=f"All figures ({mode})", title_justify="left")
        for column in ("figure", "shows", "checks that hold", "verdict"):
            table.add_column(column)
        for name, outcome in outcomes.items():
            held = f"{sum(check.holds for check in outcome.checks)} of {len(outcome.checks)}"
            table.add_row(name, outcome.title, held, outcome.verdict)
        console.print(table)
    console.print(f"Written to {arguments.out}", highlight=False)


if __name__ == "__main__":
    main()
