"""What a benchmark shows and writes: progress, tables, a JSON file and a chart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from blockopt.files import write_whole

WIDTH = 100
CONSOLE = Console(width=WIDTH)
BUSY = 0.2  # a larger share of waiting makes times meaningless


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar. Call what this yields after each unit of work, with its name."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=CONSOLE, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, advance=1, description=f"{title}: {done:<31}")


def show(title: str, columns: list[str], rows: list[list[str]], conditions: dict[str, Any]) -> None:
    """Print a table of text in the first column and numbers in the others."""
    waiting = conditions["waiting"]
    share = "?" if waiting is None else round(100 * waiting)
    caption = f"{setting(conditions)}, {conditions['date'][:10]}, {share} % waiting"
    table = Table(title=title, caption=caption, width=WIDTH)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    CONSOLE.print(table)


def warn_if_busy(*conditions: dict[str, Any]) -> None:
    """Say so if the times of a run cannot be trusted."""
    if any((one["waiting"] or 0.0) > BUSY for one in conditions):
        CONSOLE.print("[red]Other processes wanted the cores: do not trust the times of this run.")


def at_most(target: float | None) -> str:
    """Return a target as a cell of a table."""
    return "" if target is None else f"<= {target:g}"


def verdict(value: float, largest: float | None = None, *, smallest: float | None = None) -> str:
    """Return whether a target is met as a cell of a table, which is empty without a target."""
    if largest is None and smallest is None:
        return ""
    met = (largest is None or value <= largest) and (smallest is None or value >= smallest)
    return "[green]yes" if met else "[red]no"


def quartiles(ratio: dict[str, float], digits: int = 2) -> str:
    """Return a median with its quartiles as a cell of a table."""
    median, low, high = (f"{ratio[key]:.{digits}f}" for key in ("median", "low", "high"))
    return f"{median} ({low}-{high})"


def save(path: Path, results: dict[str, Any]) -> None:
    """Write the results as JSON."""
    write_whole(path, json.dumps(results, indent=2) + "\n")
    CONSOLE.print(f"Wrote {path}")


@contextmanager
def chart(path: Path, title: str, *shape: int, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its grid of axes, and write the figure at the end.

    Args:
        path: PNG file to write.
        title: A title for the figure.
        shape: Rows and columns of the grid.
        options: More options of `plt.subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(*shape, squeeze=False, layout="constrained", **options)
    yield figure, axes
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    CONSOLE.print(f"Wrote {path}")


def plot_bars(path: Path, panels: list[tuple[str, Any, list[float]]], conditions: Any) -> None:
    """Draw a panel of bars for each (label of the axis, arms, values), ours in another colour."""
    heights = [len(arms) for _, arms, _ in panels]
    title = f"{setting(conditions)} (blue: blockopt)"
    size = (9, 1.5 + 0.4 * sum(heights))
    with chart(path, title, len(panels), 1, figsize=size, height_ratios=heights) as (_, axes):
        for axis, (label, arms, values) in zip(axes[:, 0], panels):
            colours = ["tab:blue" if arm.ours else "tab:gray" for arm in arms]
            bars = axis.barh([arm.name for arm in arms], values, color=colours)
            axis.bar_label(bars, fmt="%.3g", padding=3)
            axis.invert_yaxis()
            axis.margins(x=0.12)
            axis.set_xlabel(label)


def setting(conditions: dict[str, Any]) -> str:
    """Return the machine, threads and torch of a run in words."""
    threads, torch = conditions["threads"], conditions["versions"]["torch"]
    return f"{conditions['machine']}, {threads} thread{'s' * (threads > 1)}, torch {torch}"
