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
    """Write the state; floats keep all their bits, and scales that repeat are written once.

    Example:
        >>> to_text({"num_steps": 3, "log_scales": {"w": torch.tensor([0.5, 0.5, 0.25])}})
        '{"num_steps": 3, "log_scales": {"w": [[0.5, 2], [0.25, 1]]}}'
    """
    runs = {name: _runs(logs) for name, logs in state["log_scales"].items()}
    return json.dumps({**state, "log_scales": runs})


def from_text(text: str) -> dict[str, Any]:
    """The inverse of `to_text`."""
    state: dict[str, Any] = json.loads(text)
    logs = {}
    for name, runs in state["log_scales"].items():
        values = [value for value, count in runs for _ in range(count)]
        logs[name] = torch.tensor(values, dtype=torch.float64)
    return {**state, "log_scales": logs}


def _runs(values: Tensor) -> list[list[float]]:
    """Each value and how often it stands in a row."""
    return [[value, len(list(same))] for value, same in groupby(values.tolist())]
