"""Results as cells of a table for people, and as plain values for files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from blockopt.analysis.spectral.estimate import Estimate
from blockopt.blocks import BlockGroup


def number_and_error(estimate: Estimate) -> tuple[str, str]:
    """Return two cells: the value and its standard error.

    Example:
        >>> number_and_error(Estimate(-12.345, 0.678, 20)), number_and_error(Estimate(2.0, 0.0, 3))
        (('-1.23e+01', '7e-01'), ('2.00e+00', '0'))
    """
    error = estimate.standard_error
    return f"{estimate.value:.2e}", f"{error:.0e}" if error > 0 else "0"


def duration(seconds: float) -> str:
    """Return seconds in units that people read.

    Example:
        >>> duration(3.21), duration(100), duration(7300)
        ('3.2 s', '1 min 40 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{minutes // 60} h {minutes % 60} min"


def plain(value: Any) -> Any:
    """Return a result as dictionaries, lists, strings and finite numbers, as JSON has them.

    Infinity and NaN become None, and groups of blocks become strings.

    Example:
        >>> plain({BlockGroup("query", 3): Estimate(2.0, math.inf, 1)})
        {'layer 3 query': {'value': 2.0, 'standard_error': None, 'num_products': 1}}
    """
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, BlockGroup):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
