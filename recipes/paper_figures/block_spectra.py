"""Block spectra of a transformer, a CNN and an MLP (Zhang et al., "Why Transformers need Adam")."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt.analysis.operators.dense import dense
from blockopt.analysis.operators.model_operators import HessianOperator
from blockopt.analysis.plots import spectral_densities
from blockopt.analysis.spectral.heterogeneity import JensenShannon, jensen_shannon
from recipes.data.addition import addition
from recipes.paper_figures.models import Transformer, synthetic_images
from recipes.paper_figures.outcome import Outcome, Run, panels, sign_check


class Spectra:
    """All eigenvalues of the Hessian of a model, and of its diagonal block of each matrix."""

    def __init__(self, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        operator = HessianOperator(model, loss, check_deterministic=False)
        matrix = dense(operator)
        self.size, self.whole = len(matrix), torch.linalg.eigvalsh(matrix)
        self.blocks = {}
        for name, p in model.named_parameters():
            if p.ndim > 1:
                where = operator.entries(name)
                short = name.removeprefix("layers.0.")
                self.blocks[short] = torch.linalg.eigvalsh(matrix[where][:, where])

    def distance(self) -> JensenShannon:
        """Return the distances between the blocks, on a symmetric log axis."""
        return jensen_shannon(self.blocks, axis="symmetric log")


def convolutional(width: int) -> nn.Module:
    """Return a CNN of three layers on images of 12 x 12 pixels."""
    layers = (nn.Conv2d(1, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU())
    last = (nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * width, 10))
    return nn.Sequential(*layers, *last).double()


def perceptron(width: int) -> nn.Module:
    """Return an MLP of four layers on the same images."""
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(144, width), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10)).double()


def measured(run: Run, seed: int) -> dict[str, Spectra]:
    """Return the spectra of the three models at initialisation."""
    inputs, targets = addition(run.effort.samples)
    gpt = Transformer(run.effort.small // 2, norm="pre", seed=seed)
    patches, labels = synthetic_images(2 * run.effort.samples, seed=seed)
    pixels = patches.unflatten(1, (3, 3)).unflatten(3, (4, 4)).transpose(2, 3)
    images = pixels.reshape(len(patches), 1, 12, 12) / 0.31
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        others = {
            "CNN": convolutional(max(2, run.effort.small // 2)),
            "MLP": perceptron(max(2, run.effort.small // 2)),
        }
    found = {"GPT": Spectra(gpt, functools.partial(gpt, inputs, targets))}
    for name, model in others.items():
        found[name] = Spectra(model, lambda model=model: F.cross_entropy(model(images), labels))
    return found


def figure_block_spectra(run: Run) -> Outcome:
    """Whole and block-diagonal spectra, and how far those of the blocks are apart."""
    step = run.steps("Block spectra", run.effort.repeats)
    first = measured(run, 0)
    repeats = [first]
    step()
    for seed in range(1, run.effort.repeats):
        repeats.append(measured(run, seed))
        step()
    title = "Whole and block-diagonal spectra at initialisation, and how far blocks are apart"
    figure, axes = panels(2, 3, 5.0, 3.9, title=title)
    for column, (name, spectra) in enumerate(first.items()):
        together = torch.cat(list(spectra.blocks.values()))
        lines = {"whole Hessian": spectra.whole, "its diagonal blocks": together}
        named = f"{name}, {spectra.size:,} parameters"
        spectral_densities(lines, title=named, ax=axes[column])
        found, ax = spectra.distance(), axes[3 + column]
        image = ax.imshow(found.matrix.numpy(), vmin=0, vmax=1, cmap="viridis")
        figure.colorbar(image, ax=ax, shrink=0.8).set_label("Jensen-Shannon distance", fontsize=8)
        names = [str(label) for label in found.labels]
        ax.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=7)
        ax.set_yticks(range(len(names)), names, fontsize=7)
        ax.set_title(f"{name}: mean distance of blocks {found.mean:.2f}", fontsize=10)
    means = {n: [spectra[n].distance().mean for spectra in repeats] for n in first}
    predicted = "> 0: blocks of transformers are heterogeneous"
    checks = []
    for other in ("CNN", "MLP"):
        gaps = [a - b for a, b in zip(means["GPT"], means[other])]
        own = sum(means["GPT"]) / len(gaps)
        what = f"mean distance of blocks, GPT ({own:.2f}) minus {other}"
        checks.append(sign_check(what, predicted, gaps, 1))
    sizes = ", ".join(f"{name} {spectra.size:,}" for name, spectra in first.items())
    setting = f"parameters: {sizes}; symmetric log axis; {run.effort.repeats} repeats"
    return Outcome("Block spectra of GPT, CNN and MLP", setting, checks, figure)
