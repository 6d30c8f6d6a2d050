"""Appendix E of the ICLR paper: whether the outer part dominates the Hessian with more heads.

Weights of two heads never meet in one second derivative of the output, so the functional part has
no blocks between heads. More heads of the same width in all leave it fewer entries. That says
nothing about their size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt.analysis.closed_forms.exponents import fit_exponent
from blockopt.analysis.operators.dense import dense
from blockopt.analysis.operators.model_operators import FunctionalOperator, GaussNewtonOperator
from blockopt.analysis.plots import hessian_heatmap
from recipes.data.addition import addition
from recipes.paper_figures.models import CLASSES, causal, cross_entropy, normal
from recipes.paper_figures.outcome import Check, Outcome, Run, near, panels

ROLES = ("query", "key", "value", "output")
HEADS = (1, 2, 4, 8)
NONZERO = 1e-12  # of the largest entry: what is smaller is rounding


class HeadsAttention(nn.Module):
    """Embeddings, causal attention of several heads with a residual connection, unembedding."""

    def __init__(self, width: int, heads: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.heads = heads
        self.tokens, self.positions = (
            normal(generator, rows, width, width=1) for rows in (CLASSES, 17)
        )
        self.query, self.key, self.value, self.output = (
            normal(generator, width, width, width=width) for _ in range(4)
        )
        self.unembedding = normal(generator, width, CLASSES, width=width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits (B, L, classes)."""
        x = self.tokens[inputs] + self.positions[: inputs.shape[1]]
        q, k, v = (
            (x @ W).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for W in (self.query, self.key, self.value)
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~causal(inputs.shape[1]), -math.inf).softmax(-1)
        mixed = (weights @ v).transpose(1, 2).flatten(-2)
        return (x + mixed @ self.output) @ self.unembedding


def parts(run: Run, heads: int, seed: int, squared: bool) -> tuple[Tensor, Tensor]:
    """Return the outer and the functional part for all weights of the attention layer."""
    inputs, targets = addition(max(2, run.effort.samples // 8))
    model = HeadsAttention(run.effort.small, heads, seed)

    def loss() -> Tensor:
        logits = model(inputs)
        if not squared:
            return cross_entropy(logits, targets)
        counts = targets >= 0
        return F.mse_loss(logits[counts], F.one_hot(targets[counts], CLASSES).to(logits))

    options = {"names": ROLES, "check_deterministic": False}
    operators = (GaussNewtonOperator, FunctionalOperator)
    outer, functional = (dense(kind(model, loss, **options)) for kind in operators)
    return outer, functional


def share_of_entries(functional: Tensor) -> float:
    """Return the share of entries of the Hessian that have a functional part."""
    sizes = functional.abs()
    return float((sizes > NONZERO * sizes.max()).double().mean())


def figure_outer_heads(run: Run) -> Outcome:
    """Count the entries that only the outer part has, and compare the norms of both parts."""
    number, width = run.effort.repeats, run.effort.small
    numbers = [heads for heads in HEADS if heads <= width]
    step = run.steps("Heads", 2 * len(numbers) * number)
    title = "More heads leave the functional part fewer entries, not a smaller norm"
    figure, axes = panels(1, 3, 5.0, 4.2, title=title)
    checks: list[Check] = []
    for squared, style in ((False, "-"), (True, "--")):
        loss = "squared error" if squared else "cross-entropy"
        entries, norms = [], []
        for seed in range(number):
            counted, relative = [], []
            for heads in numbers:
                outer, functional = parts(run, heads, seed, squared)
                counted.append(share_of_entries(functional))
                relative.append(float(functional.norm() / outer.norm()))
                if heads == numbers[-1] and seed == 0 and not squared:
                    size = width**2
                    title = f"The functional part with {heads} heads"
                    hessian_heatmap(functional, dict.fromkeys(ROLES, size), title=title, ax=axes[2])
                step()
            entries.append(counted)
            norms.append(relative)
        shown = (("share of entries", entries), ("‖H_f‖ / ‖H_o‖", norms))
        powers = {}
        for ax, (name, values) in zip(axes, shown):
            rows = torch.tensor(values, dtype=torch.float64)
            error = rows.std(0) / math.sqrt(number) if number > 1 else torch.zeros(len(numbers))
            look = {"fmt": f"o{style}", "capsize": 3, "label": loss}
            ax.errorbar(numbers, rows.mean(0).tolist(), error.tolist(), **look)
            powers[name] = fit_exponent(numbers, rows)
        what = f"{loss}: power of the number of heads in the"
        found = powers["share of entries"]
        checks.append(
            near(f"{what} share of entries with H_f", -1, found.value, 0.25, found.standard_error)
        )
        found = powers["‖H_f‖ / ‖H_o‖"]
        predicted = "below -0.25, if the outer part dominates in norm too"
        error = found.standard_error
        checks.append(
            Check(f"{what} ‖H_f‖ / ‖H_o‖", predicted, found.value, -math.inf, -0.25, error)
        )
        means = torch.tensor(norms, dtype=torch.float64).mean(0).tolist()
        told = ", ".join(f"{heads}: {mean:.2g}" for heads, mean in zip(numbers, means))
        last = means[-1] / means[0]
        what = f"{loss}: ‖H_f‖ / ‖H_o‖ of {numbers[-1]} heads over that of one (by heads: {told})"
        checks.append(Check(what, "< 0.5, in the same sense", last, 0.0, 0.5))
    axes[0].set_title("Entries of the Hessian that have a functional part", fontsize=10)
    axes[1].set_title("Norm of the functional part over that of the outer part", fontsize=10)
    for ax, label in zip(axes, ("share of all entries", "‖H_f‖ / ‖H_o‖")):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(numbers, [str(heads) for heads in numbers])
        ax.set_xlabel("heads, of the same width in all")
        ax.set_ylabel(label)
        ax.legend(fontsize=8)
    setting = f"attention of width {width} on sums of 5 digits, {number} repeats"
    return Outcome("The outer part with more heads", setting, checks, figure)
