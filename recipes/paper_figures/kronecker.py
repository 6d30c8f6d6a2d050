"""KFAC and EKFAC against the exact Gauss-Newton blocks of every head of a small GPT-2."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockopt.analysis import kronecker_report
from blockopt.analysis.plots import OTHER_COLORS
from recipes.common.gpt2 import GPT2, GPT2Config
from recipes.data.addition import IGNORED, VOCABULARY, addition
from recipes.paper_figures.outcome import Check, Outcome, Run, mean_check, panels

ROLES = ("query", "key", "value", "output", "mlp_in", "mlp_out")
ERRORS = {"KFAC": "kfac_error", "EKFAC": "ekfac_error", "nearest product": "nearest_error"}


class Setting(NamedTuple):
    """Which model is measured on which tokens."""

    trained: bool
    answers_only: bool

    def __str__(self) -> str:
        counted = "only answers count" if self.answers_only else "every next token counts"
        return f"{'trained' if self.trained else 'at initialisation'}, {counted}"


SETTINGS = (Setting(False, False), Setting(True, False), Setting(True, True))


def loss_of(model: GPT2, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy over the targets that count."""
    logits = model(batch[0]).flatten(0, 1)
    return F.cross_entropy(logits, batch[1].flatten(), ignore_index=IGNORED)


def fits_by_role(run: Run, seed: int, setting: Setting) -> dict[str, dict[str, float]]:
    """Return errors and overlaps of each role in one repeat."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        width = max(4, run.effort.small)
        sizes = GPT2Config(len(VOCABULARY), context=17, width=width, depth=2, heads=2)
        model = GPT2(sizes).double()
    generator = torch.Generator().manual_seed(seed)
    data = {"answers_only": setting.answers_only, "generator": generator}
    if setting.trained:
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(run.effort.steps):
            optimizer.zero_grad()
            loss_of(model, addition(32, **data)).backward()
            optimizer.step()
    batch = addition(max(2, run.effort.samples // 8), **data)
    return kronecker_report(model, lambda: loss_of(model, batch), top=8).by_role()


def figure_kronecker(run: Run) -> Outcome:
    """How well KFAC and EKFAC match the exact blocks, by role, and how well any product could."""
    number = run.effort.repeats
    step = run.steps("Kronecker factors", number * len(SETTINGS))
    found: dict[Setting, list[dict[str, dict[str, float]]]] = {}
    for setting in SETTINGS:
        for seed in range(number):
            found.setdefault(setting, []).append(fits_by_role(run, seed, setting))
            step()

    def values(setting: Setting, role: str, what: str) -> list[float]:
        return [roles[role][what] for roles in found[setting]]

    title = "How well Kronecker products match the Gauss-Newton blocks of heads"
    figure, axes = panels(2, len(SETTINGS), 5.0, 3.4, title=title)
    overlaps = {"KFAC": "kfac_overlap", "EKFAC": "ekfac_overlap"}
    for column, setting in enumerate(SETTINGS):
        for ax, shown in ((axes[column], ERRORS), (axes[3 + column], overlaps)):
            for index, (name, what) in enumerate(shown.items()):
                rows = torch.tensor([values(setting, r, what) for r in ROLES], dtype=torch.float64)
                error = (rows.std(1) / math.sqrt(number)).tolist() if number > 1 else None
                shift = 0.27 * (index - (len(shown) - 1) / 2)
                places = [place + shift for place in range(len(ROLES))]
                look = {"width": 0.25, "capsize": 2, "color": OTHER_COLORS[index + 1]}
                ax.bar(places, rows.mean(1).tolist(), yerr=error, label=name, **look)
            ax.set_xticks(range(len(ROLES)), ROLES, fontsize=8)
        axes[column].set_yscale("log")
        axes[column].set_ylim(0.02, 30)
        axes[column].axhline(1, color="black", linewidth=0.6)
        axes[column].set_title(str(setting), fontsize=10)
        axes[3 + column].set_ylim(0, 1)
        axes[3 + column].set_ylabel("overlap of the top 8 eigenvectors")
    axes[0].set_ylabel("‖G - K‖ / ‖G‖ of all blocks of a role")
    axes[0].legend(fontsize=8)
    ratios = [
        roles[role]["ekfac_error"] / roles[role]["kfac_error"]
        for repeats in found.values()
        for roles in repeats
        for role in ROLES
    ]
    what = "largest error of EKFAC over that of KFAC, all roles and repeats"
    checks = [Check(what, "<= 1 (George et al.)", max(ratios), 0.0, 1.0 + 1e-9)]
    first = SETTINGS[0]
    for kind, low, high, predicted in (
        ("nearest product", 0.0, 0.15, "small: Theorem 3.1 has one, MᵀM ⊗ Λ"),
        ("KFAC", 0.5, math.inf, "large: tokens in the place of attended tokens"),
    ):
        numbers = values(first, "value", ERRORS[kind])
        checks.append(mean_check(f"{first}: value, error of {kind}", predicted, numbers, low, high))
    for setting in SETTINGS:
        for role in ROLES:
            kfac, *others = (values(setting, role, what) for what in ERRORS.values())
            told = zip(list(ERRORS)[1:], (sum(other) / number for other in others))
            told_text = ", ".join(f"{name} {mean:.2f}" for name, mean in told)
            what = f"{setting}: {role}, error of KFAC ({told_text})"
            checks.append(mean_check(what, "< 1: better than nothing, K = 0", kfac, 0.0, 1.0))
    model = f"GPT-2 of width {max(4, run.effort.small)}, 2 layers, 2 heads"
    described = f"{model}, {run.effort.steps} steps, {number} repeats, exact factors"
    return Outcome("KFAC and EKFAC against exact blocks", described, checks, figure)
