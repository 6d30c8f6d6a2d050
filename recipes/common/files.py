"""Files and folders that are there as a whole or not at all, and their checksums.

Everything is written under another name and then renamed, which is atomic: a reader sees what was
there before or what is there now, also if the writer is killed or the disk is full.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file of any size.

    Example:
        >>> sha256(Path(os.devnull))[:16]
        'e3b0c44298fc1c14'
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a binary file that gets its name, whole and on disk, when the block succeeds."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # several processes may write at once
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file at once; text is written as UTF-8."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Make an empty folder to fill, which becomes `folder` when the block succeeds.

    Only one process may do this at a time: what a killed one has left under that name is deleted.
    """
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        yield part
        shutil.rmtree(folder, ignore_errors=True)
        part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a loss of power, where the system has a way to ask for it."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
