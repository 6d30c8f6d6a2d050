"""Figures 3, 5, 6, 7 and 8 of the ICLR paper: how blocks of the Hessian grow with the scale of the data."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

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
from recipes.paper_figures.outcome import Check, Outcome, Run, exponent_check

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


def panels(
    rows: int, columns: int, width: float = 4.0, height: float = 3.4
) -> tuple[Any, list[Any]]:
    """A new figure, and its axes row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def scales(run: Run, low: float, high: float) -> Tensor:
    """Powers of ten from 10^low to 10^high."""
    return torch.logspace(low, high, run.effort.scales, dtype=torch.float64)


def chosen(data: Growth[BlockPart], part: str) -> dict[BlockPart, Tensor]:
    """Return the norms of one part that are not zero."""
    return {
        label: norms
        for label, norms in data.norms.items()
        if label.part == part and bool((norms > 0).all())
    }


def by_layer(data: Growth[BlockPart], kind: BlockPart) -> dict[str, Tensor]:
    """Return the norms of one part of one role that are not zero, labelled by layer."""
    return {
        f"layer {label.layer}": norms
        for label, norms in chosen(data, kind.part).items()
        if label.role == kind.role
    }


def one_layer(run: Run, norm: Norm, sigmas: Tensor, title: str) -> Growth[BlockPart]:
    """Exact norms of query and value blocks of a whole one-layer GPT-2."""
    inputs, targets = addition(run.effort.sequences)

    def measure(sigma: float, seed: int) -> dict[BlockPart, float]:
        model = Transformer(run.effort.width, norm=norm, scale=sigma, seed=seed)
        return last_layer_norms(model, inputs, targets, ROLES)

    return run.growth(measure, sigmas, title)


def setting(run: Run, width: int, norms: str) -> str:
    """In words."""
    return f"d = {width}, {run.effort.sequences} sums of 5 digits, {run.effort.repeats} repeats, {norms} norms"


def figure_3a(run: Run) -> Outcome:
    """Growth without norms: σ² for the value block, σ⁵ for the query block."""
    data = one_layer(run, "none", scales(run, -2, 1), "Figure 3a")
    figure, axes = panels(1, 3)
    for ax, (part, name) in zip(axes, PARTS.items()):
        growth_lines(data.scales, chosen(data, part), EXPONENTS, title=name, ax=ax)
    figure.suptitle(
        "Without norms the query block grows with σ⁵, the value block with σ²", fontsize=11
    )
    checks = [
        exponent_check(data, label, exponent, tolerance=0.3)
        for label, exponent in EXPONENTS.items()
    ]
    largest = float(data.norms[BlockPart("functional", "value")].max())
    checks.append(Check("largest norm of functional value", "0", largest, 0.0, 0.0))
    return Outcome(
        "Growth of Hessian blocks with σ, no norms",
        setting(run, run.effort.width, "exact"),
        checks,
        figure,
    )


def figure_3b(run: Run) -> Outcome:
    """Growth with pre-norm: the exponents of the two blocks come close to each other."""
    data = one_layer(run, "pre", scales(run, -2, 1), "Figure 3b")
    figure, axes = panels(1, 3)
    for ax, (part, name) in zip(axes, PARTS.items()):
        growth_lines(data.scales, chosen(data, part), high=math.inf, title=name, ax=ax)
    figure.suptitle(
        "With pre-norm query and value blocks grow alike (fitted over all σ)", fontsize=11
    )
    checks = []
    for high, where in ((math.inf, "all σ"), (1.0, "σ < 1")):
        found = data.exponents(0.0, high)
        for part in ("outer", "full"):
            query, value = (found[BlockPart(part, role)] for role in ("query", "value"))
            what = f"{part}: exponent of query {query.value:.2f} minus value {value.value:.2f}, {where}"
            error = math.hypot(query.standard_error, value.standard_error)
            predicted = (
                "much smaller than without norms, 4"
                if part == "outer"
                else "much smaller than without norms, 3"
            )
            checks.append(Check(what, predicted, query.value - value.value, -1.0, 1.0, error))
    return Outcome(
        "Growth of Hessian blocks with σ, pre-norm",
        setting(run, run.effort.width, "exact"),
        checks,
        figure,
    )


def figure_5(run: Run) -> Outcome:
    """Figure 3a on linear axes, for σ up to 1 and up to 10."""
    figure, axes = panels(2, 3)
    checks = []
    for row, high in enumerate((1.0, 10.0)):
        sigmas = torch.linspace(0.1, high, max(3, run.effort.scales), dtype=torch.float64)
        data = one_layer(run, "none", sigmas, f"Figure 5, σ to {high:g}")
        for ax, (part, name) in zip(axes[3 * row : 3 * row + 3], PARTS.items()):
            growth_lines(
                sigmas,
                chosen(data, part),
                EXPONENTS,
                high=math.inf,
                logarithmic=False,
                title=f"{name}, σ to {high:g}",
                ax=ax,
            )
        for label, exponent in EXPONENTS.items():
            low = 0.0 if high == 1 else 1.0
            check = exponent_check(data, label, exponent, tolerance=0.5, low=low, high=math.inf)
            where = "0.1 to 1" if high == 1 else "1 to 10"
            checks.append(replace(check, what=f"{check.what}, σ from {where}"))
    figure.suptitle("The data of Figure 3a on linear axes (dashed: predicted trends)", fontsize=11)
    return Outcome("Growth on linear axes", setting(run, run.effort.width, "exact"), checks, figure)


