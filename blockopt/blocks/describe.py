"""The table of a model's blocks, for people."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from blockopt.blocks.blocks import ROLES, Blocks
from blockopt.blocks.find import find_blocks
from blockopt.blocks.split import block_numel
from blockopt.tables import aligned


def describe(
    model: nn.Module, blocks: Mapping[str, Blocks] | None = None, *, by_layer: bool = False
) -> str:
    """A table of the blocks of `model`: role, layer, number of blocks, parameters and their share.

    Args:
        model: Any module; one on the `meta` device will do.
        blocks: What `find_blocks(model)` returns, with your own options; found here by default.
        by_layer: One line for each role of each layer rather than one for each role.

    Example:
        >>> print(describe(nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32)))
        role     layer  blocks  parameters   share
        query        -       2         256   11.5%
        key          -       2         256   11.5%
        value        -       2         256   11.5%
        output       -       2         256   11.5%
        mlp_in       -      32         512   23.0%
        mlp_out      -      16         512   23.0%
        norm         -       4          64    2.9%
        bias         -      55         112    5.0%
        total              115       2,224  100.0%
    """
    blocks = find_blocks(model) if blocks is None else blocks
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    layers: dict[tuple[str, int], set[int | None]] = {}
    counts: dict[tuple[str, int], list[int]] = {}
    for name, entry in blocks.items():
        for role, numel in zip(entry.block_roles, block_numel(shapes[name], entry.split).tolist()):
            key = (role, -1 if entry.layer is None or not by_layer else entry.layer)
            layers.setdefault(key, set()).add(entry.layer)
            count = counts.setdefault(key, [0, 0])
            count[0] += 1
            count[1] += numel
    total = sum(count[1] for count in counts.values())
    rows = [("role", "layer", "blocks", "parameters", "share")]
    for key in sorted(counts, key=lambda key: (key[1], ROLES.index(key[0]))):
        number, numel = counts[key]
        rows.append(
            (key[0], _layer_range(layers[key]), f"{number:,}", f"{numel:,}", f"{numel / total:.1%}")
        )
    rows.append(("total", "", f"{sum(c[0] for c in counts.values()):,}", f"{total:,}", "100.0%"))
    return aligned(rows)


def _layer_range(layers: set[int | None]) -> str:
    numbers = sorted(layer for layer in layers if layer is not None)
    if not numbers:
        return "-"
    span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    return f"{span}, -" if None in layers else span
