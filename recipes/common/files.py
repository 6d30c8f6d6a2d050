"""Folders that are there as a whole or not at all, as `blockopt.files` has it, and checksums."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
