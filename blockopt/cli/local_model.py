"""A causal language model of transformers and batches of a text, from local files only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockopt.cli.configs import find_config, import_transformers
from blockopt.cli.errors import UserError, user_mistakes

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZERS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "spiece.model"),
)


class LocalModel(NamedTuple):
    """A model, where its weights are from, and the folder that may hold its tokenizer.

    The folder is None for a model type.
    """

    model: nn.Module
    weights: str
    folder: Path | None


class Corpus(NamedTuple):
    """Token ids (sequences, length), and what the tokens are."""

    ids: Tensor
    tokens: str


def load_model(
    source: str, overrides: Mapping[str, Any], *, random: bool = False, seed: int = 0
) -> LocalModel:
    """Load a causal language model: of a config with random weights, or of a checkpoint.

    Args:
        source: A model type that transformers knows (`gpt2`, `llama`, …), a `config.json`, or a
            folder that holds one. If the folder holds weights too, they are loaded.
        overrides: Entries of the config to replace; only with random weights.
        random: Whether to take random weights although there are others.
        seed: The seed of the random weights.

    Raises:
        UserError: If transformers is missing, there is no such model, an entry is wrong, or the
            model is not causal.
    """
    transformers, path = import_transformers(), Path(source)
    folder = path if path.is_dir() else path.parent if path.is_file() else None
    trained = path.is_dir() and any(list(path.glob(pattern)) for pattern in WEIGHTS) and not random
    if trained and overrides:
        raise UserError(
            f"Invalid --set {next(iter(overrides))}: {source} holds weights, which would not fit "
            "another config. Add --random for random weights."
        )
    config = find_config(source, overrides, hub=False)
    _check_causal(config, transformers)
    if trained:
        with user_mistakes(OSError, ValueError, prefix=f"Cannot load the weights of {source}: "):
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                source, local_files_only=True, output_loading_info=True
            )
        if missing := sorted(info["missing_keys"]):
            raise UserError(
                f"The checkpoint {source} lacks weights of {type(model).__name__}: "
                f"{', '.join(missing[:3])}. Must hold all of them; --random takes random weights."
            )
        return LocalModel(model, "weights of the checkpoint", folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        refused = f"transformers refuses this config of {config.model_type}: "
        with user_mistakes(ValueError, prefix=refused):
            model = transformers.AutoModelForCausalLM.from_config(config)
    return LocalModel(model, f"random weights, seed {seed}", folder)


def _check_causal(config: Any, transformers: Any) -> None:
    kind = type(config)
    masked = kind in transformers.AutoModelForMaskedLM._model_mapping
    masked = masked and not getattr(config, "is_decoder", False)
    causal = kind in transformers.AutoModelForCausalLM._model_mapping
    if masked or not causal or getattr(config, "is_encoder_decoder", False):
        what = "a masked language model" if masked else "not a causal language model"
        raise UserError(
            f"{config.model_type} is {what}. The command takes models that predict the next token "
            "(gpt2, llama, qwen3, …). For others, call blockopt.analysis.hessian_report with a "
            "loss of your own."
        )


def load_text(
    file: str, model: nn.Module, folder: Path | None, *, sequences: int, length: int
) -> Corpus:
    """Return sequences of tokens, spread evenly over a text file without overlap.

    Args:
        file: The text, UTF-8.
        model: The model; its vocabulary must hold the tokens.
        folder: Where its tokenizer may be; without one, the bytes of the text are the tokens.
        sequences: The number of sequences.
        length: The tokens of each.

    Raises:
        UserError: If the text is missing or too short, the sequences are too long, or the tokenizer
            is not that of the model.
    """
    path = Path(file)
    if not path.is_file():
        raise UserError(f"No text file at {file!r}.")
    if length < 2 or sequences < 1:
        raise UserError(
            f"Invalid --length {length} or --sequences {sequences}. Must be at least 2 tokens, and "
            "1 sequence."
        )
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise UserError(f"Invalid --length {length}. The model has {longest:,} positions.")
    size = model.get_input_embeddings().num_embeddings  # type: ignore[operator, union-attr]
    if folder is not None and any((folder / name).exists() for name in TOKENIZERS):
        tokens, what = _tokenized(path, folder), f"tokenizer of {folder}"
        if len(tokens) and int(tokens.max()) >= size:
            raise UserError(
                f"The tokenizer of {folder} gives token {int(tokens.max())}, and the model has "
                f"{size:,} of them."
            )
    else:
        tokens = torch.tensor(list(path.read_bytes()), dtype=torch.long)
        what = "bytes, as there is no tokenizer"
        if size < 256:
            what += f"; {size} to 255 count as {size - 1}, the last of the vocabulary"
            tokens = tokens.clamp(max=size - 1)
    if len(tokens) < sequences * length:
        raise UserError(
            f"{file} has {len(tokens):,} tokens, and --sequences {sequences} of --length {length} "
            f"need {sequences * length:,}. Must be a longer text, or fewer: "
            f"{len(tokens) // length} of this length fit."
        )
    last, steps = len(tokens) - length, max(1, sequences - 1)
    starts = [number * last // steps for number in range(sequences)]
    return Corpus(torch.stack([tokens[start : start + length] for start in starts]), what)


def _tokenized(path: Path, folder: Path) -> Tensor:
    loader = import_transformers().AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"The tokenizer of {folder} cannot be read: {str(error).splitlines()[0]}"
        ) from None
    text = path.read_text(encoding="utf-8", errors="replace")
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def next_token_losses(
    model: nn.Module, ids: Tensor, batch: int
) -> list[Callable[[], tuple[Tensor, int]]]:
    """Return a closure per batch: the mean loss of the next token, and the number of predictions.

    The loss is `model(input_ids=ids, labels=ids).loss`, but in the dtype of the model: transformers
    rounds the logits to float32.
    """

    def loss(part: Tensor) -> tuple[Tensor, int]:
        logits = model(input_ids=part, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()), part[:, 1:].numel()

    return [partial(loss, part) for part in ids.split(batch)]
