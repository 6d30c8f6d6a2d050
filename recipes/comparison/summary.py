"""A comparison in words and cells: the sentences and tables that terminal and report share."""

from __future__ import annotations

import math

from recipes.comparison.paired_statistics import Estimate, verdict
from recipes.comparison.rows import SAME, Comparison, Pair, Row

FEW = 8  # seeds
VERDICTS = {
    "better": "better than {against}",
    "worse": "worse than {against}",
    "unclear": "no difference shown",
    "diverged": "diverged",
    "baseline": "the baseline",
}


def number(value: float) -> str:
    """Return a number for a table; infinite ones come from diverged runs.

    Example:
        >>> number(1.23456), number(float("inf")), number(float("nan"))
        ('1.235', 'diverged', '–')
    """
    if math.isnan(value):
        return "–"
    return "diverged" if math.isinf(value) else f"{value:.3f}"


def with_error(value: Estimate) -> str:
    """Return mean ± standard error.

    Example:
        >>> with_error(Estimate(2.0, 0.01, 1.9, 2.1, 4))
        '2.000 ± 0.010'
    """
    return number(value.mean) + ("" if math.isnan(value.error) else f" ± {value.error:.3f}")


def with_interval(value: Estimate) -> str:
    """Return mean and confidence interval, with signs.

    Example:
        >>> with_interval(Estimate(-0.1, 0.01, -0.13, -0.07, 4))
        '-0.100 [-0.130, -0.070]'
    """
    if not math.isfinite(value.mean):
        return number(value.mean)
    interval = "" if math.isnan(value.low) else f" [{value.low:+.3f}, {value.high:+.3f}]"
    return f"{value.mean:+.3f}{interval}"


def with_half_width(value: Estimate) -> str:
    """Return mean ± half of the confidence interval.

    Example:
        >>> with_half_width(Estimate(-0.1, 0.01, -0.13, -0.07, 4))
        '-0.100 ± 0.030'
    """
    if not math.isfinite(value.mean):
        return number(value.mean)
    return f"{value.mean:+.3f}" + (
        "" if math.isnan(value.low) else f" ± {value.high - value.mean:.3f}"
    )


def tuned_axes(row: Row) -> str:
    """Return what was tuned for an arm, and where its other hyperparameters come from."""
    arm = row.outcome.arm
    text = ", ".join(axis.name for axis in row.outcome.space)
    if arm.shipped_decay is not None:
        text += f"; weight_decay {arm.shipped_decay:g} and the rest as shipped"
    if row.outcome.fixed:
        text += f"; {', '.join(row.outcome.fixed)} from {arm.base}"
    return text


def hyperparameters(row: Row) -> str:
    """Return the values of an arm; "!" marks edges of what was tried, brackets the untried."""
    tuned = row.outcome.tuned
    cells = []
    for name, value in row.outcome.values.items():
        text = f"{name} {value:.3g}"
        text = f"({text})" if name in tuned.untried else text
        cells.append(f"{text}!" if name in tuned.edges else text)
    return ", ".join(cells)


def cells(row: Row) -> list[str]:
    """Return loss, difference, steps, gradient evaluations, seconds and bytes of an arm."""
    return [
        with_error(row.loss),
        "baseline" if row.verdict == "baseline" else with_half_width(row.difference),
        "–" if row.steps is None else str(row.steps),
        f"{row.gradient_evaluations:.0f}",
        f"{row.seconds:.1f}",
        f"{row.state_bytes:.2f}",
    ]


def sentences(comparison: Comparison) -> list[str]:
    """Say who wins and who loses, in plain words, with the numbers that show it."""
    if not math.isfinite(comparison.baseline.loss.mean):
        runs = comparison.study.seeds
        return [
            f"{comparison.against} diverged in some of its {runs} test runs: "
            "there is nothing to compare with."
        ]
    return [
        *_against_baseline(comparison),
        *_pairs_in_words(comparison),
        *_steps_in_words(comparison),
        *_edges_in_words(comparison),
    ]


