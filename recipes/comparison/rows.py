"""From runs to rows: the loss of each arm, its difference to AdamW seed by seed, the steps it needs, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from recipes.comparison.arms import BASELINE
from recipes.comparison.paired_statistics import (
    Estimate,
    estimate,
    holm,
    mean_crossing,
    p_value,
    paired_difference,
    steps_to_target,
    verdict,
)
from recipes.comparison.runs import RunResult
from recipes.comparison.studies import ArmOutcome, Study

SAME = ("block-adamw", "adamw")  # one algorithm in two programs: their difference is rounding
# What to set against what: what scales add, whether they must be the measured ones, ours against
# others of the same kind.
PAIRS = (
    *((f"{base}+{curvature}", base) for base in ("block-sgd", "block-adamw", "block-adamw-block", "block-muon")
      for curvature in ("newton", "analytic")),
    *((f"{base}-{control}", base) for base in ("block-adamw+newton", "block-adamw+analytic", "adamw-ratios")
      for control in ("shuffled", "inverted")),
    ("block-sgd", "sgd"), ("block-adamw-block", "adam-mini"), ("block-muon", "muon"), SAME,
    ("block-muon+newton", "muon"), ("block-adamw+newton", "adamw-groups"), ("block-adamw+newton", "adamw-ratios"),
)  # fmt: skip


@dataclass(frozen=True)
class Steps:
    """Steps, or gradient evaluations, to the loss that AdamW ends at, as a part of AdamW's.

    Attributes:
        part: Geometric mean over seeds; a bound if `kind` says so.
        low: Lower end of the 95 % interval, NaN if there is none.
        high: Upper end.
        kind: "at", or "before" (at most `part`), "after" (at least `part`: some seed did not reach
            it), "mixed".
        missed: How many seeds did not reach it.
        seeds: How many there are.
    """

    part: float
    low: float
    high: float
    kind: str
    missed: int
    seeds: int

    def __str__(self) -> str:
        sign = {
            "at": "",
            "before": "≤ ",
            "after": "≥ " if self.missed < self.seeds else "> ",
            "mixed": "~ ",
        }[self.kind]
        return f"{sign}{self.part:.2f}"

    def with_interval(self) -> str:
        """With the interval, where there is one."""
        return str(self) if math.isnan(self.low) else f"{self} [{self.low:.2f}, {self.high:.2f}]"

    @property
    def verdict(self) -> str:
        """Whether it is known to be "fewer" or "more" than AdamW's, or "unclear"."""
        low = {"at": self.low, "after": self.part}.get(self.kind, math.nan)
        high = {"at": self.high, "before": self.part}.get(self.kind, math.nan)
        return "fewer" if high < 1 else "more" if low > 1 else "unclear"


@dataclass(frozen=True)
class Row:
    """One arm of the table.

    Attributes:
        outcome: Its runs.
        loss: Final loss at the main length over the test seeds.
        difference: To AdamW, paired by seed.
        verdict: "better", "worse", "unclear" or "diverged", against AdamW; "baseline" for itself.
        steps: To AdamW's loss; None if the study has one length only.
        evaluations: The same in gradient evaluations, with those of the curvature.
        gradient_evaluations: A run at the main length, with those of the curvature.
        seconds: The same: the median of the runs, as a machine that is busy for a while would shift
            the mean.
        curvature_share: Part of the seconds that curvature takes.
        state_bytes: A parameter.
        diverged: How many of the test runs, of all lengths.
        tests: How many there are.
        failed_refreshes: Refreshes of the scales in all test runs that gave no curvature to use.
    """

    outcome: ArmOutcome
    loss: Estimate
    difference: Estimate
    verdict: str
    steps: Steps | None
    evaluations: Steps | None
    gradient_evaluations: float
    seconds: float
    curvature_share: float
    state_bytes: float
    diverged: int
    tests: int
    failed_refreshes: int

    @property
    def name(self) -> str:
        """Of the arm."""
        return self.outcome.arm.name


