"""A comparison in words and cells: the sentences and tables that terminal and report share."""

from __future__ import annotations

import math

from recipes.arms import BASELINE
from recipes.comparison import Comparison, Pair, Row
from recipes.paired_statistics import Estimate

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
    return f"{value.mean:+.3f}" + ("" if math.isnan(value.low) else f" ± {value.high - value.mean:.3f}")


def hyperparameters(row: Row) -> str:
    """The tuned values of an arm, those at the edge of what was tried marked by "!", those never varied in brackets."""
    tuned = row.outcome.tuned
    cells = []
    for name, value in tuned.best.items():
        text = f"{name} {value:.3g}"
        cells.append(f"({text})" if name in tuned.untried else f"{text}!" if name in tuned.edges else text)
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
    rows = comparison.rows
    first, baseline = rows[0], comparison.row(BASELINE)
    study = comparison.study
    said = []
    if first.name == BASELINE:
        said.append(f"No arm has a lower mean loss than plain AdamW ({with_error(baseline.loss)}).")
    else:
        sure = "the interval excludes zero" if first.verdict == "better" else "the interval includes zero"
        said.append(
            f"The lowest loss has {first.name}: {with_error(first.loss)} against {with_error(baseline.loss)} for AdamW, a "
            f"difference of {with_interval(first.difference)} ({sure})."
        )
    for kind in ("better", "unclear", "worse", "diverged"):
        found = [row for row in rows if row.verdict == kind]
        if found:
            listed = ", ".join(f"{row.name} ({number_signed(row)})" for row in found)
            said.append(f"{VERDICTS[kind][0].upper()}{VERDICTS[kind][1:]}: {listed}.")
    reached = [row for row in rows if row.steps is not None and row.name != BASELINE]
    fast = [row for row in reached if row.steps.part < 1 and row.steps.kind in ("at", "before")]  # type: ignore[union-attr]
    if fast:
        listed = ", ".join(f"{row.name} {row.steps}" for row in fast)
        said.append(f"Steps to AdamW's loss, as a part of AdamW's: {listed}.")
    measured = [row for row in reached if row.gradient_evaluations > baseline.gradient_evaluations]
    if measured:
        listed = ", ".join(f"{row.name} {row.evaluations}" for row in measured)
        said.append(f"The same in gradient evaluations, with those that curvature takes: {listed}.")
    never = [row.name for row in reached if row.steps.kind == "after"]  # type: ignore[union-attr]
    if never:
        said.append(f"Not reached by every seed, even in runs of {max(study.lengths):g} times the length: {', '.join(never)}.")
    ours = [row for row in rows if row.outcome.arm.ours and row.verdict == "worse"]
    if ours:
        said.append(f"Of our own optimizers, {', '.join(row.name for row in ours)} did worse than AdamW here.")
    edges = [row.name for row in rows if row.outcome.tuned.edges]
    if edges:
        said.append(
            f"The budget of {study.budget} tuning runs ended with a best value at the edge of what was tried for "
            f"{', '.join(edges)}: more tuning might improve them."
        )
    return said


def number_signed(row: Row) -> str:
    """The difference of a row to AdamW, or that it diverged."""
    return f"{row.difference.mean:+.3f}" if math.isfinite(row.difference.mean) else "no finite loss"


def pair_cells(pair: Pair) -> list[str]:
    """Two arms, their difference, and what it says about the first."""
    word = {"better": "better", "worse": "worse", "unclear": "no difference shown", "diverged": "diverged"}[pair.verdict]
    return [pair.name, pair.against, with_interval(pair.difference), word]


def caveats(comparison: Comparison) -> list[str]:
    """What the numbers do not say."""
    study = comparison.study
    parameters = comparison.test_runs()[0].parameters
    tokens = study.steps * study.batch_size * study.model.context
    said = [
        f"A model of {parameters:,} parameters, trained on {tokens:,} tokens, says little about large models: gains "
        "of this kind tend to shrink as models grow.",
        f"Intervals are 95 % t intervals over {study.seeds} test seeds for one comparison each; with "
        f"{len(comparison.rows) - 1} comparisons expect about {0.05 * (len(comparison.rows) - 1):.1f} false ones by chance.",
        "Arms were tuned at the main length only; the other lengths reuse its hyperparameters.",
    ]
    untried = {row.name: [name for name in row.outcome.tuned.untried if name != "weight_decay"] for row in comparison.rows}
    listed = ", ".join(f"{arm} ({', '.join(names)})" for arm, names in untried.items() if names)
    if listed:
        said.append(f"{study.budget} tuning runs an arm are few. They left these as they were at the start: {listed}.")
    if study.seeds < 5:
        said.append(f"{study.seeds} test seeds are few: the intervals are wide, and small differences cannot be seen.")
    said += [f"Left out: {arm}. {why}" for arm, why in comparison.left_out.items()]
    return said
