"""The picture and the table on top of the README, drawn from `results/headline.json`.

    python -m recipes.comparison.headline

The file holds the final loss of every run: of optimizers as shipped, and of AdamW with learning
rates tuned by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table

from recipes.comparison.arms import ARMS
from recipes.comparison.paired_statistics import estimate, paired_difference
from recipes.comparison.plots import LIGHT

ROOT = Path(__file__).resolve().parents[1]
TITLES = {"stdlib": "Python's standard library", "linux": "documentation of Linux"}
BASELINES = {
    "block-muon": "shipped-muon",
    "block-adamw": "adamw-groups",
    "block-sgd": "shipped-adamw",
}

Losses = dict[str, dict[str, dict[int, float]]]


def main() -> None:
    """Print the table with differences to the baselines, and draw the picture."""
    found = losses(json.loads((ROOT / "results" / "headline.json").read_text())["runs"])
    console = Console()
    for corpus, by_arm in found.items():
        table = Table("arm", "seeds", "loss", "minus the baseline [95 %]", title=TITLES[corpus])
        for arm, by_seed in by_arm.items():
            mean, error, *_ = estimate(list(by_seed.values()))
            row = [arm, str(len(by_seed)), f"{mean:.3f} ± {error:.3f}", against(arm, by_arm)]
            table.add_row(*row)
        console.print(table)
    draw(found).savefig(ROOT / "images" / "headline.png", dpi=130)


def losses(runs: list[dict[str, Any]]) -> Losses:
    """Return `{corpus: {arm: {seed: loss}}}`, the lowest mean first.

    Example:
        >>> run = {"corpus": "stdlib", "arm": "shipped-muon", "seed": 1, "loss": 3.8}
        >>> losses([run, run | {"seed": 2}])
        {'stdlib': {'shipped-muon': {1: 3.8, 2: 3.8}}}
    """
    result: Losses = {}
    for run in runs:
        arms = result.setdefault(run["corpus"], {})
        arms.setdefault(run["arm"], {})[run["seed"]] = run["loss"]
    return {
        corpus: dict(sorted(arms.items(), key=lambda item: estimate([*item[1].values()]).mean))
        for corpus, arms in result.items()
    }


def against(arm: str, by_arm: dict[str, dict[int, float]]) -> str:
    """Return the difference to the baseline that a practitioner would tune, over common seeds."""
    for ours, baseline in BASELINES.items():
        if arm.startswith(f"shipped-{ours}") and baseline in by_arm:
            seeds = by_arm[arm].keys() & by_arm[baseline].keys()
            values, base = ({s: by_arm[name][s] for s in sorted(seeds)} for name in (arm, baseline))
            mean, _, low, high, count = paired_difference(values, base)
            return f"{mean:+.3f} [{low:+.3f}, {high:+.3f}] of {count}, {baseline}"
    return ""


def draw(found: Losses) -> Figure:
    """Draw a bar per arm with the 95 % interval of its mean, a panel per corpus."""
    arms = list(next(iter(found.values())))[::-1]
    figure = Figure(figsize=(9.4, 1.3 + 0.36 * len(arms)), layout="constrained")
    panels = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for axes, (corpus, by_arm) in zip(panels, found.items()):
        estimates = [estimate([*by_arm[arm].values()]) for arm in arms]
        start = min(e.low for e in estimates) - 0.15
        end = max(e.high for e in estimates)
        for height, (arm, value) in enumerate(zip(arms, estimates)):
            color = LIGHT.ours if ARMS[arm].ours else LIGHT.neutral
            axes.barh(height, value.mean - start, left=start, height=0.72, color=color)
            axes.plot([value.low, value.high], [height, height], color=LIGHT.text, linewidth=1.6)
            axes.text(value.high, height, f" {value.mean:.2f}", va="center", fontsize=9)
        axes.set_yticks(range(len(arms)), [ARMS[arm].title for arm in arms])
        axes.set_xlim(start, end + 0.15 * (end - start))
        axes.set_title(TITLES[corpus], fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    colors = {"blockopt": LIGHT.ours, "torch": LIGHT.neutral}
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    panels[0].legend(handles=handles, loc="upper right", fontsize=9)
    figure.supxlabel("loss on held-out text, nats per token (axes do not start at 0)", fontsize=9)
    size = "GPT-2 of 1M parameters, 95 % intervals of 5 seeds"
    figure.suptitle(f"Loss after 1,200 steps: lower is better. {size}", fontsize=10)
    return figure


if __name__ == "__main__":
    main()
