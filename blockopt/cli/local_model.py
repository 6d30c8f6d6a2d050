"""A causal language model of transformers and batches of a text, from local files: nothing is downloaded."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
SMALL = 10**7  # parameters up to which float64 is the default


class LocalModel(NamedTuple):
    """A model, where its weights are from, and the folder that may hold its tokenizer, None for a model type."""

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
    """The causal language model of a config, with random weights, or of a checkpoint.

    Args:
        source: A model type that transformers knows (`gpt2`, `llama`, …), a `config.json`, or a
            folder that holds one. If the folder holds weights too, they are loaded.
        overrides: Entries of the config to replace; only with random weights.
        random: Random weights although there are others.
        seed: Of the random weights.

    Raises:
        ImportError: If transformers is missing.
        ValueError: If there is no such model, an entry is wrong, or the model is not causal.
    """
    try:
        import transformers
    except ImportError:
        raise ImportError(
            "The command hessian needs transformers: pip install 'blockopt[hf]'."
        ) from None
    path = Path(source)
    folder = path if path.is_dir() else path.parent if path.is_file() else None
    entries = _config_entries(source, transformers)
    kind = entries.pop("model_type")
    trained = path.is_dir() and any(list(path.glob(pattern)) for pattern in WEIGHTS) and not random
    if trained and overrides:
        raise ValueError(
            f"Invalid --set {next(iter(overrides))}: {source} holds weights, which would not fit another config. Add --random "
            "for random weights."
        )
    config = _config(kind, {**entries, **overrides}, overrides, transformers)
    _check_causal(config, transformers)
    if trained:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            source, local_files_only=True, output_loading_info=True
        )
        if missing := sorted(info["missing_keys"]):
            raise ValueError(
                f"The checkpoint {source} lacks weights of {type(model).__name__}: {', '.join(missing[:3])}. Must hold all of "
                "them; --random takes random weights."
            )
        return LocalModel(model, "weights of the checkpoint", folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    return LocalModel(model, f"random weights, seed {seed}", folder)


def _config_entries(source: str, transformers: Any) -> dict[str, Any]:
    """What a config.json holds, or the type alone."""
    path = Path(source)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if (
            source in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
            and not path.exists()
        ):
            return {"model_type": source}
        raise ValueError(
            f"No model at {source!r}. Must be a model type of transformers {transformers.__version__} (gpt2, llama, qwen3, …), "
            "a config.json, or a folder that holds one. Nothing is downloaded."
        )
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no JSON: {error}.") from None
    if not isinstance(entries, dict) or "model_type" not in entries:
        raise ValueError(f"{file} has no 'model_type'. Must be the config of a transformers model.")
    return entries


def _config(
    kind: str, entries: dict[str, Any], overrides: Mapping[str, Any], transformers: Any
) -> Any:
    """Made anew from its entries, so that what depends on others, such as the size of a head, follows them."""
    try:
        known = transformers.AutoConfig.for_model(kind)
    except ValueError as error:
        raise ValueError(f"No model type {kind!r}: {str(error).splitlines()[0][:200]}") from None
    for key, value in overrides.items():
        sized = key.startswith(("n_", "num_", "vocab", "hidden"))
        if sized and isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise ValueError(f"Invalid --set {key}={value}. Must be at least 1.")
        if not hasattr(known, key):
            near = difflib.get_close_matches(key, known.to_dict())
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(
                f"Invalid --set {key}. Must be an entry of the config of {kind}.{hint}"
            )
    entries = {key: value for key, value in entries.items() if key not in ("dtype", "torch_dtype")}
    size = entries.get("vocab_size", getattr(known, "vocab_size", None))
    for key in SPECIAL_TOKENS:  # those of the full vocabulary have no place in a smaller one
        number = entries.get(key, getattr(known, key, None))
        if isinstance(number, int) and isinstance(size, int) and number >= size:
            entries[key] = None
    try:
        return transformers.AutoConfig.for_model(kind, **entries)
    except Exception as error:  # of many kinds, from its own checks or from dividing by a size of 0
        raise ValueError(
            f"transformers refuses this config of {kind}: {str(error).splitlines()[0][:300]}"
        ) from None


def _check_causal(config: Any, transformers: Any) -> None:
    kind = type(config)
    masked = kind in transformers.AutoModelForMaskedLM._model_mapping and not getattr(
        config, "is_decoder", False
    )
    causal = kind in transformers.AutoModelForCausalLM._model_mapping
    if masked or not causal or getattr(config, "is_encoder_decoder", False):
        what = "a masked language model" if masked else "no causal language model"
        raise ValueError(
            f"{config.model_type} is {what}. The command takes models that predict the next token (gpt2, llama, qwen3, …). For "
            "others, call hessian_report of blockopt.analysis.report with a loss of your own."
        )


def load_text(
    file: str, model: nn.Module, folder: Path | None, *, sequences: int, length: int
) -> Corpus:
    """Sequences of tokens, spread evenly over a text file without overlap.

    Args:
        file: The text, UTF-8.
        model: Whose vocabulary the tokens must be in.
        folder: Where its tokenizer may be; without one, the bytes of the text are the tokens.
        sequences: How many.
        length: Tokens of each.

    Raises:
        ValueError: If the text is missing or too short, the sequences too long, or the tokenizer is
            not that of the model.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"No text file at {file!r}.")
    if length < 2 or sequences < 1:
        raise ValueError(
            f"Invalid --length {length} or --sequences {sequences}. Must be at least 2 tokens, and 1 sequence."
        )
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ValueError(f"Invalid --length {length}. The model has {longest:,} positions.")
    size = model.get_input_embeddings().num_embeddings  # type: ignore[operator, union-attr]
    if folder is not None and any((folder / name).exists() for name in TOKENIZERS):
        tokens, what = _tokenized(path, folder), f"tokenizer of {folder}"
        if len(tokens) and int(tokens.max()) >= size:
            raise ValueError(
                f"The tokenizer of {folder} gives token {int(tokens.max())}, and the model has {size:,} of them."
            )
    else:
        tokens = torch.tensor(list(path.read_bytes()), dtype=torch.long)
        what = "bytes, for want of a tokenizer"
        if size < 256:
            what += f"; {size} to 255 count as {size - 1}, the last of the vocabulary"
            tokens = tokens.clamp(max=size - 1)
    if len(tokens) < sequences * length:
        raise ValueError(
            f"{file} has {len(tokens):,} tokens, and --sequences {sequences} of --length {length} need {sequences * length:,}. "
            f"Must be a longer text, or fewer: {len(tokens) // length} of this length fit."
        )
    starts = [
        number * (len(tokens) - length) // max(1, sequences - 1) for number in range(sequences)
    ]
    return Corpus(torch.stack([tokens[start : start + length] for start in starts]), what)


def _tokenized(path: Path, folder: Path) -> Tensor:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"The tokenizer of {folder} cannot be read: {str(error).splitlines()[0]}"
        ) from None
    text = path.read_text(encoding="utf-8", errors="replace")
    return torch.tensor(
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64
    )


def next_token_losses(
    model: nn.Module, ids: Tensor, batch: int
) -> list[Callable[[], tuple[Tensor, int]]]:
    """One closure a batch: the mean cross-entropy of the next token, and the number of predictions.

    What `model(input_ids=ids, labels=ids).loss` is, but in the dtype of the model: transformers
    rounds the logits to float32.
    """

    def loss(part: Tensor) -> tuple[Tensor, int]:
        logits = model(input_ids=part, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()), part[:, 1:].numel()

    return [partial(loss, part) for part in ids.split(batch)]
