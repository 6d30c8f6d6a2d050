"""Where text comes from: the standard library, files and folders, data sets of the Hugging Face hub.

A `Source` gives documents, each meant for training or held out, always in the same order, and a
hash of what they are made of. Documents are held out by a hash of their name (files) or of their
text (rows), so the same document is on the same side in every run and on every machine. Data that
come with a validation part keep it.
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

from recipes.common.files import sha256, write_whole

POSSIBLE = (
    "Possible are: 'stdlib' (the source of Python's standard library), 'addition' or 'addition:DIGITS', a file or folder of "
    "text, JSONL or Parquet, or a data set of the Hugging Face hub as NAME or NAME:CONFIG, such as wikitext:wikitext-2-raw-v1"
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
    """Documents that can be read again and again.

    Attributes:
        content: A hash of all that the documents are made of.
        documents: Starts reading at the first document, at every call.
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
    """Find what a name stands for. See `recipes.data.token_data.load_data` for the arguments."""
    if name == "stdlib":
        return from_files(standard_library(), validation_fraction, text_column)
    path = Path(name).expanduser()
    wild = any(sign in name for sign in "*?[")
    if (
        wild
        or path.exists()
        or kind_of(path)
        or name.startswith((".", "/", "~"))
        or name.endswith("/")
    ):
        return from_files(files_at(name), validation_fraction, text_column)
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?", name):
        if streaming and max_tokens is None:
            raise ValueError(
                "Invalid streaming=True without max_tokens. Must be given: a stream may have no end in sight."
            )
        return from_hub(name, cache, validation_fraction, text_column, streaming)
    raise ValueError(f"Unknown data {name!r}. {POSSIBLE}.")


def held_out(name: str, fraction: float) -> bool:
    """Whether a document is held out: true for that fraction of all names, by a hash that is the same everywhere.

    Example:
        >>> sum(held_out(str(i), 0.05) for i in range(10_000))
        508
    """
    return _place(name) < fraction


