"""Figures of whole Hessians: 1 and 4 of the ICLR paper, the slides' attention sinks, and those of the second paper."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockopt.analysis.closed_forms.growth import fit_exponent
from blockopt.analysis.closed_forms.scalar_attention import ScalarAttention, Sink
from blockopt.analysis.operators.dense import dense
from blockopt.analysis.operators.model_operators import HessianOperator
from blockopt.analysis.plots import (
    block_mass_heatmap,
    entry_histograms,
    hessian_heatmap,
    loss_difference_bars,
    role_color,
    spectral_densities,
)
from blockopt.analysis.spectral.block_mass import block_mass
from blockopt.analysis.taylor import loss_difference, sample_bound, sample_differences, sample_rate
from recipes.data.addition import addition
from recipes.paper_figures.growth import panels
from recipes.paper_figures.models import (
    PatchTransformer,
    Transformer,
    last_layer_hessian,
    synthetic_images,
)
from recipes.paper_figures.outcome import Check, Outcome, Run, mean_check, sign_check

ATTENTION = ("query", "key", "value", "output")
WEIGHTS = (*ATTENTION, "mlp_in", "mlp_out")


def log_median(block: Tensor) -> float:
    """The power of ten of the median absolute entry that is not zero."""
    values = block.abs()
    return math.log10(float(values[values > 0].median()))


def figure_1(run: Run) -> Outcome:
    """The Hessian of a GPT-2 block at initialisation: heat map, and histograms of query and value entries."""
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
    hessian_heatmap(
        matrix, sizes, title="GPT-2 block at initialisation: the whole Hessian", ax=axes[0]
    )
    chosen = torch.cat([operator.entries(f"layers.0.{role}") for role in ATTENTION])
    attention = matrix[chosen][:, chosen]
    hessian_heatmap(
        attention,
        {role: sizes[role] for role in ATTENTION},
        title="Its attention weights",
        ax=axes[1],
    )
    entry_histograms(blocks, title="Query entries are far smaller than value entries", ax=axes[2])
    what = "decades from the median query entry to the median value entry"
    checks = [mean_check(what, "about 2", ratios, 1.5, 2.5)]
    # The closed form and the whole matrix are two ways to the same numbers.
    start = operator.entries("layers.0.value")
    error = float(
        (matrix[start][:, start].double() - blocks["value"]).norm() / blocks["value"].norm()
    )
    checks.append(
        Check(
            "value block: closed form against autograd in float32, relative",
            "0",
            error,
            0.0,
            1e-4,
            ours=True,
        )
    )
    setting = f"d = {run.effort.small}, MLP {4 * run.effort.small}, {run.effort.samples} sums, {run.effort.repeats} repeats"
    return Outcome("Hessian of a GPT-2 block at initialisation", setting, checks, figure)


class Attended(NamedTuple):
    """The label of a block of Figure 4: its role, and "softmax" or "linear" attention."""

    role: str
    attention: str

    def __str__(self) -> str:
        return f"{self.role}, {self.attention}"


def figure_4(run: Run) -> Outcome:
    """Softmax against linear attention: without softmax, query and value entries are of one size."""
    inputs, targets = addition(run.effort.samples)
    medians: dict[Attended, list[float]] = {}
    blocks: dict[Attended, Tensor] = {}
    step = run.steps("Figure 4", 2 * run.effort.repeats)
    for seed in range(run.effort.repeats):
        for softmax in (True, False):
            hessian = last_layer_hessian(
                Transformer(run.effort.small, softmax=softmax, seed=seed), inputs, targets
            )
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

    checks = [
        mean_check(
            "softmax: decades from query to value",
            "about 2",
            difference(("value", "softmax"), ("query", "softmax")),
            1.5,
            2.5,
        ),
        mean_check(
            "linear: decades from query to value",
            "about 0",
            difference(("value", "linear"), ("query", "linear")),
            -0.75,
            0.75,
        ),
        mean_check(
            "query: decades from softmax to linear",
            "large",
            difference(("query", "linear"), ("query", "softmax")),
            1.0,
        ),
        mean_check(
            "value: decades from softmax to linear",
            "small",
            difference(("value", "linear"), ("value", "softmax")),
            -0.75,
            0.75,
        ),
    ]
    setting = f"d = {run.effort.small}, {run.effort.samples} sums, {run.effort.repeats} repeats"
    return Outcome("Entries with and without softmax", setting, checks, figure)


def scalar_model(seed: int, first: float | None) -> ScalarAttention:
    """Scalar attention on normal tokens, in which queries and keys agree; the first token may be an outlier."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 32, 16, generator=generator, dtype=torch.float64)
    w_Q, w_K = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    if first is not None:
        x[:, 0] = first
    return ScalarAttention(x, y, w_Q, w_K * (w_Q @ w_K).sign(), 1.0)


