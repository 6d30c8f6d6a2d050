"""The command line: `blockopt describe gpt2`, `blockopt hessian gpt2 --text file.txt`."""

from __future__ import annotations

import argparse

from blockopt.cli import describe, hessian
from blockopt.cli.errors import UserError

COMMANDS = {
    "describe": (describe, "table of the blocks of a model"),
    "hessian": (hessian, "spectra and block table of a causal language model on a text"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Raises:
        SystemExit: With one line, if the user made a mistake. Bugs keep their traceback.
    """
    parser = argparse.ArgumentParser(prog="blockopt", description="Hessian blocks of transformers.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (command, about) in COMMANDS.items():
        command.add_arguments(
            commands.add_parser(name, help=about, description=f"{about.capitalize()}.")
        )
    options = parser.parse_args(arguments)
    try:
        code: int = COMMANDS[options.command][0].run(options)
    except UserError as error:
        raise SystemExit(str(error)) from None
    return code