def _place(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def split(named: Iterable[tuple[str, str]], fraction: float) -> Iterator[Document]:
    r"""Split (name, text) pairs by a hash of the name, or, where there are too few for that, hold out the end of each.

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
            yield from (
                Document(part, at_end)
                for part, at_end in ((text[:cut], False), (text[cut:], True))
                if part
            )
        return
    lowest = min(_place(name) for name, _ in first)
    for name, text in itertools.chain(first, rest):
        yield Document(text, held_out(name, fraction) or _place(name) == lowest)  # one at least


def standard_library() -> dict[str, Path]:
    """The modules of Python's standard library, without its tests: {relative name: path}."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    found: dict[str, Path] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - skipped
        found |= {
            (path := Path(folder, name)).relative_to(root).as_posix(): path
            for name in names
            if name.endswith(".py")
        }
    if not found:
        raise FileNotFoundError(
            f"This Python has no source of its standard library in {root}. {POSSIBLE}."
        )
    return found


def kind_of(path: Path) -> str | None:
    """The kind of a file by its name, below a suffix of compression."""
    return KINDS.get(Path(path.stem if path.suffix in COMPRESSED else path).suffix)


def files_at(name: str) -> dict[str, Path]:
    """The files that a path, a folder or a pattern such as `data/*.jsonl` stands for: {relative name: path}."""
    path = Path(name).expanduser()
    if path.is_file():
        return {path.name: path}
    if path.is_dir():
        found = {
            p.relative_to(path).as_posix(): p for p in path.rglob("*") if p.is_file() and kind_of(p)
        }
        visible = {
            key: p
            for key, p in found.items()
            if not any(part.startswith(".") for part in Path(key).parts)
        }
        if not visible:
            raise FileNotFoundError(f"No files in {path} that end in one of {', '.join(KINDS)}.")
        return visible
    anchor = Path(
        *itertools.takewhile(lambda part: not any(sign in part for sign in "*?["), path.parts)
    )
    matches = (
        [p for p in anchor.glob(str(path.relative_to(anchor))) if p.is_file()]
        if anchor != path
        else []
    )
    if not matches:
        raise FileNotFoundError(f"No file or folder {name!r} in {Path.cwd()}. {POSSIBLE}.")
    return {p.relative_to(anchor).as_posix(): p for p in matches}


def from_files(files: dict[str, Path], fraction: float, text_column: str) -> Source:
    """Text files, each a document (or several, with <|endoftext|> between), and rows of JSONL and Parquet files.

    Of several files, those called `validation`, `valid`, `val` or `dev` (a word of the name, as in
    `data-valid.jsonl`) are held out as a whole, and those called `test` are left out; not so
    modules of Python, where the name says something else.
    """
    tests = {name for name in files if _called("test", name)}
    if len(tests) == len(files):  # they were asked for
        tests = set()
    order = sorted(
        files.keys() - tests, key=lambda name: hashlib.sha256(name.encode()).digest()
    )  # not all letters A first
    valid = {name for name in order if _called("validation|valid|val|dev", name)}
    valid = valid if len(valid) < len(order) else set()
    content = hashlib.sha256()
    for name in order:
        role = ["validation"] if name in valid else []
        content.update(json.dumps([name, sha256(files[name]), *role]).encode())

    def of(names: Iterable[str]) -> Iterator[tuple[str, str]]:
        names = list(names)
        for name in names:
            if kind_of(files[name]) in ("text", None):
                parts = [
                    part for part in _read_text(files[name]).split(END_OF_TEXT) if part.strip()
                ]
                yield from (
                    (name if len(parts) == 1 else f"{name}#{i}", part)
                    for i, part in enumerate(parts)
                )
        for kind in ("json", "parquet"):
            for path in (files[name] for name in sorted(names) if kind_of(files[name]) == kind):
                yield from texts(_read_rows(path, kind), text_column, str(path))

    def documents() -> Iterator[Document]:
        if valid:
            for names, at_side in ((valid, True), (set(order) - valid, False)):
                yield from (
                    Document(text, at_side)
                    for _, text in of(name for name in order if name in names)
                )
        else:
            yield from split(of(order), fraction)

    said = [
        f"{what} by name: {_some(names)}"
        for what, names in (("held out", valid), ("left out", tests))
        if names
    ]
    return Source(
        content.hexdigest(),
        documents,
        sum(files[name].stat().st_size for name in order),
        "; ".join(said),
    )


def _called(words: str, name: str) -> bool:
    """Whether one of the words, with or without a number, is a word of a file's name."""
    return re.search(rf"(^|[._/-])({words})\d*([._/-]|$)", name) is not None and not name.endswith(
        ".py"
    )


def _some(names: set[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(sorted(names)[:3]) + more


def _read_text(path: Path) -> str:
    import fsspec

    with fsspec.open(str(path), "rb", compression="infer") as file:
        data = file.read()
    if b"\0" in data[:1000]:
        raise ValueError(f"{path} is no text file: it has zero bytes.")
    try:
        return str(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is no UTF-8 text: byte {data[error.start]:#04x} at {error.start:,}. Convert it, for example with "
            "`iconv -f LATIN1 -t UTF-8`, or move it elsewhere."
        ) from error


def _read_rows(path: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL or Parquet file, one after another."""
    try:
        rows = quiet_datasets().load_dataset(
            kind, data_files=str(path), split="train", streaming=True
        )
    except StopIteration:  # what the package makes of an empty file
        return
    yield from rows


def texts(rows: Iterable[dict[str, Any]], column: str, where: str) -> Iterator[tuple[str, str]]:
    """The text of each row, as its name too: equal rows end on the same side. Empty rows are left out."""
    try:
        for row in rows:
            if column not in row:
                raise ValueError(
                    f"No column {column!r} in {where}. Those there are: {', '.join(map(repr, row))}."
                )
            text = row[column]
            if not isinstance(text, str | None):
                raise ValueError(
                    f"Column {column!r} in {where} holds {type(text).__name__}, for example {text!r:.50}, not text."
                )
            if text and text.strip():
                yield text, text
    except Exception as error:
        if isinstance(error, UnicodeDecodeError) or type(error).__module__.startswith("pyarrow"):
            raise ValueError(f"Cannot read {where}: {error}") from error
        raise


def from_hub(name: str, cache: Path, fraction: float, text_column: str, streaming: bool) -> Source:
    """A data set of the hub, at its present revision; offline at the revision that was last seen."""
    repository, _, config = name.partition(":")
    revision, unreachable = hub_revision(repository, cache)

    def documents() -> Iterator[Document]:
        if unreachable:
            raise _offline(repository, unreachable) from unreachable
        datasets = quiet_datasets()
        try:
            parts = datasets.load_dataset(
                repository, config or None, revision=revision, streaming=streaming
            )
        except ConnectionError as error:
            raise _offline(repository, error) from error
        except RuntimeError as error:  # such as "Dataset scripts are no longer supported"
            raise ValueError(
                f"Cannot load {name!r} from the hub: {error}. Choose a data set that is stored as Parquet or JSONL, such as "
                "HuggingFaceFW/fineweb:sample-10BT."
            ) from error
        except (ValueError, datasets.exceptions.DatasetNotFoundError) as error:
            raise ValueError(
                f"Cannot load {name!r} from the hub: {error}\nA configuration is given as NAME:CONFIG."
            ) from error
        if "train" not in parts:
            raise ValueError(
                f"{name!r} has no part 'train'. Those there are: {', '.join(map(repr, parts))}."
            )
        training = texts(parts["train"], text_column, name)
        if "validation" in parts:
            yield from (
                Document(text, True) for _, text in texts(parts["validation"], text_column, name)
            )
            yield from (Document(text, False) for _, text in training)
        else:
            yield from split(training, fraction)

    if (
        revision is None
    ):  # offline, with a copy that the hub's own cache may have: all its text is what names it
        content = hashlib.sha256()
        for document in documents():
            content.update(repr(document).encode())
        return Source(content.hexdigest(), documents)
    return Source(f"hub {name} {revision}", documents)


def hub_revision(repository: str, cache: Path) -> tuple[str | None, Exception | None]:
    """The data set's commit, and why it cannot be loaded, if so.

    Without a network the commit is the one last seen, whose tokens may be in the cache; it may be
    loaded if HF_HUB_OFFLINE asks for the copy that the hub's own cache has. Then the commit may be
    None, for whatever copy there is.
    """
    huggingface_hub = quiet_hub()
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    seen = cache / "hub" / f"{repository.replace('/', '--')}.json"
    try:
        revision = huggingface_hub.HfApi().dataset_info(repository, timeout=10).sha
    except GatedRepoError as error:
        raise ValueError(
            f"The data set {repository!r} asks for consent: accept on its page, then `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"Unknown data {repository!r}: the hub has no such data set. {POSSIBLE}."
        ) from error
    except Exception as error:  # of the network, whose classes depend on the hub's version
        wanted = isinstance(error, OfflineModeIsEnabled)
        if not seen.exists() and not wanted:
            raise _offline(repository, error) from error
        return json.loads(seen.read_text())[
            "revision"
        ] if seen.exists() else None, None if wanted else error
    if not seen.exists() or json.loads(seen.read_text())["revision"] != revision:
        seen.parent.mkdir(parents=True, exist_ok=True)
        write_whole(seen, json.dumps({"revision": revision}))
    return revision, None


def _offline(name: str, error: Exception) -> ConnectionError:
    return ConnectionError(
        f"Cannot reach the Hugging Face hub for {name!r} ({type(error).__name__}). Prepare it once where there is a network, "
        f"with `python recipes/data.py --data {name}` and the same cache folder; or set HF_HUB_OFFLINE=1 if the hub's own "
        f"cache has it; or use data that need no network. {POSSIBLE}."
    )


def quiet_hub() -> Any:
    """The `huggingface_hub` package without its telemetry and log messages."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            "The hub needs the package `huggingface_hub`: pip install huggingface_hub"
        ) from error
    huggingface_hub.logging.set_verbosity(huggingface_hub.logging.CRITICAL)
    return huggingface_hub


def quiet_datasets() -> Any:
    """The `datasets` package without telemetry, log messages and, where nobody watches, progress bars."""
    quiet_hub()
    try:
        import datasets
    except ImportError as error:
        raise ImportError("These data need the package `datasets`: pip install datasets") from error
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not os.isatty(2):
        datasets.disable_progress_bars()
    return datasets
