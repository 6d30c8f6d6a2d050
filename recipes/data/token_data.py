"""Tokens to train on: the source of Python's standard library, digit addition, files, or a data set of the hub."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
        train: Token ids mapped from the cache: one after another (tokens,), or a row an example
            (examples, length).
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
        """The tokens of "train" or "validation", enough for one window at least.

        Raises:
            ValueError: If there are fewer.
        """
        tokens = {"train": self.train, "validation": self.validation}[name]
        if tokens.ndim == 1 and len(tokens) < window:
            remedy = "Lower --context" + (
                " or raise --validation-fraction." if name == "validation" else "."
            )
            raise ValueError(
                f"The {name} part of {self.name} has {len(tokens):,} tokens, and one window takes {window:,}. {remedy}"
            )
        return tokens

    def batches(self, part: str, *, batch_size: int, context: int, seed: int) -> Batches:
        """The batches of "train" or "validation"."""
        tokens = self.part(part, window=context + 1)
        return Batches(
            tokens, batch_size=batch_size, context=context, seed=seed, ignored=self.ignored
        )

    def decode(self, ids: Tensor) -> str:
        """Tokens as text."""
        if self.tokenizer is not None:
            from tokenizers import Tokenizer

            return str(
                Tokenizer.from_file(str(self.tokenizer)).decode(
                    ids.tolist(), skip_special_tokens=False
                )
            )
        if self.train.ndim == 2:
            return decode(ids)
        return bytes(ids.tolist()).decode(errors="replace")


def default_cache() -> Path:
    """`$BLOCKOPT_CACHE`, or `~/.cache/blockopt`."""
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
) -> TokenData:
    """Load tokens from the cache, writing them there first if need be.

    Args:
        source: "stdlib", "addition", "addition:DIGITS", a file, a folder, a pattern like
            "data/*.jsonl", or a data set of the hub as "NAME" or "NAME:CONFIG".
        vocab_size: Of the byte-level BPE that is trained on the training part, if no tokenizer is
            given.
        tokenizer: A tokenizer.json file, a name on the hub, or "bytes".
        cache: Folder; by default `default_cache()`.
        validation_fraction: How much to hold out, if the data come without a validation part.
        max_tokens: At most so many tokens of each part.
        text_column: Of JSONL, Parquet and hub data.
        streaming: Read hub data without storing all of them; needs `max_tokens`.

    Raises:
        ValueError: If an argument is out of range, or the data are not as they should be.
        FileNotFoundError: If there is no such file.
        ConnectionError: If the hub is needed and cannot be reached.
        OSError: If the disk is full.
    """
    if not 0 < validation_fraction <= 0.5:
        raise ValueError(
            f"Invalid validation_fraction={validation_fraction}. Must be more than 0 and at most 0.5."
        )
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"Invalid max_tokens={max_tokens}. Must be >= 1.")
    cache = default_cache() if cache is None else Path(cache)
    settings: dict[str, Any] = {
        "format": FORMAT,
        "validation_fraction": validation_fraction,
        "max_tokens": max_tokens,
    }
    if source.partition(":")[0] == "addition":
        digits = _digits(source)
        settings |= {"content": f"addition {digits}"}
        folder = cache / "tokens" / _key(settings)
        record = cached(
            folder, lambda part: write_addition(part, digits, validation_fraction, max_tokens)
        )
        ignored, width = 2 * digits + 1, 3 * digits + 3
    else:
        if tokenizer is None and vocab_size < SMALLEST_BPE:
            raise ValueError(
                f"Invalid vocab_size={vocab_size}. Must be >= {SMALLEST_BPE} (256 bytes and the end of a text), or take "
                "tokenizer='bytes'."
            )
        given = None if tokenizer in (None, "bytes") else open_tokenizer(str(tokenizer))
        options: dict[str, Any] = {
            "validation_fraction": validation_fraction,
            "text_column": text_column,
        }
        opened = open_source(
            source, cache=cache, streaming=streaming, max_tokens=max_tokens, **options
        )
        spelling = (
            vocab_size if tokenizer is None else "bytes" if given is None else _key(given.to_str())
        )
        settings |= {"content": opened.content, "tokenizer": spelling, "text_column": text_column}
        folder = cache / "tokens" / _key(settings)
        trained = vocab_size if tokenizer is None else None
        limits: dict[str, Any] = {"vocab_size": trained, "max_tokens": max_tokens}
        record = cached(
            folder, lambda part: write_tokens(part, opened, source, tokenizer=given, **limits)
        )
        ignored, width = 0, None
    train, validation = (
        _mapped(folder / f"{part}.bin", record["dtype"], width) for part in ("train", "validation")
    )
    file = folder / "tokenizer.json" if "tokenizer.json" in record["files"] else None
    return TokenData(source, train, validation, record["vocab_size"], folder.name, file, ignored)


def _key(settings: Any) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:32]


def _mapped(path: Path, dtype: str, width: int | None) -> Tensor:
    """A file as a tensor, read when needed. Mode "c": writing to the tensor would not reach the file."""
    tokens = torch.from_numpy(np.memmap(path, dtype=dtype, mode="c"))
    return tokens if width is None else tokens.view(-1, width)


def _digits(source: str) -> int:
    _, _, digits = source.partition(":")
    if not (digits or "5").isdecimal() or not 1 <= int(digits or 5) <= MOST_DIGITS:
        raise ValueError(
            f"Invalid data {source!r}. Must be addition:DIGITS with 1 to {MOST_DIGITS} digits, such as addition:5."
        )
    return int(digits or 5)


def write_addition(
    folder: Path, digits: int, validation_fraction: float, max_tokens: int | None
) -> dict[str, Any]:
    """Different random sums, a row each, split by a hash of the sum."""
    number = EXAMPLES if max_tokens is None else max(1, max_tokens // (3 * digits + 3))
    drawn = (
        int(1.1 * number / (1 - validation_fraction)) + 100
    )  # some are held out, some drawn twice
    inputs, targets = addition(drawn, digits, answers_only=False)
    rows = torch.cat([inputs, targets[:, -1:]], dim=1).to(torch.uint8).numpy()
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for example in dict.fromkeys(row.tobytes() for row in rows):
        sides[held_out(example.hex(), validation_fraction)].append(example)
    if not all(sides):
        raise ValueError(
            f"Only {len(sides[0])} sums to train on and {len(sides[1])} held out. Must be one of each: raise max_tokens or "
            "digits."
        )
    for name, side in zip(("train", "validation"), sides):
        (folder / f"{name}.bin").write_bytes(b"".join(side[:number]))
    return {"vocab_size": len(VOCABULARY), "dtype": "uint8"}


class Batches:
    """Batches by number: `batches[step]` depends on the arguments and the step alone, so a resumed run sees what it would have.

    Tokens in one row are cut into windows of `context` inputs, each with the next token as its
    target; the windows are drawn in an order that depends on (seed, epoch), each once an epoch. A
    batch may end one epoch and begin the next. Less than `context` tokens at the end are never
    seen.

    Args:
        tokens: Ids (tokens,), or (examples, context + 1) to take whole examples.
        batch_size: Windows in a batch.
        context: Inputs in a window.
        seed: Of the order.
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
        self, tokens: Tensor, *, batch_size: int, context: int, seed: int, ignored: int = 0
    ) -> None:
        if batch_size < 1 or context < 1:
            raise ValueError(
                f"Invalid batch_size={batch_size}, context={context}. Both must be integers >= 1."
            )
        if tokens.ndim == 2 and tokens.shape[1] != context + 1:
            raise ValueError(
                f"Invalid context={context}. Must be {tokens.shape[1] - 1}, one less than an example's tokens."
            )
        self.windows = len(tokens) if tokens.ndim == 2 else (len(tokens) - 1) // context
        if self.windows < 1:
            raise ValueError(
                f"Invalid context={context}. Must be less than the number of tokens, which is {len(tokens)}."
            )
        self.batch_size, self.context, self.seed, self.ignored = batch_size, context, seed, ignored
        self.steps_per_epoch = max(1, self.windows // batch_size)
        self._array = (
            tokens.numpy()
        )  # numpy takes from unsigned 16 bit arrays on every version of torch
        self._orders: dict[
            int, np.ndarray
        ] = {}  # of the last epochs asked for, which can be drawn again at any time

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (batch_size, context) each, of the batch number `step`, counted from 0 without end."""
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
            seed = int.from_bytes(
                hashlib.sha256(f"{self.seed} {epoch}".encode()).digest()[:7], "big"
            )
            order = torch.randperm(
                self.windows, generator=torch.Generator().manual_seed(seed)
            ).numpy()
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return self._orders[epoch]


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say what to train on, the same for all scripts."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        default="stdlib",
        metavar="SOURCE",
        help="stdlib, addition[:DIGITS], a file or folder (text, JSONL, Parquet) or a hub NAME[:CONFIG] (default: %(default)s)",
    )
    group.add_argument(
        "--tokenizer",
        help="a tokenizer.json, a hub name or 'bytes' (default: a byte-level BPE trained on the data)",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        default=1024,
        help="of the BPE trained on the data (default: %(default)s)",
    )
    group.add_argument(
        "--max-tokens", type=int, help="at most so many tokens to train on, and to validate on"
    )
    group.add_argument(
        "--validation-fraction", type=float, default=0.05, help="to hold out (default: %(default)s)"
    )
    group.add_argument(
        "--text-column",
        default="text",
        help="of JSONL, Parquet and hub data (default: %(default)s)",
    )
    group.add_argument(
        "--streaming", action="store_true", help="read hub data without storing all of them"
    )
    group.add_argument(
        "--cache",
        type=Path,
        help="folder for tokens (default: $BLOCKOPT_CACHE or ~/.cache/blockopt)",
    )


def load_from_arguments(arguments: argparse.Namespace) -> TokenData:
    """`load_data` as those flags say. What is wrong with them is said without a traceback, and ends the program with code 2."""
    try:
        return load_data(
            arguments.data,
            vocab_size=arguments.vocab_size,
            tokenizer=arguments.tokenizer,
            cache=arguments.cache,
            validation_fraction=arguments.validation_fraction,
            max_tokens=arguments.max_tokens,
            text_column=arguments.text_column,
            streaming=arguments.streaming,
        )
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
