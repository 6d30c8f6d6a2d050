"""Tuning with an equal budget: coordinate descent on geometric grids without ends.

Every arm declares its axes (`arms.py`) and gets the same number of trials. The first axis, the
learning rate, comes first, by factors of 4; then what the arm adds to it; then the learning rate by
factors of 2; then the late axes, such as weight decay, which matter least in short runs. Then all
of them again, by the square root of the factor whenever nothing moves any more, until the budget is
spent. No arm stops early, and none gets more.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

Point = tuple[Fraction, ...]
Search = Generator[list[dict[str, float]], list[float], "Tuned"]


class Axis(NamedTuple):
    """One hyperparameter, on the grid `start * factor ** k`. Late ones come after the others."""

    name: str
    start: float
    factor: float = 4.0
    late: bool = False

    def value(self, exponent: Fraction) -> float:
        """Return the value at an exponent, rounded so that it prints and hashes well."""
        return float(f"{self.start * self.factor ** float(exponent):.6g}")

    def __str__(self) -> str:
        return f"{self.name} {self.start:g} (×{self.factor:g})"


class Trial(NamedTuple):
    """What was tried, and the loss that it gave (infinite if it diverged)."""

    values: dict[str, float]
    loss: float


@dataclass(frozen=True)
class Tuned:
    """The outcome of tuning one arm.

    Attributes:
        best: The hyperparameters of the lowest loss.
        loss: That loss, on tuning seeds: optimistic, as the smallest of several noisy numbers.
        trials: All that was tried, in order; their number is the budget.
        edges: Axes on which the best is the smallest or largest value tried: more budget would have
            moved on.
        untried: Axes for which the budget left no trial.
    """

    best: dict[str, float]
    loss: float
    trials: tuple[Trial, ...]
    edges: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()


@dataclass
class _Descent:
    axes: Sequence[Axis]
    budget: int
    seen: dict[Point, float] = field(default_factory=dict)
    best: Point = ()

    def values(self, point: Point) -> dict[str, float]:
        return {axis.name: axis.value(exponent) for axis, exponent in zip(self.axes, point)}

    @property
    def spent(self) -> bool:
        return len(self.seen) >= self.budget

    def loss(self, point: Point) -> float:
        return self.seen.get(point, math.inf)

    def moved(self, axis: int, by: Fraction) -> Point:
        return (*self.best[:axis], self.best[axis] + by, *self.best[axis + 1 :])

    def visit(self, points: list[Point]) -> Generator[list[dict[str, float]], list[float], None]:
        new = [point for point in points if point not in self.seen][: self.budget - len(self.seen)]
        if new:
            losses = yield [self.values(point) for point in new]
            self.seen |= {
                point: math.inf if math.isnan(loss) else loss
                for point, loss in zip(new, losses, strict=True)
            }

    def line(
        self, axis: int, step: Fraction
    ) -> Generator[list[dict[str, float]], list[float], bool]:
        """Look at both neighbours, and go on in the direction that improves while it does."""
        down, up = self.moved(axis, -step), self.moved(axis, step)
        yield from self.visit([down, up])
        if self.loss(self.best) == self.loss(down) == self.loss(up) == math.inf:
            up = down  # all diverged: smaller is safer
        target, by = (down, -step) if self.loss(down) <= self.loss(up) else (up, step)
        start = self.best
        while self.loss(target) < self.loss(self.best) or (
            self.loss(self.best) == math.inf and target in self.seen
        ):
            self.best = target
            target = self.moved(axis, by)
            yield from self.visit([target])
        return self.best != start

    def sweep(
        self, steps: Mapping[int, Fraction]
    ) -> Generator[list[dict[str, float]], list[float], bool]:
        """Do one line search per axis, and return whether any of them moved."""
        moved = False
        for axis, step in steps.items():
            moved = (yield from self.line(axis, step)) or moved
        return moved


def tune(axes: Sequence[Axis], budget: int, near: bool = False) -> Search:
    """Search by coordinate descent: a generator that yields what to try and is sent the losses.

    So the caller decides where and when trials run, and a search whose trials are known already
    replays at once.

    Args:
        axes: The search space, learning rate first.
        budget: Number of trials, all of which are spent.
        near: Whether the starts are known to be near the best, such as those of a smaller model:
            no factors of 4 then.

    Returns:
        What was found, as a `Tuned`.

    Raises:
        ValueError: If there is no axis or no budget.

    Example:
        >>> search = tune([Axis("lr", 1e-3)], budget=3)
        >>> next(search)
        [{'lr': 0.001}]
        >>> search.send([2.0])
        [{'lr': 0.00025}, {'lr': 0.004}]
    """
    if not axes or budget < 1:
        given = f"axes={list(axes)}, budget={budget}"
        raise ValueError(f"Invalid {given}. Must be at least one axis and one trial.")
    descent = _Descent(axes, budget, best=(Fraction(0),) * len(axes))
    yield from descent.visit([descent.best])
    steps = {axis: Fraction(1, 2) for axis in range(len(axes))}
    if not near:
        others = {
            late: {n: Fraction(1) for n in range(1, len(axes)) if axes[n].late == late}
            for late in (False, True)
        }
        yield from descent.sweep({0: Fraction(1)} | others[False])
        yield from descent.sweep({0: Fraction(1, 2)} | others[True])
    while not descent.spent:
        if not (yield from descent.sweep(steps)):
            steps = {axis: step / 2 for axis, step in steps.items()}
    best = min(descent.seen, key=lambda point: descent.seen[point])
    edges, untried = [], []
    for number, axis in enumerate(axes):
        tried = {point[number] for point in descent.seen}
        if len(tried) == 1:
            untried.append(axis.name)
        elif best[number] in (min(tried), max(tried)):
            edges.append(axis.name)
    trials = tuple(Trial(descent.values(point), loss) for point, loss in descent.seen.items())
    return Tuned(descent.values(best), descent.seen[best], trials, tuple(edges), tuple(untried))
