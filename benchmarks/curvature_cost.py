"""Measure what a refresh of the block curvature costs, and how accurate each estimator is.

Cost: every estimator on one GPT-2 and one batch, next to a training step. Overhead: training with
BlockLR at its defaults, next to training without it. Accuracy: a GPT so small that its Hessian and
its Gauss-Newton matrix can be computed entry by entry, at initialisation and after some steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.accuracy import LEVELS, judge
from benchmarks.lib.arms import LR
from benchmarks.lib.estimators import MEASURED
from benchmarks.lib.exact_curvature import SMALL, TINY, amount_of_work, points
from benchmarks.lib.options import Parser, positive
from benchmarks.lib.output import (
    CONSOLE,
    at_most,
    chart,
    progress_bar,
    quartiles,
    save,
    setting,
    show,
    verdict,
    warn_if_busy,
)
from benchmarks.lib.timing import conditions, time_in_rounds
from blockopt import BlockAdamW, BlockLR, block_scales, find_blocks, param_groups
from blockopt.block_lr import defaults
from blockopt.blocks import ROLES
from blockopt.curvature import Request, power_law
from recipes.common.gpt2 import GPT2, PRESETS, GPT2Config

Results = dict[str, Any]
STEP, SCALES = "training step", "block_scales"
EVERY = defaults.USUAL.every
# The largest acceptable cost of a refresh in training steps, and overhead of BlockLR; and the
# smallest acceptable rank correlation with the exact curvature of the tensors.
COST = {"gradient": 0.05, "hutchinson": 5.0}
COST |= dict.fromkeys(("analytic", "analytic, full", "secant", "newton"), 2.0)
OVERHEAD = 0.02
RANK = 0.9
SHOWN = {"analytic": ("GN", "o"), "gauss_newton": ("GN", "^"), "hutchinson": ("H", "s")}


def random_batch(config: GPT2Config, batch: int) -> Tensor:
    """Return random tokens and random targets, stacked."""
    shape = (2, batch, config.context)
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))


def measure_cost(config: GPT2Config, batch: int, rounds: int) -> Results:
    """Time every estimator and a training step on the same batch.

    Args:
        config: Sizes of the model.
        batch: Sequences in the batch.
        rounds: Number of rounds.
    """
    torch.manual_seed(0)
    model = GPT2(config)
    blocks, (tokens, targets) = find_blocks(model), random_batch(config, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss() -> Tensor:
        return model(tokens, targets)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    loss().backward()
    gradients = [p.grad for p in model.parameters()]
    optimizer.step()
    request = Request(
        model=model,
        blocks=blocks,
        losses=loss,
        update={name: p.detach() - before[name] for name, p in model.named_parameters()},
        slopes={},
        scales={name: torch.ones(b.num_blocks) for name, b in blocks.items()},
        by="role",
        num_probes=1,
        generator=torch.Generator().manual_seed(0),
        known={},
    )

    def prepare(name: str) -> None:  # a refresh finds the gradients of the step before it
        for p, g in zip(model.parameters(), gradients):
            p.grad = None if name == STEP else g

    calls = {STEP: step, **{name: partial(run, request) for name, run in MEASURED.items()}}
    calls[SCALES] = partial(block_scales, power_law(model, blocks=blocks), model, blocks)
    times = time_in_rounds(calls, rounds, "Refreshes", prepare=prepare)
    return {
        name: {
            "median_ms": times.milliseconds(name),
            "steps": times.ratio(name, STEP),
            "target": COST.get(name),
            "seconds": times.seconds[name],
        }
        for name in calls
    }


def measure_overhead(config: GPT2Config, batch: int, cycles: int) -> Results:
    """Time training with `BlockLR` at its defaults and without it, from refresh to refresh.

    Two copies of a model train step by step in turns. The first refresh, after step 1, is part of
    the warm-up; each cycle has one more.
    """
    tokens, targets = random_batch(config, batch)
    refreshed: list[bool] = []

    def make(with_block_lr: bool) -> Callable[[], None]:
        torch.manual_seed(0)
        model = GPT2(config)
        optimizer = BlockAdamW(param_groups(model), lr=LR)
        block_lr = BlockLR(optimizer, model) if with_block_lr else None

        def loss() -> Tensor:
            refreshed[-1] = True
            return model(tokens, targets)

        def step() -> None:
            model(tokens, targets).backward()
            optimizer.step()
            if block_lr is not None:
                refreshed.append(False)
                block_lr.step(loss)
            optimizer.zero_grad()

        return step

    calls = {"without": make(False), "with": make(True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the curvature of noise may be negative
        times = time_in_rounds(calls, cycles * EVERY, "Training", warm_up=2)
    if sum(refreshed[2:]) != cycles:
        raise RuntimeError(f"{sum(refreshed[2:])} refreshes in {cycles} cycles, expected one each.")
    plain = times.seconds["without"]
    steps = list(zip(plain, times.seconds["with"], refreshed[2:]))
    between = median(b / a for a, b, due in steps if not due)
    return {
        "steps": len(plain),
        "overhead": sum(times.seconds["with"]) / sum(plain) - 1,
        "between_refreshes": between - 1,
        "refreshes": sum(b - between * a for a, b, due in steps if due) / sum(plain),
        "step_ms": times.milliseconds("without"),
        "target": OVERHEAD,
        "seconds": times.seconds,
    }


def show_cost(cost: Results, title: str, run: Results) -> None:
    """Print the costs."""
    rows = []
    for name, found in cost.items():
        steps, target = found["steps"], found["target"]
        cell = quartiles(steps, 4 if steps["median"] < 0.1 else 2)
        met = verdict(steps["median"], target)
        rows.append([name, f"{found['median_ms']:.1f}", cell, at_most(target), met])
    show(title, ["measured", "ms", "training steps (quartiles)", "target", "met?"], rows, run)


def show_overhead(overhead: Results, direct: float, sizes: tuple[str, str], run: Results) -> None:
    """Print what `BlockLR` adds to training."""
    measured = (
        (f"{sizes[0]}, {overhead['steps']} steps with it over as many without", "overhead"),
        ("    of which the refreshes", "refreshes"),
        ("    of which the steps between, now with scales (median)", "between_refreshes"),
    )
    rows = [[what, f"{100 * overhead[key]:.2f} %", "", ""] for what, key in measured]
    what = f"{sizes[1]}, {defaults.CURVATURE} and {SCALES} over {EVERY} training steps"
    rows.append([what, f"{100 * direct:.2f} %", "", ""])
    for row, share in ((rows[0], overhead["overhead"]), (rows[-1], direct)):
        row[2:] = f"<= {100 * OVERHEAD:g} %", verdict(share, OVERHEAD)
    title = f"BlockLR at its defaults, a refresh every {EVERY} steps"
    show(title, ["measured", "overhead", "target", "met?"], rows, run)


def show_accuracy(found: Results, title: str, run: Results) -> None:
    """Print the rank correlations and ratios at one point of training."""
    rows = []
    for row in found["rows"]:
        tensor = row["rank"]["tensor"]
        ranks = dict.fromkeys(LEVELS, "")
        ranks |= {level: f"{ranked['mean']:.2f}" for level, ranked in row["rank"].items()}
        name = row["name"]
        if row["probes"]:
            ranks["tensor"] += f" ({tensor['min']:.2f})"
            name += f", {row['probes']}"
        low, middle, high = (two_digits(row["ratio"][key]) for key in ("low", "median", "high"))
        met = verdict(tensor["mean"], smallest=RANK) if row["default"] else ""
        rows.append([name, row["of"], *ranks.values(), f"{middle} ({low} .. {high})", met])
    columns = ["estimator, probes", "vs", "role", "layer", "tensor (min)", "head"]
    show(title, [*columns, "ratio (10 .. 90 %)", "met?"], rows, run)


def two_digits(value: float) -> str:
    """Return a number of any size, rounded to two digits."""
    return f"{float(f'{value:.1e}'):g}"


def plot(path: Path, cost: Results, accuracy: Results, run: Results) -> None:
    """Draw the costs with their targets, and estimated over exact curvature of all tensors."""
    with chart(path, setting(run), 1, 1 + len(accuracy), figsize=(16, 5.2)) as (figure, axes):
        bars, *scatters = axes[0]
        draw_cost(bars, cost)
        handles: dict[str, Any] = {}
        for axis, (name, found) in zip(scatters, accuracy.items()):
            draw_accuracy(axis, found, handles)
            axis.set_title(f"Curvature {name}, one probe")
        order = sorted(handles, key=[*ROLES, *SHOWN].index)
        handles = {name: handles[name] for name in order}
        place = {"loc": "outside right center", "frameon": False}
        figure.legend(handles.values(), handles.keys(), **place)


def draw_cost(axis: Any, cost: Results) -> None:
    """Draw one bar per estimator, with its target in orange."""
    names = [name for name in cost if name != STEP]
    values = [cost[name]["steps"]["median"] for name in names]
    axis.barh(names, values, color="tab:blue")
    for place, (name, value) in enumerate(zip(names, values)):
        target = cost[name]["target"] or 0.0
        if target:
            axis.scatter(target, place, marker="|", s=260, linewidths=3, color="tab:orange")
        end = (max(value, target), place)  # the label stands right of bar and target
        axis.annotate(f"{value:.2g}", end, xytext=(5, 0), textcoords="offset points", va="center")
    axis.axvline(1, color="tab:gray", linewidth=0.8, linestyle=":")
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set(xlabel="training steps per refresh (orange: target)", title="Cost")


def draw_accuracy(axis: Any, found: Results, handles: dict[str, Any]) -> None:
    """Draw one point per tensor and estimator, and add handles of both for the legend."""
    import matplotlib.pyplot as plt

    colours = dict(zip(ROLES, plt.get_cmap("tab20").colors))
    extremes, hidden = [], 0
    for estimator, (own, marker) in SHOWN.items():
        exact_values, estimates = found["values"][own], found["values"][estimator]
        for tensor, exact, estimate in zip(found["tensors"], exact_values, estimates):
            if exact <= 0 or estimate <= 0:
                hidden += 1
                continue
            colour = colours[tensor["role"]]
            style = {"facecolor": "none" if estimator == "hutchinson" else colour}
            axis.scatter(exact, estimate, s=24, marker=marker, alpha=0.75, ec=colour, **style)
            extremes += [exact, estimate]
            handles.setdefault(tensor["role"], axis.scatter([], [], color=colour))
        handles.setdefault(estimator, axis.scatter([], [], marker=marker, fc="none", ec="k"))
    low, high = min(extremes) / 2, max(extremes) * 2
    axis.plot([low, high], [low, high], color="tab:gray", linewidth=0.8, zorder=0)
    axis.set(xscale="log", yscale="log", ylabel="estimated")
    axis.set_xlabel("exact Gauss-Newton, for hutchinson exact Hessian")
    note = f"{hidden} not positive, not shown"
    axis.text(0.98, 0.02, note, transform=axis.transAxes, ha="right", fontsize=8)


def main() -> None:
    """Measure, print, save."""
    parser = Parser("curvature_cost", __doc__)
    parser.add_preset("--size", "10M", "preset of recipes/common/gpt2.py to time refreshes on")
    parser.add_preset("--train-size", "3M", "preset to time training with BlockLR on")
    length = "sequences per batch, as long as the preset's context"
    parser.add_argument("--batch", type=positive, default=8, help=length)
    parser.add_argument("--rounds", type=positive, default=5, help="rounds of refreshes")
    cycles = f"cycles of {EVERY} training steps"
    parser.add_argument("--cycles", type=positive, default=1, help=cycles)
    arguments = parser.parse()
    small, steps, seeds = SMALL, 200, 5
    if arguments.quick:
        arguments.size = arguments.train_size = "tiny"
        arguments.batch, arguments.rounds, arguments.cycles = 1, 1, 1
        small, steps, seeds = TINY, 5, 1
    presets = {**PRESETS, "tiny": TINY}
    batch, config, train = arguments.batch, presets[arguments.size], presets[arguments.train_size]

    runs: Results = {}
    with conditions() as runs["cost"]:
        cost = measure_cost(config, batch, arguments.rounds)
    show_cost(cost, f"A refresh, {arguments.size}, {batch} x {config.context} tokens", runs["cost"])
    with conditions() as runs["training"]:
        overhead = measure_overhead(train, batch, arguments.cycles)
    refresh = [cost[name]["steps"]["median"] for name in (defaults.CURVATURE, SCALES)]
    direct = sum(refresh) / EVERY
    show_overhead(overhead, direct, (arguments.train_size, arguments.size), runs["training"])
    warn_if_busy(*runs.values())
    options = {name: str(value) for name, value in vars(arguments).items()}
    results = {"options": options, "conditions": runs, "cost": cost}
    results |= {"training": overhead, "direct_overhead": direct}
    save(arguments.output, results)  # a run that is cut short keeps what it has

    accuracy: Results = {}
    work = 2 * amount_of_work(small)
    with conditions() as runs["accuracy"], progress_bar("Exact", work) as advance:
        for point in points(small, steps):
            accuracy[point.name] = judge(point, seeds, advance)
    for name, found in accuracy.items():
        title = f"Rank correlation with the exact curvature {name}, loss {found['loss']:.2f}"
        show_accuracy(found, title, runs["accuracy"])
    CONSOLE.print(
        "GN, H: exact Gauss-Newton matrix and Hessian; λ_max: its largest eigenvalue in a tensor. "
        f"Ranks are of the mean curvature of groups of blocks; mean (min) over {seeds} seeds. "
        "Ratio: to the exact value, over tensors where "
        "that is positive; in units of its median for gradient and power_law, which are relative. "
        "Matrices: those of attention and MLP, which the power law is about. Target: a rank "
        f"correlation of {RANK} by tensor with one probe."
    )
    save(arguments.output, {**results, "accuracy": accuracy})
    plot(arguments.plot, cost, accuracy, runs["cost"])


if __name__ == "__main__":
    main()
