"""Where text comes from: the standard library, files and folders, data sets of the hub.

A `Source` yields documents, each for training or held out, always in the same order, and has a hash
of their content. Documents are held out by a hash of their name (files) or of their text (rows), so
the same document is on the same side in every run and on every machine. Data that come with a
validation part keep it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from blockopt.files import write_whole
from recipes.common.errors import MissingFileError, OfflineError, UsageError, import_package
from recipes.common.files import sha256

POSSIBLE = (
    "Possible are: 'stdlib' (the source of Python's standard library), 'addition' or "
    "'addition:DIGITS', a file or folder of text, JSONL or Parquet, or a data set of the Hugging "
    "Face hub as NAME or NAME:CONFIG, such as wikitext:wikitext-2-raw-v1"
)
END_OF_TEXT = "<|endoftext|>"
KINDS = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".py"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".parquet": "parquet",
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


class Document(NamedTuple):
    """One text, and whether it is held out from training."""

    text: str
    validation: bool


class Source(NamedTuple):
    """Documents that can be read any number of times.

    Attributes:
        content: A hash of the content of all documents.
        documents: Each call starts reading at the first document.
        size: Bytes to read, or None if that is not known beforehand.
        note: What the user should know about the choice of documents.
    """

    content: str
    documents: Callable[[], Iterator[Document]]
    size: int | None = None
    note: str = ""


def open_source(
    name: str,
    *,
    cache: Path,
    validation_fraction: float,
    text_column: str,
    streaming: bool,
    max_tokens: int | None,
) -> Source:
    """Find what a name stands for. See `load_data` in `token_data.py` for the arguments."""
    if name == "stdlib":
        return from_files(standard_library(), validation_fraction, text_column)
    path = Path(name).expanduser()
    looks_like_a_path = name.startswith((".", "/", "~")) or name.endswith("/") or kind_of(path)
    if looks_like_a_path or path.exists() or any(sign in name for sign in "*?["):
        return from_files(files_at(name), validation_fraction, text_column)
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?", name):
        if streaming and max_tokens is None:
            raise UsageError("Invalid streaming=True without max_tokens, as a stream may not end.")
        return from_hub(name, cache, validation_fraction, text_column, streaming)
    raise UsageError(f"Unknown data {name!r}. {POSSIBLE}.")


def held_out(name: str, fraction: float) -> bool:
    """Whether a document is held out: true for that fraction of all names, by their hash.

    Example:
        >>> sum(held_out(str(i), 0.05) for i in range(10_000))
        508
    """
    return _place(name) < fraction


def _place(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def split(named: Iterable[tuple[str, str]], fraction: float) -> Iterator[Document]:
    r"""Split (name, text) pairs by a hash of the name; of too few documents hold out the ends.

    Example:
        >>> for document in split([("one", "first line\nsecond line\n")], 0.4):
        ...     print(document)
        Document(text='first line\n', validation=False)
        Document(text='second line\n', validation=True)
    """
    rest = iter(named)
    first = list(itertools.islice(rest, max(20, math.ceil(10 / fraction))))
    if len(first) < max(20, 1 / fraction):
        for _, text in first:
            near, cut = (int(len(text) * (1 - share)) for share in (2 * fraction, fraction))
            cut = text.rfind("\n", near, cut) + 1 or cut
            parts = ((text[:cut], False), (text[cut:], True))
            yield from (Document(part, at_end) for part, at_end in parts if part)
        return
    lowest = min(_place(name) for name, _ in first)
    for name, text in itertools.chain(first, rest):
        yield Document(text, held_out(name, fraction) or _place(name) == lowest)  # one at least


def standard_library() -> dict[str, Path]:
    """Return {relative name: path} of the modules of Python's standard library, without tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - skipped
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise MissingFileError(
            f"This Python has no source of its standard library in {root}. {POSSIBLE}."
        )
    return {path.relative_to(root).as_posix(): path for path in found}


def kind_of(path: Path) -> str | None:
    """Return the kind of a file by its name, which may end in a suffix of compression."""
    return KINDS.get(Path(path.stem if path.suffix in COMPRESSED else path).suffix)


