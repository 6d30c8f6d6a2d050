"""Text to token ids: byte-level BPE, a tokenizer of your own, or bytes; kept in a cache.

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

from recipes.common.errors import DiskError, MissingFileError, OfflineError, UsageError
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


def open_tokenizer(name: str) -> Tokenizer:
    """Open a `tokenizer.json` file, a folder that has one, or that of a model of the hub."""
    from tokenizers import Tokenizer

    path = Path(name).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise UsageError(
                f"{path} is no tokenizer of the `tokenizers` package: {error}"
            ) from error
    must = "Must be a tokenizer.json file, a name on the hub, or 'bytes'."
    if path.suffix == ".json" or name.startswith((".", "/", "~")) or path.exists():
        raise MissingFileError(f"No tokenizer {str(path)!r}. {must}")
    huggingface_hub = quiet_hub()
    from huggingface_hub.errors import (
        EntryNotFoundError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    download = huggingface_hub.hf_hub_download
    try:
        return Tokenizer.from_file(download(name, "tokenizer.json", local_files_only=True))
    except LocalEntryNotFoundError:
        pass  # not there yet
    except ValueError as error:
        raise UsageError(f"Invalid tokenizer={name!r}. {must}") from error
    try:
        # Fails at once without a network, where a download would try again and again.
        huggingface_hub.HfApi().model_info(name, timeout=10)
        return Tokenizer.from_file(download(name, "tokenizer.json"))
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise UsageError(f"The hub has no tokenizer.json of {name!r}. {must}") from error
    except Exception as error:  # of the network, whose classes depend on the hub's version
        raise OfflineError(
            f"Cannot reach the Hugging Face hub for the tokenizer {name!r} "
            f"({type(error).__name__}). Give the path of its tokenizer.json; for a fresh model, "
            "it may be left out: then one is trained on the data."
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
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(enough(), trainer)
    return tokenizer


class Encoder:
    """Turns texts into arrays of ids, each with an end of text after it.

    Args:
        tokenizer: A tokenizer, or None for plain bytes.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size, self.end = 256, END_OF_BYTES
        if tokenizer is not None:
            vocabulary = tokenizer.get_vocab()
            self.vocab_size = max(vocabulary.values()) + 1
            ends = [vocabulary[token] for token in ENDS if token in vocabulary]
            if not ends:
                raise UsageError(
                    "The tokenizer has no token for the end of a text. "
                    f"Must have one of {', '.join(ENDS)}."
                )
            self.end = ends[0]
            tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is text
            tokenizer.no_truncation()
            tokenizer.no_padding()
        small = np.uint8 if self.vocab_size <= 1 << 8 else np.uint16
        self.dtype = np.dtype(small if self.vocab_size <= 1 << 16 else np.int32)

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Encode texts; long ones in pieces that end with a line break, to save memory."""
        pieces = [(i, piece) for i, text in enumerate(texts) for piece in _pieces(text)]
        if self.tokenizer is None:
            ids = [np.frombuffer(piece.encode(), np.uint8) for _, piece in pieces]
        else:
            parts = [piece for _, piece in pieces]
            encoded = self.tokenizer.encode_batch_fast(parts, add_special_tokens=False)
            ids = [np.array(e.ids, self.dtype) for e in encoded]
        following = [*(number for number, _ in pieces[1:]), None]
        return [
            part if number == after else np.append(part, part.dtype.type(self.end))
            for part, (number, _), after in zip(ids, pieces, following)
        ]


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE:
        stop = text.rfind("\n", start + PIECE // 2, start + PIECE) + 1 or start + PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]


def write_tokens(
    folder: Path,
    source: Source,
    name: str,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int | None,
    max_tokens: int | None,
    report: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Tokenize a source into `train.bin` and `validation.bin`.

    Args:
        folder: Where to write.
        source: What to tokenize.
        name: The name of the source, for messages.
        tokenizer: A tokenizer, or None for plain bytes or for a BPE to be trained.
        vocab_size: Size of the BPE to train on the training part; None to train none.
        max_tokens: The most tokens to write of each part.
        report: Called with what is about to be done.

    Returns:
        What there is to remember: the size of the vocabulary and the dtype of the files.
    """
    chosen = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = chosen or "true"
    if source.note:
        say(f"{name}: {source.note}")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    where = {"console": console, "transient": True, "disable": not console.is_terminal}
    with Progress(*columns, TimeRemainingColumn(), **where) as progress:

        def watched(what: str, total: int | None) -> Iterator[Document]:
            if report is not None:
                report(f"{name}: {what}")
            task = progress.add_task(f"{name}: {what}", total=total)
            for document in source.documents():
                yield document
                progress.advance(task, len(document.text))
            progress.update(task, completed=total)

        if vocab_size is not None:
            documents = watched("training the tokenizer", source.size)
            learned = (document.text for document in documents if not document.validation)
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
                    if written[0] >= limit and written[1]:  # `split` holds out something early
                        break
            flush()
    # If it is unset, the package complains in processes that are forked later.
    os.environ["TOKENIZERS_PARALLELISM"] = chosen or "false"
    if not all(written):
        found = f"{written[0]:,} tokens to train on, {written[1]:,} held out"
        raise UsageError(f"Too little text in {name!r}: {found}.")
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    if vocab_size is not None and encoder.vocab_size < vocab_size:
        found = f"a vocabulary of {encoder.vocab_size} only, not of {vocab_size}"
        say(f"{name}: the text has words for {found}")
    return {"vocab_size": encoder.vocab_size, "dtype": encoder.dtype.name}


def cached(folder: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return what `build(folder)` returned; call it now if the folder is not there or damaged.

    Several processes may call this at once: one builds, the others wait and read.
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
        raise DiskError(f"{_not_writable(folder)}: {error.strerror}") from error
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
        raise DiskError(f"{problem}. {_not_writable(folder)}") from error
    return record


def _not_writable(folder: Path) -> str:
    other = "Choose another cache folder (--cache, or the variable BLOCKOPT_CACHE)"
    return f"Cannot write tokens to {folder.parent}. {other}"


def read_record(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the record of an intact folder; or None and what is wrong, "" if there is none."""
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
