"""The state of `BlockLR` as one string, which the optimizer's checkpoint carries in a group.

A string in a parameter group is what every checkpoint format keeps: torch's own, with or without
`weights_only=True`, that of `accelerate` and Lightning, and DCP, whose plans need the same keys in
the state that is saved and in the one that is loaded, however long the history.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor


def to_text(state: Mapping[str, Any]) -> str:
    """Write a state of numbers, strings, lists, dictionaries and float64 vectors.

    Floats keep all their bits, and values that repeat in a vector are written once.

    Example:
        >>> to_text({"num_steps": 3, "scales": torch.tensor([0.5, 0.5, 0.25])})
        '{"num_steps": 3, "scales": {"runs": [[0.5, 2], [0.25, 1]]}}'
    """
    return json.dumps(state, default=_runs)


def from_text(text: str) -> dict[str, Any]:
    """The inverse of `to_text`."""
    state: dict[str, Any] = json.loads(text, object_hook=_vector)
    return state


def _runs(vector: Tensor) -> dict[str, list[Any]]:
    """Each value and how often it stands in a row."""
    return {"runs": [[value, len(list(same))] for value, same in groupby(vector.tolist())]}


def _vector(found: dict[str, Any]) -> Any:
    if found.keys() != {"runs"}:
        return found
    values = [value for value, count in found["runs"] for _ in range(count)]
    return torch.tensor(values, dtype=torch.float64)