def figure_sink(run: Run) -> Outcome:
    """Attention sinks: what a growing bias of the first token does to the bulk and to the outliers."""
    figure, axes = panels(2, 2, 5.6, 3.8)
    biases = torch.linspace(0, 6, 13, dtype=torch.float64).tolist()
    settings: list[tuple[str, Sink, float | None]] = [
        ("bias on scores, first token an outlier (3)", "score", 3.0),
        ("bias on scores, first token like the others", "score", None),
        ("bias on the first token itself", "input", None),
    ]
    number = max(run.effort.repeats, 2)
    step = run.steps("Attention sinks", number * (len(settings) + 2))
    checks = []
    for style, (name, kind, first) in zip(("-", "--", ":"), settings):
        curves = []
        for seed in range(number):
            models = [scalar_model(seed, first).with_sink(bias, kind) for bias in biases]
            curves.append([[float(m.beta.abs()), float(m.outliers.abs().max())] for m in models])
            step()
        decades = torch.tensor(curves, dtype=torch.float64).log10()
        change = decades - decades[:, :1]
        for index, (what, color) in enumerate(
            (("bulk", role_color("query")), ("largest outlier", role_color("value")))
        ):
            axes[0].plot(
                biases,
                (10 ** change[..., index].mean(0)).tolist(),
                style,
                color=color,
                label=f"{what}: {name}",
            )
        values = change[:, -1].unbind(-1)
        checks.append(
            sign_check(
                f"{name}: decades that the bulk moves", "< 0: shrinks", values[0].tolist(), -1
            )
        )
        checks.append(
            sign_check(
                f"{name}: decades that the largest outlier moves",
                "> 0: grows",
                values[1].tolist(),
                1,
            )
        )
    axes[0].set_yscale("log")
    axes[0].set_xlabel("bias b of the first token")
    axes[0].set_ylabel("size, relative to b = 0")
    axes[0].set_title("Scalar attention: bulk |β| and largest outlier", fontsize=10)
    axes[0].legend(fontsize=6)
    model = scalar_model(0, 3.0)
    spectra = {f"b = {bias:g}": model.with_sink(bias).eigenvalues() for bias in (0.0, 3.0, 6.0)}
    for index, (label, values) in enumerate(spectra.items()):
        axes[1].stem(
            [index + 0.035 * (place - len(values) / 2) for place in range(len(values))],
            values.tolist(),
            linefmt=role_color(label, index),
            markerfmt="o",
            basefmt="k-",
            label=label,
        )
    axes[1].set_xticks(range(len(spectra)), list(spectra))
    axes[1].set_ylabel("eigenvalue")
    axes[1].set_yscale("symlog", linthresh=0.05)
    top = 2 * max(float(values.abs().max()) for values in spectra.values())
    axes[1].set_ylim(-top, top)
    axes[1].set_yticks([-10.0, -1.0, -0.1, 0.0, 0.1, 1.0, 10.0])
    axes[1].set_title(
        "Scalar attention: all eigenvalues, first token 3, bias b on scores", fontsize=10
    )
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
            ends.append(
                [
                    math.log10(float((v[-1] - v[0]) / (found["sink 0"][-1] - found["sink 0"][0])))
                    for v in found.values()
                ][-1]
            )
            if seed == 0:
                name = "no norms" if norm == "none" else "pre-norm"
                spectral_densities(
                    found, title=f"GPT-2, 2 layers, {name}: Hessian of all layers", ax=ax
                )
            step()
        what = f"GPT-2, {norm} norm: decades that λ_max - λ_min moves from sink 0 to 8"
        checks.append(sign_check(what, "> 0: stretches", ends, 1))
    figure.suptitle("Attention sinks and the spectrum of the Hessian", fontsize=11)
    setting = f"scalar: d_K = 8, 32 sequences of 16 tokens; GPT-2: d = {width}, 2 layers; {number} repeats"
    return Outcome("Attention sinks and the spectrum", setting, checks, figure)


