"""From runs to rows: loss, difference to the baseline by seed, steps needed, costs per arm."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from recipes.comparison.arms import ARMS
from recipes.comparison.paired_statistics import (
    Estimate,
    estimate,
    mean_crossing,
    paired_difference,
    steps_to_target,
    verdicts,
)
from recipes.comparison.runs import RunResult
from recipes.comparison.studies import ArmOutcome, Study

SAME = ("block-adamw", "adamw")  # one algorithm in two programs: their difference is rounding
OTHER_WAYS = (
    ("block-sgd", "sgd"),
    ("block-adamw-block", "adam-mini"),
    ("block-muon", "muon"),
    SAME,
    ("block-muon+newton", "muon"),
    ("block-adamw+newton", "adamw-groups"),
    ("block-adamw+newton", "adamw-ratios"),
)


def _pairs() -> list[tuple[str, str]]:
    """What to compare: scales with none, controls with the measured ones, ours with others."""
    scaled = [name for name, arm in ARMS.items() if arm.ours and arm.scales is not None]
    found = [(name, name.partition("+")[0]) for name in scaled]
    found += [(name, arm.base) for name, arm in ARMS.items() if arm.base is not None]
    found += OTHER_WAYS
    return found + [(f"shipped-{a}", f"shipped-{b}") for a, b in OTHER_WAYS]


@dataclass(frozen=True)
class Steps:
    """Steps, or gradient evaluations, to the loss that the baseline ends at, as a part of its own.

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
        missed = "≥ " if self.missed < self.seeds else "> "
        sign = {"at": "", "before": "≤ ", "after": missed, "mixed": "~ "}[self.kind]
        return f"{sign}{self.part:.2f}"

    def with_interval(self) -> str:
        """Return it with its interval, where there is one."""
        return str(self) if math.isnan(self.low) else f"{self} [{self.low:.2f}, {self.high:.2f}]"

    @property
    def verdict(self) -> str:
        """Whether it is known to be "fewer" or "more" than the baseline's, or "unclear"."""
        low = {"at": self.low, "after": self.part}.get(self.kind, math.nan)
        high = {"at": self.high, "before": self.part}.get(self.kind, math.nan)
        return "fewer" if high < 1 else "more" if low > 1 else "unclear"


@dataclass(frozen=True)
class Row:
    """One arm of the table.

    Attributes:
        outcome: Its runs.
        loss: Final loss at the main length over the test seeds.
        difference: Final loss minus the baseline's, paired by seed, with its 95 % interval.
        verdict: "better", "worse", "unclear" or "diverged", by the interval corrected for the
            number of arms; "baseline" for the baseline.
        steps: Steps to the baseline's loss; None if the study has one length only.
        evaluations: The same in gradient evaluations, with those of the curvature.
        gradient_evaluations: Per run at the main length, with those of the curvature.
        seconds: Per run at the main length, the median, which a machine that is busy for a while
            shifts less than the mean.
        curvature_share: Part of the seconds that curvature takes.
        state_bytes: Bytes of optimizer state per parameter.
        diverged: How many test runs, of all lengths, diverged.
        tests: How many test runs there are.
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
        """The name of the arm."""
        return self.outcome.arm.name


@dataclass(frozen=True)
class Pair:
    """Two arms compared seed by seed; the verdict is corrected for the number of pairs."""

    name: str
    against: str
    difference: Estimate
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """A finished study.

    Attributes:
        study: The protocol.
        rows: One per arm, lowest loss first.
        pairs: Arms that differ in one thing, apart from the tuned values.
        left_out: `{arm: why}`, for arms whose package is not installed.
    """

    study: Study
    rows: list[Row]
    pairs: list[Pair]
    left_out: dict[str, str]

    def test_runs(self) -> list[RunResult]:
        """Return the test runs of all arms and lengths."""
        return [run for row in self.rows for run in row.outcome.test_runs()]

    def all_runs(self) -> list[RunResult]:
        """Return tuning runs and test runs."""
        return [*(run for row in self.rows for run in row.outcome.tuning), *self.test_runs()]

    def row(self, name: str) -> Row:
        """Return the row of an arm."""
        return next(row for row in self.rows if row.name == name)

    @property
    def baseline(self) -> Row:
        """The row of the arm that all are compared with."""
        return self.row(self.study.baseline)

    @property
    def against(self) -> str:
        """The plain name of the baseline, such as "AdamW"."""
        return self.baseline.outcome.arm.title


def compared(study: Study, outcomes: Sequence[ArmOutcome], left_out: dict[str, str]) -> Comparison:
    """Make rows and pairs of what was run.

    Raises:
        ValueError: If the baseline is not among the outcomes.
    """
    by_name = {outcome.arm.name: outcome for outcome in outcomes}
    if study.baseline not in by_name:
        raise ValueError(f"Invalid outcomes of {list(by_name)}. Must hold {study.baseline}.")

    def difference(name: str, against: str) -> Estimate:
        return paired_difference(
            finals(by_name[name], study.steps), finals(by_name[against], study.steps)
        )

    baseline = by_name[study.baseline]
    differences = {name: difference(name, study.baseline) for name in by_name}
    others = {name: value for name, value in differences.items() if name != study.baseline}
    said = verdicts(others) | {study.baseline: "baseline"}
    rows = [
        _row(outcome, baseline, study, differences[name], said[name])
        for name, outcome in by_name.items()
    ]
    paired = {
        f"{name} {against}": (name, against, difference(name, against))
        for name, against in _pairs()
        if name in by_name and against in by_name
    }
    said = verdicts({key: estimated for key, (_, _, estimated) in paired.items()})
    pairs = [Pair(*found, said[key]) for key, found in paired.items()]
    return Comparison(study, sorted(rows, key=lambda row: row.loss.mean), pairs, left_out)


def finals(outcome: ArmOutcome, steps: int) -> dict[int, float]:
    """Return the final loss of each test seed at a length."""
    return {seed: result.final for seed, result in outcome.tests[steps].items()}


def _row(
    outcome: ArmOutcome, baseline: ArmOutcome, study: Study, difference: Estimate, verdict: str
) -> Row:
    results = list(outcome.tests[study.steps].values())
    seconds = median(result.seconds for result in results)
    curvature = median(result.curvature_seconds for result in results)

    def evaluations(steps: int, result: RunResult) -> int:
        return max(steps, result.gradient_evaluations)

    return Row(
        outcome=outcome,
        loss=estimate([result.final for result in results]),
        difference=difference,
        verdict=verdict,
        steps=_to_target(outcome, baseline, study.steps, lambda steps, _: steps),
        evaluations=_to_target(outcome, baseline, study.steps, evaluations),
        gradient_evaluations=fmean(result.gradient_evaluations for result in results),
        seconds=seconds,
        curvature_share=curvature / seconds if seconds else 0.0,
        state_bytes=fmean(result.state_bytes for result in results),
        diverged=sum(result.diverged is not None for result in outcome.test_runs()),
        tests=len(outcome.test_runs()),
        failed_refreshes=sum(result.failed_refreshes for result in outcome.test_runs()),
    )


def _to_target(
    outcome: ArmOutcome, baseline: ArmOutcome, main: int, cost: Callable[[int, RunResult], int]
) -> Steps | None:
    """Return the cost of reaching the baseline's loss with the same seed, as a part of its cost."""
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
