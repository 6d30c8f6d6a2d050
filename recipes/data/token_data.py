"""Tokens to train on: from the standard library, digit addition, files, or data sets of the hub."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockopt.checks import check_count
from recipes.common.errors import UsageError
from recipes.data.addition import IGNORED, VOCABULARY, addition, decode
from recipes.data.sources import held_out, open_source
from recipes.data.tokens import SMALLEST_BPE, cached, open_tokenizer, write_tokens

FORMAT = 1  # of the cache: another number, and everything is written again
EXAMPLES = 200_000  # of addition, unless max_tokens asks for another number
MOST_DIGITS = 17  # sums of more do not fit into 64 bits


@dataclass(frozen=True)
class TokenData:
    """Tokens of a training and a validation part.

    Attributes:
        name: What was asked for.
        train: Token ids mapped from the cache: one after another (tokens,), or one row per
            example (examples, length).
        validation: The same, of what is held out.
        vocab_size: Ids are less than this.
        key: Hash of content, tokenizer and settings, which names the cache folder.
        tokenizer: The tokenizer's file, or None if tokens are bytes or digits.
        ignored: How many targets at the start of each example do not count (those of a question,
            not of its answer).
    """

    name: str
    train: Tensor
    validation: Tensor
    vocab_size: int
    key: str
    tokenizer: Path | None = None
    ignored: int = 0

    @property
    def context(self) -> int | None:
        """The context that examples need, or None if any will do."""
        return self.train.shape[1] - 1 if self.train.ndim == 2 else None

    def part(self, name: str, *, window: int) -> Tensor:
        """Return the tokens of "train" or "validation".

        Raises:
            UsageError: If there are too few for one window.
        """
        tokens = {"train": self.train, "validation": self.validation}[name]
        if tokens.ndim == 1 and len(tokens) < window:
            more = " or raise --validation-fraction" if name == "validation" else ""
            raise UsageError(
                f"The {name} part of {self.name} has {len(tokens):,} tokens, and one window takes "
                f"{window:,}. Lower --context{more}."
            )
        return tokens

    def batches(self, part: str, *, batch_size: int, context: int, seed: int) -> Batches:
        """Return the batches of "train" or "validation"."""
        tokens, sizes = self.part(part, window=context + 1), (batch_size, context)
        return Batches(tokens, *sizes, seed=seed, ignored=self.ignored)

    def decode(self, ids: Tensor) -> str:
        """Return tokens as text."""
        if self.tokenizer is not None:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(self.tokenizer))
            return str(tokenizer.decode(ids.tolist(), skip_special_tokens=False))
        if self.train.ndim == 2:
            return decode(ids)
        return bytes(ids.tolist()).decode(errors="replace")


def default_cache() -> Path:
    """Return `$BLOCKOPT_CACHE`, or `~/.cache/blockopt`."""
    return Path(os.environ.get("BLOCKOPT_CACHE") or "~/.cache/blockopt").expanduser()


def load_data(
    source: str,
    *,
    vocab_size: int = 1024,
    tokenizer: str | None = None,
    cache: Path | None = None,
    validation_fraction: float = 0.05,
    max_tokens: int | None = None,
    text_column: str = "text",
    streaming: bool = False,
    report: Callable[[str], None] | None = None,
) -> TokenData:
    """Load tokens from the cache, after writing them there if needed.

    Args:
        source: "stdlib", "addition", "addition:DIGITS", a file, a folder, a pattern like
            "data/*.jsonl", or a data set of the hub as "NAME" or "NAME:CONFIG".
        vocab_size: Size of the byte-level BPE that is trained on the training part, if no tokenizer
            is given.
        tokenizer: A tokenizer.json file, a name on the hub, or "bytes".
        cache: Folder; by default `default_cache()`.
        validation_fraction: How much to hold out, if the data come without a validation part.
        max_tokens: The most tokens to take of each part.
        text_column: The column of JSONL, Parquet and hub data that holds the text.
        streaming: Whether to read hub data without storing all of them; needs `max_tokens`.
        report: Called with what is about to be done, where it may take long.

    Raises:
        UsageError: If an argument is out of range, or the data are not as they should be.
        MissingFileError: If there is no such file.
        OfflineError: If the hub is needed and cannot be reached.
        DiskError: If the disk is full.
    """
    if not 0 < validation_fraction <= 0.5:
        raise UsageError(
            f"Invalid validation_fraction={validation_fraction}. Must be more than 0, at most 0.5."
        )
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"Invalid max_tokens={max_tokens}. Must be >= 1.")
    cache = default_cache() if cache is None else Path(cache)
    settings: dict[str, Any] = {"format": FORMAT, "max_tokens": max_tokens}
    settings |= {"validation_fraction": validation_fraction}
    if source.partition(":")[0] == "addition":
        digits = _digits(source)
        settings |= {"content": f"addition {digits}"}
        folder = cache / "tokens" / _key(settings)
        limits = (validation_fraction, max_tokens)
        record = cached(folder, lambda part: write_addition(part, digits, *limits))
        ignored, width = 2 * digits + 1, 3 * digits + 3
    else:
        if tokenizer is None and vocab_size < SMALLEST_BPE:
            raise UsageError(
                f"Invalid vocab_size={vocab_size}. Must be >= {SMALLEST_BPE} (256 bytes and the "
                "end of a text), or take tokenizer='bytes'."
            )
        given = None if tokenizer in (None, "bytes") else open_tokenizer(str(tokenizer))
        opened = open_source(
            source,
            cache=cache,
            validation_fraction=validation_fraction,
            text_column=text_column,
            streaming=streaming,
            max_tokens=max_tokens,
        )
        spelling = "bytes" if given is None else _key(given.to_str())
        spelling = vocab_size if tokenizer is None else spelling
        settings |= {"content": opened.content, "tokenizer": spelling, "text_column": text_column}
        folder = cache / "tokens" / _key(settings)
        trained = vocab_size if tokenizer is None else None
        encoding = {"tokenizer": given, "vocab_size": trained, "max_tokens": max_tokens}
        encoding |= {"report": report}
        record = cached(folder, lambda part: write_tokens(part, opened, source, **encoding))
        ignored, width = 0, None
    train, validation = (
        _mapped(folder / f"{part}.bin", record["dtype"], width) for part in ("train", "validation")
    )
    file = folder / "tokenizer.json" if "tokenizer.json" in record["files"] else None
    return TokenData(source, train, validation, record["vocab_size"], folder.name, file, ignored)


def _key(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def _mapped(path: Path, dtype: str, width: int | None) -> Tensor:
    """Return a file as a tensor, read when needed; writing to it does not reach the file."""
    tokens = torch.from_numpy(np.memmap(path, dtype=dtype, mode="c"))
    return tokens if width is None else tokens.view(-1, width)


def _digits(source: str) -> int:
    _, _, digits = source.partition(":")
    if not (digits or "5").isdecimal() or not 1 <= int(digits or 5) <= MOST_DIGITS:
        raise UsageError(
            f"Invalid data {source!r}. Must be addition:DIGITS with 1 to {MOST_DIGITS} digits, "
            "such as addition:5."
        )
    return int(digits or 5)


def write_addition(
    folder: Path, digits: int, validation_fraction: float, max_tokens: int | None
) -> dict[str, Any]:
    """Write different random sums, one per row, split by a hash of the sum."""
    number = EXAMPLES if max_tokens is None else max(1, max_tokens // (3 * digits + 3))
    drawn = int(1.1 * number / (1 - validation_fraction)) + 100  # some held out, some drawn twice
    inputs, targets = addition(drawn, digits, answers_only=False)
    rows = torch.cat([inputs, targets[:, -1:]], dim=1).to(torch.uint8).numpy()
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for example in dict.fromkeys(row.tobytes() for row in rows):
        sides[held_out(example.hex(), validation_fraction)].append(example)
    if not all(sides):
        raise UsageError(
            f"Only {len(sides[0])} sums to train on and {len(sides[1])} held out. "
            "Must be one of each: raise max_tokens or digits."
        )
    for name, side in zip(("train", "validation"), sides):
        (folder / f"{name}.bin").write_bytes(b"".join(side[:number]))
    return {"vocab_size": len(VOCABULARY), "dtype": "uint8"}


class Batches:
    """Batches by number: `batches[step]` depends on the arguments and the step alone.

    Tokens in one row are cut into windows of `context` inputs, each with the next token as its
    target. The windows come in an order that depends on (seed, epoch), each once per epoch. A batch
    may end one epoch and begin the next. Fewer than `context` tokens at the end are never seen.

    Args:
        tokens: Ids (tokens,), or (examples, context + 1) to take whole examples.
        batch_size: Windows in a batch.
        context: Inputs in a window.
        seed: Decides the order.
        ignored: How many targets at the start of each window do not count: -100, which
            `F.cross_entropy` leaves out.

    Attributes:
        windows: How many there are.
        steps_per_epoch: Whole batches in one epoch, at least one.

    Raises:
        ValueError: If there are too few tokens for one window, or examples are of another length.

    Example:
        >>> batches = Batches(torch.arange(9), batch_size=2, context=2, seed=0)
        >>> batches.windows, batches.steps_per_epoch
        (4, 2)
        >>> torch.cat([batches[0][0], batches[1][0]]).sort(0).values.tolist()
        [[0, 1], [2, 3], [4, 5], [6, 7]]
    """

    def __init__(
        self, tokens: Tensor, batch_size: int, context: int, *, seed: int, ignored: int = 0
    ) -> None:
        check_count("batch_size", batch_size)
        check_count("context", context)
        if tokens.ndim == 2 and tokens.shape[1] != context + 1:
            raise ValueError(
                f"Invalid context={context}. Must be {tokens.shape[1] - 1}, "
                "one less than the tokens of an example."
            )
        self.windows = len(tokens) if tokens.ndim == 2 else (len(tokens) - 1) // context
        if self.windows < 1:
            raise ValueError(f"Invalid context={context}. Must be less than {len(tokens)} tokens.")
        self.batch_size, self.context, self.seed, self.ignored = batch_size, context, seed, ignored
        self.steps_per_epoch = max(1, self.windows // batch_size)
        self._array = tokens.numpy()  # takes from unsigned 16 bit arrays with every torch
        self._orders: dict[int, np.ndarray] = {}  # of the last epochs that were asked for

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, (batch_size, context) each, of a batch, counted from 0."""
        if step < 0:
            raise IndexError(f"Invalid step={step}. Must be >= 0.")
        positions = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs, places = positions // self.windows, positions % self.windows
        chosen = np.concatenate(
            [self._order(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)]
        )
        if self._array.ndim == 2:
            taken = self._array[chosen]
        else:
            taken = self._array[chosen[:, None] * self.context + np.arange(self.context + 1)]
        tokens = torch.from_numpy(taken.astype(np.int64))
        targets = tokens[:, 1:].clone()
        targets[:, : self.ignored] = IGNORED
        return tokens[:, :-1].contiguous(), targets

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            digest = hashlib.sha256(f"{self.seed} {epoch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            order = torch.randperm(self.windows, generator=generator).numpy()
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return self._orders[epoch]


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what to train on, the same for all scripts."""
    group = parser.add_argument_group("data")
    add = group.add_argument
    sources = (
        "stdlib, addition[:DIGITS], a file or folder (text, JSONL, Parquet), hub NAME[:CONFIG]"
    )
    add("--data", default="stdlib", metavar="SOURCE", help=sources)
    tokenizers = "a tokenizer.json, a hub name or 'bytes' (default: a BPE trained on the data)"
    add("--tokenizer", help=tokenizers)
    add("--vocab-size", type=int, default=1024, help="tokens of a BPE trained on the data")
    add("--max-tokens", type=int, help="the most tokens to train on, and to hold out")
    add("--validation-fraction", type=float, default=0.05, help="share of the data to hold out")
    add("--text-column", default="text", help="where JSONL, Parquet and hub data have the text")
    add("--streaming", action="store_true", help="do not store all of the hub data")
    add_cache_argument(group)


def add_cache_argument(parser: argparse._ActionsContainer) -> None:
    """Add the flag for the folder of the tokens."""
    cache = "folder for tokens (default: $BLOCKOPT_CACHE or ~/.cache/blockopt)"
    parser.add_argument("--cache", type=Path, help=cache)


def load_from_arguments(
    arguments: argparse.Namespace, report: Callable[[str], None] | None = None
) -> TokenData:
    """Call `load_data` as those flags say."""
    return load_data(
        arguments.data,
        vocab_size=arguments.vocab_size,
        tokenizer=arguments.tokenizer,
        cache=arguments.cache,
        validation_fraction=arguments.validation_fraction,
        max_tokens=arguments.max_tokens,
        text_column=arguments.text_column,
        streaming=arguments.streaming,
        report=report,
    )
