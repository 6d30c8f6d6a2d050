"""Measure how long `optimizer.step()` takes on GPT-2's parameters, next to its alternatives."""

from __future__ import annotations

from typing import Any

from benchmarks.lib.arms import ARMS, Arm
from benchmarks.lib.options import Parser, positive
from benchmarks.lib.output import at_most, plot_bars, quartiles, save, show, verdict, warn_if_busy
from benchmarks.lib.problem import make_problem
from benchmarks.lib.timing import Times, conditions, time_in_rounds


def summarize(arm: Arm, times: Times) -> dict[str, Any]:
    """Return the times of an arm, and every comparison that has a target."""
    comparisons = [
        {"reference": reference, **times.ratio(arm.name, reference), "target": target}
        for reference, target in arm.targets
    ]
    milliseconds, seconds = times.milliseconds(arm.name), times.seconds[arm.name]
    return {"median_ms": milliseconds, "seconds": seconds, "comparisons": comparisons}


def table_rows(name: str, summary: dict[str, Any]) -> list[list[str]]:
    """Return the rows of an arm: one per comparison, or one without any."""
    rows = [
        [
            "",
            "",
            c["reference"],
            quartiles(c),
            at_most(c["target"]),
            verdict(c["median"], c["target"]),
        ]
        for c in summary["comparisons"]
    ] or [[""] * 6]
    rows[0][:2] = name, f"{summary['median_ms']:.1f}"
    return rows


def main() -> None:
    """Measure, print, save."""
    parser = Parser("step_time", __doc__)
    parser.add_problem()
    parser.add_argument("--rounds", type=positive, default=25, help="rounds of all arms but Muon")
    parser.add_argument("--muon-rounds", type=positive, default=2, help="rounds of the Muon arms")
    arguments = parser.parse("adam_mini")
    if arguments.quick:
        arguments.size, arguments.rounds, arguments.muon_rounds = "0.5M", 2, 1
    problem = make_problem(arguments.size, arguments.layout)
    sizes = problem.describe()
    suites = [("main", "all parameters", arguments.rounds, 2)]
    if not arguments.no_muon:
        suites.append(("muon", "matrices alone", arguments.muon_rounds, 1))

    results, panels = {}, []
    for suite, what, rounds, warm_up in suites:
        arms = [arm for arm in ARMS if arm.suite == suite]
        steps = {arm.name: arm.build(problem).step for arm in arms}
        with conditions() as run:
            times = time_in_rounds(steps, rounds, "Steps", warm_up=warm_up)
        summaries = {arm.name: summarize(arm, times) for arm in arms}
        millions = sizes["parameters"] / 1e6
        show(
            f"optimizer.step(), {millions:.1f}M parameters, {arguments.layout}, {what}",
            ["arm", "ms", "vs", "ratio (quartiles)", "target", "met?"],
            [row for name, summary in summaries.items() for row in table_rows(name, summary)],
            run,
        )
        warn_if_busy(run)
        medians = [summaries[arm.name]["median_ms"] for arm in arms]
        panels.append((f"median ms per step, {what}", arms, medians))
        results[suite] = {"conditions": run, "arms": summaries}
        # After each suite: a run that is cut short keeps what it has.
        save(arguments.output, {"problem": sizes, "suites": results})
        plot_bars(arguments.plot, panels, run)


if __name__ == "__main__":
    main()
