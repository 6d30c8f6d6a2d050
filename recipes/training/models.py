"""The model of a run, by flags: our GPT-2, or any causal language model of transformers."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recipes.common.errors import MissingFileError, UsageError
from recipes.common.gpt2 import GPT2, PRESETS, GPT2Config
from recipes.data.token_data import TokenData

SIZES = ("width", "depth", "heads", "norm", "attention")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what to train."""
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--model", default="0.5M", choices=PRESETS, help="size of our GPT-2")
    add("--context", type=int, help="tokens per sequence (default: the preset's)")
    add("--width", type=int, help="width of our GPT-2 (default: the preset's)")
    add("--depth", type=int, help="layers of our GPT-2 (default: the preset's)")
    add("--heads", type=int, help="heads of our GPT-2 (default: the preset's)")
    add("--norm", choices=("pre", "post", "none"), help="where our GPT-2 has norms")
    add("--attention", choices=("softmax", "linear"), help="'linear' leaves the softmax out")
    given = group.add_mutually_exclusive_group()
    fresh, trained = "a fresh transformers model", "a transformers model to fine-tune"
    given.add_argument("--hf-config", metavar="NAME", help=f"{fresh}: config file or hub name")
    given.add_argument("--hf-checkpoint", metavar="NAME", help=f"{trained}: folder or hub name")


def check_model_arguments(arguments: argparse.Namespace) -> None:
    """Check the flags before any data are loaded; take the checkpoint's tokenizer by default.

    Raises:
        UsageError: If they do not fit together.
    """
    given = [name for name in SIZES if getattr(arguments, name) is not None]
    if (arguments.hf_config or arguments.hf_checkpoint) and given:
        raise UsageError(
            f"--{given[0]} is an option of our GPT-2. Models of transformers have their own config."
        )
    if arguments.context is not None and arguments.context < 1:
        raise UsageError(f"Invalid --context={arguments.context}. Must be >= 1.")
    gpt2_config(arguments, vocab_size=1, context=1)  # checks the sizes
    digits = arguments.data.partition(":")[0] == "addition"  # which have no tokenizer
    if arguments.hf_checkpoint and arguments.tokenizer is None and not digits:
        arguments.tokenizer = _tokenizer_of(arguments.hf_checkpoint)


def _tokenizer_of(checkpoint: str) -> str:
    """Return the `--tokenizer` for a checkpoint, to which other token ids would mean nothing."""
    folder = Path(checkpoint).expanduser()
    if (folder / "tokenizer.json").is_file():
        return str(folder / "tokenizer.json")
    if folder.exists():
        raise UsageError(
            f"There is no tokenizer.json in {checkpoint}. Pass the --tokenizer that it was trained "
            "with ('bytes' if it was trained on bytes), or write one: "
            f"transformers.AutoTokenizer.from_pretrained({checkpoint!r})"
            f".save_pretrained({checkpoint!r})."
        )
    if checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1:
        raise UsageError(f"No checkpoint {checkpoint!r}. Must be a folder, or a name on the hub.")
    return checkpoint  # on the hub


def gpt2_config(arguments: argparse.Namespace, *, vocab_size: int, context: int) -> GPT2Config:
    """Return the preset, with what the flags change."""
    sizes = {"vocab_size": vocab_size, "context": context}
    sizes |= {n: getattr(arguments, n) for n in SIZES if getattr(arguments, n) is not None}
    return dataclasses.replace(PRESETS[arguments.model], **sizes)


def context_of(arguments: argparse.Namespace, data: TokenData) -> int:
    """Return the tokens per sequence: what the data need, the flag, or the preset's.

    Raises:
        UsageError: If the data need another number than the flag.
    """
    if data.context is not None and arguments.context not in (None, data.context):
        raise UsageError(
            f"Invalid --context={arguments.context}. Examples of {data.name} need {data.context}."
        )
    return data.context or arguments.context or PRESETS[arguments.model].context


def build_model(
    arguments: argparse.Namespace, data: TokenData, positions: int | None = None
) -> nn.Module:
    """Build the model that the flags ask for, with the vocabulary of the data.

    Args:
        arguments: The flags of `add_model_arguments`.
        data: What it is trained on.
        positions: How many it must have; by default those of `context_of`.

    Raises:
        UsageError: If it does not fit the data.
        MissingFileError: If there is no such config or checkpoint, or the hub cannot be reached.
    """
    context = context_of(arguments, data) if positions is None else positions
    if not (arguments.hf_config or arguments.hf_checkpoint):
        return GPT2(gpt2_config(arguments, vocab_size=data.vocab_size, context=context))
    try:
        model = _of_transformers(arguments, data)
    except OSError as error:
        raise MissingFileError(
            f"{(arguments.hf_checkpoint or arguments.hf_config)!r} is no folder or file here, or "
            f"not a whole one, and the hub does not give it (offline?). {error}"
        ) from error
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and context > longest:
        raise UsageError(
            f"Invalid --context={context}. Must be at most {longest}, the model's positions."
        )
    model.config.use_cache = False
    return model.train()


def _of_transformers(arguments: argparse.Namespace, data: TokenData) -> Any:
    import transformers

    if arguments.hf_checkpoint:
        name = arguments.hf_checkpoint
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        known = model.config.vocab_size
        if known < data.vocab_size:
            raise UsageError(
                f"The data have {data.vocab_size:,} tokens, and {name} knows {known:,}. "
                "Tokenize with its own: --tokenizer."
            )
        return model
    config = transformers.AutoConfig.from_pretrained(arguments.hf_config)
    config.vocab_size = data.vocab_size
    for special in ("bos_token_id", "eos_token_id", "pad_token_id"):  # of another vocabulary
        setattr(config, special, None)
    return transformers.AutoModelForCausalLM.from_config(config)
