"""Figures of whole Hessians: 1 and 4 of the ICLR paper, and the slides' attention sinks."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.scalar_attention import ScalarAttention, Sink
from blockopt.analysis.operators.dense import dense
from blockopt.analysis.operators.model_operators import HessianOperator
from blockopt.analysis.plots import (
    entry_histograms,
    hessian_heatmap,
    role_color,
    spectral_densities,
)
from recipes.data.addition import addition
from recipes.paper_figures.models import Transformer, last_layer_hessian
from recipes.paper_figures.outcome import Check, Outcome, Run, mean_check, panels, sign_check

ATTENTION = ("query", "key", "value", "output")


def log_median(block: Tensor) -> float:
    """Return the power of ten of the median absolute entry that is not zero."""
    values = block.abs()
    return math.log10(float(values[values > 0].median()))


def figure_1(run: Run) -> Outcome:
    """The Hessian of a GPT-2 block at initialisation: heat map, and histograms of entries."""
    inputs, targets = addition(run.effort.samples)
    model = Transformer(run.effort.small).float()  # the heat map shows no more digits
    sizes = {name.split(".")[-1]: parameter.numel() for name, parameter in model.named_parameters()}
    step = run.steps("Figure 1", run.effort.repeats + 1)
    operator = HessianOperator(model, lambda: model(inputs, targets), check_deterministic=False)
    matrix = dense(operator)
    step()
    ratios = []
    blocks: dict[str, Tensor] = {}
    for seed in range(run.effort.repeats):
        hessian = last_layer_hessian(Transformer(run.effort.small, seed=seed), inputs, targets)
        found = {role: hessian.block(role, role) for role in ("query", "value")}
        blocks = blocks or found
        ratios.append(log_median(found["value"]) - log_median(found["query"]))
        step()
    figure, axes = panels(1, 3, 5.2, 4.6)
    title = "GPT-2 block at initialisation: the whole Hessian"
    hessian_heatmap(matrix, sizes, title=title, ax=axes[0])
    chosen = torch.cat([operator.entries(f"layers.0.{role}") for role in ATTENTION])
    attention, parts = matrix[chosen][:, chosen], {role: sizes[role] for role in ATTENTION}
    hessian_heatmap(attention, parts, title="Its attention weights", ax=axes[1])
    entry_histograms(blocks, title="Query entries are far smaller than value entries", ax=axes[2])
    what = "decades from the median query entry to the median value entry"
    checks = [mean_check(what, "about 2", ratios, 1.5, 2.5)]
    # The closed form and the whole matrix are two ways to the same numbers.
    start = operator.entries("layers.0.value")
    difference = matrix[start][:, start].double() - blocks["value"]
    error = float(difference.norm() / blocks["value"].norm())
    what = "value block: closed form against autograd in float32, relative"
    checks.append(Check(what, "0", error, 0.0, 1e-4, ours=True))
    sizes_used = f"d = {run.effort.small}, MLP {4 * run.effort.small}"
    setting = f"{sizes_used}, {run.effort.samples} sums, {run.effort.repeats} repeats"
    return Outcome("Hessian of a GPT-2 block at initialisation", setting, checks, figure)


class Attended(NamedTuple):
    """The label of a block of Figure 4: its role, and "softmax" or "linear" attention."""

    role: str
    attention: str

    def __str__(self) -> str:
        return f"{self.role}, {self.attention}"


def figure_4(run: Run) -> Outcome:
    """Softmax against linear attention: without softmax, all entries are of one size."""
    inputs, targets = addition(run.effort.samples)
    medians: dict[Attended, list[float]] = {}
    blocks: dict[Attended, Tensor] = {}
    step = run.steps("Figure 4", 2 * run.effort.repeats)
    for seed in range(run.effort.repeats):
        for softmax in (True, False):
            model = Transformer(run.effort.small, softmax=softmax, seed=seed)
            hessian = last_layer_hessian(model, inputs, targets)
            for role in ("value", "query"):
                label = Attended(role, "softmax" if softmax else "linear")
                block = hessian.block(role, role)
                blocks.setdefault(label, block)
                medians.setdefault(label, []).append(log_median(block))
            step()
    figure, axes = panels(1, 2, 5.4, 3.6)
    for ax, role in zip(axes, ("value", "query")):
        shown = {label: block for label, block in blocks.items() if label.role == role}
        entry_histograms(shown, title=f"{role.capitalize()} block, with and without softmax", ax=ax)
        ax.sharex(axes[0])

    def difference(*labels: tuple[str, str]) -> list[float]:
        a, b = (medians[Attended(*label)] for label in labels)
        return [x - y for x, y in zip(a, b)]

    roles, kinds = "decades from query to value", "decades from softmax to linear"
    softmax_gap = difference(("value", "softmax"), ("query", "softmax"))
    linear_gap = difference(("value", "linear"), ("query", "linear"))
    query_gap = difference(("query", "linear"), ("query", "softmax"))
    value_gap = difference(("value", "linear"), ("value", "softmax"))
    checks = [
        mean_check(f"softmax: {roles}", "about 2", softmax_gap, 1.5, 2.5),
        mean_check(f"linear: {roles}", "about 0", linear_gap, -0.75, 0.75),
        mean_check(f"query: {kinds}", "large", query_gap, 1.0),
        mean_check(f"value: {kinds}", "small", value_gap, -0.75, 0.75),
    ]
    setting = f"d = {run.effort.small}, {run.effort.samples} sums, {run.effort.repeats} repeats"
    return Outcome("Entries with and without softmax", setting, checks, figure)


def scalar_model(seed: int, first: float | None) -> ScalarAttention:
    """Return scalar attention on normal tokens whose first may be an outlier; w_Q·w_K > 0."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 32, 16, generator=generator, dtype=torch.float64)
    w_Q, w_K = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    if first is not None:
        x[:, 0] = first
    return ScalarAttention(x, y, w_Q, w_K * (w_Q @ w_K).sign(), 1.0)


