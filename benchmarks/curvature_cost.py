"""What a refresh of the block curvature costs, in training steps, and how near each estimator comes to the exact curvature.

Cost: every estimator on one GPT-2 and one batch, next to a training step. Accuracy: a GPT so small
that its Hessian and its Gauss-Newton matrix can be computed entry by entry, at initialisation and
after some steps (`_exact.py`).
"""

from __future__ import annotations

import argparse
import inspect
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.arms import (
    CONSOLE,
    LR,
    add_outputs,
    check,
    machine_of_run,
    positive,
    progress_bar,
    save,
    show,
    verdict,
)
from benchmarks.lib.exact_curvature import LEVELS, SMALL, TINY, amount_of_work, judge, points
from benchmarks.step_time import BUSY, ratio
from blockopt import BlockAdamW, BlockLR, find_blocks, param_groups
from blockopt.block_lr.history import role_of
from blockopt.block_lr.scales import block_scales
from blockopt.blocks import ROLES
from blockopt.curvature import (
    analytic,
    directional,
    gauss_newton,
    gradient,
    hutchinson,
    newton,
    power_law,
)
from recipes.common.gpt2 import GPT2, PRESETS, GPT2Config

STEP = "training step"
DEFAULTS = {name: option.default for name, option in inspect.signature(BlockLR).parameters.items()}
EVERY = DEFAULTS["every"]
OVERHEAD = 0.03  # of the time of training that BlockLR may take at its defaults
RANK = 0.9  # rank correlation with the exact curvature of the tensors that we aim at
SEEDS = 5
SHOWN = {"analytic outer": "o", "gauss_newton": "^", "hutchinson": "s"}


