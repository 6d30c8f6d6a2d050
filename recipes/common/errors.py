"""Mistakes that a user can mend: scripts print one line for them; bugs keep their traceback."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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


def import_package(name: str, user: str, package: str | None = None) -> Any:
    """Return a module, or say which package to install for the user of it.

    Raises:
        MissingPackageError: If it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        package = package or name
        raise MissingPackageError(
            f"{user} needs the package {package}: pip install {package}"
        ) from None


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print a `UserError` without a traceback, and exit with code 2."""
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
