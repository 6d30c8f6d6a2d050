"""Mistakes that a user can mend: scripts print one line for them; bugs keep their traceback."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Something that the user can mend. The message says what is wrong and what to do."""


class UsageError(UserError, ValueError):
    """Flags, data or models that do not fit."""


class MissingFileError(UserError, FileNotFoundError):
    """A file or folder that is not there."""


class DiskError(UserError, OSError):
    """A file or folder that cannot be written."""


class OfflineError(UserError, ConnectionError):
    """The Hugging Face hub is needed and cannot be reached."""


class MissingPackageError(UserError, ModuleNotFoundError):
    """A package that must be installed first."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print a `UserError` without a traceback, and exit with code 2."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