class Refreshes:
    """A GPT-2 in training and all that the estimators need of it.

    Args:
        config: Sizes of the model.
        batch: Sequences of random tokens a batch.
    """

    def __init__(self, config: GPT2Config, batch: int) -> None:
        torch.manual_seed(0)
        self.model = GPT2(config)
        self.tokens, self.targets = torch.randint(config.vocab_size, (2, batch, config.context))
        self.blocks = find_blocks(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, fused=True)
        before = [p.detach().clone() for p in self.model.parameters()]
        self.loss().backward()
        self.gradients = [p.grad for p in self.model.parameters()]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.update = {
            name: p.detach() - old for (name, p), old in zip(self.model.named_parameters(), before)
        }
        self.curvature = power_law(self.model, blocks=self.blocks)

    def loss(self) -> Tensor:
        """The loss of the batch."""
        return self.model(self.tokens, self.targets)

    def step(self) -> None:
        """What every estimator is compared with."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def prepare(self, arm: CostArm) -> None:
        """A refresh finds the gradients of the step before it; a step finds none."""
        for p, g in zip(self.model.parameters(), self.gradients):
            p.grad = None if arm.name == STEP else g


@dataclass(frozen=True)
class CostArm:
    """Something to time.

    Attributes:
        name: Its name in the table.
        run: Does it.
        target: The most training steps it should cost.
    """

    name: str
    run: Callable[[Refreshes], Any]
    target: float | None = None


COST_ARMS = (
    CostArm(STEP, lambda r: r.step()),
    CostArm("gradient", lambda r: gradient(r.model, blocks=r.blocks), 0.05),
    CostArm("power_law", lambda r: power_law(r.model, blocks=r.blocks)),
    CostArm("gauss_newton", lambda r: gauss_newton(r.model, r.loss, blocks=r.blocks)),
    CostArm("analytic outer", lambda r: analytic(r.model, r.loss, blocks=r.blocks), 2.0),
    CostArm(
        "analytic full", lambda r: analytic(r.model, r.loss, blocks=r.blocks, part="full"), 2.0
    ),
    CostArm(
        "analytic functional",
        lambda r: analytic(r.model, r.loss, blocks=r.blocks, part="functional"),
    ),
    CostArm(
        "secant",
        lambda r: directional(r.model, r.loss, r.update, blocks=r.blocks, method="secant"),
        2.0,
    ),
    CostArm("newton", lambda r: newton(r.model, r.loss, r.update, blocks=r.blocks), 2.0),
    CostArm("directional", lambda r: directional(r.model, r.loss, r.update, blocks=r.blocks)),
    CostArm("hutchinson", lambda r: hutchinson(r.model, r.loss, blocks=r.blocks), 5.0),
    CostArm("block_scales", lambda r: block_scales(r.curvature, r.model, r.blocks)),
)


def measure_cost(refreshes: Refreshes, rounds: int) -> dict[str, dict[str, Any]]:
    """Each arm once a round, in an order that rotates, after a round to warm up; ratios to the step of the same round."""
    times: dict[str, list[float]] = {arm.name: [] for arm in COST_ARMS}
    with progress_bar("Refreshes", (1 + rounds) * len(COST_ARMS)) as advance:
        for number in range(-1, rounds):
            start = number % len(COST_ARMS)
            for arm in COST_ARMS[start:] + COST_ARMS[:start]:
                refreshes.prepare(arm)
                begin = time.perf_counter()
                arm.run(refreshes)
                if number >= 0:
                    times[arm.name].append(time.perf_counter() - begin)
                advance(arm.name)
    return {
        arm.name: {
            "median_ms": 1e3 * median(times[arm.name]),
            "steps": ratio(times, arm.name, STEP),
            "target": arm.target,
            "seconds": times[arm.name],
        }
        for arm in COST_ARMS
    }


def measure_training(config: GPT2Config, batch: int, cycles: int) -> dict[str, Any]:
    """The time of training with BlockLR at its defaults, over that without it, for whole cycles from refresh to refresh.

    Both train the same model with BlockAdamW, step by step in turns. The first refresh, after step
    1, is left out like all that comes first; each cycle has one.
    """
    tokens, targets = torch.randint(
        config.vocab_size, (2, batch, config.context), generator=torch.Generator().manual_seed(0)
    )

    def make(with_block_lr: bool) -> Callable[[], bool]:
        torch.manual_seed(0)
        model = GPT2(config)
        optimizer = BlockAdamW(param_groups(model), lr=LR)
        block_lr = BlockLR(optimizer, model) if with_block_lr else None
        calls = []

        def loss() -> Tensor:
            calls.append(None)
            return model(tokens, targets)

        def step() -> bool:
            calls.clear()
            model(tokens, targets).backward()
            optimizer.step()
            if block_lr is not None:
                block_lr.step(loss)
            optimizer.zero_grad()
            return bool(calls)

        return step

    arms, times, refreshed = (make(False), make(True)), ([], []), []
    with warnings.catch_warnings(), progress_bar("Training", 2 + cycles * EVERY) as advance:
        warnings.simplefilter(
            "ignore", UserWarning
        )  # random tokens teach nothing: curvature may well be negative
        for number in range(-2, cycles * EVERY):
            for which in (0, 1) if number % 2 else (1, 0):
                begin = time.perf_counter()
                due = arms[which]()
                elapsed = time.perf_counter() - begin
                if number >= 0:
                    times[which].append(elapsed)
                    refreshed += [due] * which
            advance("with and without BlockLR")
    plain, scaled = times
    if sum(refreshed) != cycles:
        raise RuntimeError(
            f"{sum(refreshed)} refreshes in {cycles} cycles. Must be one a cycle, or the overhead is not BlockLR's."
        )
    between = median(b / a for a, b, due in zip(plain, scaled, refreshed) if not due)
    return {
        "steps": len(plain),
        "overhead": sum(scaled) / sum(plain) - 1,
        "between_refreshes": between - 1,
        "refreshes": sum(b - between * a for a, b, due in zip(plain, scaled, refreshed) if due)
        / sum(plain),
        "step_ms": 1e3 * median(plain),
        "target": OVERHEAD,
        "seconds": {"without": plain, "with": scaled},
    }


def show_cost(results: dict[str, Any], title: str, machine: dict[str, Any]) -> None:
    """Print the costs."""
    rows = []
    for name, arm in results.items():
        steps, target = arm["steps"], arm["target"]
        digits = 4 if steps["median"] < 0.1 else 2
        quartiles = (
            f"{steps['median']:.{digits}f} ({steps['low']:.{digits}f}-{steps['high']:.{digits}f})"
        )
        bound = "" if target is None else f"<= {target:g}"
        rows.append(
            [name, f"{arm['median_ms']:.1f}", quartiles, bound, verdict(steps["median"], target)]
        )
    show(title, ["arm", "ms", "training steps (quartiles)", "target", "met?"], rows, machine)


def show_training(
    training: dict[str, Any], direct: float, sizes: tuple[str, str], machine: dict[str, Any]
) -> None:
    """Print what BlockLR adds to training."""
    bound = f"<= {100 * OVERHEAD:g} %"
    what = [
        (
            f"{sizes[0]}, {training['steps']} steps with it over as many without",
            training["overhead"],
            True,
        ),
        ("    of which the refreshes", training["refreshes"], False),
        (
            "    of which the steps between, now with scales (median)",
            training["between_refreshes"],
            False,
        ),
        (
            f"{sizes[1]}, {DEFAULTS['curvature']} and block_scales over {EVERY} training steps",
            direct,
            True,
        ),
    ]
    rows = [
        [
            name,
            f"{100 * share:.2f} %",
            bound if aimed else "",
            verdict(share, OVERHEAD) if aimed else "",
        ]
        for name, share, aimed in what
    ]
    show(
        f"BlockLR at its defaults, a refresh every {EVERY} steps",
        ["measured", "overhead", "target", "met?"],
        rows,
        machine,
    )


def two_digits(value: float) -> str:
    """A number of any size, short."""
    return f"{float(f'{value:.1e}'):g}"


def show_accuracy(found: dict[str, Any], title: str, machine: dict[str, Any]) -> None:
    """Print rank correlations and ratios at one point of training."""
    rows = []
    for row in found["rows"]:
        ranks = [f"{row['rank'][level]['mean']:.2f}" for level in LEVELS]
        tensor = row["rank"]["tensor"]
        if row["probes"]:
            ranks[LEVELS.index("tensor")] += f" ({tensor['min']:.2f})"
        name = f"{row['name']}, {row['probes']}" if row["probes"] else row["name"]
        low, middle, high = (two_digits(row["ratio"][key]) for key in ("low", "median", "high"))
        met = verdict(-tensor["mean"], -RANK) if row["default"] else ""
        rows.append([name, row["of"], *ranks, f"{middle} ({low} .. {high})", met])
    columns = [
        "estimator, probes",
        "vs",
        "role",
        "layer",
        "tensor (min)",
        "head",
        "ratio (10 .. 90 %)",
        "met?",
    ]
    show(title, columns, rows, machine)


def plot(
    path: Path, cost: dict[str, Any], accuracy: dict[str, Any], machine: dict[str, Any]
) -> None:
    """Bars of the costs with their targets, and estimates over exact curvature of all tensors at each point of training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, 1 + len(accuracy), figsize=(16, 5.2), layout="constrained", squeeze=False
    )
    bars, *scatters = axes[0]
    names = [name for name in cost if name != STEP]
    values = [cost[name]["steps"]["median"] for name in names]
    bars.barh(names, values, color="tab:blue")
    targets = [
        (place, cost[name]["target"])
        for place, name in enumerate(names)
        if cost[name]["target"] is not None
    ]
    bars.scatter(
        [t for _, t in targets],
        [p for p, _ in targets],
        marker="|",
        s=260,
        linewidths=3,
        color="tab:orange",
    )
    for place, (name, value) in enumerate(zip(names, values)):  # right of bar and target
        end = (max(value, cost[name]["target"] or 0.0), place)
        bars.annotate(f"{value:.2g}", end, xytext=(5, 0), textcoords="offset points", va="center")
    bars.axvline(1, color="tab:gray", linewidth=0.8, linestyle=":")
    bars.invert_yaxis()
    bars.margins(x=0.12)
    bars.set(xlabel="training steps a refresh (orange: target)", title="Cost")
    colours = plt.get_cmap("tab20").colors
    seen: dict[str, Any] = {}
    for axis, (name, found) in zip(scatters, accuracy.items()):
        draw_scatter(axis, found, colours, seen)
        axis.set(
            title=f"Curvature {name}, one probe",
            xlabel="exact (GN, or H for hutchinson)",
            ylabel="estimated",
        )
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    roles = sorted({role for role in seen if role in ROLES}, key=ROLES.index)
    handles = [*(seen[role] for role in roles), *(seen[name] for name in SHOWN)]
    figure.legend(handles, [*roles, *SHOWN], loc="outside right center", frameon=False)
    figure.suptitle(
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}", fontsize=9
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
    CONSOLE.print(f"Wrote {path}")


