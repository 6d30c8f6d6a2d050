"""Progress bars for whoever asks for them: rich is imported only then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


@contextmanager
def progress_bar(shown: bool, description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that moves a bar by a number of units of work; it does nothing if the bar is not to be shown.

    Raises:
        ImportError: If rich is missing.
    """
    if not shown:
        yield lambda _: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError as error:
        raise ImportError(
            "progress=True needs rich. Install it (`pip install rich`), or pass progress=False."
        ) from error
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda number: bar.advance(task, number)


def track(items: Sequence[Item], description: str, shown: bool) -> Iterable[Item]:
    """The items, one after the other, with a bar over them."""
    with progress_bar(shown, description, len(items)) as advance:
        for item in items:
            yield item
            advance(1)
