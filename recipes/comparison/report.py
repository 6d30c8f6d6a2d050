"""The table in the terminal, the plots as PNG files, and one self-contained `report.html`."""

from __future__ import annotations

import base64
import datetime
import html
import io
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from blockopt.files import write_whole
from recipes.comparison.plots import DARK, LIGHT, plots
from recipes.comparison.rows import Comparison, Row
from recipes.comparison.run_loop import CLIP, WARMUP
from recipes.comparison.runs import RunResult
from recipes.comparison.studies import Study
from recipes.comparison.summary import (
    caveats,
    cells,
    headline,
    hyperparameters,
    pair_cells,
    sentences,
    tuned_axes,
)

COLORS = {"better": "green", "worse": "red", "diverged": "red", "baseline": "bold"}
CAPTIONS = {
    "headline": "Final loss on held-out data: mean over test seeds with its 95 % interval.",
    "differences": "Final loss minus {against}'s with the same seed: mean, 95 % interval, and each "
    "seed as a dot. Left is better. Colours: the interval excludes zero after the correction for "
    "the number of arms.",
    "curves": "Training loss at the main length, mean over test seeds with one standard error: "
    "the seven arms of lowest loss and {against}. Only the end of each curve is compared: before "
    "it, learning rates have not come down yet.",
    "steps": "Steps that a run of its own length needs to end at {against}'s loss, as a part of "
    "{against}'s. Hatched: only a bound. Green and red: fewer and more steps, beyond the interval, "
    "where the loss differs as well.",
    "memory": "Loss against the memory of the optimizer's state.",
    "scales": "Block scales over the run, by role: what curvature gave each kind of block.",
    "tuning": "Tuning runs by learning rate, without the worst tenth. A ring marks the chosen "
    "one, a cross one that diverged.",
}
STYLE = """
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1f2328; --soft: #59636e; --line: #d0d7de;
  --card: #f6f8fa; --better: #1a7f37; --worse: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --bg: #0d1117; --fg: #e6edf3; --soft: #9198a1;
  --line: #30363d; --card: #161b22; --better: #3fb950; --worse: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--bg); color: var(--fg);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
.soft { color: var(--soft); } .better { color: var(--better); }
.worse, .diverged { color: var(--worse); }
.summary { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .5rem 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; white-space: nowrap; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
tr.baseline { font-weight: 600; }
table.words { white-space: normal; overflow-wrap: normal; } table.words td { vertical-align: top; }
table.words td:first-child { white-space: nowrap; }
.plots { columns: 2 26rem; column-gap: 1.2rem; }
figure { margin: 0 0 1.2rem; break-inside: avoid; }
figure img { width: 100%; height: auto; border: 1px solid var(--line); border-radius: 8px; }
figcaption { color: var(--soft); font-size: .9rem; }
pre { background: var(--card); padding: .7rem; overflow-x: auto; border-radius: 8px; }
"""
HEADINGS = (
    "arm",
    "loss",
    "minus {against}",
    "steps to",
    "gradients to",
    "gradients",
    "seconds",
    "bytes",
)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print table and summary, within 100 columns."""
    style = {"box": box.SIMPLE_HEAD, "padding": 0, "pad_edge": False}
    table = Table(title=_title(comparison), title_justify="left", **style)
    for heading in (
        "arm",
        "loss",
        f"minus {comparison.against}",
        "steps",
        "grads",
        "secs",
        "bytes",
    ):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    for row in comparison.rows:
        table.add_row(row.name, *cells(row), style=COLORS.get(row.verdict))
    console.print(table)
    for sentence in sentences(comparison):
        console.print(f"• {sentence}", highlight=False, markup=False)


def _title(comparison: Comparison) -> str:
    study = comparison.study
    seeds, tuning = f"{study.seeds} test seeds", f"{study.budget} tuning runs per arm"
    return f"{study.name} parameters, {study.steps} steps, {seeds}, {tuning}"


def write_plots(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the plots as PNG files in the light theme."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in plots(comparison).items():
        written.append(folder / f"{comparison.study.name}-{name}.png")
        draw(LIGHT).savefig(written[-1], dpi=160)
    return written


def write_report(
    comparisons: Sequence[Comparison], path: Path, command: str, about: dict[str, Any]
) -> None:
    """Write one HTML file with everything in it: no network, no script, images inline.

    Its headline is the result, above it the project's name and the date.

    Args:
        comparisons: One per model size, smallest first.
        path: The file.
        command: The command to run it again.
        about: What `provenance` returns.
    """
    title = "blockopt: optimizers compared"
    found = ". ".join(headline(comparison) for comparison in comparisons)
    day = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{title}</title><style>{STYLE}</style></head><body>",
        f'<p class="soft">{title}, {day}</p><h1>{_escaped(found)}.</h1>',
    ]
    for comparison in comparisons:
        parts.append(f"<h2>{_escaped(_title(comparison))}</h2>")
        parts.append(_summary(comparison))
    for comparison in comparisons:
        name = _escaped(comparison.study.name)
        parts.append(f"<h2>Results, {name} parameters</h2>{_main_table(comparison)}")
        parts.append(f'<div class="plots">{_figures(comparison)}</div>{_more_tables(comparison)}')
    parts.append(_method(comparisons, command, about))
    parts.append("</body></html>\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "\n".join(parts))


def _summary(comparison: Comparison) -> str:
    found = "".join(f"<li>{_escaped(sentence)}</li>" for sentence in sentences(comparison))
    limits = "".join(f"<li>{_escaped(sentence)}</li>" for sentence in caveats(comparison))
    return (
        f'<div class="summary"><ul>{found}</ul><p class="soft">What this does not show:</p>'
        f'<ul class="soft">{limits}</ul></div>'
    )


def _main_table(comparison: Comparison) -> str:
    body = [
        _row(
            [row.name, *_with_gradients_to_target(row), f"{100 * row.curvature_share:.0f} %"],
            row.verdict,
        )
        for row in comparison.rows
    ]
    against = comparison.against
    headings = [heading.format(against=against) for heading in HEADINGS]
    main = _table([*headings, "curvature"], body)
    words = (
        '<p class="soft">Loss: mean ± standard error on held-out data after the last step. Minus '
        f"{against}: mean over seeds of the difference with the same seed, ± half of its 95 % "
        "interval; green and red: the interval excludes zero after Holm's correction for the "
        "number of arms. "
        f"Steps to, gradients to: {against}'s loss, as a part of its own, with the 95 % interval; "
        "“&gt;” is reached by no seed, “≥” not by all, “≤” already by the shortest runs. "
        "Gradients: forward and backward passes per run, those for curvature included. Seconds: "
        "per run, the median, with curvature. Bytes: optimizer state per parameter. Curvature: its "
        "part of the seconds.</p>"
    )
    return main + words


def _with_gradients_to_target(row: Row) -> list[str]:
    """Return the cells of the terminal's table, with gradients to the target and intervals."""
    loss, difference, _, *costs = cells(row)
    parts = ("–" if p is None else p.with_interval() for p in (row.steps, row.evaluations))
    return [loss, difference, *parts, *costs]


