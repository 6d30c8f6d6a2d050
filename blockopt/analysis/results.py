"""What every result of the analysis can do: rows for a table, JSON, HTML and a data frame."""

from __future__ import annotations

import html
import importlib
import json
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from blockopt.analysis.formatting import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 60  # of a table that a notebook shows by itself


class Result(ABC):
    """A measurement with one row per block."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per line of a table."""

    @abstractmethod
    def plot(self) -> Figure:
        """Draw it (needs matplotlib); `figure.savefig(...)` writes it."""

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it: groups as strings, infinity and NaN as None."""
        return dict(plain(self))

    def to_json(self, *, indent: int | None = None) -> str:
        """Return `to_dict()` as the text of a JSON file."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False, ensure_ascii=False)

    def to_frame(self) -> Any:
        """Return `rows()` as a pandas DataFrame.

        Raises:
            ImportError: If pandas is missing.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise ImportError(
                "to_frame() needs pandas: pip install pandas. rows() returns the same numbers as "
                "dictionaries, and to_json() as text."
            ) from error
        return pandas.DataFrame(self.rows())

    def to_html(self, most_rows: int | None = None) -> str:
        """Return `rows()` as an HTML table, with at most so many rows."""
        rows = self.rows()
        shown = rows if most_rows is None else rows[:most_rows]
        return html_table(shown, left_out=len(rows) - len(shown))

    def _repr_html_(self) -> str:
        return self.to_html(MOST_ROWS)


def figure_of(ax: Any) -> Figure:
    """Return the figure that an axis is in."""
    figure: Figure = ax.figure
    return figure


def html_table(rows: list[dict[str, Any]], left_out: int = 0) -> str:
    """Return rows as an HTML table, with three digits of each number.

    Example:
        >>> html_table([{"block": "a<b", "trace": 0.12345}])
        '<table><tr><th>block</th><th>trace</th></tr><tr><td>a&lt;b</td><td>0.123</td></tr></table>'
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = ["".join(f"<th>{html.escape(column)}</th>" for column in columns)]
    lines += ["".join(f"<td>{_cell(row.get(column))}</td>" for column in columns) for row in rows]
    table = "".join(f"<tr>{line}</tr>" for line in lines)
    note = f"<p>{left_out} more rows</p>" if left_out > 0 else ""
    return f"<table>{table}</table>{note}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}"
    return html.escape(f"{value:,}" if type(value) is int else str(value))