class Trained:
    """A small post-norm vision transformer on images that we make, with copies of its weights before and after training."""

    def __init__(self, run: Run, seed: int, pixel: float = 0.31) -> None:
        number = 32 * run.effort.samples
        self.images, self.labels = synthetic_images(number, pixel=pixel, seed=seed)
        self.unseen, self.unseen_labels = synthetic_images(number, pixel=pixel, seed=seed + 1000)
        self.model = PatchTransformer(16, self.images.shape[1], run.effort.small, 10, seed=seed)
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(run.effort.steps):
            rows = torch.randint(number, (128,), generator=generator)
            optimizer.zero_grad()
            F.cross_entropy(self.model(self.images[rows]), self.labels[rows]).backward()
            optimizer.step()
        self.after = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        with torch.no_grad():
            self.accuracy = float(
                (self.model(self.unseen).argmax(-1) == self.unseen_labels).double().mean()
            )

    def loss(self) -> Tensor:
        """On one batch of 128 images."""
        return F.cross_entropy(self.model(self.images[:128]), self.labels[:128])

    def hessian(self, roles: Sequence[str]) -> Tensor:
        """The dense matrix of some weights of the layer."""
        names = [f"layer.{role}" for role in roles]
        return dense(HessianOperator(self.model, self.loss, names=names, check_deterministic=False))


def figure_gap_heatmap(run: Run) -> Outcome:
    """The second paper's heat maps: the Hessian of a post-norm block at initialisation and after training.

    The paper does not say how its pixels are scaled, and the blocks grow with different powers of
    that scale: hence two.
    """
    number = run.effort.repeats
    step = run.steps("Heat maps", 4 * number)
    figure, axes = panels(2, 2, 5.4, 4.4)
    whens, scales, size = ("at initialisation", "after training"), (0.31, 1.0), run.effort.small**2
    parts = {
        role: torch.arange(index * size, (index + 1) * size)
        for index, role in enumerate(ATTENTION[:3])
    }
    excess: dict[tuple[float, str], list[float]] = {
        (scale, when): [] for scale in scales for when in whens
    }
    accuracies = []
    for scale, seed in itertools.product(scales, range(number)):
        trained = Trained(run, seed, scale)
        accuracies.append(trained.accuracy)
        for row, (when, weights) in enumerate(zip(whens, (trained.before, trained.after))):
            trained.model.load_state_dict(weights)
            matrix = trained.hessian(ATTENTION[:3])
            mean = {role: float(matrix[p][:, p].abs().mean()) for role, p in parts.items()}
            excess[scale, when].append(math.log10(mean["value"] / max(mean["query"], mean["key"])))
            if seed == 0 and scale == scales[0]:
                hessian_heatmap(
                    matrix,
                    dict.fromkeys(parts, size),
                    title=f"Post-norm block {when}",
                    ax=axes[2 * row],
                )
                mass = block_mass(matrix, parts)
                block_mass_heatmap(
                    mass.labels,
                    mass.matrix,
                    title=f"{when.capitalize()}: share of ‖H‖², %",
                    ax=axes[2 * row + 1],
                )
            step()
    what = "decades from the larger of query, key to value, mean |entry|"
    checks = [
        sign_check(
            f"pixels of deviation {scale}, {when}: {what}", "> 0: value-value is largest", values, 1
        )
        for (scale, when), values in excess.items()
    ]
    accuracy = mean_check(
        "accuracy on other images", "over 0.5, as the paper trains to", accuracies, low=0.5
    )
    checks.append(replace(accuracy, ours=True))
    figure.suptitle(
        "A post-norm vision block on images that we make (pixels of deviation 0.31)", fontsize=11
    )
    setting = f"d = {run.effort.small}, 9 patches, 10 classes, {run.effort.steps} steps, 128 images, {number} repeats"
    return Outcome("Heat maps of a post-norm block", setting, checks, figure)


