"""Block spectra of a transformer, a CNN and an MLP (Zhang et al., "Why Transformers need Adam").

All three have the same number of parameters, as nearly as widths allow, and about as many layers.
They see the same images, and are measured at initialisation and after training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt.analysis.operators.dense import dense
from blockopt.analysis.operators.model_operators import HessianOperator
from blockopt.analysis.plots import distance_heatmap, spectral_densities
from blockopt.analysis.spectral.density import SpectralDensity, spectral_density
from blockopt.analysis.spectral.heterogeneity import Axis, jensen_shannon
from recipes.paper_figures.models import (
    Layer,
    accuracy,
    causal,
    normal,
    synthetic_images,
    train,
    weights_of,
)
from recipes.paper_figures.outcome import Outcome, Run, mean_check, panels, sign_check

PIXELS, TOKENS, PATCH, CLASSES = 144, 9, 16, 10
PIXEL = 1.0  # standard deviation of the pixels
DEPTH = 6  # hidden layers of the CNN and the MLP
AXES: tuple[Axis, ...] = ("symmetric log", "linear")
WHENS = ("at initialisation", "after training")


class PatchGPT(nn.Module):
    """Pre-norm blocks with causal attention, which read an image patch by patch."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.patches = normal(generator, PATCH, width, width=PATCH)
        self.positions = normal(generator, TOKENS, width, width=width)
        self.layers = nn.ModuleList(
            Layer(width, 4 * width, "pre", True, generator) for _ in range(2)
        )
        self.head = normal(generator, width, CLASSES, width=width)

    def forward(self, images: Tensor) -> Tensor:  # (B, tokens, patch)
        """Return the logits."""
        x = images @ self.patches + self.positions
        for layer in self.layers:
            x = layer(x, causal(TOKENS))
        return F.layer_norm(x, x.shape[-1:]).mean(1) @ self.head


class AsPixels(nn.Module):
    """Puts patches (B, 9, 16) together again: images (B, 1, 12, 12)."""

    def forward(self, patches: Tensor) -> Tensor:
        """Return the images."""
        rows = patches.unflatten(1, (3, 3)).unflatten(3, (4, 4)).transpose(2, 3)
        return rows.reshape(len(patches), 1, 12, 12)


def convolutional(width: int, seed: int) -> nn.Module:
    """Return a CNN: six convolutions, of which two halve the image, and a linear layer."""
    widths, strides = [1] + [width] * DEPTH, [2, 1, 2, 1, 1, 1]
    layers = [nn.Conv2d(widths[i], width, 3, strides[i], 1) for i in range(DEPTH)]
    return with_relu(AsPixels(), layers, nn.Linear(9 * width, CLASSES), seed)


def perceptron(width: int, seed: int) -> nn.Module:
    """Return an MLP: six hidden layers and a linear one."""
    widths = [PIXELS] + [width] * DEPTH
    layers = [nn.Linear(widths[i], width) for i in range(DEPTH)]
    return with_relu(nn.Flatten(), layers, nn.Linear(width, CLASSES), seed)


def with_relu(first: nn.Module, layers: list[nn.Module], last: nn.Module, seed: int) -> nn.Module:
    """Return layers with ReLU between them, initialised as He et al. do; biases start at zero."""
    model = nn.Sequential(first)
    for layer in layers:
        model.extend([layer, nn.ReLU()])
    model.extend([nn.Flatten(), last]).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
        if parameter.ndim > 1:
            gain = "linear" if parameter is last.weight else "relu"
            nn.init.kaiming_normal_(parameter, nonlinearity=gain, generator=generator)
    return model