def _against_baseline(comparison: Comparison) -> list[str]:
    rows, against, said = comparison.rows, comparison.against, []
    first, base_loss = rows[0], with_error(comparison.baseline.loss)
    if first.verdict == "baseline":
        said.append(f"No arm has a lower mean loss than {against} ({base_loss}).")
    else:
        chance = "" if first.verdict == "better" else ", which may be chance"
        difference = f"a difference of {with_interval(first.difference)}{chance}"
        loss = with_error(first.loss)
        said.append(
            f"{first.name} has the lowest loss: {loss}, {against} has {base_loss}, {difference}."
        )
    for kind in ("better", "unclear", "worse"):
        found = [row for row in rows if row.verdict == kind and not _only_in_steps(row, comparison)]
        if found:
            listed = ", ".join(f"{row.name} ({row.difference.mean:+.3f})" for row in found)
            words = VERDICTS[kind].format(against=against)
            said.append(f"{words[0].upper()}{words[1:]}: {listed}.")
    dearer = [row for row in rows if _only_in_steps(row, comparison)]
    if dearer:
        base = comparison.baseline.gradient_evaluations
        listed = ", ".join(
            f"{row.name} ({row.difference.mean:+.3f}, {row.gradient_evaluations / base - 1:.0%} "
            "more gradients)"
            for row in dearer
        )
        said.append(
            f"Lower loss than {against} after the same steps, but not shown for the same "
            f"gradients, of which curvature takes some: {listed}."
        )
    said.append(
        "A difference counts as better or worse only if its interval excludes zero after Holm's "
        f"correction for {len(rows) - 1} comparisons with {against}."
    )
    lost = [r.name for r in rows if r.verdict == "unclear" and verdict(r.difference) != "unclear"]
    if lost:
        said.append(f"Without the correction it would also exclude zero for {', '.join(lost)}.")
    diverged = [
        f"{row.name} ({row.diverged} of {row.tests} test runs)" for row in rows if row.diverged
    ]
    if diverged:
        said.append(f"Diverged: {', '.join(diverged)}.")
    ours = [row.name for row in rows if row.outcome.arm.ours and row.verdict == "worse"]
    if ours:
        said.append(f"Of our own optimizers, {', '.join(ours)} did worse than {against} here.")
    return said


def _only_in_steps(row: Row, comparison: Comparison) -> bool:
    """Whether an arm gains per step, takes more gradients, and does not show a gain in these."""
    dearer = row.gradient_evaluations > comparison.baseline.gradient_evaluations
    shown = row.evaluations is not None and row.evaluations.verdict == "fewer"
    return row.verdict == "better" and dearer and not shown


def headline(comparison: Comparison) -> str:
    """Return the result in one sentence: the best arm that is better than the baseline."""
    study, rows = comparison.study, comparison.rows
    where = f"at {study.name} parameters and {study.steps:,} steps"
    better = [r for r in rows if r.verdict == "better" and not _only_in_steps(r, comparison)]
    if not better:
        return f"No optimizer is shown to be better than {comparison.against} {where}"
    best = better[0]
    gain = f"{-best.difference.mean:.3f} below {comparison.against}'s loss"
    return f"{best.name} ends {gain} {where}"


def _pairs_in_words(comparison: Comparison) -> list[str]:
    """Say what scales add, whether they must be the measured ones, and what rounding does."""
    families: dict[str, list[str]] = {}
    for pair in comparison.pairs:
        arm, other = (comparison.row(name).outcome.arm for name in (pair.name, pair.against))
        against = f"against {pair.against} "
        if (pair.name, pair.against) == SAME:
            kind = "One algorithm in two programs, so that the difference is rounding"
        elif arm.control is not None:
            kind, against = "Scales in the wrong places, against the measured ones", ""
        elif arm.optimizer == other.optimizer and other.scales is None:
            kind, against = "Scales from curvature, against all scales 1", ""
        else:
            kind = "Compared with other ways to the same end"
        found = f"{pair.name} {against}{with_interval(pair.difference)}"
        families.setdefault(kind, []).append(found)
    return [f"{kind}: {'; '.join(listed)}." for kind, listed in families.items()]