def _more_tables(comparison: Comparison) -> str:
    arms = []
    for row in comparison.rows:
        trials = f"{len(row.outcome.tuned.trials)}"
        values = [row.name, row.outcome.arm.about, tuned_axes(row), hyperparameters(row), trials]
        arms.append(_row(values, row.verdict, text=4))
    tuned = _table(["arm", "what it is", "what was tuned", "values", "runs"], arms, text=4)
    note = "“!”: at the edge of what was tried. In brackets: never varied within the budget."
    pairs = ""
    if comparison.pairs:
        lines = [_row(pair_cells(pair), "", text=2) for pair in comparison.pairs]
        table = _table(["arm", "against", "difference", "verdict"], lines, text=2)
        pairs = f"<h3>Arms compared with each other</h3>{table}"
        pairs += '<p class="soft">Verdicts are corrected (Holm) for the number of pairs.</p>'
    return f'{pairs}<h3>What was tuned</h3>{tuned}<p class="soft">{note}</p>'


def _table(headings: Sequence[str], rows: Sequence[str], text: int = 1) -> str:
    head, body = f"<thead>{_row(headings, '', text, 'th')}</thead>", "".join(rows)
    words = ' class="words"' if text > 1 else ""
    return f'<div class="wide"><table{words}>{head}<tbody>{body}</tbody></table></div>'