def files_at(name: str) -> dict[str, Path]:
    """Return {relative name: path} of the files of a path, a folder or a pattern like `*.jsonl`."""
    path = Path(name).expanduser()
    if path.is_file():
        return {path.name: path}
    if path.is_dir():
        found = {p.relative_to(path): p for p in path.rglob("*") if p.is_file() and kind_of(p)}
        found = {n: p for n, p in found.items() if not any(s.startswith(".") for s in n.parts)}
        if not found:
            raise MissingFileError(f"No files in {path} that end in one of {', '.join(KINDS)}.")
        return {name.as_posix(): p for name, p in found.items()}
    plain = itertools.takewhile(lambda part: not any(sign in part for sign in "*?["), path.parts)
    anchor = Path(*plain)
    wild = anchor.glob(str(path.relative_to(anchor))) if anchor != path else ()
    matches = [p for p in wild if p.is_file()]
    if not matches:
        raise MissingFileError(f"No file or folder {name!r} in {Path.cwd()}. {POSSIBLE}.")
    return {p.relative_to(anchor).as_posix(): p for p in matches}


def from_files(files: dict[str, Path], fraction: float, text_column: str) -> Source:
    """Read text files, a document each unless <|endoftext|> cuts them, and rows of other files.

    Of several files, those called `validation`, `valid`, `val` or `dev` (a word of the name, as in
    `data-valid.jsonl`) are held out as a whole, and those called `test` are left out. Modules of
    Python are not, as their names mean something else.
    """
    tests = {name for name in files if _called("test", name)}
    if len(tests) == len(files):  # they were asked for
        tests = set()
    order = sorted(files.keys() - tests, key=_place)  # not by letters, which may mean something
    valid = {name for name in order if _called("validation|valid|val|dev", name)}
    valid = valid if len(valid) < len(order) else set()
    content = hashlib.sha256()
    for name in order:
        role = ["validation"] if name in valid else []
        content.update(json.dumps([name, sha256(files[name]), *role]).encode())

    def of(names: list[str]) -> Iterator[tuple[str, str]]:
        for name in names:
            if kind_of(files[name]) in ("text", None):
                parts = [p for p in _read_text(files[name]).split(END_OF_TEXT) if p.strip()]
                one = len(parts) == 1
                yield from ((name if one else f"{name}#{i}", p) for i, p in enumerate(parts))
        for kind in ("json", "parquet"):
            for path in (files[name] for name in sorted(names) if kind_of(files[name]) == kind):
                yield from texts(_read_rows(path, kind), text_column, str(path))

    def documents() -> Iterator[Document]:
        if valid:
            for side in (True, False):
                chosen = [name for name in order if (name in valid) == side]
                yield from (Document(text, side) for _, text in of(chosen))
        else:
            yield from split(of(order), fraction)

    by_name = (("held out", valid), ("left out", tests))
    note = "; ".join(f"{what} by name: {_some(names)}" for what, names in by_name if names)
    size = sum(files[name].stat().st_size for name in order)
    return Source(content.hexdigest(), documents, size, note)


def _called(words: str, name: str) -> bool:
    """Whether one of the words, with or without a number, is a word of a file's name."""
    found = re.search(rf"(^|[._/-])({words})\d*([._/-]|$)", name)
    return found is not None and not name.endswith(".py")


