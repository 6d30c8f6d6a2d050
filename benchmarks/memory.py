"""What an optimizer keeps between steps, and what it allocates on top during a step, on GPT-2's parameters."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would print two lines a measurement
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from benchmarks.lib.arms import (
    ARMS,
    Arm,
    Problem,
    describe_problem,
    machine_of_run,
    make_parser,
    make_problem,
    parse,
    plot_bars,
    progress_bar,
    save,
    show,
    verdict,
)

SHARE = (
    0.05  # of the parameters' bytes that a step may allocate, unless the largest tensor is larger
)


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors in the state."""
    tensors = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    return sum(t.untyped_storage().nbytes() for t in tensors)


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most bytes that are allocated at one time by the function and not yet freed.

    Torch's CPU allocator reports every allocation and release to the profiler, those inside of
    kernels too. Tensors from before are not counted, nor is their release.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def measure(arm: Arm, problem: Problem) -> dict[str, Any]:
    """State and peak of one arm, in its second step, and the target for the peak."""
    optimizer = arm.build(problem)
    optimizer.step()
    peak = peak_bytes(optimizer.step)
    sizes = [
        p.numel() * p.element_size() for group in optimizer.param_groups for p in group["params"]
    ]
    count = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    return {
        "parameters": count,
        "state_bytes": state_bytes(optimizer),
        "state_bytes_per_parameter": state_bytes(optimizer) / count,
        "state_target": arm.state_target,
        "peak_bytes": peak,
        "peak_share_of_parameters": peak / sum(sizes),
        "peak_target": max(SHARE * sum(sizes), max(sizes)) if arm.ours else None,
    }


def table_row(arm: Arm, measured: dict[str, Any]) -> list[str]:
    """The row of an arm."""
    state, state_target = measured["state_bytes_per_parameter"], measured["state_target"]
    peak, peak_target = measured["peak_bytes"], measured["peak_target"]
    return [
        arm.name,
        f"{state:.3f}",
        "" if state_target is None else f"<= {state_target}",
        verdict(state, state_target),
        f"{peak / 1e6:.1f}",
        "" if peak_target is None else f"<= {peak_target / 1e6:.1f}",
        verdict(peak, peak_target),
    ]


def main() -> None:
    """Measure, print, save."""
    arguments = parse(
        make_parser("Bytes of state a parameter, and peak of allocations during a step.", "memory")
    )
    problem = make_problem(arguments.size, arguments.layout)
    arms = [arm for arm in ARMS if arm.suite == "main" or not arguments.no_muon]
    results = {}
    with machine_of_run() as machine, progress_bar("Measuring", len(arms)) as advance:
        for arm in arms:
            results[arm.name] = measure(arm, problem)
            advance(arm.name)

    description = describe_problem(problem)
    columns = ["arm", "state B/param", "target", "met?", "peak MB", "target", "met?"]
    rows = [table_row(arm, results[arm.name]) for arm in arms]
    title = (
        f"Memory of a step, {description['parameters'] / 1e6:.1f}M parameters, {arguments.layout}"
    )
    show(title, columns, rows, machine)
    save(arguments.output, {"machine": machine, "problem": description, "arms": results})
    state = [results[arm.name]["state_bytes_per_parameter"] for arm in arms]
    peak = [results[arm.name]["peak_bytes"] / 1e6 for arm in arms]
    plot_bars(
        arguments.plot,
        [("bytes of state a parameter", arms, state), ("peak MB during a step", arms, peak)],
        machine,
    )


if __name__ == "__main__":
    main()