def size(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(p.numel() for p in model.parameters())


def nearest(make: Callable[[int, int], nn.Module], wanted: int, seed: int) -> nn.Module:
    """Return the model of a width whose number of parameters is nearest."""
    width = next(w for w in itertools.count(2) if size(make(w, 0)) >= wanted)
    nearer = min((max(width - 1, 2), width), key=lambda w: abs(size(make(w, 0)) - wanted))
    return make(nearer, seed)


class Studied:
    """A model, on images that all models of this seed see, before and after training."""

    def __init__(self, run: Run, model: nn.Module, pixel: float, seed: int) -> None:
        number, self.model = 32 * run.effort.samples, model
        self._lanczos_steps, self._batch = 5 * run.effort.probes, 2 * run.effort.samples
        self.images, self.labels = synthetic_images(number, pixel=pixel, seed=seed)
        self.states = {WHENS[0]: weights_of(model)}
        train(model, self.loss, number, run.effort.steps, seed)
        self.states[WHENS[1]] = weights_of(model)
        unseen, labels = synthetic_images(number, pixel=pixel, seed=seed + 1000)
        self.accuracy = accuracy(model, unseen, labels)

    def loss(self, rows: Tensor | None = None) -> Tensor:
        """Return the loss on some images, by default on one batch, of 128 images in full."""
        chosen = slice(self._batch) if rows is None else rows
        return F.cross_entropy(self.model(self.images[chosen]), self.labels[chosen])

    def blocks(self, when: str) -> dict[str, Tensor]:
        """Return all eigenvalues of the Hessian of each matrix or kernel."""
        self.model.load_state_dict(self.states[when])
        names = [name for name, p in self.model.named_parameters() if p.ndim > 1]
        return {
            name.removeprefix("layers.").removesuffix(".weight"): torch.linalg.eigvalsh(
                dense(self._operator([name]))
            )
            for name in names
        }

    def whole(self, when: str) -> SpectralDensity:
        """Return the density of the eigenvalues of all parameters, by Lanczos."""
        self.model.load_state_dict(self.states[when])
        return spectral_density(self._operator(None), num_steps=self._lanczos_steps, num_probes=2)

    def _operator(self, names: list[str] | None) -> HessianOperator:
        return HessianOperator(self.model, self.loss, names=names, check_deterministic=False)


def studied(run: Run, pixel: float, seed: int) -> dict[str, Studied]:
    """Return the three models, trained."""
    gpt = PatchGPT(run.effort.small, seed=seed)
    models = {
        "GPT": gpt,
        "CNN": nearest(convolutional, size(gpt), seed),
        "MLP": nearest(perceptron, size(gpt), seed),
    }
    return {name: Studied(run, model, pixel, seed) for name, model in models.items()}


def figure_block_spectra(run: Run) -> Outcome:
    """Whole and block-diagonal spectra, and how far those of the blocks are apart."""
    number = run.effort.repeats
    title = "GPT, CNN and MLP of one size on the same images: spectra, and how far blocks are apart"
    figure, axes = panels(4, 3, 5.0, 3.9, title=title)

    drawn = studied(run, PIXEL, 0)
    sizes = _draw(drawn, axes)

    def distances(pixel: float, seed: int) -> dict[str, float]:
        found = {}
        for name, one in (drawn if seed == 0 else studied(run, pixel, seed)).items():
            found[f"accuracy of {name}"] = one.accuracy
            for when in WHENS:
                blocks = one.blocks(when)
                for axis in AXES:
                    mean = jensen_shannon(blocks, axis=axis).mean
                    found[f"{name}, {when}, {axis} axis"] = mean
        return found

    found = run.repeated(distances, [PIXEL], "Block spectra")[0]
    checks = []
    predicted = "> 0: blocks of transformers are heterogeneous"
    for when, axis, other in itertools.product(WHENS, AXES, ("CNN", "MLP")):
        own, others = (found[f"{name}, {when}, {axis} axis"] for name in ("GPT", other))
        levels = f"GPT ({sum(own) / number:.2f}) minus {other} ({sum(others) / number:.2f})"
        what = f"{when}, {axis} axis: mean distance of blocks, {levels}"
        checks.append(sign_check(what, predicted, [a - b for a, b in zip(own, others)], 1))
    for name in sizes:
        values = found[f"accuracy of {name}"]
        learned = mean_check(f"accuracy of {name} on other images", "over 0.5", values, low=0.5)
        checks.append(replace(learned, ours=True))
    counts = ", ".join(f"{name} {count:,}" for name, count in sizes.items())
    setting = f"parameters: {counts}; {run.effort.steps} steps of Adam; {number} repeats"
    return Outcome("Block spectra of GPT, CNN and MLP", setting, checks, figure)


def _draw(models: Mapping[str, Studied], axes: list[Any]) -> dict[str, int]:
    """Draw the spectra of models of one seed, and return their numbers of parameters."""
    sizes = {name: size(one.model) for name, one in models.items()}
    for column, (name, one) in enumerate(models.items()):
        for row, when in enumerate(WHENS):
            blocks, whole = one.blocks(when), one.whole(when)
            together = torch.cat(list(blocks.values()))
            lines = {"whole Hessian": whole, "its diagonal blocks": together}
            # Nearer to 0, Lanczos puts eigenvalues on arbitrary places.
            near = 1e-2 * float(whole.nodes.abs().max())
            title = f"{name} {when}, {sizes[name]:,} parameters"
            spectral_densities(lines, threshold=near, title=title, ax=axes[6 * row + column])
            found = jensen_shannon(blocks, axis=AXES[0])
            title = f"{name}: mean distance of blocks {found.mean:.2f}"
            ax = axes[6 * row + 3 + column]
            distance_heatmap(found.labels, found.matrix, title=title, ax=ax)
    return sizes
