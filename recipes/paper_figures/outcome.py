"""What a figure comes with: numbers predicted and measured, and criteria told in advance."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.progress import Progress
from torch import Tensor

from blockopt.analysis.closed_forms.growth import Growth, growth
from recipes.paper_figures.kept_norms import KeptNorms, Measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Repeats = dict[Any, list[float]]  # by label, one number per repeat


@dataclass(frozen=True)
class Effort:
    """How much is measured. The paper's sizes are those of `FULL`.

    Attributes:
        repeats: Repeats of each measurement, with other weights.
        scales: Number of scales σ.
        width: d_V = d_K in the growth figures.
        deep_width: The same where there are several layers.
        sequences: Number of sums in the growth figures.
        probes: Random vectors per estimated norm.
        depth: Depth of the deepest transformer.
        small: Width of the models whose whole Hessian is built.
        samples: Number of sums that they see; of images, 32 times as many.
        steps: Training steps.
        seeds: Repeats of what costs next to nothing.
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
    seeds: int


# repeats, scales, width, deep_width, sequences, probes, depth, small, samples, steps, seeds
FULL = Effort(20, 20, 128, 128, 64, 20, 5, 16, 64, 1000, 200)
QUICK = Effort(3, 8, 128, 48, 8, 10, 3, 16, 64, 300, 200)
TINY = Effort(2, 4, 8, 6, 2, 4, 2, 4, 4, 5, 2)


@dataclass(frozen=True)
class Check:
    """One statement of the figure: it holds if the measured number lies in a range.

    Attributes:
        what: What is measured.
        predicted: What the paper predicts, in words.
        measured: The number.
        low: The smallest that agrees.
        high: The largest that agrees.
        error: Standard error over repeats, NaN if there is none.
        ours: Whether it is not a statement of the paper but one of ours about the run: a figure
            where it fails is not reproduced.
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
        """Return the cells of a table."""
        error = "" if math.isnan(self.error) else f" ± {self.error:.2g}"
        if self.low == -math.inf or self.high == math.inf:
            criterion = f"<= {self.high:.4g}" if self.low == -math.inf else f">= {self.low:.4g}"
        else:
            criterion = f"{self.low:.8g} to {self.high:.8g}"
        predicted = f"(ours) {self.predicted}" if self.ours else self.predicted
        holds = "yes" if self.holds else "NO"
        return [self.what, predicted, f"{self.measured:.4g}{error}", criterion, holds]


HEADER = ["what", "paper", "measured", "criterion", "holds"]


@dataclass(frozen=True)
class Outcome:
    """A figure that was made.

    Attributes:
        title: What it shows.
        setting: The sizes of this run.
        checks: The statements of the paper about it.
        figure: The plot.
    """

    title: str
    setting: str
    checks: Sequence[Check]
    figure: Figure

    @property
    def verdict(self) -> str:
        """Reproduced if all statements of the paper hold, not if none does, partly otherwise."""
        held = [check.holds for check in self.checks if not check.ours]
        if not any(held) or not all(check.holds for check in self.checks if check.ours):
            return "not reproduced"
        return "reproduced" if all(held) else "partly reproduced"

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
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
        named = {name: getattr(self, name) for name in ("title", "setting", "verdict")}
        return named | {"checks": checks}

    def markdown(self) -> str:
        """Return the table of checks."""
        rows = [HEADER, ["---"] * len(HEADER), *(check.row() for check in self.checks)]
        rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def panels(
    rows: int, columns: int, width: float = 4.0, height: float = 3.4, *, title: str = ""
) -> tuple[Figure, list[Any]]:
    """Return a new figure, and its axes row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


class Run:
    """How much to measure, and a bar that shows how far it is.

    Args:
        effort: How much to measure.
        progress: Where to draw bars, if anywhere.
        kept: Where what was measured is kept, if anywhere.
    """

    def __init__(
        self, effort: Effort, progress: Progress | None = None, kept: KeptNorms | None = None
    ) -> None:
        self.effort, self.progress, self.kept = effort, progress, kept

    def steps(self, title: str, total: int) -> Callable[[], None]:
        """Add a bar, and return a function that moves it on by one."""
        if self.progress is None:
            return lambda: None
        task, bars = self.progress.add_task(title, total=total), self.progress
        return lambda: bars.advance(task)

    def growth(self, measure: Measure, scales: Tensor, title: str) -> Growth[Any]:
        """Measure norms at all scales, in all repeats."""
        e = self.effort
        sizes = f"d = {e.width} or {e.deep_width}, {e.sequences} sums, {e.probes} probes"
        measure = self._through_file(measure, f"{title}: {sizes}")
        step = self.steps(title, len(scales) * e.repeats)

        def measured(sigma: float, seed: int) -> Mapping[Any, float]:
            found = measure(sigma, seed)
            step()
            return found

        return growth(measured, scales, repeats=e.repeats)

    def repeated(self, measure: Measure, scales: Sequence[float], title: str) -> list[Repeats]:
        """Measure numbers of trained models at each scale of the data, in all repeats."""
        e = self.effort
        sizes = f"d = {e.small}, {32 * e.samples} images, {e.steps} steps"
        measure = self._through_file(measure, f"{title}: {sizes}")
        step, found = self.steps(title, len(scales) * e.repeats), []
        for scale in scales:
            values: Repeats = {}
            for seed in range(e.repeats):
                for label, value in measure(scale, seed).items():
                    values.setdefault(label, []).append(value)
                step()
            found.append(values)
        return found

    def _through_file(self, measure: Measure, setting: str) -> Measure:
        return measure if self.kept is None else self.kept.through(measure, setting)


def exponent_check(
    data: Growth[Any],
    label: Hashable,
    predicted: float,
    *,
    tolerance: float,
    low: float = 0.0,
    high: float = 1.0,
) -> Check:
    """Check that a norm grows with the predicted exponent over `low <= σ < high`."""
    found = data.exponents(low, high)[label]
    return near(f"exponent of {label}", predicted, found.value, tolerance, found.standard_error)


def near(
    what: str, predicted: float, measured: float, tolerance: float, error: float = math.nan
) -> Check:
    """Check that a number is as predicted, up to a tolerance."""
    low, high = predicted - tolerance, predicted + tolerance
    return Check(what, f"{predicted:g}", measured, low, high, error)


def mean_check(
    what: str,
    predicted: str,
    values: Sequence[float],
    low: float = -math.inf,
    high: float = math.inf,
) -> Check:
    """Check that the mean over repeats lies in a range."""
    mean, error = _mean(values)
    return Check(what, predicted, mean, low, high, error)


def sign_check(what: str, predicted: str, values: Sequence[float], sign: Literal[-1, 1]) -> Check:
    """Check that the mean over repeats has a sign, by two standard errors at least."""
    mean, error = _mean(values)
    beyond = 0.0 if math.isnan(error) else 2 * error
    bounds = (beyond, math.inf) if sign > 0 else (-math.inf, -beyond)
    return Check(what, predicted, mean, *bounds, error)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    numbers = torch.tensor(values, dtype=torch.float64)
    error = float(numbers.std() / math.sqrt(len(numbers))) if len(numbers) > 1 else math.nan
    return float(numbers.mean()), error
