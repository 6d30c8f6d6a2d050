"""What the block learning rates were at each refresh, to plot or save, and the latest scales."""

from __future__ import annotations

import csv
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from blockopt.blocks import ROLES, BlockGroup, Blocks, Level, block_groups, sum_groups
from blockopt.tables import aligned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Path = str | os.PathLike[str]


class Refresh(NamedTuple):
    """One refresh.

    Attributes:
        step: The number of the optimizer step it followed, from 1.
        curvature: Mean curvature of each group of blocks.
        scale: Geometric mean of the smoothed scales of each group.
    """

    step: int
    curvature: dict[BlockGroup, float]
    scale: dict[BlockGroup, float]

    @staticmethod
    def of(
        step: int,
        curvature: Mapping[str, Tensor],
        logs: Mapping[str, Tensor],
        blocks: Mapping[str, Blocks],
        numel: Mapping[str, Tensor],
        by: Level,
    ) -> Refresh:
        """The refresh after a step, pooled over the groups of a level.

        Args:
            step: The number of the step.
            curvature: `{parameter name: one value per block}`.
            logs: The logarithms of the scales, in the same form.
            blocks: What `find_blocks(model)` returns.
            numel: The number of entries of each block.
            by: The level; for "head", the blocks of a role in a parameter are one group.
        """
        groups, numbers = block_groups(blocks, "tensor" if by == "head" else by)
        entries = sum_groups(numel, numbers, len(groups))

        def means(values: Mapping[str, Tensor]) -> Tensor:
            weighted = {name: values[name] * numel[name] for name in blocks}
            return sum_groups(weighted, numbers, len(groups)) / entries

        pooled, scales = means(curvature).tolist(), means(logs).exp().tolist()
        return Refresh(step, dict(zip(groups, pooled)), dict(zip(groups, scales)))

    def to_plain(self) -> dict[str, Any]:
        """The refresh as numbers, strings and lists, which every checkpoint format takes."""
        rows = [
            [*group, curvature, self.scale[group]] for group, curvature in self.curvature.items()
        ]
        return {"step": self.step, "rows": rows}

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Refresh:
        """The inverse of `to_plain`."""
        curvature = {BlockGroup(*row[:4]): row[4] for row in plain["rows"]}
        scale = {BlockGroup(*row[:4]): row[5] for row in plain["rows"]}
        return Refresh(plain["step"], curvature, scale)


class History(list[Refresh]):
    """The refreshes of a `BlockLR`, in order: a list that can be plotted and saved.

    Example:
        >>> query, value = BlockGroup("query"), BlockGroup("value")
        >>> history = History([Refresh(1, {query: 0.5, value: 2.0}, {query: 2.0, value: 0.5})])
        >>> history.rows()[0]
        {'step': 1, 'block': 'query', 'curvature': 0.5, 'scale': 2.0}
    """

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary of step, block, curvature and scale per refresh and group of blocks."""
        return [
            {
                "step": refresh.step,
                "block": str(group),
                "curvature": curvature,
                "scale": refresh.scale[group],
            }
            for refresh in self
            for group, curvature in refresh.curvature.items()
        ]

    def to_csv(self, path: Path) -> None:
        """Write the rows as a table with a header."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ("step", "block", "curvature", "scale"))
            writer.writeheader()
            writer.writerows(self.rows())

    def to_json(self, path: Path) -> None:
        """Write the rows as a list of objects."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.rows(), file)

    def plot(self, path: Path | None = None) -> Figure:
        """Plot curvature and scale of each group of blocks over the steps, one colour per role.

        Args:
            path: Where to save the figure too; its ending gives the format.

        Raises:
            ImportError: If matplotlib is missing.
            ValueError: If there was no refresh yet.
        """
        if not self:
            raise ValueError(
                "No refresh to plot yet: the first comes after optimizer step warmup + 1."
            )
        try:
            from matplotlib import colormaps
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("history.plot() needs matplotlib: pip install matplotlib.") from error
        figure = Figure(
            figsize=(10, 4), layout="constrained"
        )  # without pyplot, which would keep every figure alive
        left, right = figure.subplots(1, 2)
        for axes, quantity in ((left, "curvature"), (right, "scale")):
            self._draw(axes, quantity, colormaps["tab20"].colors)  # type: ignore[attr-defined]
        handles = {line.get_label(): line for line in right.get_lines()}
        figure.legend(
            handles.values(),
            [str(label) for label in handles],
            loc="outside right center",
            title="role",
        )
        if path is not None:
            figure.savefig(path)
        return figure

    def _draw(self, axes: Axes, quantity: str, colors: list[Any]) -> None:
        """Draw one line per group, a thin one if its role has several."""
        steps = [refresh.step for refresh in self]
        groups = list(
            dict.fromkeys(group for refresh in self for group in getattr(refresh, quantity))
        )
        members = Counter(group.role for group in groups)
        for group in sorted(groups, key=lambda group: ROLES.index(group.role)):
            values = [getattr(refresh, quantity).get(group, math.nan) for refresh in self]
            shown = [
                value if value > 0 else math.nan for value in values
            ]  # a log axis has no place for others
            width = 1.8 if members[group.role] == 1 else 0.6
            color = colors[ROLES.index(group.role)]
            axes.plot(steps, shown, color=color, marker=".", linewidth=width, label=group.role)
        axes.set(xlabel="optimizer step", ylabel=f"{quantity} of the block", yscale="log")


class ScaleTable:
    """The scales of all blocks, which prints as a table by role.

    Example:
        >>> ScaleTable({"norm.weight": torch.tensor([0.5])}, {"norm.weight": Blocks(("norm",))})
        role  blocks  min  median  max
        norm       1  0.5     0.5  0.5
    """

    def __init__(self, scales: Mapping[str, Tensor], blocks: Mapping[str, Blocks]) -> None:
        self._scales, self._blocks = dict(scales), dict(blocks)

    def as_dict(self) -> dict[str, Tensor]:
        """`{parameter name: tensor of num_blocks}`."""
        return dict(self._scales)

    def __str__(self) -> str:
        by_role: dict[str, list[Tensor]] = {}
        for name, scale in self._scales.items():
            entry = self._blocks[name]
            of_block = torch.tensor([ROLES.index(role) for role in entry.block_roles])
            for role in dict.fromkeys(entry.roles):
                by_role.setdefault(role, []).append(scale[of_block == ROLES.index(role)])
        rows: list[tuple[str, ...]] = [("role", "blocks", "min", "median", "max")]
        for role in sorted(by_role, key=ROLES.index):
            scales = torch.cat(by_role[role])
            numbers = (scales.min(), scales.median(), scales.max())
            rows.append((role, f"{len(scales):,}", *(f"{float(number):.3g}" for number in numbers)))
        return aligned(rows)

    __repr__ = __str__
