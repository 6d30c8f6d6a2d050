"""What a figure comes with: numbers predicted and measured, and whether it is reproduced by criteria told in advance."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.progress import Progress
from torch import Tensor

from blockopt.analysis.closed_forms.growth import Growth, growth

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Effort:
    """How much is measured. The paper's sizes are those of `FULL`.

    Attributes:
        repeats: Of each measurement, with other weights.
        scales: Number of scales σ.
        width: d_V = d_K of the growth figures.
        deep_width: The same where there are several layers.
        sequences: Number of sums, of the growth figures.
        probes: Random vectors of an estimated norm.
        depth: Of the deepest transformer.
        small: Width of the models whose whole Hessian is built.
        samples: Number of sums they see; of images, 32 times as many.
        steps: Of training.
    """

    repeats: int
    scales: int
    width: int
    deep_width: int
    sequences: int
    probes: int
    depth: int
    small: int
    samples: int
    steps: int


FULL = Effort(
    repeats=20,
    scales=20,
    width=128,
    deep_width=128,
    sequences=64,
    probes=20,
    depth=5,
    small=16,
    samples=64,
    steps=1000,
)
QUICK = Effort(
    repeats=3,
    scales=8,
    width=128,
    deep_width=48,
    sequences=8,
    probes=10,
    depth=3,
    small=16,
    samples=64,
    steps=300,
)
TINY = Effort(
    repeats=2,
    scales=4,
    width=8,
    deep_width=6,
    sequences=2,
    probes=4,
    depth=2,
    small=4,
    samples=4,
    steps=5,
)


@dataclass(frozen=True)
class Check:
    """One statement of the figure: it holds if the measured number lies in a range.

    Attributes:
        what: Is measured.
        predicted: By the paper, in words.
        measured: The number.
        low: Smallest that agrees.
        high: Largest that agrees.
        error: Standard error over repeats, NaN if there is none.
        ours: Whether it is no statement of the paper but one of ours about the run: a figure where
            it fails is not reproduced.
    """

    what: str
    predicted: str
    measured: float
    low: float
    high: float
    error: float = math.nan
    ours: bool = False

    @property
    def holds(self) -> bool:
        """Whether it is in the range."""
        return self.low <= self.measured <= self.high

    def row(self) -> list[str]:
        """The cells of a table."""
        error = "" if math.isnan(self.error) else f" ± {self.error:.2g}"
        if self.low == -math.inf or self.high == math.inf:
            criterion = f"<= {self.high:.4g}" if self.low == -math.inf else f">= {self.low:.4g}"
        else:
            criterion = f"{self.low:.8g} to {self.high:.8g}"
        predicted = f"(ours) {self.predicted}" if self.ours else self.predicted
        return [
            self.what,
            predicted,
            f"{self.measured:.4g}{error}",
            criterion,
            "yes" if self.holds else "NO",
        ]


HEADER = ["what", "paper", "measured", "criterion", "holds"]


@dataclass(frozen=True)
class Outcome:
    """A figure that was made.

    Attributes:
        title: What it shows.
        setting: Of this run.
        checks: Statements of the paper about it.
        figure: The plot.
    """

    title: str
    setting: str
    checks: Sequence[Check]
    figure: Figure

    @property
    def verdict(self) -> str:
        """Reproduced if all statements of the paper hold, not reproduced if none does, partly otherwise."""
        held = [check.holds for check in self.checks if not check.ours]
        if not any(held) or not all(check.holds for check in self.checks if check.ours):
            return "not reproduced"
        return "reproduced" if all(held) else "partly reproduced"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        checks = [
            {
                "what": c.what,
                "paper": c.predicted,
                "measured": c.measured,
                "standard_error": None if math.isnan(c.error) else c.error,
                "criterion": [bound if math.isfinite(bound) else None for bound in (c.low, c.high)],
                "holds": c.holds,
                "ours": c.ours,
            }
            for c in self.checks
        ]
        return {
            "title": self.title,
            "setting": self.setting,
            "verdict": self.verdict,
            "checks": checks,
        }

    def markdown(self) -> str:
        """The table of checks."""
        rows = [HEADER, ["---"] * len(HEADER), *(check.row() for check in self.checks)]
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
        )


class Run:
    """How much to measure, and a bar that shows how far it is.

    Args:
        effort: Sizes.
        progress: Bars; none if None.
    """

    def __init__(self, effort: Effort, progress: Progress | None = None) -> None:
        self.effort, self.progress = effort, progress

    def steps(self, title: str, total: int) -> Callable[[], None]:
        """A new bar; what is returned moves it on by one."""
        if self.progress is None:
            return lambda: None
        task, bars = self.progress.add_task(title, total=total), self.progress
        return lambda: bars.advance(task)

    def growth(
        self, measure: Callable[[float, int], Mapping[Any, float]], scales: Tensor, title: str
    ) -> Growth[Any]:
        """Norms at all scales, of all repeats."""
        step = self.steps(title, len(scales) * self.effort.repeats)

        def measured(sigma: float, seed: int) -> Mapping[Any, float]:
            found = measure(sigma, seed)
            step()
            return found

        return growth(measured, scales, repeats=self.effort.repeats)


def exponent_check(
    data: Growth[Any],
    label: Hashable,
    predicted: float,
    *,
    tolerance: float,
    low: float = 0.0,
    high: float = 1.0,
) -> Check:
    """That a norm grows with the predicted exponent over `low <= σ < high`."""
    found = data.exponents(low, high)[label]
    what = f"exponent of {label}"
    return Check(
        what,
        f"{predicted:g}",
        found.value,
        predicted - tolerance,
        predicted + tolerance,
        found.standard_error,
    )


def mean_check(
    what: str,
    predicted: str,
    values: Sequence[float],
    low: float = -math.inf,
    high: float = math.inf,
) -> Check:
    """That the mean of repeats, of a logarithm say, lies in a range."""
    mean, error = _mean(values)
    return Check(what, predicted, mean, low, high, error)


def sign_check(what: str, predicted: str, values: Sequence[float], sign: Literal[-1, 1]) -> Check:
    """That the mean of repeats is positive, or negative, by two standard errors at least."""
    mean, error = _mean(values)
    beyond = 0.0 if math.isnan(error) else 2 * error
    return Check(
        what,
        predicted,
        mean,
        beyond if sign > 0 else -math.inf,
        math.inf if sign > 0 else -beyond,
        error,
    )


def _mean(values: Sequence[float]) -> tuple[float, float]:
    numbers = torch.tensor(values, dtype=torch.float64)
    error = float(numbers.std() / math.sqrt(len(numbers))) if len(numbers) > 1 else math.nan
    return float(numbers.mean()), error
