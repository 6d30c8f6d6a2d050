"""The plots of a comparison, narrow enough to be read on a phone, in a light and a dark theme."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullLocator

from blockopt.blocks import ROLES
from recipes.comparison.paired_statistics import estimate
from recipes.comparison.rows import Comparison, Row, finals

WIDTH = 5.2  # inches: 10 point text is then 10 pixels on a screen of 375
MOST_CURVES = 7


class Theme(NamedTuple):
    """Colours of a plot."""

    background: str
    text: str
    grid: str
    better: str
    worse: str
    neutral: str
    ours: str


LIGHT = Theme("#ffffff", "#1f2328", "#d0d7de", "#1a7f37", "#cf222e", "#6e7781", "#0969da")
DARK = Theme("#161b22", "#e6edf3", "#30363d", "#3fb950", "#ff7b72", "#8b949e", "#4493f8")


def plots(comparison: Comparison) -> dict[str, Callable[[Theme], Figure]]:
    """Return the plots that the comparison has data for, by file name."""
    rows = comparison.rows
    chosen = {"headline": headline, "differences": differences, "curves": curves}
    chosen |= {"steps": steps_bars} if any(row.steps is not None for row in rows) else {}
    chosen |= {"memory": memory}
    chosen |= {"scales": scales} if any(_scales(row) for row in rows) else {}
    chosen |= {"tuning": tuning}
    return {
        name: (lambda theme, draw=draw: draw(comparison, theme)) for name, draw in chosen.items()
    }


def headline(comparison: Comparison, theme: Theme) -> Figure:
    """Draw the final loss of each optimizer as a bar with its 95 % interval, ours in one colour."""
    study = comparison.study
    rows = [row for row in comparison.rows if math.isfinite(row.loss.mean)]
    rows = [row for row in rows if row.outcome.arm.control is None][::-1]
    ends = {row.name: row.loss[2:4] for row in rows}
    ends |= {row.name: (row.loss.mean,) * 2 for row in rows if math.isnan(row.loss.low)}
    low = min((left for left, _ in ends.values()), default=0.0)
    high = max((right for _, right in ends.values()), default=1.0)
    start = max(0.0, math.floor(10 * (low - 0.5 * (high - low))) / 10)  # from 0, all look alike
    figure, (axes,) = _figure(theme, 1, 1.35 + 0.33 * len(rows))
    for height, row in enumerate(rows):
        color = theme.ours if row.outcome.arm.ours else theme.neutral
        axes.barh(height, row.loss.mean - start, left=start, height=0.72, color=color)
        axes.plot(ends[row.name], [height, height], color=theme.text, linewidth=1.6)
        text = f" {row.loss.mean:.2f}"
        axes.text(ends[row.name][1], height, text, va="center", color=theme.text, fontsize=9)
    axes.set_yticks(range(len(rows)), [row.outcome.arm.title for row in rows])
    axes.grid(visible=False, axis="y")
    axes.set_xlim(start, high + 0.15 * (high - start))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    unit = "byte" if study.data.tokenizer == "bytes" else "token"
    label = f"loss on held-out text, nats per {unit}"
    label += f" (the axis starts at {start:g})" if start else ""
    figure.supxlabel(label, color=theme.text, fontsize=9)
    data = {"stdlib": "Python's standard library"}.get(study.data.source, study.data.source)
    size = f"GPT-2 of {study.name} parameters, {data.rsplit('/', 1)[-1]}"
    title = f"Loss after {study.steps:,} steps: lower is better\n{size}, {study.seeds} seeds"
    figure.suptitle(f"{title}, 95 % intervals", color=theme.text, fontsize=9, x=0.01, ha="left")
    marks = {"blockopt": theme.ours, "others": theme.neutral}
    handles = [Patch(color=color, label=name) for name, color in marks.items()]
    style = {"labelcolor": theme.text, "facecolor": theme.background, "edgecolor": theme.grid}
    axes.legend(handles=handles, loc="upper right", fontsize=9, **style)
    return figure


def differences(comparison: Comparison, theme: Theme) -> Figure:
    """Draw the difference to the baseline with its interval, one line per arm."""
    rows = [row for row in comparison.rows if math.isfinite(row.difference.mean)][::-1]
    figure, (axes,) = _figure(theme, 1, 0.9 + 0.28 * len(rows))
    base = finals(comparison.baseline.outcome, comparison.study.steps)
    for height, row in enumerate(rows):
        seeds = finals(row.outcome, comparison.study.steps)
        color = {"better": theme.better, "worse": theme.worse}.get(row.verdict, theme.neutral)
        dots = [seeds[seed] - base[seed] for seed in seeds]
        axes.plot(dots, [height] * len(dots), ".", color=color, alpha=0.35)
        if not math.isnan(row.difference.low):
            interval = [row.difference.low, row.difference.high]
            axes.plot(interval, [height, height], color=color, linewidth=2.5)
        axes.plot(row.difference.mean, height, "o", color=color)
    axes.axvline(0, color=theme.text, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    reach = max((abs(row.difference.mean) for row in rows), default=0.0)
    if reach > 3:
        axes.set_xscale("symlog", linthresh=0.1)
    axes.set(xlabel=f"loss minus {comparison.against}'s (left is better)")
    return figure


def curves(comparison: Comparison, theme: Theme) -> Figure:
    """Draw the training loss, smoothed over a twentieth of the run, with one standard error."""
    rows = [row for row in comparison.rows if math.isfinite(row.loss.mean)]
    shown = rows[:MOST_CURVES]
    shown += [row for row in rows[MOST_CURVES:] if row.verdict == "baseline"]
    figure, (axes,) = _figure(theme, 1, 3.4 + 0.1 * len(shown))
    top = 0.0
    for row, color in zip(shown, itertools.cycle(colormaps["tab10"].colors)):  # type: ignore[attr-defined]
        runs = [result.losses for result in row.outcome.tests[comparison.study.steps].values()]
        window = max(1, comparison.study.steps // 20)
        smooth = [
            [fmean(losses[max(0, i + 1 - window) : i + 1]) for i in range(len(losses))]
            for losses in runs
        ]
        points = [estimate(values) for values in zip(*smooth)]
        steps = range(1, len(points) + 1)
        means = [point.mean for point in points]
        errors = [0.0 if math.isnan(point.error) else point.error for point in points]
        style, width = ("--", 2.4) if row.verdict == "baseline" else ("-", 1.3)
        axes.plot(steps, means, style, color=color, linewidth=width, label=row.name)
        below, above = ([m + s * e for m, e in zip(means, errors)] for s in (-1, 1))
        axes.fill_between(steps, below, above, color=color, alpha=0.2)
        top = max(top, means[len(means) // 5])
    low, _ = axes.get_ylim()
    if top > low:
        axes.set_ylim(low, top * 1.02)  # the first steps are far above
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="training loss")
    _legend(figure, axes, theme)
    return figure


def steps_bars(comparison: Comparison, theme: Theme) -> Figure:
    """Draw the steps to the baseline's loss as a part of its own; hatched: a bound."""
    rows = [row for row in comparison.rows if row.steps is not None][::-1]
    figure, (axes,) = _figure(theme, 1, 0.9 + 0.28 * len(rows))
    for height, row in enumerate(rows):
        steps = row.steps
        assert steps is not None
        exact = steps.kind == "at"
        claims = {("fewer", "better"): theme.better, ("more", "worse"): theme.worse}
        color = claims.get((steps.verdict, row.verdict), theme.neutral)
        style = {"color": color} if exact else {"color": "none", "hatch": "////"}
        axes.barh(height, steps.part, edgecolor=color, **style)
        if not math.isnan(steps.low):
            interval = [steps.low, min(steps.high, 3.0)]
            axes.plot(interval, [height, height], color=theme.text, linewidth=1.2)
        end = steps.part if math.isnan(steps.high) else max(steps.part, min(steps.high, 3.0))
        axes.text(end + 0.02, height, f" {steps}", va="center", color=theme.text, fontsize=8)
    axes.axvline(1, color=theme.text, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.margins(x=0.15)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    signs = "(> : reached by no seed; ≥ : not by all)"
    against = comparison.against
    axes.set(xlabel=f"steps to {against}'s loss / {against}'s steps\n{signs}")
    return figure


def memory(comparison: Comparison, theme: Theme) -> Figure:
    """Draw the loss with its standard error against bytes of optimizer state."""
    rows = [row for row in comparison.rows if math.isfinite(row.loss.mean)]
    figure, (axes,) = _figure(theme, 1, 3.2 + 0.1 * len(rows))
    markers = itertools.cycle("os^vDPX<>p*h")
    colors = itertools.cycle(colormaps["tab20"].colors)  # type: ignore[attr-defined]
    for row, marker, color in zip(rows, markers, colors):
        error = 0.0 if math.isnan(row.loss.error) else row.loss.error
        style = {"fmt": marker, "color": color, "markersize": 7}
        axes.errorbar(row.state_bytes, row.loss.mean, error, label=row.name, **style)
    axes.set(xlabel="optimizer state, bytes per parameter", ylabel="loss on held-out data")
    _legend(figure, axes, theme)
    return figure


def scales(comparison: Comparison, theme: Theme) -> Figure:
    """Draw block scales over the run: geometric mean over test seeds, one panel per arm."""
    rows = [row for row in comparison.rows if _scales(row)]
    columns = 1 if len(rows) < 3 else 2
    figure, panels = _figure(theme, len(rows), 2.0 / columns + 0.6 / len(rows), columns)
    colors: Any = colormaps["tab20"].colors  # type: ignore[attr-defined]
    for row, axes in zip(rows, panels):
        results = row.outcome.tests[comparison.study.steps].values()
        runs = [dict(result.scales) for result in results if result.scales]
        steps = sorted(set.intersection(*(set(run) for run in runs)))
        roles = {role for run in runs for found in run.values() for role in found}
        for role in sorted(roles, key=ROLES.index):
            logs = [fmean(math.log(run[step][role]) for run in runs) for step in steps]
            style = {"color": colors[ROLES.index(role)], "linewidth": 1.6}
            axes.plot(steps, [math.exp(log) for log in logs], label=role, **style)
        axes.set_yscale("log")
        for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            ticks(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "125" else "")  # a few only
        axes.set_title(row.name, color=theme.text, fontsize=9 if columns == 1 else 7.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in panels[-columns:]:
        axes.set_xlabel("step")
    panels[0].set_ylabel("scale")
    _legend(figure, panels[0], theme, columns=5)
    return figure


def tuning(comparison: Comparison, theme: Theme) -> Figure:
    """Draw every tuning run by its learning rate, with a ring around the chosen one."""
    columns = 2
    rows = comparison.rows
    number = math.ceil(len(rows) / columns)
    figure, panels = _figure(theme, len(rows), 1.35 * number / len(rows) + 0.25, columns)
    losses = [trial.loss for row in rows for trial in row.outcome.tuned.trials]
    trials = [loss for loss in losses if math.isfinite(loss)]
    for row, axes in zip(rows, panels):
        tuned = row.outcome.tuned
        tried = [(t.values["lr"], t.loss) for t in tuned.trials if math.isfinite(t.loss)]
        lost = [t.values["lr"] for t in tuned.trials if not math.isfinite(t.loss)]
        best: dict[float, float] = {}
        for rate, loss in tried:
            best[rate] = min(loss, best.get(rate, math.inf))
        rates = sorted(best)
        axes.plot(rates, [best[rate] for rate in rates], color=theme.neutral, linewidth=1)
        axes.plot([rate for rate, _ in tried], [loss for _, loss in tried], ".", color=theme.text)
        axes.plot(lost, [max(trials, default=1.0)] * len(lost), "x", color=theme.worse)
        if math.isfinite(tuned.loss):
            ring = {"markersize": 9, "markerfacecolor": "none", "color": theme.better}
            axes.plot(tuned.best["lr"], tuned.loss, "o", **ring)
        axes.set_xscale("log")
        ticks = rates[:: max(1, math.ceil(len(rates) / 4))]
        axes.set_xticks(ticks, [f"{rate:.2g}" for rate in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(row.name, color=theme.text, fontsize=8)
        if trials:
            low, high = min(trials), sorted(trials)[int(0.9 * (len(trials) - 1))]
            axes.set_ylim(low - 0.08 * (high - low + 1e-9), high + 0.15 * (high - low + 1e-9))
    for axes in panels[-columns:]:
        axes.set_xlabel("learning rate")
    return figure


def _scales(row: Row) -> bool:
    return any(result.scales for runs in row.outcome.tests.values() for result in runs.values())


def _figure(
    theme: Theme, panels: int, height: float, columns: int = 1
) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of panels, `height` inches for each, in the colours of the theme."""
    size = (WIDTH, height * panels)
    figure = Figure(figsize=size, layout="constrained", facecolor=theme.background)
    rows = math.ceil(panels / columns)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=columns > 1).flatten()
    for axes in grid[panels:]:
        axes.remove()
    for axes in grid[:panels]:
        axes.set_facecolor(theme.background)
        axes.tick_params(colors=theme.text, which="both", labelsize=9)
        axes.grid(color=theme.grid, linewidth=0.6)
        axes.set_axisbelow(True)
        for name, spine in axes.spines.items():
            spine.set_color(theme.grid)
            spine.set_visible(name in ("left", "bottom"))
        axes.xaxis.label.set_color(theme.text)
        axes.yaxis.label.set_color(theme.text)
    return figure, list(grid[:panels])


def _legend(figure: Figure, axes: Axes, theme: Theme, columns: int = 2) -> None:
    """Put a legend above the plot, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:  # none if all runs diverged
        style = {"labelcolor": theme.text, "facecolor": theme.background, "edgecolor": theme.grid}
        style |= {"loc": "outside upper center", "ncols": columns, "fontsize": 8}
        figure.legend(handles, labels, **style)