def figure_gap_norms(run: Run) -> Outcome:
    """The second paper's norms: parameters and Hessian blocks by role, on one batch of 128 images."""
    number = run.effort.repeats
    step = run.steps("Norms by role", number)
    parameters, curvatures = [], []
    for seed in range(number):
        trained = Trained(run, seed)
        parameters.append(
            [
                float(trained.model.get_parameter(f"layer.{role}").detach().norm())
                for role in ATTENTION
            ]
        )
        curvatures.append([float(trained.hessian([role]).norm()) for role in ATTENTION])
        step()
    figure, axes = panels(1, 2, 4.6, 3.4)
    for ax, values, name in (
        (axes[0], parameters, "Frobenius norm of the weight"),
        (axes[1], curvatures, "Frobenius norm of its Hessian"),
    ):
        table = torch.tensor(values, dtype=torch.float64)
        error = (table.std(0) / math.sqrt(number)).tolist() if number > 1 else None
        ax.bar(
            ATTENTION,
            table.mean(0).tolist(),
            yerr=error,
            capsize=3,
            color=[role_color(role) for role in ATTENTION],
        )
        ax.set_title(f"{name}, after training", fontsize=10)
    checks = []
    for what, values in (("weights", parameters), ("Hessian blocks", curvatures)):
        for role, index in (("key", 1), ("value", 2)):
            decades = [
                math.log10(row[index] / max(row[0], row[3])) for row in values
            ]  # query and output
            checks.append(
                sign_check(
                    f"{what}: decades from query and output to {role}",
                    "> 0: keys and values dominate",
                    decades,
                    1,
                )
            )
    figure.suptitle("A post-norm vision block on images that we make: norms by role", fontsize=11)
    setting = f"d = {run.effort.small}, {run.effort.steps} steps, one batch of 128 images, {number} repeats"
    return Outcome("Norms of weights and Hessian blocks", setting, checks, figure)


def moving_average(values: Tensor, decay: float) -> Tensor:
    """The exponential moving average, with weights that sum to 1 from the start."""
    found, total, weight = [], 0.0, 0.0
    for value in values.tolist():
        total, weight = decay * total + (1 - decay) * value, decay * weight + 1 - decay
        found.append(total / weight)
    return torch.tensor(found, dtype=values.dtype)


def figure_loss_difference(run: Run) -> Outcome:
    """|L_{k+1} - L_k| as samples are added, against the bound 1/k; and what a step does to the loss."""
    trained = Trained(run, 0)
    orders = max(2, run.effort.repeats)
    step = run.steps("Loss differences", orders)
    with torch.no_grad():
        losses = F.cross_entropy(
            trained.model(trained.unseen), trained.unseen_labels, reduction="none"
        )
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
    figure, axes = panels(1, 2, 5.4, 3.8)
    ax = axes[0]
    ax.plot(
        sizes.tolist(),
        differences[0].tolist(),
        ".",
        markersize=2,
        color="#bbbbbb",
        label="one order of the samples",
    )
    ax.plot(
        sizes.tolist(),
        average.tolist(),
        color=role_color("query"),
        label=f"its moving average: k^{smooth.value:.2f}",
    )
    line = math.exp(rate.intercept) * (sizes + 1.0) ** rate.value
    ax.plot(
        sizes.tolist(),
        line.tolist(),
        "--",
        color=role_color("value"),
        label=f"mean of {orders} orders: k^{rate.value:.2f}",
    )
    ax.plot(
        sizes.tolist(), bound.tolist(), ":", color="black", label="bound, largest loss / (k + 1)"
    )
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
    checks = [
        Check(
            f"power of k, mean of {orders} orders",
            "-1",
            rate.value,
            -1.1,
            -0.9,
            rate.standard_error,
        ),
        Check("power of k, moving average of one order", "-1", smooth.value, -1.25, -0.75),
        Check(
            "share of differences above the bound",
            "0",
            float((differences > bound).double().mean()),
            0.0,
            0.0,
            ours=True,
        ),
        Check(
            "second order of the step's difference over the actual one",
            "1, to second order",
            found.second_order / found.actual,
            0.9,
            1.1,
            ours=True,
        ),
    ]
    figure.suptitle(
        "Loss differences of a trained post-norm vision block, images that we make", fontsize=11
    )
    setting = f"d = {run.effort.small}, {run.effort.steps} steps, {len(losses)} other images, accuracy {trained.accuracy:.2f}"
    return Outcome("Loss differences", setting, checks, figure)
