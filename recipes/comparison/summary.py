"""A comparison in words and cells: the sentences and tables that terminal and report share."""

from __future__ import annotations

import math

from recipes.comparison.arms import BASELINE
from recipes.comparison.paired_statistics import Estimate
from recipes.comparison.rows import SAME, Comparison, Pair, Row

FEW = 8  # seeds
VERDICTS = {
    "better": "better than AdamW",
    "worse": "worse than AdamW",
    "unclear": "no difference shown",
    "diverged": "diverged",
    "baseline": "the baseline",
}


def number(value: float, digits: int = 3) -> str:
    """A number for a table; infinite ones come of diverged runs.

    Example:
        >>> number(1.23456), number(float("inf")), number(float("nan"))
        ('1.235', 'diverged', '–')
    """
    if math.isnan(value):
        return "–"
    return "diverged" if math.isinf(value) else f"{value:.{digits}f}"


def with_error(value: Estimate) -> str:
    """Mean ± standard error.

    Example:
        >>> with_error(Estimate(2.0, 0.01, 1.9, 2.1, 4))
        '2.000 ± 0.010'
    """
    return number(value.mean) + ("" if math.isnan(value.error) else f" ± {value.error:.3f}")


def with_interval(value: Estimate) -> str:
    """Mean and confidence interval, with signs.

    Example:
        >>> with_interval(Estimate(-0.1, 0.01, -0.13, -0.07, 4))
        '-0.100 [-0.130, -0.070]'
    """
    if not math.isfinite(value.mean):
        return number(value.mean)
    interval = "" if math.isnan(value.low) else f" [{value.low:+.3f}, {value.high:+.3f}]"
    return f"{value.mean:+.3f}{interval}"


def with_half_width(value: Estimate) -> str:
    """Mean and half of the confidence interval, which is symmetric.

    Example:
        >>> with_half_width(Estimate(-0.1, 0.01, -0.13, -0.07, 4))
        '-0.100 ± 0.030'
    """
    if not math.isfinite(value.mean):
        return number(value.mean)
    return f"{value.mean:+.3f}" + (
        "" if math.isnan(value.low) else f" ± {value.high - value.mean:.3f}"
    )


def hyperparameters(row: Row) -> str:
    """The tuned values of an arm, those at the edge of what was tried marked by "!", those never varied in brackets."""
    tuned = row.outcome.tuned
    cells = []
    for name, value in row.outcome.values.items():
        text = f"{name} {value:.3g}"
        if name in row.outcome.fixed:
            text += f" (of {row.outcome.arm.base})"
        cells.append(
            f"({text})" if name in tuned.untried else f"{text}!" if name in tuned.edges else text
        )
    return ", ".join(cells)


def cells(row: Row) -> list[str]:
    """Loss, difference, steps, gradient evaluations, seconds and bytes of an arm."""
    return [
        with_error(row.loss),
        "baseline" if row.name == BASELINE else with_half_width(row.difference),
        "–" if row.steps is None else str(row.steps),
        f"{row.gradient_evaluations:.0f}",
        f"{row.seconds:.1f}",
        f"{row.state_bytes:.2f}",
    ]


def sentences(comparison: Comparison) -> list[str]:
    """Who wins and who loses, in plain words, with the numbers that say so."""
    baseline = comparison.row(BASELINE)
    if baseline.verdict == "diverged" or not math.isfinite(baseline.loss.mean):
        runs = comparison.study.seeds
        return [
            f"AdamW diverged in some of its {runs} test runs: there is nothing to compare with."
        ]
    return [
        *_against_adamw(comparison),
        *_pairs_in_words(comparison),
        *_steps_in_words(comparison),
        *_edges_in_words(comparison),
    ]


def _against_adamw(comparison: Comparison) -> list[str]:
    rows, baseline = comparison.rows, comparison.row(BASELINE)
    first, said = rows[0], []
    if first.name == BASELINE:
        said.append(f"No arm has a lower mean loss than plain AdamW ({with_error(baseline.loss)}).")
    else:
        sure = "excludes" if first.verdict == "better" else "includes"
        said.append(
            f"The lowest loss has {first.name}: {with_error(first.loss)} against {with_error(baseline.loss)} for AdamW, a "
            f"difference of {with_interval(first.difference)} (the interval {sure} zero)."
        )
    for kind in ("better", "unclear", "worse"):
        found = [row for row in rows if row.verdict == kind]
        if found:
            listed = ", ".join(f"{row.name} ({row.difference.mean:+.3f})" for row in found)
            said.append(f"{VERDICTS[kind][0].upper()}{VERDICTS[kind][1:]}: {listed}.")
    claimed = [row.name for row in rows if row.verdict in ("better", "worse")]
    sure_ones = comparison.sure()
    if claimed:
        lost = [name for name in claimed if name not in sure_ones]
        stand = (
            f"all but {', '.join(lost)} stand"
            if 0 < len(lost) < len(claimed)
            else "none stands"
            if lost
            else "all stand"
        )
        said.append(
            f"Of these differences, {stand} when corrected (Holm) for {len(rows) - 1} comparisons with AdamW."
        )
    diverged = [
        f"{row.name} ({row.diverged} of {row.tests} test runs)" for row in rows if row.diverged
    ]
    if diverged:
        said.append(f"Diverged: {', '.join(diverged)}.")
    ours = [row.name for row in rows if row.outcome.arm.ours and row.verdict == "worse"]
    if ours:
        said.append(f"Of our own optimizers, {', '.join(ours)} did worse than AdamW here.")
    return said


