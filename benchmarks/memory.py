"""Measure what an optimizer keeps between steps, and what it allocates on top during a step."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints two lines each time
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from benchmarks.lib.arms import ARMS, Arm
from benchmarks.lib.options import Parser
from benchmarks.lib.output import at_most, plot_bars, progress_bar, save, show, verdict
from benchmarks.lib.problem import Problem, make_problem
from benchmarks.lib.timing import conditions

SHARE = 0.05  # of the parameters' bytes that a step may allocate, or the largest tensor


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of all tensors in the state."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(v.untyped_storage().nbytes() for v in values if isinstance(v, Tensor))


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the most bytes that a function has allocated and not yet freed at any time.

    Torch's CPU allocator reports every allocation and release to the profiler, also those inside
    kernels. Tensors that existed before do not count, nor does their release.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measure(arm: Arm, problem: Problem) -> dict[str, Any]:
    """Return the state and the peak of one arm in its second step, and its targets."""
    optimizer = arm.build(problem)
    optimizer.step()
    peak = peak_bytes(optimizer.step)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sizes = [p.numel() * p.element_size() for p in parameters]
    count, state = sum(p.numel() for p in parameters), state_bytes(optimizer)
    return {
        "parameters": count,
        "state_bytes": state,
        "state_bytes_per_parameter": state / count,
        "state_target": arm.state_target,
        "peak_bytes": peak,
        "peak_share_of_parameters": peak / sum(sizes),
        "peak_target": max(SHARE * sum(sizes), max(sizes)) if arm.ours else None,
    }


def table_row(name: str, measured: dict[str, Any]) -> list[str]:
    """Return the row of an arm."""
    state, state_target = measured["state_bytes_per_parameter"], measured["state_target"]
    peak, peak_target = measured["peak_bytes"], measured["peak_target"]
    megabytes = None if peak_target is None else round(peak_target / 1e6, 1)
    return [
        *(name, f"{state:.3f}", at_most(state_target), verdict(state, state_target)),
        *(f"{peak / 1e6:.1f}", at_most(megabytes), verdict(peak, peak_target)),
    ]


def main() -> None:
    """Measure, print, save."""
    parser = Parser("memory", __doc__)
    parser.add_problem()
    arguments = parser.parse("adam_mini")
    problem = make_problem("0.5M" if arguments.quick else arguments.size, arguments.layout)
    arms = [arm for arm in ARMS if arm.suite == "main" or not arguments.no_muon]
    results = {}
    with conditions() as run, progress_bar("Measuring", len(arms)) as advance:
        for arm in arms:
            results[arm.name] = measure(arm, problem)
            advance(arm.name)

    sizes = problem.describe()
    show(
        f"Memory of a step, {sizes['parameters'] / 1e6:.1f}M parameters, {arguments.layout}",
        ["arm", "state B/param", "target", "met?", "peak MB", "target", "met?"],
        [table_row(name, measured) for name, measured in results.items()],
        run,
    )
    save(arguments.output, {"conditions": run, "problem": sizes, "arms": results})
    state = [found["state_bytes_per_parameter"] for found in results.values()]
    peak = [found["peak_bytes"] / 1e6 for found in results.values()]
    panels = [("bytes of state per parameter", arms, state), ("peak MB during a step", arms, peak)]
    plot_bars(arguments.plot, panels, run)


if __name__ == "__main__":
    main()
