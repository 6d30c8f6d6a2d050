"""Measure a whole training step, forward and backward included, with BlockMuon and with AdamW."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.lib.arms import ARMS, FUSED, Arm
from benchmarks.lib.options import Parser, positive
from benchmarks.lib.output import at_most, plot_bars, quartiles, save, show, verdict, warn_if_busy
from benchmarks.lib.problem import make_problem
from benchmarks.lib.timing import conditions, time_in_rounds

TARGETS = {"BlockAdamW": 1.15, "BlockMuon, all parameters": 1.15}


def training_step(size: str, arm: Arm) -> Callable[[], None]:
    """Return a call that trains a model of its own on one batch of 8 sequences."""
    problem = make_problem(size, "linear")
    model, config, optimizer = problem.model, problem.config, arm.build(problem)
    tokens = torch.randint(config.vocab_size, (8, config.context + 1))

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def main() -> None:
    """Measure, print, save."""
    parser = Parser("training_step", __doc__)
    parser.add_preset("--size", "10M", "preset of recipes/common/gpt2.py")
    parser.add_argument("--rounds", type=positive, default=9, help="steps of each optimizer")
    arguments = parser.parse()
    if arguments.quick:
        arguments.size, arguments.rounds = "0.5M", 2
    arms = [arm for arm in ARMS if arm.name in (FUSED, *TARGETS)]
    calls = {arm.name: training_step(arguments.size, arm) for arm in arms}
    with conditions() as run:
        times = time_in_rounds(calls, arguments.rounds, "Training steps", warm_up=2)
    ratios = {name: times.ratio(name, FUSED) for name in TARGETS}
    rows = [[FUSED, f"{times.milliseconds(FUSED):.0f}", "", "", ""]]
    for name, ratio in ratios.items():
        met = verdict(ratio["median"], TARGETS[name])
        milliseconds = f"{times.milliseconds(name):.0f}"
        rows.append([name, milliseconds, quartiles(ratio), at_most(TARGETS[name]), met])
    header = ["optimizer", "ms", f"vs {FUSED} (quartiles)", "target", "met?"]
    show(f"Training step, {arguments.size}, 8 sequences", header, rows, run)
    warn_if_busy(run)
    save(arguments.output, {"conditions": run, "seconds": times.seconds, "ratios": ratios})
    medians = [times.milliseconds(arm.name) for arm in arms]
    plot_bars(arguments.plot, [("median ms per training step", arms, medians)], run)


if __name__ == "__main__":
    main()