def _pairs_in_words(comparison: Comparison) -> list[str]:
    """What scales add, whether it matters that they are the measured ones, and what rounding alone does."""
    families: dict[str, list[Pair]] = {}
    for pair in comparison.pairs:
        arm = comparison.row(pair.name).outcome.arm
        if (pair.name, pair.against) == SAME:
            kind = "One algorithm in two programs, so that the difference is rounding"
        elif arm.control is not None:
            kind = "Scales in the wrong places, against the measured ones"
        elif pair.against == arm.optimizer:
            kind = "Scales from curvature, against all scales 1"
        else:
            kind = "Against other ways to the same end"
        families.setdefault(kind, []).append(pair)
    said = []
    for kind, pairs in families.items():
        listed = "; ".join(
            f"{pair.name} {_against(pair, kind)}{with_interval(pair.difference)}" for pair in pairs
        )
        said.append(f"{kind}: {listed}.")
    return said


def _against(pair: Pair, kind: str) -> str:
    """Name the other arm where the family does not."""
    return f"against {pair.against} " if kind.startswith(("Against", "One")) else ""


def _steps_in_words(comparison: Comparison) -> list[str]:
    reached = {
        row.name: row for row in comparison.rows if row.steps is not None and row.name != BASELINE
    }
    if not reached:
        return []
    said, study = [], comparison.study
    seeds = min(study.seeds, study.length_seeds)
    fast = [
        f"{name} {row.steps.with_interval()}"
        for name, row in reached.items()
        if row.steps.verdict == "fewer"
    ]  # type: ignore[union-attr]
    if fast:
        said.append(
            f"Fewer steps to AdamW's loss, as a part of AdamW's ({seeds} seeds): {', '.join(fast)}."
        )
    measured = [
        f"{name} {row.evaluations.with_interval()}"  # type: ignore[union-attr]
        for name, row in reached.items()
        if row.gradient_evaluations > comparison.row(BASELINE).gradient_evaluations
    ]
    if measured:
        said.append(
            f"In gradient evaluations, with those that curvature takes: {', '.join(measured)}."
        )
    missed = [
        f"{n} ({row.steps.missed} of {row.steps.seeds} seeds)"
        for n, row in reached.items()
        if row.steps.missed
    ]  # type: ignore[union-attr]
    if missed:
        said.append(
            f"Not reached, even in runs of {max(study.lengths):g} times the length: {', '.join(missed)}."
        )
    return said


def _edges_in_words(comparison: Comparison) -> list[str]:
    edges = [row.name for row in comparison.rows if row.outcome.tuned.edges]
    if not edges:
        return []
    return [
        f"The budget of {comparison.study.budget} tuning runs ended with a best value at the edge of what was tried for "
        f"{', '.join(edges)}: more tuning might improve them."
    ]


def pair_cells(pair: Pair) -> list[str]:
    """Two arms, their difference, and what it says about the first."""
    word = {
        "better": "better",
        "worse": "worse",
        "unclear": "no difference shown",
        "diverged": "diverged",
    }[pair.verdict]
    return [pair.name, pair.against, with_interval(pair.difference), word]


def caveats(comparison: Comparison) -> list[str]:
    """What the numbers do not say."""
    study = comparison.study
    parameters = comparison.test_runs()[0].parameters
    tokens = study.steps * study.batch_size * study.model.context
    said = [
        f"A model of {parameters:,} parameters, trained on {tokens:,} tokens ({tokens / parameters:.2g} a parameter), says "
        "little about large models and long runs: gains of this kind tend to shrink as models grow.",
        f"Intervals are 95 % t intervals over {study.seeds} test seeds, at hyperparameters chosen on one tuning seed: the "
        "noise of tuning is not in them. All differences share the runs of AdamW, so that false ones would come together.",
        "Arms were tuned at the main length only; the other lengths reuse its hyperparameters.",
        "Bytes are those of the optimizer's state between steps. A refresh needs more for a moment: newton a copy of the "
        "weights.",
    ]
    untried: dict[str, list[str]] = {}
    for row in comparison.rows:
        for name in row.outcome.tuned.untried:
            untried.setdefault(name, []).append(row.name)
    for name, arms in untried.items():
        who = "all arms" if len(arms) == len(comparison.rows) else ", ".join(arms)
        said.append(
            f"{study.budget} tuning runs an arm are few. They left {name} as it was at the start for {who}."
        )
    failed = [
        f"{row.name} ({row.failed_refreshes})" for row in comparison.rows if row.failed_refreshes
    ]
    if failed:
        said.append(
            f"Refreshes that gave no curvature to use, in all test runs: {', '.join(failed)}."
        )
    if study.seeds < FEW:
        said.append(
            f"{study.seeds} test seeds are few: the intervals are wide, and small differences cannot be seen."
        )
    said += [f"Left out: {arm}. {why}" for arm, why in comparison.left_out.items()]
    return said
