"""The table of a model's blocks, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from blockopt.blocks.blocks import ROLES, Blocks
from blockopt.blocks.find import find_blocks
from blockopt.blocks.split import block_numel
from blockopt.tables import aligned

WITH_HEADS = ("query", "key", "value", "output", "gate")


def describe(
    model: nn.Module, blocks: Mapping[str, Blocks] | None = None, *, by_layer: bool = False
) -> str:
    """A table of the blocks of `model`, by role: where they are, how many, and what updates them.

    `scale of a` says what one scale of `BlockLR(by="head")` applies to: a head, a row (one token or
    neuron), a whole tensor, or several of these. `BlockMuon` says which update the role gets there:
    Muon, AdamW, whitened steps for embeddings and heads, or several of these.

    Args:
        model: Any module; one on the `meta` device will do.
        blocks: What `find_blocks(model)` returns, with your own options; found here by default.
        by_layer: One line for each role of each layer rather than one for each role.

    Example:
        >>> print(describe(nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32)))
        role     layer  blocks  parameters   share       scale of a  BlockMuon
        query        -       2         256   11.5%             head       Muon
        key          -       2         256   11.5%             head       Muon
        value        -       2         256   11.5%             head       Muon
        output       -       2         256   11.5%             head       Muon
        mlp_in       -      32         512   23.0%              row       Muon
        mlp_out      -      16         512   23.0%              row       Muon
        norm         -       4          64    2.9%           tensor      AdamW
        bias         -      55         112    5.0%  head/row/tensor      AdamW
        total              115       2,224  100.0%
    """
    blocks = find_blocks(model) if blocks is None else blocks
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found: dict[tuple[str, int], _Row] = {}
    for name, entry in blocks.items():
        numel = block_numel(shapes[name], entry.split).tolist()
        muon = entry.hidden_matrices(shapes[name]) is not None
        update = "Muon" if muon else "whitened" if entry.is_table(shapes[name]) else "AdamW"
        for role in dict.fromkeys(entry.roles):
            key = (role, -1 if entry.layer is None or not by_layer else entry.layer)
            row = found.setdefault(key, _Row([], [], set(), set(), set()))
            sizes = [size for r, size in zip(entry.block_roles, numel) if r == role]
            row.blocks.append(len(sizes))
            row.entries.append(sum(sizes))
            row.layers.add(entry.layer)
            row.units.add(_unit(entry, role))
            row.updates.add(update)
    total = sum(sum(row.entries) for row in found.values())
    rows = [("role", "layer", "blocks", "parameters", "share", "scale of a", "BlockMuon")]
    for key in sorted(found, key=lambda key: (key[1], ROLES.index(key[0]))):
        row = found[key]
        held = sum(row.entries)
        counts = (f"{sum(row.blocks):,}", f"{held:,}", f"{held / total:.1%}")
        units, updates = ("/".join(sorted(found)) for found in (row.units, row.updates))
        rows.append((key[0], _layer_range(row.layers), *counts, units, updates))
    number = sum(sum(row.blocks) for row in found.values())
    rows.append(("total", "", f"{number:,}", f"{total:,}", "100.0%", "", ""))
    return "\n".join(line.rstrip() for line in aligned(rows).splitlines())


class _Row(NamedTuple):
    """What the parameters of one line have."""

    blocks: list[int]
    entries: list[int]
    layers: set[int | None]
    units: set[str]
    updates: set[str]


def _unit(entry: Blocks, role: str) -> str:
    """What one block of a role is."""
    split = entry.split
    if split is None:
        return "tensor"
    section = entry.roles.index(role) % len(split.sizes)
    if split.parts[section] == split.sizes[section] and not split.pooled:
        by_head = role in WITH_HEADS and split.parts[section] * split.repeat > 1
        return "head" if by_head else "row"  # where heads have a dimension of their own
    if split.parts[section] * (1 if split.pooled else split.repeat) > 1:
        return "head"
    return "matrix" if split.stack > 1 else "tensor"


def _layer_range(layers: set[int | None]) -> str:
    numbers = sorted(layer for layer in layers if layer is not None)
    if not numbers:
        return "-"
    span = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    return f"{span}, -" if None in layers else span
