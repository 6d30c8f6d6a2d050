"""`blockopt describe gpt2`: the table of the blocks of a model."""

from __future__ import annotations

import argparse

import torch
from torch import nn

from blockopt.blocks import ROW_ROLES, describe, find_blocks
from blockopt.cli.configs import find_config, import_transformers
from blockopt.cli.errors import UserError, user_mistakes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "model", help="a transformers model type (gpt2), a config.json or its folder, or a hub name"
    )
    parser.add_argument(
        "--by-layer", action="store_true", help="one line for each role of each layer"
    )
    parser.add_argument("--no-per-head", action="store_true", help="do not cut attention by head")
    parser.add_argument(
        "--per-row",
        nargs="*",
        choices=ROW_ROLES,
        default=ROW_ROLES,
        metavar="ROLE",
        help=f"roles cut by row, out of {', '.join(ROW_ROLES)} (default: all)",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    model = build_from_config(options.model)
    with user_mistakes(ValueError):  # a model whose blocks cannot be told
        blocks = find_blocks(model, per_head=not options.no_per_head, per_row=options.per_row)
    print(f"{type(model).__name__} ({options.model})")
    print(describe(model, blocks, by_layer=options.by_layer))
    return 0


def build_from_config(source: str) -> nn.Module:
    """Build the model of a config on the `meta` device, without weights.

    Raises:
        UserError: If transformers is not installed, the config is not found, or has no model.
    """
    config, transformers = find_config(source, hub=True), import_transformers()
    auto_classes = (  # masked before causal: BERT has both, and its causal form is the odd one
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForImageClassification,
        transformers.AutoModel,
    )
    auto_class = next((c for c in auto_classes if type(config) in c._model_mapping), None)
    if auto_class is None:
        raise UserError(
            f"transformers {transformers.__version__} has no model for the {type(config).__name__} "
            f"of {source!r}."
        )
    with torch.device("meta"):
        model: nn.Module = auto_class.from_config(config)
    return model
