"""The second paper over training: entries of Hessian blocks, and its assumption A1."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from blockopt.analysis.operators.model_operators import HessianOperator
from blockopt.analysis.plots import role_color
from recipes.paper_figures.models import PatchTransformer
from recipes.paper_figures.outcome import Check, Outcome, Run, mean_check, panels, sign_check
from recipes.paper_figures.vision import Trained, accuracy_check

PARAMETERS = ("query", "key", "value", "mlp_in", "mlp_out")  # those of the paper's block
COLUMNS = 64  # of each block, drawn at random, whose entries stand for all


def entries_of(trained: Trained, role: str, generator: torch.Generator) -> Tensor:
    """Return absolute entries of the Hessian block of one weight, those of random columns."""
    names = [f"layer.{role}"]
    operator = HessianOperator(trained.model, trained.loss, names=names, check_deterministic=False)
    size = operator.shape[0]
    chosen = torch.randperm(size, generator=generator)[: min(COLUMNS, size)]
    units = torch.zeros(size, len(chosen), dtype=torch.float64)
    units[chosen, torch.arange(len(chosen))] = 1
    return (operator @ units).abs()


def figure_entries(run: Run) -> Outcome:
    """Entries of the Hessian blocks of a post-norm block over training."""
    number, last = run.effort.repeats, run.effort.steps
    at = sorted({0, *(round(last * 10 ** (-0.5 * i)) for i in range(5))})
    step = run.steps("Entries over training", number * len(at))
    title = "Hessian blocks of a post-norm vision block over training, synthetic images"
    figure, axes = panels(1, 2, 5.6, 4.0, title=title)
    sizes = torch.zeros(number, len(at), len(PARAMETERS), dtype=torch.float64)
    accuracies = []
    for seed in range(number):
        trained, columns = Trained(run, seed, record=at), torch.Generator().manual_seed(seed)
        accuracies.append(trained.accuracy)
        for place, when in enumerate(at):
            trained.model.load_state_dict(trained.recorded[when])
            for index, role in enumerate(PARAMETERS):
                found = entries_of(trained, role, columns)
                sizes[seed, place, index] = found.mean()
                if seed == 0 and role in ("query", "value"):
                    quantiles = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
                    low, middle, high = found.quantile(quantiles).clamp(min=1e-12).tolist()
                    x, color = max(when, 0.5), role_color(role)
                    axes[1].plot([x, x], [low, high], color=color, linewidth=4, alpha=0.4)
                    axes[1].plot([x], [middle], "o", color=color)
            step()
    decades = sizes.log10()
    x = [max(when, 0.5) for when in at]
    for index, role in enumerate(PARAMETERS):
        mean = decades[..., index].mean(0)
        error = decades[..., index].std(0) / math.sqrt(number) if number > 1 else 0 * mean
        color = role_color(role)
        axes[0].plot(x, (10**mean).tolist(), "o-", color=color, label=role)
        ends = ((10 ** (mean - error)).tolist(), (10 ** (mean + error)).tolist())
        axes[0].fill_between(x, *ends, color=color, alpha=0.2)
    for role in ("query", "value"):
        axes[1].plot([], [], "o", color=role_color(role), label=role)
    axes[0].set_title(f"Mean |entry| of each block, mean of {number} runs", fontsize=10)
    axes[1].set_title("Median |entry| and 10 % to 90 %, one run", fontsize=10)
    for ax in axes:
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("training step (0 is drawn at 0.5)")
        ax.legend(fontsize=8)
    query, key, value = (decades[..., index] for index in range(3))
    excess = value - torch.maximum(query, key)
    checks = []
    for place, when in enumerate(at):
        what = f"step {when}: decades from the larger of query, key to value, mean |entry|"
        gaps = excess[:, place].tolist()
        checks.append(sign_check(what, "> 0: value-value stays the largest", gaps, 1))
    for index, role in enumerate(PARAMETERS):
        grown = (decades[:, -1, index] - decades[:, 0, index]).tolist()
        what = f"{role}: decades that mean |entry| grows from step 0 to {at[-1]}"
        checks.append(sign_check(what, "> 0: entries grow in all blocks", grown, 1))
    checks.append(accuracy_check(accuracies))
    setting = f"d = {run.effort.small}, {last} steps, 128 images, {number} repeats"
    return Outcome("Entries of Hessian blocks over training", setting, checks, figure)


def sample_gradients(model: PatchTransformer, images: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of the loss of each image alone, (images, parameters)."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(model, parameters, (image.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    found = vmap(grad(loss), (None, 0, 0), chunk_size=256)(parameters, images, labels)
    return torch.cat([g.flatten(1) for g in found.values()], 1)


def norms_of_means(gradients: Tensor) -> Tensor:
    """Return ‖∇L_k‖ for k = 1, 2, ..., L_k being the mean loss of the first k samples.

    Example:
        >>> norms_of_means(torch.tensor([[3.0, 4.0], [-3.0, -4.0]]))
        tensor([5., 0.])
    """
    k = torch.arange(1, len(gradients) + 1).to(gradients)
    return (gradients.cumsum(0) / k[:, None]).norm(dim=1)


def figure_shared_minimiser(run: Run) -> Outcome:
    """Assumption A1: at the trained weights, the gradients of L_{k-1} and L_k vanish."""
    number = run.effort.repeats
    step = run.steps("Shared minimiser", number)
    title = "Assumption A1: do L(k - 1) and L(k) share a minimiser, the trained weights?"
    figure, axes = panels(1, 2, 5.6, 4.0, title=title)
    rows: dict[str, list[float]] = {}
    for seed in range(number):
        trained = Trained(run, seed)
        norms = {}
        for when, weights in (("before", trained.before), ("after", trained.after)):
            trained.model.load_state_dict(weights)
            gradients = sample_gradients(trained.model, trained.images, trained.labels)
            norms[when] = norms_of_means(gradients)
            single = float(gradients.norm(dim=1).mean())
        last = len(trained.images)
        for name, k in (("k - 1", last - 1), ("k", last), ("k / 16", max(1, last // 16))):
            ratio = float(norms["after"][k - 1] / norms["before"][k - 1])
            rows.setdefault(f"‖∇L(w*)‖ of {name} samples over that before training", []).append(
                ratio
            )
        rows.setdefault("‖∇L_k(w*)‖ over the mean of ‖∇ℓ_i(w*)‖", []).append(
            float(norms["after"][-1]) / single
        )
        if seed == 0:
            k = list(range(1, last + 1))
            for when, color in (("before", "#777777"), ("after", role_color("query"))):
                axes[0].plot(k, norms[when].tolist(), color=color, label=f"{when} training")
            axes[0].axhline(single, color="black", linestyle=":", label="one image, mean, after")
        step()
    axes[0].set_xscale("log")
    axes[0].set_yscale("log")
    axes[0].set_xlabel("k, samples")
    axes[0].set_ylabel("‖∇L(k)‖")
    axes[0].set_title("Norm of the gradient of the mean loss of k samples", fontsize=10)
    axes[0].legend(fontsize=8)
    short = ("k - 1", "k", "k / 16", "k, over one image")
    for place, values in enumerate(rows.values()):
        axes[1].plot([place] * len(values), values, "o", alpha=0.6, color=role_color("query"))
    axes[1].axhline(0.1, color="black", linewidth=0.8)
    axes[1].set_yscale("log")
    axes[1].set_xticks(range(len(rows)), short)
    axes[1].set_title("The ratios of the table, each run; below the line: A1 holds", fontsize=10)
    checks: list[Check] = []
    for what, values in rows.items():
        checks.append(mean_check(what, "0", values, 0.0, 0.1))
    model = f"d = {run.effort.small}, {run.effort.steps} steps of Adam on batches of 128"
    setting = f"{model}, {32 * run.effort.samples} images, {number} repeats"
    return Outcome("Assumption A1, a shared minimiser", setting, checks, figure)
