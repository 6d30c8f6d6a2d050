"""Tables as aligned text: labels to the left, numbers to the right."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return a table of at most `width` columns, or as wide as its cells.

    Labels that are too long lose their middle, since they begin with a module and end with a role.

    Example:
        >>> name = "model.layers.10.self_attn.q_proj.weight query"
        >>> print(aligned([("block", "trace"), (name, "1")], 31))
        block                     trace
        model.layer…weight query      1
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    if width is not None:
        widths[0] = min(widths[0], max(width - sum(w + 2 for w in widths[1:]), 8))
    lines = []
    for label, *cells in rows:
        if len(label) > widths[0]:
            end = widths[0] // 2
            label = f"{label[: widths[0] - end - 1]}…{label[-end:]}"
        numbers = (cell.rjust(w) for cell, w in zip(cells, widths[1:]))
        lines.append("  ".join([label.ljust(widths[0]), *numbers]).rstrip())
    return "\n".join(lines)
