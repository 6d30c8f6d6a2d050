"""Command line parsers that show a script's docstring as it is, and the default of every flag."""

from __future__ import annotations

import argparse


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows a description as it stands, and the default of every flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default in (None, argparse.SUPPRESS, []) or default is False:
            return action.help
        listed = " ".join(map(str, default)) if isinstance(default, list) else "%(default)s"
        return f"{action.help} (default: {listed})"


def script_parser(about: str | None) -> argparse.ArgumentParser:
    """Return an empty parser whose help begins with the docstring of a script."""
    return argparse.ArgumentParser(description=about, formatter_class=HelpFormatter)


def flag(name: str) -> str:
    """Return the flag of an attribute.

    Example:
        >>> flag("batch_size")
        '--batch-size'
    """
    return f"--{name.replace('_', '-')}"
