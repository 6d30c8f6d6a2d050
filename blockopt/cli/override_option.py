"""`--override`, with which a command is told the blocks that names do not tell."""

from __future__ import annotations

import argparse
from typing import Any

from torch import nn

from blockopt.blocks import Blocks, UnknownBlocksError, find_blocks, parse_override
from blockopt.cli.errors import UserError, user_mistakes


def add_override_option(parser: argparse.ArgumentParser) -> None:
    """Add the option to a command."""
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="NAME=ROLE[:SPLIT]",
        help="the role of a parameter or pattern, such as 'h.*.fc.weight=mlp_in', or its sections "
        "with dimension, sizes and parts: 'h.*.qkv.weight=query+key+value:0/64+64+64/4+4+4'; may "
        "be repeated",
    )


def blocks_with_overrides(
    model: nn.Module, overrides: list[str], **options: Any
) -> dict[str, Blocks]:
    """Return what `find_blocks` finds with the overrides of the command line.

    Raises:
        UserError: If an override is wrong, or one is missing; its message has the flags to pass.
    """
    with user_mistakes(ValueError):
        parsed = dict(map(parse_override, overrides))
    try:
        return find_blocks(model, overrides=parsed, **options)
    except UnknownBlocksError as error:
        raise UserError(error.for_a_command()) from None
    except ValueError as error:
        raise UserError(str(error)) from None
