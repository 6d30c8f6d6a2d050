"""The model of a run, by flags: our GPT-2, or any causal model of transformers, fresh or from a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.common.gpt2 import GPT2, PRESETS, GPT2Config
from recipes.data.token_data import TokenData

SIZES = ("width", "depth", "heads", "norm", "attention")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say what to train."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", default="0.5M", choices=PRESETS, help="sizes of our GPT-2 (default: %(default)s)"
    )
    group.add_argument(
        "--context",
        type=int,
        help="tokens in a sequence (default: the preset's, or what the data need)",
    )
    group.add_argument("--width", type=int, help="instead of the preset's; so are the next two")
    group.add_argument("--depth", type=int, help="number of blocks")
    group.add_argument("--heads", type=int, help="number of attention heads")
    group.add_argument(
        "--norm",
        choices=("pre", "post", "none"),
        help="before or after each residual branch, or nowhere",
    )
    group.add_argument(
        "--attention", choices=("softmax", "linear"), help="linear: the masked scores themselves"
    )
    given = group.add_mutually_exclusive_group()
    given.add_argument(
        "--hf-config",
        metavar="NAME",
        help="a fresh transformers model: config.json, its folder or a hub name",
    )
    given.add_argument(
        "--hf-checkpoint",
        metavar="NAME",
        help="fine-tune a transformers model: its folder or a hub name",
    )


def check_model_arguments(arguments: argparse.Namespace) -> None:
    """Look at the flags before any data are loaded; if no tokenizer is asked for, that of the checkpoint is taken.

    Raises:
        ValueError: If they do not fit together.
    """
    given = [name for name in SIZES if getattr(arguments, name) is not None]
    if (arguments.hf_config or arguments.hf_checkpoint) and given:
        raise ValueError(
            f"--{given[0]} is an option of our GPT-2. Models of transformers have theirs in their config."
        )
    if arguments.context is not None and arguments.context < 1:
        raise ValueError(f"Invalid --context={arguments.context}. Must be >= 1.")
    gpt2_config(arguments, vocab_size=1, context=1)  # checks the sizes
    digits = arguments.data.partition(":")[0] == "addition"  # which have no tokenizer
    if arguments.hf_checkpoint and arguments.tokenizer is None and not digits:
        arguments.tokenizer = _tokenizer_of(arguments.hf_checkpoint)


def _tokenizer_of(checkpoint: str) -> str:
    """What `--tokenizer` must be for a checkpoint: ids of another would mean something else to it."""
    folder = Path(checkpoint).expanduser()
    if (folder / "tokenizer.json").is_file():
        return str(folder / "tokenizer.json")
    if folder.exists():
        raise ValueError(
            f"There is no tokenizer.json in {checkpoint}. Pass the --tokenizer that it was trained with ('bytes', if those), "
            f"or write one: transformers.AutoTokenizer.from_pretrained({checkpoint!r}).save_pretrained({checkpoint!r})."
        )
    if checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1:
        raise ValueError(f"No checkpoint {checkpoint!r}. Must be a folder, or a name on the hub.")
    return checkpoint  # on the hub


def gpt2_config(arguments: argparse.Namespace, *, vocab_size: int, context: int) -> GPT2Config:
    """The preset, with what the flags change."""
    changed = {
        name: getattr(arguments, name) for name in SIZES if getattr(arguments, name) is not None
    }
    return dataclasses.replace(
        PRESETS[arguments.model], vocab_size=vocab_size, context=context, **changed
    )


def context_of(arguments: argparse.Namespace, data: TokenData) -> int:
    """Tokens in a sequence: what the data need, what is asked for, or the preset's.

    Raises:
        ValueError: If the data need another than is asked for.
    """
    if data.context is not None and arguments.context not in (None, data.context):
        raise ValueError(
            f"Invalid --context={arguments.context}. Examples of {data.name} need {data.context}."
        )
    return data.context or arguments.context or PRESETS[arguments.model].context


def build_model(
    arguments: argparse.Namespace, data: TokenData, positions: int | None = None
) -> nn.Module:
    """The model that the flags ask for, with the vocabulary of the data.

    Args:
        arguments: The flags of `add_model_arguments`.
        data: What it is trained on.
        positions: How many it must have; by default those of `context_of`.

    Raises:
        ValueError: If it does not fit the data.
        OSError: If there is no such config or checkpoint, or the hub cannot be reached.
    """
    context = context_of(arguments, data) if positions is None else positions
    if not (arguments.hf_config or arguments.hf_checkpoint):
        return GPT2(gpt2_config(arguments, vocab_size=data.vocab_size, context=context))
    try:
        model = _of_transformers(arguments, data)
    except OSError as error:
        name = arguments.hf_checkpoint or arguments.hf_config
        raise OSError(
            f"{name!r} is no folder or file here, or not a whole one, and the hub does not give it (offline?). {error}"
        ) from error
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and context > longest:
        raise ValueError(
            f"Invalid --context={context}. Must be at most {longest}, the positions that the model has."
        )
    model.config.use_cache = False
    return model.train()


def _of_transformers(arguments: argparse.Namespace, data: TokenData) -> Any:
    import transformers

    if arguments.hf_checkpoint:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            arguments.hf_checkpoint, dtype=torch.float32
        )
        if model.config.vocab_size < data.vocab_size:
            raise ValueError(
                f"The data have {data.vocab_size:,} tokens, and {arguments.hf_checkpoint} knows {model.config.vocab_size:,}. "
                "Tokenize with its own: --tokenizer."
            )
        return model
    config = transformers.AutoConfig.from_pretrained(arguments.hf_config)
    config.vocab_size = data.vocab_size
    for special in ("bos_token_id", "eos_token_id", "pad_token_id"):  # of another vocabulary
        setattr(config, special, None)
    return transformers.AutoModelForCausalLM.from_config(config)


def token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of a batch, (B, T) each, of a model that returns logits or an output that has them."""
    output: Any = model(inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    if logits.dtype.itemsize < 4:  # FSDP2 in bfloat16 leaves them so, too coarse for a loss
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
