"""Files that can be trusted: their checksum, and small ones that are there as a whole or not at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def sha256(path: Path) -> str:
    """The SHA-256 of a file of any size.

    Example:
        >>> sha256(Path(os.devnull))[:16]
        'e3b0c44298fc1c14'
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Write a small file under another name, force it to disk, and rename it, which is atomic."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
