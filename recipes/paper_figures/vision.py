"""Figures of the second paper, Petrov et al.: a post-norm vision block on synthetic images."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from blockopt.analysis.closed_forms.exponents import fit_exponent
from blockopt.analysis.operators.dense import dense
from blockopt.analysis.operators.model_operators import HessianOperator
from blockopt.analysis.plots import (
    block_mass_heatmap,
    hessian_heatmap,
    loss_difference_bars,
    role_color,
)
from blockopt.analysis.spectral.block_mass import block_mass
from blockopt.analysis.taylor import loss_difference, sample_bound, sample_differences, sample_rate
from recipes.paper_figures.models import (
    PatchTransformer,
    accuracy,
    synthetic_images,
    train,
    weights_of,
)
from recipes.paper_figures.outcome import Check, Outcome, Run, mean_check, panels, sign_check

ATTENTION = ("query", "key", "value", "output")
WEIGHTS = (*ATTENTION, "mlp_in", "mlp_out")


class Trained:
    """A small post-norm vision transformer, with its weights before and after training.

    `recorded` has those after chosen steps.
    """

    def __init__(
        self, run: Run, seed: int, pixel: float = 0.31, record: Collection[int] = ()
    ) -> None:
        number = 32 * run.effort.samples
        self.images, self.labels = synthetic_images(number, pixel=pixel, seed=seed)
        self.unseen, self.unseen_labels = synthetic_images(number, pixel=pixel, seed=seed + 1000)
        self.model = PatchTransformer(16, self.images.shape[1], run.effort.small, 10, seed=seed)
        self.before = weights_of(self.model)
        self.recorded = {0: self.before}
        self.recorded |= train(self.model, self.loss, number, run.effort.steps, seed, record)
        self.after = weights_of(self.model)
        self.accuracy = accuracy(self.model, self.unseen, self.unseen_labels)

    def loss(self, rows: Tensor | None = None) -> Tensor:
        """Return the loss on some images, by default on one batch of 128."""
        chosen = slice(128) if rows is None else rows
        return F.cross_entropy(self.model(self.images[chosen]), self.labels[chosen])

    def hessian(self, roles: Sequence[str]) -> Tensor:
        """Return the dense Hessian of some weights of the layer."""
        names = [f"layer.{role}" for role in roles]
        return dense(HessianOperator(self.model, self.loss, names=names, check_deterministic=False))


def accuracy_check(accuracies: list[float]) -> Check:
    """Return the check that training has worked."""
    predicted = "over 0.5, as the paper trains to"
    found = mean_check("accuracy on other images", predicted, accuracies, low=0.5)
    return replace(found, ours=True)


def figure_gap_heatmap(run: Run) -> Outcome:
    """The second paper's heat maps: the Hessian of a post-norm block before and after training.

    The paper does not say how its pixels are scaled, and the blocks grow with different powers of
    that scale: hence two.
    """
    number, size = run.effort.repeats, run.effort.small**2
    title = "A post-norm vision block on synthetic images (pixels of deviation 0.31)"
    figure, axes = panels(2, 2, 5.4, 4.4, title=title)
    whens, scales = ("at initialisation", "after training"), (0.31, 1.0)
    parts = dict(zip(ATTENTION, torch.arange(3 * size).split(size)))

    def matrices(trained: Trained) -> Iterator[tuple[str, Tensor]]:
        for when, weights in zip(whens, (trained.before, trained.after)):
            trained.model.load_state_dict(weights)
            yield when, trained.hessian(ATTENTION[:3])

    drawn = Trained(run, 0, scales[0])

    def excess(scale: float, seed: int) -> dict[str, float]:
        trained = drawn if (scale, seed) == (scales[0], 0) else Trained(run, seed, scale)
        found = {"accuracy": trained.accuracy}
        for when, matrix in matrices(trained):
            mean = {role: float(matrix[p][:, p].abs().mean()) for role, p in parts.items()}
            found[when] = math.log10(mean["value"] / max(mean["query"], mean["key"]))
        return found

    for row, (when, matrix) in enumerate(matrices(drawn)):
        sizes, title = dict.fromkeys(parts, size), f"Post-norm block {when}"
        hessian_heatmap(matrix, sizes, title=title, ax=axes[2 * row])
        mass, title = block_mass(matrix, parts), f"{when.capitalize()}: share of ‖H‖², %"
        block_mass_heatmap(mass.labels, mass.matrix, title=title, ax=axes[2 * row + 1])
    checks, accuracies = [], []
    for scale, found in zip(scales, run.repeated(excess, scales, "Heat maps")):
        accuracies += found["accuracy"]
        for when in whens:
            what = f"pixels of deviation {scale}, {when}"
            what += ": decades from the larger of query, key to value, mean |entry|"
            checks.append(sign_check(what, "> 0: value-value is largest", found[when], 1))
    checks.append(accuracy_check(accuracies))
    model = f"d = {run.effort.small}, 9 patches, 10 classes"
    setting = f"{model}, {run.effort.steps} steps, 128 images, {number} repeats"
    return Outcome("Heat maps of a post-norm block", setting, checks, figure)


def figure_gap_norms(run: Run) -> Outcome:
    """The second paper's norms: parameters and Hessian blocks by role, on 128 images."""
    number = run.effort.repeats
    step = run.steps("Norms by role", number)
    parameters, curvatures = [], []
    for seed in range(number):
        trained = Trained(run, seed)
        weights = [trained.model.get_parameter(f"layer.{role}").detach() for role in ATTENTION]
        parameters.append([float(weight.norm()) for weight in weights])
        curvatures.append([float(trained.hessian([role]).norm()) for role in ATTENTION])
        step()
    title = "A post-norm vision block on synthetic images: norms by role"
    figure, axes = panels(1, 2, 4.6, 3.4, title=title)
    colors, shown = [role_color(role) for role in ATTENTION], ("the weight", "its Hessian")
    for ax, values, name in zip(axes, (parameters, curvatures), shown):
        table = torch.tensor(values, dtype=torch.float64)
        error = (table.std(0) / math.sqrt(number)).tolist() if number > 1 else None
        ax.bar(ATTENTION, table.mean(0).tolist(), yerr=error, capsize=3, color=colors)
        ax.set_title(f"Frobenius norm of {name}, after training", fontsize=10)
    checks = []
    for what, values in (("weights", parameters), ("Hessian blocks", curvatures)):
        for role, index in (("key", 1), ("value", 2)):
            # The paper's block has no output matrix, so query is what is left to compare with.
            decades = [math.log10(row[index] / row[0]) for row in values]
            moved = f"{what}: decades from query to {role}"
            checks.append(sign_check(moved, "> 0: keys and values dominate", decades, 1))
    model = f"d = {run.effort.small}, {run.effort.steps} steps"
    setting = f"{model}, one batch of 128 images, {number} repeats"
    return Outcome("Norms of weights and Hessian blocks", setting, checks, figure)