def _some(names: set[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def _read_text(path: Path) -> str:
    import fsspec

    with fsspec.open(str(path), "rb", compression="infer") as file:
        data = file.read()
    if b"\0" in data[:1000]:
        raise UsageError(f"{path} is no text file: it has zero bytes.")
    try:
        return str(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is no UTF-8 text: byte {data[error.start]:#04x} at {error.start:,}. "
            "Convert it, for example with `iconv -f LATIN1 -t UTF-8`, or move it elsewhere."
        ) from error


def _read_rows(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Read the rows of a JSONL or Parquet file, one after another."""
    load = quiet_datasets().load_dataset
    try:
        rows = load(kind, data_files=str(path), split="train", streaming=True)
    except StopIteration:  # what the package makes of an empty file
        return
    yield from rows


def texts(rows: Iterable[dict[str, Any]], column: str, where: str) -> Iterator[tuple[str, str]]:
    """Return name and text of each row that is not empty; equal rows have the same name."""
    try:
        for row in rows:
            if column not in row:
                there = ", ".join(map(repr, row))
                raise UsageError(f"No column {column!r} in {where}. Those there are: {there}.")
            text = row[column]
            if not isinstance(text, str | None):
                found = f"{type(text).__name__}, for example {text!r:.50}"
                raise UsageError(f"Column {column!r} in {where} holds {found}, not text.")
            if text and text.strip():
                yield text, text
    except Exception as error:
        if isinstance(error, UnicodeDecodeError) or type(error).__module__.startswith("pyarrow"):
            raise UsageError(f"Cannot read {where}: {error}") from error
        raise


def from_hub(name: str, cache: Path, fraction: float, text_column: str, streaming: bool) -> Source:
    """Read a data set of the hub at its present revision, or offline at the one last seen."""
    repository, _, config = name.partition(":")
    revision, unreachable = hub_revision(repository, cache)

    def documents() -> Iterator[Document]:
        if unreachable:
            raise _offline(repository, unreachable) from unreachable
        datasets = quiet_datasets()
        try:
            options = {"revision": revision, "streaming": streaming}
            parts = datasets.load_dataset(repository, config or None, **options)
        except ConnectionError as error:
            raise _offline(repository, error) from error
        except RuntimeError as error:  # such as "Dataset scripts are no longer supported"
            raise UsageError(
                f"Cannot load {name!r} from the hub: {error}. Choose a data set that is stored as "
                "Parquet or JSONL, such as HuggingFaceFW/fineweb:sample-10BT."
            ) from error
        except (ValueError, datasets.exceptions.DatasetNotFoundError) as error:
            raise UsageError(
                f"Cannot load {name!r} from the hub: {error}\n"
                "A configuration is given as NAME:CONFIG."
            ) from error
        if "train" not in parts:
            there = ", ".join(map(repr, parts))
            raise UsageError(f"{name!r} has no part 'train'. Those there are: {there}.")
        training = texts(parts["train"], text_column, name)
        if "validation" in parts:
            validation = texts(parts["validation"], text_column, name)
            yield from (Document(text, True) for _, text in validation)
            yield from (Document(text, False) for _, text in training)
        else:
            yield from split(training, fraction)

    if revision is None:  # offline, with the copy that the hub's own cache may have: hash its text
        content = hashlib.sha256()
        for document in documents():
            content.update(repr(document).encode())
        return Source(content.hexdigest(), documents)
    return Source(f"hub {name} {revision}", documents)


def hub_revision(repository: str, cache: Path) -> tuple[str | None, Exception | None]:
    """Return the data set's commit, and the error because of which it cannot be loaded, if any.

    Without a network the commit is the one last seen, whose tokens may be in the cache. With
    HF_HUB_OFFLINE the copy in the hub's own cache may be loaded; its commit may be unknown, None.
    """
    huggingface_hub = quiet_hub()
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    seen = cache / "hub" / f"{repository.replace('/', '--')}.json"
    try:
        revision = huggingface_hub.HfApi().dataset_info(repository, timeout=10).sha
    except GatedRepoError as error:
        raise UsageError(
            f"The data set {repository!r} asks for consent: accept it on its page, "
            "then `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"Unknown data {repository!r}: the hub has no such data set. {POSSIBLE}."
        ) from error
    except Exception as error:  # of the network, whose classes depend on the hub's version
        wanted = isinstance(error, OfflineModeIsEnabled)
        if not seen.exists() and not wanted:
            raise _offline(repository, error) from error
        known = json.loads(seen.read_text())["revision"] if seen.exists() else None
        return known, None if wanted else error
    if not seen.exists() or json.loads(seen.read_text())["revision"] != revision:
        seen.parent.mkdir(parents=True, exist_ok=True)
        write_whole(seen, json.dumps({"revision": revision}))
    return revision, None


def _offline(name: str, error: Exception) -> OfflineError:
    return OfflineError(
        f"Cannot reach the Hugging Face hub for {name!r} ({type(error).__name__}). Prepare it once "
        f"where there is a network, with `python recipes/prepare_data.py --data {name}` and the "
        "same cache folder; or set HF_HUB_OFFLINE=1 if the hub's own cache has it; or use data "
        f"that need no network. {POSSIBLE}."
    )


def quiet_hub() -> Any:
    """Import `huggingface_hub` without its telemetry and log messages."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    huggingface_hub = import_package("huggingface_hub", "The hub")
    huggingface_hub.logging.set_verbosity(huggingface_hub.logging.CRITICAL)
    return huggingface_hub


def quiet_datasets() -> Any:
    """Import `datasets` without telemetry, log messages and, outside terminals, progress bars."""
    quiet_hub()
    datasets = import_package("datasets", "Reading these data")
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not os.isatty(2):
        datasets.disable_progress_bars()
    return datasets
