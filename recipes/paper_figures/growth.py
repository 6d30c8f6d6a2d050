"""Figures 3, 5, 6, 7 and 8 of the ICLR paper: how Hessian blocks grow with the data's scale."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from blockopt.analysis.closed_forms.attention_growth import BlockPart, linear_attention_exponents
from blockopt.analysis.closed_forms.growth import Growth
from blockopt.analysis.plots import growth_lines
from recipes.data.addition import IGNORED, addition
from recipes.paper_figures.models import (
    CLASSES,
    LinearAttentionChain,
    Norm,
    Transformer,
    estimated_norms,
    last_layer_norms,
    linear_mlp_norms,
    normal,
)
from recipes.paper_figures.outcome import Check, Outcome, Run, exponent_check, near, panels

ROLES = ("value", "query")
EXPONENTS = {
    BlockPart("outer", "value"): 2,
    BlockPart("full", "value"): 2,
    BlockPart("outer", "query"): 6,
    BlockPart("functional", "query"): 5,
    BlockPart("full", "query"): 5,
}
PARTS = {
    "outer": "outer product part H_o",
    "functional": "functional part H_f",
    "full": "whole Hessian H",
}


def scales(run: Run, low: float, high: float) -> Tensor:
    """Return scales σ from 10^low to 10^high."""
    return torch.logspace(low, high, run.effort.scales, dtype=torch.float64)


def chosen(data: Growth[BlockPart], part: str) -> dict[BlockPart, Tensor]:
    """Return the norms of one part that are not zero."""
    found = {label: norms for label, norms in data.norms.items() if label.part == part}
    return {label: norms for label, norms in found.items() if bool((norms > 0).all())}


def by_layer(data: Growth[BlockPart], kind: BlockPart) -> dict[str, Tensor]:
    """Return the norms of one part of one role that are not zero, labelled by layer."""
    norms = chosen(data, kind.part).items()
    return {f"layer {label.layer}": values for label, values in norms if label.role == kind.role}


def one_layer(run: Run, norm: Norm, sigmas: Tensor, title: str) -> Growth[BlockPart]:
    """Measure exact norms of query and value blocks of a whole one-layer GPT-2."""
    inputs, targets = addition(run.effort.sequences)

    def measure(sigma: float, seed: int) -> dict[BlockPart, float]:
        model = Transformer(run.effort.width, norm=norm, scale=sigma, seed=seed)
        return last_layer_norms(model, inputs, targets, ROLES)

    return run.growth(measure, sigmas, title)


def all_layers(
    run: Run, make: Callable[..., nn.Module], depth: int, sigmas: Tensor, title: str
) -> Growth[BlockPart]:
    """Measure norms of query and value blocks of every layer of models of one depth.

    Norms are estimated, except in the last layer of a `Transformer`, above which nothing mixes
    positions.
    """
    inputs, targets = addition(run.effort.sequences)

    def measure(sigma: float, seed: int) -> dict[BlockPart, float]:
        model = make(run.effort.deep_width, depth, scale=sigma, seed=seed)
        found = {}
        for layer in range(depth):
            if layer == depth - 1 and isinstance(model, Transformer):
                norms = last_layer_norms(model, inputs, targets, ROLES)
            else:
                effort = (run.effort.probes, seed)
                norms = estimated_norms(model, inputs, targets, layer, ROLES, *effort)
            found |= {kind._replace(layer=layer + 1): norm for kind, norm in norms.items()}
        return found

    return run.growth(measure, sigmas, f"{title}, depth {depth}")


def setting(run: Run, width: int, norms: str) -> str:
    """Return the setting in words."""
    effort = run.effort
    data = f"{effort.sequences} sums of 5 digits"
    return f"d = {width}, {data}, {effort.repeats} repeats, {norms} norms"


def figure_3a(run: Run) -> Outcome:
    """Growth without norms: σ² for the value block, σ⁵ for the query block."""
    data = one_layer(run, "none", scales(run, -2, 1), "Figure 3a")
    title = "Without norms the query block grows with σ⁵, the value block with σ²"
    figure, axes = panels(1, 3, title=title)
    for ax, (part, name) in zip(axes, PARTS.items()):
        growth_lines(data.scales, chosen(data, part), EXPONENTS, title=name, ax=ax)
    checks = [exponent_check(data, *expected, tolerance=0.3) for expected in EXPONENTS.items()]
    largest = float(data.norms[BlockPart("functional", "value")].max())
    checks.append(Check("largest norm of functional value", "0", largest, 0.0, 0.0))
    title = "Growth of Hessian blocks with σ, no norms"
    return Outcome(title, setting(run, run.effort.width, "exact"), checks, figure)


def figure_3b(run: Run) -> Outcome:
    """Growth with pre-norm: the exponents of the two blocks come close to each other."""
    data = one_layer(run, "pre", scales(run, -2, 1), "Figure 3b")
    title = "With pre-norm query and value blocks grow alike (fitted over all σ)"
    figure, axes = panels(1, 3, title=title)
    for ax, (part, name) in zip(axes, PARTS.items()):
        growth_lines(data.scales, chosen(data, part), high=math.inf, title=name, ax=ax)
    checks = []
    for high, where in ((math.inf, "all σ"), (1.0, "σ < 1")):
        found = data.exponents(0.0, high)
        for part, without in (("outer", 4), ("full", 3)):
            query, value = (found[BlockPart(part, role)] for role in ("query", "value"))
            powers = f"query {query.value:.2f} minus value {value.value:.2f}"
            what = f"{part}: exponent of {powers}, {where}"
            error = math.hypot(query.standard_error, value.standard_error)
            predicted = f"much smaller than without norms, {without}"
            checks.append(Check(what, predicted, query.value - value.value, -1.0, 1.0, error))
    title = "Growth of Hessian blocks with σ, pre-norm"
    return Outcome(title, setting(run, run.effort.width, "exact"), checks, figure)


def figure_5(run: Run) -> Outcome:
    """Figure 3a on linear axes, for σ up to 1 and up to 10."""
    title = "The data of Figure 3a on linear axes (dashed: predicted trends)"
    figure, axes = panels(2, 3, title=title)
    everywhere: dict[str, Any] = {"high": math.inf, "logarithmic": False}
    checks = []
    for row, (low, high) in enumerate(((0.0, 1.0), (1.0, 10.0))):
        sigmas = torch.linspace(0.1, high, max(3, run.effort.scales), dtype=torch.float64)
        data = one_layer(run, "none", sigmas, f"Figure 5, σ to {high:g}")
        for ax, (part, name) in zip(axes[3 * row : 3 * row + 3], PARTS.items()):
            title = f"{name}, σ to {high:g}"
            growth_lines(sigmas, chosen(data, part), EXPONENTS, **everywhere, title=title, ax=ax)
        for expected in EXPONENTS.items():
            check = exponent_check(data, *expected, tolerance=0.5, low=low, high=math.inf)
            where = "0.1 to 1" if high == 1 else "1 to 10"
            checks.append(replace(check, what=f"{check.what}, σ from {where}"))
    return Outcome("Growth on linear axes", setting(run, run.effort.width, "exact"), checks, figure)


def worst(
    data: Growth[BlockPart],
    kind: BlockPart,
    layers: range,
    predicted: float,
    *,
    tolerance: float,
    high: float = 1.0,
) -> Check:
    """Check the exponent that is farthest from the predicted one among the layers."""
    found = data.exponents(0.0, high)
    labels = [kind._replace(layer=layer) for layer in layers]
    labels = [label for label in labels if label in found]
    far = max(labels, key=lambda label: abs(found[label].value - predicted))
    what = f"depth {layers[-1]}: {far}, farthest of {len(labels)}"
    return near(what, predicted, found[far].value, tolerance, found[far].standard_error)


def figure_6(run: Run) -> Outcome:
    """Blocks of each layer of transformers of several layers, without norms."""
    depths = range(2, run.effort.depth + 1)
    title = "Several layers without norms: for σ < 1 each follows the exponents of a single one"
    figure, axes = panels(len(depths), 4, title=title)
    values = [BlockPart("outer", "value"), BlockPart("full", "value")]
    queries = [BlockPart("functional", "query"), BlockPart("full", "query")]
    checks = []
    for row, depth in enumerate(depths):
        data = all_layers(run, Transformer, depth, scales(run, -2, 1), "Figure 6")
        for ax, kind in zip(axes[4 * row :], values + queries):
            title, lines = f"depth {depth}: {kind} blocks", by_layer(data, kind)
            growth_lines(data.scales, lines, {"layer 1": EXPONENTS[kind]}, title=title, ax=ax)
        for kind, exponent in EXPONENTS.items():
            checks.append(worst(data, kind, range(1, depth + 1), exponent, tolerance=0.5))
        # "The top layer quite closely follows our prediction, also for σ > 1."
        if int((data.scales >= 1).sum()) > 1:
            for kind in (values[0], queries[1]):
                top = kind._replace(layer=depth)
                bounds = {"tolerance": 1.0, "low": 1.0, "high": math.inf}
                beyond = exponent_check(data, top, EXPONENTS[kind], **bounds)
                checks.append(replace(beyond, what=f"depth {depth}, σ > 1: {beyond.what}"))
        place = int((data.scales - 0.1).abs().argmin())
        for kind in (values[1], queries[1]):
            ends = (data.mean()[kind._replace(layer=layer)][place] for layer in (1, depth))
            bottom, top_norm = map(float, ends)
            sigma = f"σ = {float(data.scales[place]):.2g}"
            what = f"depth {depth}: {kind} of layer 1 over layer {depth} at {sigma}"
            predicted = "< 1: earlier layers are lower"
            checks.append(Check(what, predicted, bottom / top_norm, 0.0, 1.0))
        largest = float(data.norms[BlockPart("functional", "value", layer=depth)].max())
        what = f"depth {depth}: largest functional value of the top layer"
        checks.append(Check(what, "0", largest, 0.0, 0.0))
    described = setting(run, run.effort.deep_width, "top layers exact, others estimated")
    return Outcome("Growth in transformers of several layers", described, checks, figure)


def figure_7(run: Run) -> Outcome:
    """Chains of linear attention: 2·3^D."""
    depths, everywhere = (1, 2, 3), {"tolerance": 1e-6, "high": math.inf}
    title = "Linear attention: the outer part grows with σ^(2·3^D) in every layer, D the depth"
    figure, axes = panels(len(depths), 4, title=title)
    kinds = [BlockPart(part, role) for role in ROLES for part in ("outer", "full")]
    checks = []
    for row, depth in enumerate(depths):
        data = all_layers(run, LinearAttentionChain, depth, scales(run, -1, 0), "Figure 7")
        exponent, layers = linear_attention_exponents(depth)["outer"], range(1, depth + 1)
        for ax, kind in zip(axes[4 * row :], kinds):
            title, trend = f"depth {depth}: {kind} blocks", {f"layer {depth}": exponent}
            lines = by_layer(data, kind)
            growth_lines(data.scales, lines, trend, high=math.inf, title=title, ax=ax)
        for role in ROLES:
            checks.append(worst(data, BlockPart("outer", role), layers, exponent, **everywhere))
            last = layers[-1:]
            checks.append(worst(data, BlockPart("full", role), last, exponent, **everywhere))
            functional, outer = (
                float(data.norms[BlockPart(part, role, layer=depth)].max())
                for part in ("functional", "outer")
            )
            what = f"depth {depth}: functional {role} of the last layer, relative"
            checks.append(Check(what, "0", functional / outer, 0.0, 1e-10))
            if depth == 1:
                continue
            earlier = [BlockPart("full", role, layer=layer) for layer in layers[:-1]]
            slopes = [data.local_slopes()[label] for label in earlier]
            slope, what = min(float(s[-1]) for s in slopes), f"depth {depth}: slope of full {role}"
            predicted, bounds = (
                f"towards {exponent} for larger σ",
                (0.75 * exponent, 1.25 * exponent),
            )
            at = f"{what} at σ near 1, smallest of earlier layers"
            checks.append(Check(at, predicted, slope, *bounds))
            slope = max(float(s[0]) for s in slopes)
            predicted = f"below {exponent}: only for larger σ"
            at = f"{what} at the smallest σ, largest of earlier layers"
            checks.append(Check(at, predicted, slope, 0.0, 0.75 * exponent))
    described = setting(run, run.effort.deep_width, "estimated")
    return Outcome("Growth in linear attention networks", described, checks, figure)


def figure_8(run: Run) -> Outcome:
    """Linear MLPs: 2 at any depth."""
    inputs, targets = addition(run.effort.sequences)
    counts = targets != IGNORED
    width, depths = run.effort.width, range(1, 6)
    title = "Linear MLPs: every block grows with σ², at any depth"
    figure, axes = panels(1, len(depths), 3.2, title=title)
    checks = []

    def measure(sigma: float, seed: int, depth: int) -> dict[str, float]:
        draw = functools.partial(normal, torch.Generator().manual_seed(seed), width=width)
        embedding = (draw(CLASSES, width) * (sigma / 0.8 * math.sqrt(width))).detach()
        weights = [draw(width, width).detach() for _ in range(depth - 1)]
        weights.append(draw(width, CLASSES).detach())
        norms = linear_mlp_norms(embedding[inputs[counts]], weights)
        return {f"layer {layer + 1}": norm for layer, norm in enumerate(norms)}

    for ax, depth in zip(axes, depths):
        at_depth = functools.partial(measure, depth=depth)
        data = run.growth(at_depth, scales(run, -2, 1), f"Figure 8, depth {depth}")
        title, trend = f"linear MLP, depth {depth}", {"layer 1": 2}
        growth_lines(data.scales, data.norms, trend, high=math.inf, title=title, ax=ax)
        ax.legend(fontsize=6, loc="lower right")
        found = data.exponents()
        far = max(found, key=lambda label: abs(found[label].value - 2))
        what = f"depth {depth}: exponent of {far}, farthest of {depth}"
        checks.append(near(what, 2, found[far].value, 1e-6))
        if depth > 1:
            levels = torch.stack([mean[-1] for mean in data.mean().values()])
            ratio = float(levels.max() / levels.min())
            what = f"depth {depth}: largest over smallest layer"
            checks.append(Check(what, "1: the lines overlap", ratio, 1.0, 1.5))
    return Outcome("Growth in linear MLPs", setting(run, width, "exact"), checks, figure)
