"""The slides' claim that the Gauss-Newton matrix misses the largest eigenvalue of transformers.

"GGN-based approximations of the largest eigenvalue are worse for Transformers than for MLPs", which
they learn from the scalar model of "Cracking the Hessian". The pairs here have one size and see the
same data: the scalar model and a linear network with its weights; a vision transformer and an MLP,
before and after training, with cross-entropy and with squared error.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt.analysis.operators.dense import dense
from blockopt.analysis.operators.model_operators import GaussNewtonOperator, HessianOperator
from blockopt.analysis.plots import OTHER_COLORS
from blockopt.analysis.spectral.eigenpairs import top_eigenpairs
from recipes.paper_figures.hessians import scalar_model
from recipes.paper_figures.models import PatchTransformer, synthetic_images, train
from recipes.paper_figures.outcome import Check, Outcome, Run, panels, sign_check

CLASSES = 10
SMALL = 100  # parameters up to which the whole matrix is built


class LinearNetwork(nn.Module):
    """`f(x) = w_V (w_Q·w_K) x / √d_K`: the scalar model without attention, of the same size."""

    def __init__(self, w_Q: Tensor, w_K: Tensor, w_V: Tensor) -> None:
        super().__init__()
        self.w_Q, self.w_K, self.w_V = (nn.Parameter(w.clone()) for w in (w_Q, w_K, w_V))

    def forward(self, x: Tensor) -> Tensor:
        """Apply to each number alone."""
        return self.w_V * (self.w_Q @ self.w_K) * x / math.sqrt(len(self.w_Q))


class Perceptron(nn.Module):
    """Two ReLU layers on all pixels of an image at once."""

    def __init__(self, inputs: int, width: int, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = (nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            self.layers = nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, CLASSES)).double()

    def forward(self, images: Tensor) -> Tensor:  # (B, tokens, patch)
        """Return the logits."""
        logits: Tensor = self.layers(images)
        return logits


def missed(model: nn.Module, loss: Callable[[], Tensor]) -> float:
    """Return `|λ(H) - λ(G)| / λ(H)` of the largest eigenvalues of Hessian and Gauss-Newton."""
    options = {"check_deterministic": False}
    kinds = (HessianOperator, GaussNewtonOperator)
    values = []
    for kind in kinds:
        operator = kind(model, loss, **options)
        if operator.shape[0] <= SMALL:
            values.append(float(torch.linalg.eigvalsh(dense(operator))[-1]))
            continue
        with operator.keep_graph():
            pairs = top_eigenpairs(operator, 1, which="largest", tolerance=1e-5)
        values.append(float(pairs.values[0]))
    hessian, gauss_newton = values
    return abs(hessian - gauss_newton) / hessian


def scalar_pair(seed: int) -> tuple[float, float]:
    """Return what is missed in scalar attention and in a linear network with its weights."""
    attention = scalar_model(seed, None)
    eigenvalues = (attention.eigenvalues(), attention.gauss_newton_eigenvalues())
    hessian, gauss_newton = (float(values.max()) for values in eigenvalues)
    network = LinearNetwork(attention.w_Q, attention.w_K, attention.w_V)
    other = missed(network, lambda: F.mse_loss(network(attention.x), attention.y))
    return abs(hessian - gauss_newton) / hessian, other


def vision_pair(run: Run, seed: int, squared: bool) -> list[tuple[float, float]]:
    """Return what is missed in a transformer and in an MLP of its size, untrained and trained."""
    images, labels = synthetic_images(32 * run.effort.samples, seed=seed)
    transformer = PatchTransformer(16, images.shape[1], run.effort.small, CLASSES, seed=seed)
    size = sum(p.numel() for p in transformer.parameters())
    pixels = images[0].numel()
    # The width w at which pixels·w + w² + classes·w, and the biases, come nearest to that size
    linear = pixels + CLASSES + 2
    width = round((math.sqrt(linear**2 + 4 * (size - CLASSES)) - linear) / 2)
    perceptron = Perceptron(pixels, max(2, width), seed)
    found: list[list[float]] = []
    for model in (transformer, perceptron):

        def loss(rows: Tensor, model: nn.Module = model) -> Tensor:
            logits = model(images[rows])
            if squared:
                return F.mse_loss(logits, F.one_hot(labels[rows], CLASSES).to(logits))
            return F.cross_entropy(logits, labels[rows])

        batch = torch.arange(min(128, len(images)))
        of_model = [missed(model, lambda: loss(batch))]  # noqa: B023 (called at once)
        train(model, loss, len(images), run.effort.steps, seed)
        of_model.append(missed(model, lambda: loss(batch)))  # noqa: B023
        found.append(of_model)
    return list(zip(*found))


def figure_top_eigenvalue(run: Run) -> Outcome:
    """Compare what Gauss-Newton misses of the largest eigenvalue in transformers and in MLPs."""
    number, seeds = run.effort.repeats, run.effort.seeds
    step = run.steps("Top eigenvalues", seeds + 2 * number)
    groups: dict[str, list[tuple[float, float]]] = {"scalar": []}
    for seed in range(seeds):
        groups["scalar"].append(scalar_pair(seed))
        step()
    for squared, name in ((False, "cross-entropy"), (True, "squared error")):
        for seed in range(number):
            pairs = vision_pair(run, seed, squared)
            for when, pair in zip(("at init", "trained"), pairs):
                groups.setdefault(f"{name}, {when}", []).append(pair)
            step()
    title = "What the Gauss-Newton matrix misses of the largest eigenvalue, at equal size"
    figure, (ax,) = panels(1, 1, 8.5, 4.2, title=title)
    checks: list[Check] = []
    for place, (name, pairs) in enumerate(groups.items()):
        for shift, values, color in zip((-0.15, 0.15), zip(*pairs), OTHER_COLORS[1:]):
            points = sorted(max(value, 1e-12) for value in values)
            spread = [place + shift + 0.1 * (i / len(points) - 0.5) for i in range(len(points))]
            ax.plot(spread, points, ".", color=color, markersize=4, alpha=0.6)
            middle = points[len(points) // 2]
            ax.plot([place + shift - 0.1, place + shift + 0.1], 2 * [middle], color=color)
        gaps = [math.log10(max(a, 1e-12) / max(b, 1e-12)) for a, b in pairs]
        means = [sorted(values)[len(pairs) // 2] for values in zip(*pairs)]
        told = f"medians {means[0]:.2g} and {means[1]:.2g}"
        what = f"{name}: decades from MLP to transformer in |λ(H) - λ(G)| / λ(H) ({told})"
        checks.append(sign_check(what, "> 0: worse for transformers", gaps, 1))
    for name, color in zip(("transformer", "MLP"), OTHER_COLORS[1:]):
        ax.plot([], [], "o", color=color, label=name)
    ax.set_yscale("log")
    ax.set_xticks(range(len(groups)), list(groups), fontsize=8)
    ax.set_ylabel("|λ(H) - λ(G)| / λ(H), largest eigenvalues")
    ax.set_title("points: repeats; lines: medians", fontsize=9)
    ax.legend(fontsize=8)
    scalar = f"scalar: d_K = 8, {seeds} seeds"
    vision = f"vision: width {run.effort.small}, {run.effort.steps} steps, {number} repeats"
    return Outcome("Gauss-Newton and the largest eigenvalue", f"{scalar}; {vision}", checks, figure)