def moving_average(values: Tensor, decay: float) -> Tensor:
    """Return the exponential moving average, with weights that sum to 1 from the start."""
    found, total, weight = [], 0.0, 0.0
    for value in values.tolist():
        total, weight = decay * total + (1 - decay) * value, decay * weight + 1 - decay
        found.append(total / weight)
    return torch.tensor(found, dtype=values.dtype)


def figure_loss_difference(run: Run) -> Outcome:
    """|L_{k+1} - L_k| as samples are added, and its bound 1/k; what a step does to the loss."""
    trained = Trained(run, 0)
    orders = max(2, run.effort.repeats)
    step = run.steps("Loss differences", orders)
    with torch.no_grad():
        logits = trained.model(trained.unseen)
        losses = F.cross_entropy(logits, trained.unseen_labels, reduction="none")
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(orders):
        rows.append(losses[torch.randperm(len(losses), generator=generator)])
        step()
    differences = sample_differences(torch.stack(rows)).abs()
    sizes = torch.arange(1, len(losses))
    bound = sample_bound(sizes, float(losses.max()))
    average = moving_average(differences[0], 0.95)
    rate = sample_rate(differences)
    start = min(100, len(average) // 2)  # a few times the memory of the average
    smooth = fit_exponent(sizes[start:] + 1.0, average[start:])
    title = "Loss differences of a trained post-norm vision block, synthetic images"
    figure, axes = panels(1, 2, 5.4, 3.8, title=title)
    ax, k = axes[0], sizes.tolist()
    dots = {"markersize": 2, "color": "#bbbbbb", "label": "one order of the samples"}
    ax.plot(k, differences[0].tolist(), ".", **dots)
    label = f"its moving average: k^{smooth.value:.2f}"
    ax.plot(k, average.tolist(), color=role_color("query"), label=label)
    line = math.exp(rate.intercept) * (sizes + 1.0) ** rate.value
    label = f"mean of {orders} orders: k^{rate.value:.2f}"
    ax.plot(k, line.tolist(), "--", color=role_color("value"), label=label)
    ax.plot(k, bound.tolist(), ":", color="black", label="bound, largest loss / (k + 1)")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(bottom=float(average.min()) / 30)
    ax.set_xlabel("k, samples")
    ax.set_ylabel("|L(k+1) - L(k)|")
    ax.set_title("What one more sample does to the mean loss", fontsize=10)
    ax.legend(fontsize=7)
    gradients = torch.autograd.grad(trained.loss(), list(trained.model.parameters()))
    names = [name for name, _ in trained.model.named_parameters()]
    update = {n: -0.1 * g for n, g in zip(names, gradients) if n.split(".")[-1] in WEIGHTS}
    found = loss_difference(trained.model, trained.loss, update)
    names = tuple(label.parameter.rpartition(".")[2] for label in found.labels)
    found = replace(found, labels=names)
    loss_difference_bars(found, title="What a gradient step (lr 0.1) does to the loss", ax=axes[1])
    above = float((differences > bound).double().mean())
    ratio, what = found.second_order / found.actual, "second order of the step's difference"
    mean = f"power of k, mean of {orders} orders"
    checks = [
        Check(mean, "-1", rate.value, -1.1, -0.9, rate.standard_error),
        Check("power of k, moving average of one order", "-1", smooth.value, -1.25, -0.75),
        Check("share of differences above the bound", "0", above, 0.0, 0.0, ours=True),
        Check(f"{what} over the actual one", "1, to second order", ratio, 0.9, 1.1, ours=True),
    ]
    model = f"d = {run.effort.small}, {run.effort.steps} steps"
    setting = f"{model}, {len(losses)} other images, accuracy {trained.accuracy:.2f}"
    return Outcome("Loss differences", setting, checks, figure)