def figure_sink(run: Run) -> Outcome:
    """Attention sinks: what a growing bias of the first token does to bulk and outliers."""
    title = "Attention sinks and the spectrum of the Hessian"
    figure, axes = panels(2, 2, 5.6, 3.8, title=title)
    biases = torch.linspace(0, 6, 13, dtype=torch.float64).tolist()
    settings: list[tuple[str, Sink, float | None]] = [
        ("bias on scores, first token an outlier (3)", "score", 3.0),
        ("bias on scores, first token like the others", "score", None),
        ("bias on the first token itself", "input", None),
    ]
    number, seeds = max(run.effort.repeats, 2), run.effort.seeds
    step = run.steps("Attention sinks", seeds * len(settings) + 2 * number)
    checks = []
    for style, (name, kind, first) in zip(("-", "--", ":"), settings):
        curves = []
        for seed in range(seeds):
            models = [scalar_model(seed, first).with_sink(bias, kind) for bias in biases]
            curves.append([[float(m.beta.abs()), float(m.outliers.abs().max())] for m in models])
            step()
        decades = torch.tensor(curves, dtype=torch.float64).log10()
        change = decades - decades[:, :1]
        colors = {"bulk": role_color("query"), "largest outlier": role_color("value")}
        for index, (what, color) in enumerate(colors.items()):
            means = (10 ** change[..., index].mean(0)).tolist()
            axes[0].plot(biases, means, style, color=color, label=f"{what}: {name}")
        bulk, outlier = (moved.tolist() for moved in change[:, -1].unbind(-1))
        what = f"{name}: decades that the"
        checks.append(sign_check(f"{what} bulk moves", "< 0: shrinks", bulk, -1))
        checks.append(sign_check(f"{what} largest outlier moves", "> 0: grows", outlier, 1))
        if first is not None:  # few seeds tell little: how many follow the slides?
            shrinks, grows = (
                sum(sign * value > 0 for value in moved) / seeds
                for sign, moved in ((-1, bulk), (1, outlier))
            )
            share = f"{name}: share of {seeds} seeds in which the"
            checks.append(Check(f"{share} bulk shrinks", "most", shrinks, 0.75, 1.0))
            checks.append(Check(f"{share} largest outlier grows", "most", grows, 0.75, 1.0))
    axes[0].set_yscale("log")
    axes[0].set_xlabel("bias b of the first token")
    axes[0].set_ylabel("size, relative to b = 0")
    axes[0].set_title("Scalar attention: bulk |β| and largest outlier", fontsize=10)
    axes[0].legend(fontsize=6)
    model = scalar_model(0, 3.0)
    spectra = {f"b = {bias:g}": model.with_sink(bias).eigenvalues() for bias in (0.0, 3.0, 6.0)}
    for index, (label, values) in enumerate(spectra.items()):
        places = [index + 0.035 * (place - len(values) / 2) for place in range(len(values))]
        style = {"linefmt": role_color(label, index), "markerfmt": "o", "basefmt": "k-"}
        axes[1].stem(places, values.tolist(), label=label, **style)
    axes[1].set_xticks(range(len(spectra)), list(spectra))
    axes[1].set_ylabel("eigenvalue")
    axes[1].set_yscale("symlog", linthresh=0.05)
    top = 2 * max(float(values.abs().max()) for values in spectra.values())
    axes[1].set_ylim(-top, top)
    axes[1].set_yticks([-10.0, -1.0, -0.1, 0.0, 0.1, 1.0, 10.0])
    title = "Scalar attention: all eigenvalues, first token 3, bias b on scores"
    axes[1].set_title(title, fontsize=10)
    inputs, targets = addition(run.effort.samples // 4)
    width = run.effort.small // 2
    for ax, norm in zip(axes[2:], ("none", "pre")):
        ends = []
        for seed in range(number):
            found = {}
            for bias in (0.0, 4.0, 8.0):
                gpt2 = Transformer(width, 2, norm=norm, seed=seed)
                for layer in gpt2.layers:
                    layer.sink = bias
                names = [name for name, _ in gpt2.named_parameters() if name.startswith("layers")]
                loss = functools.partial(gpt2, inputs, targets)
                matrix = dense(HessianOperator(gpt2, loss, names=names, check_deterministic=False))
                found[f"sink {bias:g}"] = torch.linalg.eigvalsh(matrix)
            first, last = (float(found[f"sink {n}"][-1] - found[f"sink {n}"][0]) for n in (0, 8))
            ends.append(math.log10(last / first))
            if seed == 0:
                name = "no norms" if norm == "none" else "pre-norm"
                title = f"GPT-2, 2 layers, {name}: Hessian of all layers"
                spectral_densities(found, title=title, ax=ax)
            step()
        what = f"GPT-2, {norm} norm: decades that λ_max - λ_min moves from sink 0 to 8"
        checks.append(sign_check(what, "> 0: stretches", ends, 1))
    scalar = f"scalar: d_K = 8, 32 sequences of 16 tokens, {seeds} seeds"
    setting = f"{scalar}; GPT-2: d = {width}, 2 layers, {number} repeats"
    return Outcome("Attention sinks and the spectrum", setting, checks, figure)