def draw_scatter(axis: Any, found: dict[str, Any], colours: Any, seen: dict[str, Any]) -> None:
    """One point a tensor and estimator; `seen` gets a handle of each role and estimator for the legend."""
    own = {"analytic outer": "GN", "gauss_newton": "GN", "hutchinson": "H"}
    extremes, hidden = [], 0
    for estimator, marker in SHOWN.items():
        for label, exact, estimate in zip(
            found["tensors"], found["values"][own[estimator]], found["values"][estimator]
        ):
            if exact <= 0 or estimate <= 0:
                hidden += 1
                continue
            role = role_of(label)
            colour = colours[ROLES.index(role)]
            face = "none" if estimator == "hutchinson" else colour
            axis.scatter(
                exact, estimate, marker=marker, s=24, alpha=0.75, facecolor=face, edgecolor=colour
            )
            extremes += [exact, estimate]
            seen.setdefault(role, axis.scatter([], [], color=colour))
        seen.setdefault(
            estimator, axis.scatter([], [], marker=marker, facecolor="none", edgecolor="k")
        )
    axis.set(xscale="log", yscale="log")
    low, high = min(extremes) / 2, max(extremes) * 2
    axis.plot([low, high], [low, high], color="tab:gray", linewidth=0.8, zorder=0)
    axis.text(
        0.98,
        0.02,
        f"{hidden} not positive, not shown",
        transform=axis.transAxes,
        ha="right",
        fontsize=8,
    )


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--size",
        choices=tuple(PRESETS),
        default="10M",
        help="preset of recipes/gpt2.py to time refreshes on",
    )
    parser.add_argument(
        "--train-size",
        choices=tuple(PRESETS),
        default="3M",
        help="preset to time training with BlockLR on",
    )
    parser.add_argument(
        "--batch",
        type=positive,
        default=8,
        help="sequences a batch, as long as the preset's context",
    )
    parser.add_argument("--threads", type=positive, default=2, help="threads of torch")
    parser.add_argument("--rounds", type=positive, default=5, help="rounds of refreshes")
    parser.add_argument(
        "--cycles", type=positive, default=1, help=f"cycles of {EVERY} training steps"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, in seconds, to see that it works"
    )
    add_outputs(parser, "curvature_cost")
    return parser


