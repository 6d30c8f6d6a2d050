"""`blockopt describe gpt2`: the table of the blocks of a model."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from blockopt.blocks import ROW_ROLES, describe, find_blocks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
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
    """Run the command; returns the exit code."""
    model = build_from_config(options.model)
    try:
        blocks = find_blocks(model, per_head=not options.no_per_head, per_row=options.per_row)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(f"{type(model).__name__} ({options.model})")
    print(describe(model, blocks, by_layer=options.by_layer))
    return 0


def build_from_config(source: str) -> nn.Module:
    """The model of a transformers config, without weights: on the `meta` device, nothing of the model is downloaded.

    Args:
        source: A model type that transformers knows (`gpt2`, `llama`, …), a `config.json`, a folder
            that holds one, or the name of a model on the hub, whose config alone is fetched.

    Raises:
        SystemExit: If transformers is not installed or the config cannot be had.
    """
    try:
        import transformers
    except ImportError:
        raise SystemExit("describe needs transformers: pip install 'blockopt[hf]'") from None
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    try:
        if source in known and not Path(source).exists():
            config = transformers.AutoConfig.for_model(source)
        else:
            config = transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"No model config at {source!r}: it is neither a model type of transformers {transformers.__version__} "
            f"(gpt2, llama, qwen3, …), nor a config.json or a folder with one, nor a model that the hub gives now.\n"
            f"transformers says: {str(error).splitlines()[0]}"
        ) from None
    auto_classes = (  # masked before causal: BERT has both, and its causal form is the odd one
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForImageClassification,
        transformers.AutoModel,
    )
    auto_class = next((c for c in auto_classes if type(config) in c._model_mapping), None)
    if auto_class is None:
        raise SystemExit(
            f"transformers {transformers.__version__} has no model for the {type(config).__name__} of {source!r}."
        )
    with torch.device("meta"):
        model: nn.Module = auto_class.from_config(config)
    return model