def _steps_in_words(comparison: Comparison) -> list[str]:
    reached = {
        row.name: (row, row.steps, row.evaluations)
        for row in comparison.rows
        if row.steps is not None and row.evaluations is not None and row.verdict != "baseline"
    }
    study, base = comparison.study, comparison.baseline.gradient_evaluations
    seeds, against = min(study.seeds, study.length_seeds), comparison.against
    lists = {
        f"Fewer steps to {against}'s loss, as a part of {against}'s ({seeds} seeds)": [
            f"{name} {steps.with_interval()}"
            for name, (_, steps, _) in reached.items()
            if steps.verdict == "fewer" and comparison.row(name).verdict == "better"
        ],
        "In gradient evaluations, with those that curvature takes": [
            f"{name} {evaluations.with_interval()}"
            for name, (row, _, evaluations) in reached.items()
            if row.gradient_evaluations > base
        ],
        f"Not reached, even in runs of {max(study.lengths):g} times the length": [
            f"{name} ({steps.missed} of {steps.seeds} seeds)"
            for name, (_, steps, _) in reached.items()
            if steps.missed
        ],
    }
    return [f"{about}: {', '.join(listed)}." for about, listed in lists.items() if listed]


def _edges_in_words(comparison: Comparison) -> list[str]:
    edges = [row.name for row in comparison.rows if row.outcome.tuned.edges]
    if not edges:
        return []
    return [
        f"After {comparison.study.budget} tuning runs a best value lay at the edge of what was "
        f"tried for {', '.join(edges)}: more tuning might improve them."
    ]


def pair_cells(pair: Pair) -> list[str]:
    """Return two arms, their difference, and what it says about the first."""
    words = {"unclear": "no difference shown"}
    difference = with_interval(pair.difference)
    return [pair.name, pair.against, difference, words.get(pair.verdict, pair.verdict)]


def caveats(comparison: Comparison) -> list[str]:
    """Say what the numbers do not show."""
    study, rows = comparison.study, comparison.rows
    parameters = comparison.test_runs()[0].parameters
    tokens = study.steps * study.batch_size * study.model.context
    said = [
        f"A model of {parameters:,} parameters, trained on {tokens:,} tokens "
        f"({tokens / parameters:.2g} per parameter), says little about large models and long runs: "
        "gains of this kind tend to shrink as models grow.",
        f"Intervals are 95 % t intervals over {study.seeds} test seeds, at hyperparameters chosen "
        "on one tuning seed: the noise of tuning is not in them. All differences share the runs "
        f"of {comparison.against}, so that false ones would come together.",
        "Bytes are those of the optimizer's state between steps. A refresh needs more for a "
        "moment: newton needs a copy of the weights.",
    ]
    if len(study.lengths) > 1:
        said.append("Arms were tuned at the main length only; other lengths reuse what was found.")
    if any(row.outcome.arm.shipped for row in rows):
        said.append(
            "Only the learning rate was tuned for the shipped arms; their weight decay is in the "
            "table of tuned values. Betas are (0.9, 0.95), and BlockLR has its defaults."
        )
    untried: dict[str, list[str]] = {}
    for row in rows:
        for name in row.outcome.tuned.untried:
            untried.setdefault(name, []).append(row.name)
    for name, arms in untried.items():
        who = "all arms" if len(arms) == len(rows) else ", ".join(arms)
        said.append(
            f"{study.budget} tuning runs per arm are few. They left {name} at its start for {who}."
        )
    failed = [f"{row.name} ({row.failed_refreshes})" for row in rows if row.failed_refreshes]
    if failed:
        listed = ", ".join(failed)
        said.append(f"Refreshes that gave no curvature to use, in all test runs: {listed}.")
    if study.seeds < FEW:
        said.append(
            f"{study.seeds} test seeds are few: the intervals are wide, and small differences "
            "cannot be seen."
        )
    return [*said, *(f"Left out: {arm}. {why}" for arm, why in comparison.left_out.items())]
