"""Folders to write to, those that are there as a whole or not at all, and checksums."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recipes.common.errors import DiskError


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file of any size.

    Example:
        >>> sha256(Path("/dev/null"))[:16]
        'e3b0c44298fc1c14'
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def output_folder(folder: Path) -> Path:
    """Make the folder that a script writes to, before it works for hours.

    Raises:
        DiskError: If it cannot be made, or nothing can be written to it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise DiskError(
            f"Cannot write to the folder {folder}: {error.strerror}. Choose another one."
        ) from error


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
