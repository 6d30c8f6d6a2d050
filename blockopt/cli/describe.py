"""`blockopt describe gpt2`: the table of the blocks of a model."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blockopt.blocks import ROW_ROLES, describe
from blockopt.cli.configs import (
    add_set_option,
    find_config,
    import_transformers,
    parse_settings,
)
from blockopt.cli.errors import UserError
from blockopt.cli.override_option import add_override_option, blocks_with_overrides


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
    add_set_option(parser)
    add_override_option(parser)
    parser.add_argument(
        "--watch",
        action="store_true",
        help="build the model with random weights, in memory, and find its blocks by one forward "
        "pass on random tokens or images, beside the names of its modules",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    device = "cpu" if options.watch else "meta"
    model = build_from_config(options.model, parse_settings(options.set), device)
    blocks = blocks_with_overrides(
        model,
        options.override,
        per_head=not options.no_per_head,
        per_row=options.per_row,
        example=random_input(model) if options.watch else None,
    )
    print(f"{type(model).__name__} ({options.model})")
    print(describe(model, blocks, by_layer=options.by_layer))
    return 0


def build_from_config(source: str, overrides: Mapping[str, Any], device: str) -> nn.Module:
    """Build the model of a config: on the `meta` device without weights, or with random ones.

    Raises:
        UserError: If transformers is not installed, the config is not found, or has no model.
    """
    config, transformers = find_config(source, overrides, hub=True), import_transformers()
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
    with torch.device(device):
        model: nn.Module = auto_class.from_config(config)
    return model


def random_input(model: Any) -> dict[str, Tensor]:
    """Return random tokens or an image for a model of transformers, by the name of its input.

    Raises:
        UserError: If it takes something else.
    """
    config, generator = model.config, torch.Generator().manual_seed(0)
    if model.main_input_name == "input_ids":
        tokens = torch.randint(config.vocab_size, (1, 8), generator=generator)
        decoder = {"decoder_input_ids": tokens} if config.is_encoder_decoder else {}
        return {"input_ids": tokens, **decoder}
    size = getattr(config, "image_size", None)
    if model.main_input_name == "pixel_values" and size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        shape = (1, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    raise UserError(
        f"--watch knows models of tokens and of images, and {type(model).__name__} takes "
        f"{model.main_input_name}. Use blockopt.find_blocks(model, example=...) in Python."
    )
