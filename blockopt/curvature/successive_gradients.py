"""Curvature over slope along the update, from the gradients that training computes anyway.

A step from `w_t` to `w_{t+1}` makes the update `u_t`, and the next steps bring gradients `g_{t+1}`,
`g_{t+2}`, … of fresh batches at the points that follow. Since these batches had no part in `u_t`,

    s_k = g_{t+k} · u_t,    k = 1, 2, 3

is an unbiased estimate of the slope of the loss along `u_t` at `w_{t+k}`, for each block. Its
change is the curvature between updates: `s_{k+1} - s_k` has the mean `u_t · H u_{t+k}`. The slope
at `w_t` itself has no such estimate, because `g_t` made the update: `g_t · u_t` is far too steep.
We take the parabola through the three slopes, `s_0 = 3 s_1 - 3 s_2 + s_3`. Then

    slope before the update     s_0
    curvature along the update  s_1 - s_0 = -2 s_1 + 3 s_2 - s_3   for   u_t · H u_t.

That is exact if the slope is quadratic in `k`. Momentum makes it nearly so; without momentum
updates jump, and the estimate is useless. A single window of three gradients is mostly noise, so
the slopes are summed over many windows before they are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from blockopt.blocks import Blocks, Level, block_groups
from blockopt.curvature.newton import curvature_over_slope
from blockopt.distributed import is_sharded, placed_like
from blockopt.measure.closures import Curvature, block_dots

LAGS = 3  # gradients after an update
SPACING = 5  # steps from the start of a window to the next
SMALLEST_NUMBER = 5  # of windows that are worth a measurement

Slopes = dict[str, list[float]]


class SlopesAlongUpdates:
    """Collects `s_1`, `s_2` and `s_3` of each group of blocks while the optimizer steps.

    It costs no gradient and no closure: a copy of the weights for four of five steps, and one inner
    product with the gradients in three of them. Gradients are read after the step, as it has left
    them: a constant factor, of a `GradScaler` or of clipping, cancels in the result.

    Args:
        by: Which blocks form a group; see `block_scales`.

    Attributes:
        sums: The sums of the slopes over all windows, `{group: [s_1, s_2, s_3]}`.
        number: How many windows these are.
    """

    def __init__(self, by: Level) -> None:
        self._by = by
        self._blocks: dict[str, Blocks] = {}
        self.sums: Slopes = {}
        self.number = 0
        self._before_last_step = self.sums, self.number
        self.end_window()

    @property
    def is_enough(self) -> bool:
        """Whether there are windows enough to measure on."""
        return self.number >= SMALLEST_NUMBER

    def end_window(self) -> None:
        """Forget the update at hand: a checkpoint does not hold it."""
        self._before: dict[str, Tensor] = {}
        self._update: dict[str, Tensor] = {}
        self._slopes: list[Tensor] = []

    def before_step(self, number: int, parameters: Callable[[], Mapping[str, Tensor]]) -> None:
        """Keep the weights if the step of this number begins a window."""
        self._before = {}
        if not self._update and number % SPACING == 0:
            self._before = {name: p.detach().clone() for name, p in parameters().items()}

    def after_step(
        self,
        parameters: Callable[[], Mapping[str, Tensor]],
        blocks: Callable[[], Mapping[str, Blocks]],
    ) -> None:
        """Take the slopes along the update at hand, or take the step's update at hand."""
        self._before_last_step = self.sums, self.number
        if self._update:
            self._take_slopes(parameters())
        elif self._before:
            now = parameters()
            if now.keys() != self._blocks.keys():
                self._find_groups(blocks())
            self._update = {
                name: before.neg_().add_(now[name].detach())
                for name, before in self._before.items()
                if name in self._blocks
            }
        self._before = {}

    def take_back(self) -> None:
        """Undo what the last step has left here: the optimizer turned out to have refused it.

        All ranks refuse a step alike, but a gradient that is not finite may be on one of them only.
        They must go on with the same windows, since they measure after the same one.
        """
        self.sums, self.number = self._before_last_step
        self.end_window()

    def _find_groups(self, blocks: Mapping[str, Blocks]) -> None:
        labels, groups = block_groups(blocks, self._by)
        self._blocks, self._labels, self._groups = dict(blocks), labels, groups
        self._undivided = {n for n, numbers in groups.items() if len(numbers.unique()) == 1}

    @torch.no_grad()
    def _take_slopes(self, parameters: Mapping[str, Tensor]) -> None:
        dots, groups = [], []
        for name, update in self._update.items():
            gradient = parameters[name].grad if name in parameters else None
            if gradient is None:
                continue
            gradient = placed_like(gradient, parameters[name])
            exact = gradient.dtype == update.dtype in (torch.float32, torch.float64)
            if exact and name in self._undivided and not is_sharded(gradient):
                dots.append(torch.dot(gradient.reshape(-1), update.reshape(-1)).reshape(1))
                groups.append(self._groups[name][:1])
            else:
                dots.append(block_dots(gradient, update, self._blocks[name]))
                groups.append(self._groups[name])
        total = torch.zeros(len(self._labels), dtype=torch.float64)
        if dots:  # one transfer: each waits for the device
            row = torch.cat([dot.to(dots[0].device, torch.float64) for dot in dots]).cpu()
            total.index_add_(0, torch.cat(groups), row)
        if not bool(torch.isfinite(total).all()):  # of a step that the optimizer refuses
            self.end_window()
            return
        self._slopes.append(total)
        if len(self._slopes) == LAGS:
            sums = dict(self.sums)
            for label, slopes in zip(self._labels, torch.stack(self._slopes, dim=1).tolist()):
                old = sums.get(str(label), [0.0] * LAGS)
                sums[str(label)] = [a + b for a, b in zip(old, slopes)]
            self.sums, self.number = sums, self.number + 1
            self.end_window()

    def take(self) -> Slopes:
        """Return the sums, and start them anew."""
        sums, self.sums, self.number = self.sums, {}, 0
        self._before_last_step = self.sums, self.number
        return sums

    def state_dict(self) -> dict[str, Any]:
        """Return the sums; the window at hand ends here, in this run as in one that resumes."""
        self.end_window()
        return {"sums": dict(self.sums), "number": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.sums, self.number = dict(state["sums"]), state["number"]
        self._before_last_step = self.sums, self.number
        self.end_window()


def successive_gradients(
    slopes: Mapping[str, list[float]],
    blocks: Mapping[str, Blocks],
    *,
    scales: Mapping[str, Tensor] | None = None,
    by: Level = "role",
) -> Curvature:
    """Return curvature over slope along the update from slopes at the points that followed it.

    It is the ratio of `newton`, without an extra gradient; the module explains the formula.

    Args:
        slopes: `{group of blocks: [s_1, s_2, s_3]}`, sums or means over many updates.
        blocks: What `find_blocks(model)` returns.
        scales: The multipliers that the updates were made with; see `newton`.
        by: Which blocks form a group; see `block_scales`.

    Returns:
        `{parameter name: curvature over slope of each block's group}`. Groups without slopes count
        as the sharpest one.

    Example:
        On the loss `w²` from w = 8, updates of -2 pass 6, 4 and 2. The slope along them was -32
        before; four such steps reach the minimum:

        >>> slopes = {"other": [-2 * 12.0, -2 * 8.0, -2 * 4.0]}
        >>> successive_gradients(slopes, {"w": Blocks(("other",))})
        {'w': tensor([0.2500], dtype=torch.float64)}
    """
    labels, groups = block_groups(blocks, by)
    rows = [slopes.get(str(label), [0.0] * LAGS) for label in labels]
    first, second, third = torch.tensor(rows, dtype=torch.float64).unbind(dim=1)
    before = 3 * first - 3 * second + third
    values = curvature_over_slope(first - before, before, groups, scales)
    return {name: values[groups[name]] for name in blocks}