def worst(
    data: Growth[BlockPart],
    kind: BlockPart,
    layers: range,
    predicted: float,
    what: str,
    *,
    tolerance: float,
    high: float = 1.0,
) -> Check:
    """The exponent that is farthest from the predicted one among the layers."""
    found = data.exponents(0.0, high)
    labels = [kind._replace(layer=layer + 1) for layer in layers]
    labels = [label for label in labels if label in found]
    far = max(labels, key=lambda label: abs(found[label].value - predicted))
    low, top = predicted - tolerance, predicted + tolerance
    return Check(
        f"{what}: {far}, farthest of {len(labels)}",
        f"{predicted:g}",
        found[far].value,
        low,
        top,
        found[far].standard_error,
    )


def figure_6(run: Run) -> Outcome:
    """Blocks of each layer of transformers of several layers, without norms."""
    inputs, targets = addition(run.effort.sequences)
    depths = range(2, run.effort.depth + 1)
    figure, axes = panels(len(depths), 4)
    checks = []
    for row, depth in enumerate(depths):

        def measure(sigma: float, seed: int, depth: int) -> dict[BlockPart, float]:
            model = Transformer(run.effort.deep_width, depth, scale=sigma, seed=seed)
            found = {}
            for layer in range(depth):
                if layer == depth - 1:  # exact: nothing above it mixes positions
                    norms = last_layer_norms(model, inputs, targets, ROLES)
                else:
                    norms = estimated_norms(
                        model, inputs, targets, layer, ROLES, run.effort.probes, seed
                    )
                found.update({k._replace(layer=layer + 1): norm for k, norm in norms.items()})
            return found

        data = run.growth(
            functools.partial(measure, depth=depth), scales(run, -2, 1), f"Figure 6, depth {depth}"
        )
        pairs = (("outer", "value"), ("full", "value"), ("functional", "query"), ("full", "query"))
        for ax, kind in zip(axes[4 * row :], (BlockPart(*pair) for pair in pairs)):
            growth_lines(
                data.scales,
                by_layer(data, kind),
                {"layer 1": EXPONENTS[kind]},
                title=f"depth {depth}: {kind} blocks",
                ax=ax,
            )
        for kind, exponent in EXPONENTS.items():
            checks.append(
                worst(data, kind, range(depth), exponent, f"depth {depth}", tolerance=0.5)
            )
        if (
            int((data.scales >= 1).sum()) > 1
        ):  # "the top layer quite closely follows our prediction, also for σ > 1"
            for kind in (BlockPart("outer", "value"), BlockPart("full", "query")):
                beyond = exponent_check(
                    data,
                    kind._replace(layer=depth),
                    EXPONENTS[kind],
                    tolerance=1.0,
                    low=1.0,
                    high=math.inf,
                )
                checks.append(replace(beyond, what=f"depth {depth}, σ > 1: {beyond.what}"))
        near = int((data.scales - 0.1).abs().argmin())
        for kind in (BlockPart("full", "value"), BlockPart("full", "query")):
            bottom, top = (
                float(data.mean()[kind._replace(layer=layer)][near]) for layer in (1, depth)
            )
            sigma = f"σ = {float(data.scales[near]):.2g}"
            ratio = bottom / top
            what = f"depth {depth}: {kind} of layer 1 over layer {depth} at {sigma}"
            checks.append(Check(what, "< 1: earlier layers are lower", ratio, 0.0, 1.0))
        checks.append(
            Check(
                f"depth {depth}: largest functional value of the top layer",
                "0",
                float(data.norms[BlockPart("functional", "value", layer=depth)].max()),
                0.0,
                0.0,
            )
        )
    figure.suptitle(
        "Several layers without norms: for σ < 1 each follows the exponents of a single one",
        fontsize=11,
    )
    norms = "top layers exact, others estimated"
    return Outcome(
        "Growth in transformers of several layers",
        setting(run, run.effort.deep_width, norms),
        checks,
        figure,
    )


