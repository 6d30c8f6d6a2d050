"""Results as aligned text for people and as plain values for files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from blockopt.analysis.spectral.trace import Estimate


def aligned(rows: Sequence[tuple[str, ...]], width: int) -> str:
    """A table of at most `width` columns: labels to the left, numbers to the right.

    Labels that are too long lose their middle, since they begin with a layer and end with a role.

    Example:
        >>> print(aligned([("block", "trace"), ("model.layers.10.self_attn.q_proj.weight:query", "1")], 31))
        block                     trace
        model.layer…weight:query      1
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    widths[0] = min(widths[0], max(width - sum(w + 2 for w in widths[1:]), 8))
    lines = []
    for label, *cells in rows:
        if len(label) > widths[0]:
            end = widths[0] // 2
            label = f"{label[: widths[0] - end - 1]}…{label[-end:]}"
        lines.append(
            "  ".join(
                [label.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells, widths[1:]))]
            )
        )
    return "\n".join(lines)


def number_and_error(estimate: Estimate) -> tuple[str, str]:
    """Two cells: the value, and its standard error.

    Example:
        >>> number_and_error(Estimate(-12.345, 0.678, 20)), number_and_error(Estimate(2.0, 0.0, 3))
        (('-1.23e+01', '7e-01'), ('2.00e+00', '0'))
    """
    return (
        f"{estimate.value:.2e}",
        f"{estimate.standard_error:.0e}" if estimate.standard_error > 0 else "0",
    )


def plain(value: Any) -> Any:
    """A result as dictionaries, lists, strings and finite numbers, as JSON has them; infinity and NaN become None.

    Example:
        >>> plain({"trace": Estimate(2.0, math.inf, 1)})
        {'trace': {'value': 2.0, 'standard_error': None, 'num_products': 1}}
    """
    if isinstance(value, Tensor):
        return plain(value.tolist())
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
