"""Section 3.3 of the ICLR paper: how the norms of the weights enter Hessian blocks of attention.

Beside their part in the attention itself, the blocks hold W_Q, W_K and W_V as factors: the outer
part of queries twice W_K and twice W_V, their functional part twice W_K and once W_V, keys the same
with W_Q, and values none. The powers are those of Theorems 3.1 and 3.2; the paper has no figure.
"""

from __future__ import annotations

import functools
import math

import torch

from blockopt.analysis import SelfAttentionHessian
from blockopt.analysis.closed_forms.attention_growth import BlockPart
from blockopt.analysis.plots import growth_lines
from recipes.paper_figures.growth import scales
from recipes.paper_figures.outcome import Check, Outcome, Run, near, panels

WEIGHTS = ("query", "key", "value")
NAMES = {"query": "W_Q", "key": "W_K", "value": "W_V"}
# The power of each weight in the norm of each part, in the order of WEIGHTS
POWERS = {
    BlockPart("outer", "query"): (0, 2, 2),
    BlockPart("functional", "query"): (0, 2, 1),
    BlockPart("outer", "key"): (2, 0, 2),
    BlockPart("functional", "key"): (2, 0, 1),
    BlockPart("outer", "value"): (0, 0, 0),
}
LENGTH = 17


def norms_at(factor: float, seed: int, scaled: str, width: int) -> dict[BlockPart, float]:
    """Return the norms of causal attention under the squared error, with one weight scaled."""
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    X, Y = draw(2, 4, LENGTH, width)
    # Small weights, so that attention is nearly uniform and itself hardly depends on them
    weights = {role: 0.3 * draw(width, width) / math.sqrt(width) for role in WEIGHTS}
    weights[scaled] = factor * weights[scaled]
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    hessian = SelfAttentionHessian(X, *weights.values(), Y, mask=mask)
    parts = {label: hessian.factored(label.role, part=label.part) for label in POWERS}
    return {label: float(block.frobenius()) for label, block in parts.items()}


def figure_weights(run: Run) -> Outcome:
    """Measure the powers of |W_Q|, |W_K| and |W_V|."""
    width = run.effort.width
    title = "Query and key blocks hold the other's weight and the values' as factors"
    figure, axes = panels(1, 3, title=title)
    checks: list[Check] = []
    for number, (ax, scaled) in enumerate(zip(axes, WEIGHTS)):
        measure = functools.partial(norms_at, scaled=scaled, width=width)
        name = NAMES[scaled]
        data = run.growth(measure, scales(run, -2, 0), f"Weights, {name}")
        powers = {label: power[number] for label, power in POWERS.items()}
        growth_lines(data.scales, data.norms, powers, high=math.inf, title=name, ax=ax)
        ax.set_xlabel(f"σ, factor of {name}")
        for label, power in powers.items():
            found = data.exponents(0.0, math.inf)[label]
            what = f"power of {name} in {label}"
            checks.append(near(what, power, found.value, 0.1, found.standard_error))
    setting = f"d = {width}, 4 sequences of {LENGTH}, {run.effort.repeats} repeats, exact norms"
    return Outcome("How weights enter the Hessian blocks", setting, checks, figure)