def figure_7(run: Run) -> Outcome:
    """Chains of linear attention: 2·3^D."""
    inputs, targets = addition(run.effort.sequences)
    depths = (1, 2, 3)
    figure, axes = panels(len(depths), 4)
    checks = []
    for row, depth in enumerate(depths):

        def measure(sigma: float, seed: int, depth: int) -> dict[BlockPart, float]:
            model = LinearAttentionChain(run.effort.deep_width, depth, scale=sigma, seed=seed)
            found = {}
            for layer in range(depth):
                norms = estimated_norms(
                    model, inputs, targets, layer, ROLES, run.effort.probes, seed
                )
                found.update({k._replace(layer=layer + 1): norm for k, norm in norms.items()})
            return found

        data = run.growth(
            functools.partial(measure, depth=depth), scales(run, -1, 0), f"Figure 7, depth {depth}"
        )
        exponent = linear_attention_exponents(depth)["outer"]
        everywhere = math.inf
        kinds = [BlockPart(part, role) for role in ROLES for part in ("outer", "full")]
        for ax, kind in zip(axes[4 * row :], kinds):
            growth_lines(
                data.scales,
                by_layer(data, kind),
                {f"layer {depth}": exponent},
                high=everywhere,
                title=f"depth {depth}: {kind} blocks",
                ax=ax,
            )
        for role in ROLES:
            checks.append(
                worst(
                    data,
                    BlockPart("outer", role),
                    range(depth),
                    exponent,
                    f"depth {depth}",
                    tolerance=1e-6,
                    high=everywhere,
                )
            )
            last = worst(
                data,
                BlockPart("full", role),
                range(depth - 1, depth),
                exponent,
                f"depth {depth}",
                tolerance=1e-6,
                high=everywhere,
            )
            checks.append(last)
            largest = {
                part: float(data.norms[BlockPart(part, role, layer=depth)].max())
                for part in ("functional", "outer")
            }
            functional = largest["functional"] / largest["outer"]
            checks.append(
                Check(
                    f"depth {depth}: functional {role} of the last layer, relative",
                    "0",
                    functional,
                    0.0,
                    1e-10,
                )
            )
            if depth > 1:
                slopes = [
                    data.local_slopes()[BlockPart("full", role, layer=layer)]
                    for layer in range(1, depth)
                ]
                slope = min(float(values[-1]) for values in slopes)
                what = (
                    f"depth {depth}: slope of full {role} at σ near 1, smallest of earlier layers"
                )
                checks.append(
                    Check(
                        what,
                        f"towards {exponent} for larger σ",
                        slope,
                        0.75 * exponent,
                        1.25 * exponent,
                    )
                )
                slope = max(float(values[0]) for values in slopes)
                what = f"depth {depth}: slope of full {role} at the smallest σ, largest of earlier layers"
                checks.append(
                    Check(what, f"below {exponent}: only for larger σ", slope, 0.0, 0.75 * exponent)
                )
    figure.suptitle(
        "Linear attention: the outer part grows with σ^(2·3^D) in every layer, D the depth",
        fontsize=11,
    )
    return Outcome(
        "Growth in linear attention networks",
        setting(run, run.effort.deep_width, "estimated"),
        checks,
        figure,
    )


def figure_8(run: Run) -> Outcome:
    """Linear MLPs: 2 at any depth."""
    inputs, targets = addition(run.effort.sequences)
    counts = targets != IGNORED
    width, depths = run.effort.width, range(1, 6)
    figure, axes = panels(1, len(depths), 3.2)
    checks = []
    for ax, depth in zip(axes, depths):

        def measure(sigma: float, seed: int, depth: int) -> dict[str, float]:
            generator = torch.Generator().manual_seed(seed)
            x = (
                normal(generator, CLASSES, width, width=width) * (sigma / 0.8 * math.sqrt(width))
            ).detach()[inputs[counts]]
            weights = [
                normal(generator, width, width, width=width).detach() for _ in range(depth - 1)
            ]
            weights.append(normal(generator, width, CLASSES, width=width).detach())
            norms = linear_mlp_norms(x, weights)
            return {f"layer {layer + 1}": norm for layer, norm in enumerate(norms)}

        data = run.growth(
            functools.partial(measure, depth=depth), scales(run, -2, 1), f"Figure 8, depth {depth}"
        )
        growth_lines(
            data.scales,
            data.norms,
            {"layer 1": 2},
            high=math.inf,
            title=f"linear MLP, depth {depth}",
            ax=ax,
        )
        ax.legend(fontsize=6, loc="lower right")
        found = data.exponents()
        far = max(found, key=lambda label: abs(found[label].value - 2))
        checks.append(
            Check(
                f"depth {depth}: exponent of {far}, farthest of {depth}",
                "2",
                found[far].value,
                2 - 1e-6,
                2 + 1e-6,
            )
        )
        if depth > 1:
            levels = torch.stack([mean[-1] for mean in data.mean().values()])
            ratio = float(levels.max() / levels.min())
            checks.append(
                Check(
                    f"depth {depth}: largest over smallest layer",
                    "1: the lines overlap",
                    ratio,
                    1.0,
                    1.5,
                )
            )
    figure.suptitle("Linear MLPs: every block grows with σ², at any depth", fontsize=11)
    return Outcome("Growth in linear MLPs", setting(run, width, "exact"), checks, figure)
