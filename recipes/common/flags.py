"""Command line parsers that show a script's docstring as it is, and the default of every flag."""

from __future__ import annotations

import argparse


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default not in (None, False, argparse.SUPPRESS)
        return f"{action.help} (default: %(default)s)" if shown else action.help


def script_parser(about: str | None) -> argparse.ArgumentParser:
    """Return an empty parser whose help begins with the docstring of a script."""
    return argparse.ArgumentParser(description=about, formatter_class=_Formatter)


def flag(name: str) -> str:
    """Return the flag of an attribute.

    Example:
        >>> flag("batch_size")
        '--batch-size'
    """
    return f"--{name.replace('_', '-')}"
