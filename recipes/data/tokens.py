"""Text to token ids: byte-level BPE, a tokenizer of your own, or plain bytes; written once, then mapped from a cache.

A cache folder holds `train.bin`, `validation.bin` (ids, one after another), `tokenizer.json` if
there is one, and `meta.json` with the size and checksum of each. It is written under another name
and renamed when complete, by one process at a time.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from recipes.common.files import sha256, whole_folder
from recipes.data.sources import END_OF_TEXT, Document, Source, quiet_hub

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SMALLEST_BPE = 257  # all bytes and the end of a text
END_OF_BYTES = 0  # among plain bytes this one, which text does not have, ends a document
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot|>", "[SEP]")
TRAINING_CHARACTERS = 100_000_000  # that a BPE learns from, at most
PIECE = 1_000_000  # characters that are encoded at a time


def say(message: str) -> None:
    """Tell the user something, on stderr."""
    Console(stderr=True, highlight=False).print(message, soft_wrap=True, markup=False)


# --- tokenizers
# --------------------------------------------------------------------------------------------------------------


def open_tokenizer(name: str) -> Tokenizer:
    """A tokenizer from a `tokenizer.json` file, a folder that has one, or a model of the hub by name."""
    from tokenizers import Tokenizer

    path = Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(
                f"{path} is no tokenizer of the `tokenizers` package: {error}"
            ) from error
    if path.suffix == ".json" or name.startswith((".", "/", "~")) or path.exists():
        raise FileNotFoundError(
            f"No tokenizer {str(path)!r}. Must be a tokenizer.json file, a name on the hub, or 'bytes'."
        )
    huggingface_hub = quiet_hub()
    from huggingface_hub.errors import (
        EntryNotFoundError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Tokenizer.from_file(
            huggingface_hub.hf_hub_download(name, "tokenizer.json", local_files_only=True)
        )
    except LocalEntryNotFoundError:
        pass  # not there yet
    except ValueError as error:
        raise ValueError(
            f"Invalid tokenizer={name!r}. Must be a tokenizer.json file, a name on the hub, or 'bytes'."
        ) from error
    try:
        huggingface_hub.HfApi().model_info(
            name, timeout=10
        )  # fails at once without a network, a download only after retries
        return Tokenizer.from_file(huggingface_hub.hf_hub_download(name, "tokenizer.json"))
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise ValueError(
            f"The hub has no tokenizer.json of {name!r}. Must be a file, a name on the hub, or 'bytes'."
        ) from error
    except Exception as error:  # of the network, whose classes depend on the hub's version
        raise ConnectionError(
            f"Cannot reach the Hugging Face hub for the tokenizer {name!r} ({type(error).__name__}). Give the path of its "
            "tokenizer.json; for a fresh model, it may be left out: then one is trained on the data."
        ) from error


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, characters: int = TRAINING_CHARACTERS
) -> Tokenizer:
    """Train a byte-level BPE, which can write any text, on the first so many characters.

    Example:
        >>> tokenizer = train_tokenizer(["to be or not to be"] * 9, vocab_size=260)
        >>> tokenizer.encode("to bé").tokens, tokenizer.decode(tokenizer.encode("to bé").ids)
        (['to', 'Ġ', 'b', 'Ã', '©'], 'to bé')
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def enough() -> Iterator[str]:
        left = characters
        for text in texts:
            if left <= 0:
                return
            yield text[:left]
            left -= len(text)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(enough(), trainer)
    return tokenizer


