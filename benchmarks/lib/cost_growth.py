"""How the cost of the factored closed forms grows with the length and the width of a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.attention_case import ROLES
from benchmarks.lib.output import chart
from benchmarks.lib.timing import time_in_rounds
from blockopt.analysis import SelfAttentionHessian, fit_exponent

Results = dict[str, Any]


def cost_growth(lengths: Sequence[int], widths: Sequence[int], rounds: int) -> Results:
    """Time trace, diagonal and Frobenius norm of each block at several lengths and widths."""

    def run(hessian: SelfAttentionHessian, role: str) -> None:
        block = hessian.factored(role)
        block.trace(), block.diagonal(), block.squared_frobenius()

    at = {"length": list(lengths), "width": list(widths)}
    sizes = {
        "length": [(length, widths[0]) for length in lengths],
        "width": [(lengths[0], width) for width in widths],
    }
    seconds: dict[str, dict[str, list[float]]] = {}
    for what in at:
        seconds[what] = {role: [] for role in ROLES}
        for length, width in sizes[what]:
            torch.manual_seed(0)
            X, Y = torch.randn(2, 1, length, width)
            weights = [torch.randn(width, width) / math.sqrt(width) for _ in ROLES]
            hessian = SelfAttentionHessian(X, *weights, Y)
            calls = {role: partial(run, hessian, role) for role in ROLES}
            times = time_in_rounds(calls, rounds, f"Growth, {what}")
            for role in ROLES:
                seconds[what][role].append(min(times.seconds[role]))

    def last_slope(what: str, role: str) -> float:
        x, y = torch.tensor(at[what]).double(), torch.tensor(seconds[what][role]).double()
        return fit_exponent(x[-3:], y[-3:]).value

    slopes = {what: {role: last_slope(what, role) for role in ROLES} for what in at}
    return {"at": at, "seconds": seconds, "slopes_of_last_three": slopes}


def plot_cost_growth(path: Path, growth: Results) -> None:
    """Draw the cost against length and width, log-log, with the slopes of the theory."""
    # Leading terms: C_i takes L² d², E_i = C_iᵀ Λ C_i takes L d³; for keys the inner products of d
    # by d matrices take L² d², and those of T_i take L³.
    expected = {
        "length": {"query": 2, "key": 3, "value": 2},
        "width": {"query": 3, "key": 3, "value": 2},
    }
    labels = {"length": "length of the sequence L", "width": "width d = dk"}
    title = "Cost of the factored blocks of one head"
    with chart(path, title, 1, 2, figsize=(9, 4), sharey=True) as (_, axes):
        for axis, what in zip(axes[0], labels):
            at = growth["at"][what]
            for role, colour in zip(ROLES, ("tab:blue", "tab:orange", "tab:green")):
                seconds, theory = growth["seconds"][what][role], expected[what][role]
                slope = growth["slopes_of_last_three"][what][role]
                label = f"{role}: last slope {slope:.1f}, theory at most {theory}"
                line = [seconds[-1] * (n / at[-1]) ** theory for n in at]
                axis.loglog(at, seconds, "o-", color=colour, label=label)
                axis.loglog(at, line, "--", color=colour, alpha=0.5)
            axis.set_xlabel(labels[what])
            axis.set_xticks(at, [str(n) for n in at])
            axis.minorticks_off()
            axis.legend(fontsize=8)
            axis.grid(alpha=0.3)
        axes[0, 0].set_ylabel("seconds, trace + diagonal + Frobenius")