def main() -> None:
    """Measure, print, save."""
    parser = make_parser()
    arguments = parser.parse_args()
    small, steps, seeds = SMALL, 200, SEEDS
    if arguments.quick:
        arguments.size = arguments.train_size = "0.5M"
        arguments.batch, arguments.rounds, arguments.cycles, arguments.threads = 1, 2, 1, 1
        small, steps, seeds = TINY, 20, 2
    check(parser, arguments, ["matplotlib"])

    config, machines = PRESETS[arguments.size], {}
    refreshes = Refreshes(config, arguments.batch)
    with machine_of_run() as machines["cost"]:
        cost = measure_cost(refreshes, arguments.rounds)
    million = sum(p.numel() for p in refreshes.model.parameters()) / 1e6
    del refreshes
    show_cost(
        cost,
        f"A refresh, {million:.1f}M parameters, {arguments.batch} x {config.context} tokens",
        machines["cost"],
    )
    with machine_of_run() as machines["training"]:
        training = measure_training(
            PRESETS[arguments.train_size], arguments.batch, arguments.cycles
        )
    direct = (
        sum(cost[name]["steps"]["median"] for name in (DEFAULTS["curvature"], "block_scales"))
        / EVERY
    )
    show_training(training, direct, (arguments.train_size, arguments.size), machines["training"])
    if any(
        machine["waiting"] is not None and machine["waiting"] > BUSY
        for machine in machines.values()
    ):
        CONSOLE.print(
            "[red]Other processes wanted the cores during this run: do not trust its times."
        )
    options = {
        key: value for key, value in vars(arguments).items() if key not in ("output", "plot")
    }
    results = {
        "options": options,
        "machines": machines,
        "cost": cost,
        "training": training,
        "direct_overhead": direct,
    }
    save(arguments.output, results)  # each time: a run cut short keeps what it has

    accuracy: dict[str, Any] = {}
    with (
        machine_of_run() as machines["accuracy"],
        progress_bar("Exact", 2 * amount_of_work(small)) as advance,
    ):
        for point in points(small, steps):
            accuracy[point.name] = judge(point, seeds, advance)
    for name, found in accuracy.items():
        numel = sum(p.numel() for p in point.model.parameters())
        title = f"Rank correlation with the exact curvature {name}, {numel:,} parameters, loss {found['loss']:.2f}"
        show_accuracy(found, title, machines["accuracy"])
    CONSOLE.print(
        f"GN, H: exact Gauss-Newton matrix and Hessian. Mean curvature of groups of blocks; mean (min) over {seeds} seeds. "
        "Ratio: to the exact one, over tensors where that is positive; in units of its median for gradient and power_law, "
        f"which are relative; matrices: of attention and MLP, which the law is for. Target: {RANK} at level tensor, one probe."
    )
    save(arguments.output, {**results, "accuracy": accuracy})
    plot(arguments.plot, cost, accuracy, machines["cost"])


if __name__ == "__main__":
    main()
