"""Results of a long measurement that survive a kill: saved piece by piece, each time as a whole."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockopt.files import whole_file
from blockopt.measure.closures import trainable_parameters


class PartialResultsError(ValueError):
    """Raised if a file of partial results cannot be used."""


class PartialResults:
    """Finished pieces of a measurement by number, in one file that is whole at any moment.

    Args:
        path: The file, which need not be there; None to keep nothing.
        key: What the pieces depend on, as `fingerprint` returns it.

    Attributes:
        pieces: What has been finished, in this run or an earlier one.

    Raises:
        PartialResultsError: If the file is of another measurement, or cannot be read.
    """

    def __init__(self, path: Path | str | None, key: str) -> None:
        self._path, self._key = None if path is None else Path(path), key
        self.pieces: dict[int, Any] = {}
        if self._path is None or not self._path.exists():
            return
        try:
            saved = torch.load(self._path, weights_only=True)
            found, self.pieces = saved["key"], saved["pieces"]
        except Exception as error:  # of many kinds: it is not our file, or it is damaged
            raise PartialResultsError(
                f"{self._path} holds no partial results that can be read: {error}. Delete it to "
                "start anew."
            ) from error
        if found != key:
            raise PartialResultsError(
                f"The partial results in {self._path} are of other weights, data or options. "
                "Delete the file to start anew, or give another one."
            )

    def save(self, number: int, piece: Any) -> None:
        """Add a piece, and write all of them."""
        self.pieces[number] = piece
        if self._path is not None:
            with whole_file(self._path) as file:
                torch.save({"key": self._key, "pieces": self.pieces}, file)


def fingerprint(model: nn.Module, *settings: object) -> str:
    """Return a checksum of the trainable weights and of settings, which print what they are.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> first = fingerprint(model, "hessian", 3)
        >>> first == fingerprint(model, "hessian", 3), first == fingerprint(model, "hessian", 4)
        (True, False)
    """
    digest = hashlib.sha256(repr(settings).encode())
    for name, p in trainable_parameters(model).items():
        digest.update(f"{name} {tuple(p.shape)} {p.dtype}".encode())
        flat = p.detach().contiguous().view(-1).view(torch.uint8).cpu()
        digest.update(flat.numpy().data)
    return digest.hexdigest()