class Encoder:
    """Texts to arrays of ids, each with the end of a text after it.

    Args:
        tokenizer: Or None for plain bytes.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size, self.end = 256, END_OF_BYTES
        if tokenizer is not None:
            vocabulary = tokenizer.get_vocab()
            self.vocab_size = max(vocabulary.values()) + 1
            ends = [vocabulary[token] for token in ENDS if token in vocabulary]
            if not ends:
                raise ValueError(
                    f"The tokenizer has no token for the end of a text. Must have one of {', '.join(ENDS)}."
                )
            self.end = ends[0]
            tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is text
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self.dtype = np.dtype(
            np.uint8
            if self.vocab_size <= 1 << 8
            else np.uint16
            if self.vocab_size <= 1 << 16
            else np.int32
        )

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Encode; long texts in pieces, for memory's sake, cut after a line break."""
        pieces = [(i, piece) for i, text in enumerate(texts) for piece in _pieces(text)]
        if self.tokenizer is None:
            ids = [np.frombuffer(piece.encode(), np.uint8) for _, piece in pieces]
        else:
            encoded = self.tokenizer.encode_batch_fast(
                [piece for _, piece in pieces], add_special_tokens=False
            )
            ids = [np.array(e.ids, self.dtype) for e in encoded]
        last = [
            i == len(pieces) - 1 or pieces[i + 1][0] != pieces[i][0] for i in range(len(pieces))
        ]
        return [
            np.append(part, part.dtype.type(self.end)) if is_last else part
            for part, is_last in zip(ids, last)
        ]


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE:
        stop = text.rfind("\n", start + PIECE // 2, start + PIECE) + 1 or start + PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]


# --- writing
# -----------------------------------------------------------------------------------------------------------------


def write_tokens(
    folder: Path,
    source: Source,
    name: str,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int | None,
    max_tokens: int | None,
) -> dict[str, Any]:
    """Tokenize a source into `train.bin` and `validation.bin`.

    Args:
        folder: Where to write.
        source: What to tokenize.
        name: Of the source, for messages.
        tokenizer: Or None for plain bytes, or for a BPE to be trained on the training part.
        vocab_size: Of the BPE to be trained; None to train none.
        max_tokens: To write of each part, at most.

    Returns:
        What there is to remember: the size of the vocabulary and the dtype of the files.
    """
    chosen = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = chosen or "true"
    if source.note:
        say(f"{name}: {source.note}")
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:

        def watched(what: str, total: int | None) -> Iterator[Document]:
            task = progress.add_task(f"{name}: {what}", total=total)
            for document in source.documents():
                yield document
                progress.advance(task, len(document.text))
            progress.update(task, completed=total)

        if vocab_size is not None:
            learned = (
                document.text
                for document in watched("training the tokenizer", source.size)
                if not document.validation
            )
            limit = min(TRAINING_CHARACTERS, 8 * max_tokens if max_tokens else TRAINING_CHARACTERS)
            tokenizer = train_tokenizer(learned, vocab_size, limit)
        encoder = Encoder(tokenizer)
        written, waiting_size = [0, 0], 0
        waiting: tuple[list[str], list[str]] = ([], [])
        limit = max_tokens or 1 << 62
        with (
            (folder / "train.bin").open("wb") as train,
            (folder / "validation.bin").open("wb") as validation,
        ):
            files = (train, validation)

            def flush() -> None:
                for side, texts in enumerate(waiting):
                    for ids in encoder(texts):
                        ids = ids[: limit - written[side]]
                        files[side].write(ids.tobytes())
                        written[side] += len(ids)
                    texts.clear()

            for text, side in watched("tokenizing", source.size):
                if written[side] < limit:
                    waiting[side].append(text)
                    waiting_size += len(text)
                if waiting_size >= PIECE:
                    flush()
                    waiting_size = 0
                    if (
                        written[0] >= limit and written[1]
                    ):  # a held-out document comes soon, see `split`
                        break
            flush()
    os.environ["TOKENIZERS_PARALLELISM"] = (
        chosen or "false"
    )  # unset, the package complains in processes forked later
    if not all(written):
        raise ValueError(
            f"Too little text in {name!r}: {written[0]:,} tokens to train on, {written[1]:,} held out."
        )
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    if vocab_size is not None and encoder.vocab_size < vocab_size:
        say(
            f"{name}: the text has words for a vocabulary of {encoder.vocab_size} only, not of {vocab_size}"
        )
    return {"vocab_size": encoder.vocab_size, "dtype": encoder.dtype.name}


# --- the cache
# ---------------------------------------------------------------------------------------------------------------


def cached(folder: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What `build(folder)` returned when the folder was written; written now if it is not there or damaged.

    Two processes may call this at once: one builds, the other waits and reads.
    """
    from filelock import FileLock, Timeout

    record, _ = read_record(folder)
    if record is not None:
        return record
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{folder.name}.lock"))
        try:
            lock.acquire(timeout=2)
        except Timeout:
            say(f"another process is writing {folder}: waiting for it")
            lock.acquire()
    except OSError as error:
        raise OSError(error.errno, f"{_not_writable(folder)}: {error.strerror}") from error
    try:
        record, damage = read_record(folder)
        if record is not None:
            return record
        if damage:
            say(f"{damage}: writing it again")
        return _write(folder, build)
    finally:
        lock.release()


def _write(folder: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Build the folder under another name, and rename it. The caller holds the lock."""
    try:
        with whole_folder(folder) as part:
            record = build(part)
            record["files"] = {
                p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)}
                for p in sorted(part.iterdir())
            }
            meta = {"sha256": _record_checksum(record), "record": record}
            (part / "meta.json").write_text(json.dumps(meta, indent=1))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = shutil.disk_usage(folder.parent).free / 1e6
        problem = f"The disk is full ({error.strerror}; {free:.1f} MB free)"
        raise OSError(error.errno, f"{problem}. {_not_writable(folder)}") from error
    return record


def _not_writable(folder: Path) -> str:
    return f"Cannot write tokens to {folder.parent}. Choose another cache folder (--cache, or the variable BLOCKOPT_CACHE)"


def read_record(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """The record of a complete and undamaged folder, or None and what is wrong with it ("" if there is no such folder)."""
    if not folder.exists():
        return None, ""
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_text())
        record: dict[str, Any] = meta["record"]
        if meta["sha256"] != _record_checksum(record):
            raise ValueError("wrong checksum")
        for name, expected in record["files"].items():
            path = folder / name
            if (size := path.stat().st_size) != expected["bytes"]:
                return None, f"{path} has {size:,} bytes instead of {expected['bytes']:,}"
            if sha256(path) != expected["sha256"]:
                raise ValueError("wrong checksum")
    except FileNotFoundError:
        return None, f"{path} is missing"
    except (ValueError, KeyError, TypeError) as error:
        return None, f"{path} is damaged ({error})"
    return record, ""


def _record_checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