@dataclass(frozen=True)
class Pair:
    """Two arms set against each other, seed by seed."""

    name: str
    against: str
    difference: Estimate
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """A finished study.

    Attributes:
        study: The protocol.
        rows: One an arm, lowest loss first.
        pairs: Arms that differ in one thing, the tuned learning rate aside.
        left_out: `{arm: why}`, for arms whose package is not installed.
    """

    study: Study
    rows: list[Row]
    pairs: list[Pair]
    left_out: dict[str, str]

    def test_runs(self) -> list[RunResult]:
        """All test runs, of all arms and lengths."""
        return [run for row in self.rows for run in row.outcome.test_runs()]

    def all_runs(self) -> list[RunResult]:
        """Tuning runs and test runs."""
        return [*(run for row in self.rows for run in row.outcome.tuning), *self.test_runs()]

    def sure(self) -> list[str]:
        """Arms whose difference to AdamW stands when all comparisons with it may err with probability 5 % together."""
        return holm(
            {row.name: p_value(row.difference) for row in self.rows if row.verdict != "baseline"}
        )

    def row(self, name: str) -> Row:
        """The row of an arm."""
        return next(row for row in self.rows if row.name == name)


def compared(study: Study, outcomes: Sequence[ArmOutcome], left_out: dict[str, str]) -> Comparison:
    """Make rows and pairs of what was run.

    Raises:
        ValueError: If AdamW, which all are compared with, is not among the outcomes.
    """
    by_name = {outcome.arm.name: outcome for outcome in outcomes}
    if BASELINE not in by_name:
        raise ValueError(
            f"Invalid outcomes of {list(by_name)}. Must hold {BASELINE}, which all are compared with."
        )
    rows = [_row(outcome, by_name[BASELINE], study) for outcome in outcomes]
    pairs = []
    for name, against in PAIRS:
        if name in by_name and against in by_name:
            difference = paired_difference(
                finals(by_name[name], study.steps), finals(by_name[against], study.steps)
            )
            pairs.append(Pair(name, against, difference, verdict(difference)))
    return Comparison(study, sorted(rows, key=lambda row: row.loss.mean), pairs, left_out)


def finals(outcome: ArmOutcome, steps: int) -> dict[int, float]:
    """Final loss of each test seed at a length."""
    return {seed: result.final for seed, result in outcome.tests[steps].items()}


def _row(outcome: ArmOutcome, baseline: ArmOutcome, study: Study) -> Row:
    results = list(outcome.tests[study.steps].values())
    losses = finals(outcome, study.steps)
    difference = paired_difference(losses, finals(baseline, study.steps))
    seconds = median(result.seconds for result in results)
    return Row(
        outcome=outcome,
        loss=estimate(list(losses.values())),
        difference=difference,
        verdict="baseline" if outcome is baseline else verdict(difference),
        steps=_to_target(outcome, baseline, study.steps, lambda steps, result: steps),
        evaluations=_to_target(
            outcome,
            baseline,
            study.steps,
            lambda steps, result: max(steps, result.gradient_evaluations),
        ),
        gradient_evaluations=fmean(result.gradient_evaluations for result in results),
        seconds=seconds,
        curvature_share=median(result.curvature_seconds for result in results) / seconds
        if seconds
        else 0.0,
        state_bytes=fmean(result.state_bytes for result in results),
        diverged=sum(result.diverged is not None for result in outcome.test_runs()),
        tests=len(outcome.test_runs()),
        failed_refreshes=sum(result.failed_refreshes for result in outcome.test_runs()),
    )


def _to_target(
    outcome: ArmOutcome, baseline: ArmOutcome, main: int, cost: Callable[[int, RunResult], int]
) -> Steps | None:
    """What each seed takes to the loss that AdamW has with the same seed at the main length, as a part of AdamW's cost."""
    if len(outcome.tests) < 2:
        return None
    crossings = []
    for seed in sorted(set.intersection(*(set(runs) for runs in outcome.tests.values()))):
        reference = baseline.tests[main][seed]
        if not math.isfinite(reference.final):
            return None
        losses = {
            cost(steps, runs[seed]): runs[seed].final for steps, runs in outcome.tests.items()
        }
        crossing = steps_to_target(losses, reference.final)
        crossings.append(crossing._replace(steps=crossing.steps / cost(main, reference)))
    logs, kind = mean_crossing(crossings)
    part, low, high = (math.exp(value) for value in (logs.mean, logs.low, logs.high))
    known = kind == "at" and logs.count > 2  # the interval of two seeds is too wide to say anything
    missed = sum(crossing.kind == "after" for crossing in crossings)
    return Steps(
        part, *((low, high) if known else (math.nan, math.nan)), kind, missed, len(crossings)
    )