def _row(values: Sequence[str], kind: str, text: int = 1, tag: str = "td") -> str:
    """Return a line of a table, whose first `text` cells are words."""
    marked = "".join(
        f"<{tag}{' class=text' if i < text else ''}>{_escaped(value)}</{tag}>"
        for i, value in enumerate(values)
    )
    return f'<tr class="{kind}">{marked}</tr>'


def _figures(comparison: Comparison) -> str:
    made = []
    for name, draw in plots(comparison).items():
        light, dark = (_inline(draw(theme)) for theme in (LIGHT, DARK))
        caption = _escaped(CAPTIONS[name].format(against=comparison.against))
        made.append(
            f'<figure><picture><source srcset="{dark}" media="(prefers-color-scheme: dark)">'
            f'<img src="{light}" alt="{caption}"></picture>'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    return "\n".join(made)


def _inline(figure: Any) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _method(comparisons: Sequence[Comparison], command: str, about: dict[str, Any]) -> str:
    items = []
    for number, comparison in enumerate(comparisons):
        items.append(_protocol(comparison.study))
        if number:
            before = comparisons[number - 1].study.name
            items[-1] += f" Tuning starts at the best values of {before}, by factors of 2."
    items += [
        "All arms have the same model, initial weights, batches, tokens and schedule with the same "
        f"seed: linear warm-up over {100 * WARMUP:.0f} % of the steps, then linear to zero. "
        f"Gradients are clipped at norm {CLIP:g}; only matrices decay.",
        "Each arm is tuned by coordinate descent over its own space with the same number of runs "
        "on one tuning seed. The grids have no ends, so a best value at an edge is followed as far "
        "as the budget goes. A control takes all but its learning rate from the arm that it "
        "controls, as tuned.",
        "Then it is tested on seeds and held-out text that tuning has not seen. Differences are "
        "taken seed by seed.",
        "Losses are those of finished runs only, on held-out data. Steps to a loss come from runs "
        "of several lengths, each with its own decay, by interpolation in the logarithm of the "
        "steps.",
        "Gradient evaluations and seconds include curvature. Seconds are rough: runs share the "
        "machine, and AdamW and SGD are torch's defaults, not fused.",
    ]
    listed = "".join(f"<li>{_escaped(item)}</li>" for item in items)
    spaces = "".join(_spaces(comparison) for comparison in comparisons)
    runs = [run for comparison in comparisons for run in comparison.all_runs()]
    made = Counter(json.dumps({name: run.header.get(name) for name in about}) for run in runs)
    by = [f'<p class="soft">{n} runs: {_escaped(one)}</p>' for one, n in made.most_common()]
    return (
        f"<h2>How it was measured</h2><ul>{listed}</ul>{spaces}<h2>Run it again</h2>"
        f"<pre>{_escaped(command)}</pre><p>Finished runs are kept and not run again.</p>"
        f"<p>What made the runs:{_other_code(runs, about)}</p>{''.join(by)}"
    )


def _protocol(study: Study) -> str:
    model, data = study.model, study.data
    lengths = ", ".join(f"{round(length * study.steps)}" for length in sorted(study.lengths))
    seeds = f"{study.seeds} test seeds at {study.steps} steps"
    if len(study.lengths) > 1:
        seeds += f" and {min(study.seeds, study.length_seeds)} at other lengths"
    return (
        f"{study.name}: {data.source} ({data.tokenizer or f'BPE of {model.vocab_size}'}), context "
        f"{model.context}, batches of {study.batch_size}, width {model.width}, depth "
        f"{model.depth}, {model.heads} heads; runs of {lengths} steps; {study.budget} tuning runs "
        f"per arm; {seeds}."
    )


def _other_code(runs: Sequence[RunResult], about: dict[str, Any]) -> str:
    other = sum(run.header.get("code") != about.get("code") for run in runs)
    if not other:
        return ""
    made = f"{other} of {len(runs)} by other code than that which wrote this report"
    return f" <strong>{made}.</strong>"


def _spaces(comparison: Comparison) -> str:
    lines = [
        _row([row.name, ", ".join(map(str, row.outcome.space))], "", text=2)
        for row in comparison.rows
    ]
    title = f"Search spaces, {comparison.study.name}: start, and factor of the first grid"
    return f"<h3>{_escaped(title)}</h3>{_table(['arm', 'axes'], lines, text=2)}"


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)
