"""Mistakes of the user, which the command line reports in one line without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake of the user, with a message that says what to change."""


@contextmanager
def user_mistakes(*kinds: type[Exception], prefix: str = "") -> Iterator[None]:
    """Report exceptions of these kinds that are raised inside as mistakes of the user."""
    try:
        yield
    except kinds as error:
        raise UserError(prefix + str(error)) from None
