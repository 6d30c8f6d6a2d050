"""How long `optimizer.step()` takes on GPT-2's parameters, next to the optimizers it replaces."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.lib.arms import (
    ARMS,
    CONSOLE,
    Arm,
    Problem,
    describe_problem,
    machine_of_run,
    make_parser,
    make_problem,
    parse,
    plot_bars,
    positive,
    progress_bar,
    save,
    show,
    verdict,
)

WARM_UP = 2
BUSY = (
    0.2  # share of a run with some process waiting for a core, from which on its times mean little
)


def measure(
    arms: Sequence[Arm], problem: Problem, rounds: int, warm_up: int
) -> dict[str, list[float]]:
    """Seconds of each step, `{arm: one time a round}`.

    In a round every arm steps once, so that a disturbance of the machine hits all of them; the
    order rotates from round to round. Ratios are taken within a round.
    """
    optimizers = {arm.name: arm.build(problem) for arm in arms}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    names = list(optimizers)
    with progress_bar("Steps", (warm_up + rounds) * len(names)) as advance:
        for number in range(-warm_up, rounds):
            start = number % len(names)
            for name in names[start:] + names[:start]:
                begin = time.perf_counter()
                optimizers[name].step()
                elapsed = time.perf_counter() - begin
                if number >= 0:
                    times[name].append(elapsed)
                advance(name)
    return times


def ratio(times: dict[str, list[float]], name: str, reference: str) -> dict[str, float]:
    """Median and quartiles over the rounds of the ratio within a round."""
    ratios = sorted(mine / other for mine, other in zip(times[name], times[reference]))
    return {
        "median": median(ratios),
        "low": ratios[len(ratios) // 4],
        "high": ratios[(3 * len(ratios)) // 4],
    }


def summarize(arm: Arm, times: dict[str, list[float]]) -> dict[str, Any]:
    """What the JSON file says of an arm: its times, and every comparison that has a target."""
    comparisons = []
    for reference, target in arm.targets:
        measured = ratio(times, arm.name, reference)
        comparisons.append(
            {
                "reference": reference,
                **measured,
                "target": target,
                "met": measured["median"] <= target,
            }
        )
    return {
        "median_ms": 1e3 * median(times[arm.name]),
        "seconds": times[arm.name],
        "comparisons": comparisons,
    }


def table_rows(name: str, summary: dict[str, Any]) -> list[list[str]]:
    """The rows of an arm: one a comparison, or one without any."""
    rows = []
    for c in summary["comparisons"]:
        quartiles = f"{c['median']:.2f} ({c['low']:.2f}-{c['high']:.2f})"
        rows.append(
            [
                "",
                "",
                c["reference"],
                quartiles,
                f"<= {c['target']}",
                verdict(c["median"], c["target"]),
            ]
        )
    rows = rows or [[""] * 6]
    rows[0][:2] = name, f"{summary['median_ms']:.1f}"
    return rows


def main() -> None:
    """Measure, print, save."""
    parser = make_parser(
        "Time optimizer.step() of blockopt and its peers, interleaved in one run.", "step_time"
    )
    parser.add_argument("--rounds", type=positive, default=25, help="rounds of all arms but Muon")
    parser.add_argument("--muon-rounds", type=positive, default=2, help="rounds of the Muon arms")
    arguments = parse(parser)
    problem = make_problem(arguments.size, arguments.layout)
    description = describe_problem(problem)
    suites = [("main", "all parameters", arguments.rounds, WARM_UP)]
    if not arguments.no_muon:  # steps of seconds need one to warm up
        suites.append(("muon", "matrices alone", arguments.muon_rounds, 1))

    results, panels = {}, []
    for suite, what, rounds, warm_up in suites:
        arms = [arm for arm in ARMS if arm.suite == suite]
        with machine_of_run() as machine:
            times = measure(arms, problem, rounds, warm_up)
        summaries = {arm.name: summarize(arm, times) for arm in arms}
        show(
            f"optimizer.step(), {description['parameters'] / 1e6:.1f}M parameters, {arguments.layout}, {what}",
            ["arm", "ms", "vs", "ratio (quartiles)", "target", "met?"],
            [row for name, summary in summaries.items() for row in table_rows(name, summary)],
            machine,
        )
        if machine["waiting"] is not None and machine["waiting"] > BUSY:
            CONSOLE.print(
                "[red]Other processes wanted the cores during this run: do not trust its times."
            )
        panels.append(
            (f"median ms a step, {what}", arms, [summaries[arm.name]["median_ms"] for arm in arms])
        )
        results[suite] = {"machine": machine, "arms": summaries}
        save(
            arguments.output, {"problem": description, "suites": results}
        )  # each time: a run cut short keeps what it has
        plot_bars(arguments.plot, panels, machine)


if __name__ == "__main__":
    main()
