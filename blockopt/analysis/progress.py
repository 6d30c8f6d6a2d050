"""Progress bars, for callers that ask for them; rich is imported only then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(shown: bool, description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar, and give the function that moves it by a number of units of work.

    If the bar is not to be shown, the function does nothing.

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
