"""The small models of the papers' figures, written out, and the norms of their Hessian blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt.analysis.closed_forms.attention_growth import BlockPart
from blockopt.analysis.closed_forms.checks import Part
from blockopt.analysis.closed_forms.positionwise_loss import PositionwiseLoss
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from blockopt.analysis.operators.model_operators import FunctionalOperator, GaussNewtonOperator
from recipes.data.addition import IGNORED, VOCABULARY

CLASSES = len(VOCABULARY)
Norm = Literal["none", "pre", "post"]


def normal(generator: torch.Generator, *shape: int, width: int) -> nn.Parameter:
    """Draw GPT-2's initialisation as the paper has it: N(0, 0.64 / width), in float64."""
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
    return nn.Parameter(0.8 / math.sqrt(width) * drawn)


def causal(length: int) -> Tensor:
    """Return who sees whom: (length, length), True for itself and those before."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def attend(
    x: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    softmax: bool = True,
    sink: float = 0.0,
) -> Tensor:
    """Apply one head of attention to x (B, L, d); `sink` is added to scores of the first token."""
    scores = (x @ query) @ (x @ key).mT / math.sqrt(query.shape[-1])
    scores = torch.cat([scores[..., :1] + sink, scores[..., 1:]], -1)
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1) if softmax else scores * visible
    return weights @ (x @ value)


class Layer(nn.Module):
    """Attention with one head and a ReLU MLP, each with a residual connection.

    "pre": `x + attention(LN(x))`, `x + mlp(LN(x))`; "post": `LN(x + attention(x))`, `LN(x +
    mlp(x))`; "none": no norms.
    """

    def __init__(
        self, width: int, mlp_width: int, norm: Norm, softmax: bool, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.norm, self.softmax, self.sink = norm, softmax, 0.0
        self.query, self.key, self.value, self.output = (
            normal(generator, width, width, width=width) for _ in range(4)
        )
        self.mlp_in = normal(generator, width, mlp_width, width=width)
        self.mlp_in_bias = nn.Parameter(torch.zeros(mlp_width, dtype=torch.float64))
        self.mlp_out = normal(generator, mlp_width, width, width=width)
        self.mlp_out_bias = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def before(self, x: Tensor) -> Tensor:
        """Return what attention or the MLP sees of the stream."""
        return F.layer_norm(x, x.shape[-1:]) if self.norm == "pre" else x

    def after(self, x: Tensor) -> Tensor:
        """Return the stream after a residual connection."""
        return F.layer_norm(x, x.shape[-1:]) if self.norm == "post" else x

    def above_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Apply the rest of the layer, which takes each position alone."""
        x = self.after(x + attended)
        hidden = (self.before(x) @ self.mlp_in + self.mlp_in_bias).relu()
        return self.after(x + hidden @ self.mlp_out + self.mlp_out_bias)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:  # (B, L, d)
        """Return the stream after the layer."""
        mixed = attend(
            self.before(x), self.query, self.key, self.value, visible, self.softmax, self.sink
        )
        return self.above_attention(x, mixed @ self.output)


class Transformer(nn.Module):
    """The ICLR paper's GPT-2 (Appendix F): embeddings, single-head layers, unembedding.

    Args:
        width: d_V = d_K.
        depth: Number of layers.
        norm: "pre" also has a norm at the end, like GPT-2; "none" has none at all.
        softmax: Whether attention has a softmax; otherwise it is linear.
        scale: σ, standard deviation of the embeddings of tokens and positions; by default that of
            the other weights.
        seed: Decides all weights. It draws the same numbers for any scale.
    """

    def __init__(
        self,
        width: int,
        depth: int = 1,
        *,
        norm: Norm = "none",
        softmax: bool = True,
        scale: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.norm: Norm = norm
        self.tokens, self.positions = (
            normal(generator, rows, width, width=width) for rows in (CLASSES, 17)
        )
        self.layers = nn.ModuleList(
            Layer(width, 4 * width, norm, softmax, generator) for _ in range(depth)
        )
        self.unembedding = normal(generator, width, CLASSES, width=width)
        self.unembedding_bias = nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64))
        if scale is not None:
            with torch.no_grad():
                for embedding in (self.tokens, self.positions):
                    embedding.mul_(scale / 0.8 * math.sqrt(width))

    def embed(self, inputs: Tensor) -> Tensor:
        """Return what enters the first layer."""
        return self.tokens[inputs] + self.positions[: inputs.shape[1]]

    def unembed(self, x: Tensor) -> Tensor:
        """Return the logits of the stream."""
        x = F.layer_norm(x, x.shape[-1:]) if self.norm == "pre" else x
        return x @ self.unembedding + self.unembedding_bias

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over the targets that count."""
        x, visible = self.embed(inputs), causal(inputs.shape[1])
        for layer in self.layers:
            x = layer(x, visible)
        return cross_entropy(self.unembed(x), targets)


class LinearAttentionChain(nn.Module):
    """Attention layers without softmax or anything between them, and squared error (Figure 7)."""

    def __init__(self, width: int, depth: int, *, scale: float, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.tokens, self.positions = (
            nn.Parameter(scale * torch.randn(rows, width, generator=generator, dtype=torch.float64))
            for rows in (CLASSES, 17)
        )
        weights = [
            {r: normal(generator, width, width, width=width) for r in ("query", "key", "value")}
            for _ in range(depth)
        ]
        self.layers = nn.ModuleList(nn.ParameterDict(w) for w in weights)
        self.unembedding = normal(generator, width, CLASSES, width=width)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean squared error against one-hot targets, over those that count."""
        length = inputs.shape[1]
        x, visible = self.tokens[inputs] + self.positions[:length], causal(length)
        for layer in self.layers:
            x = attend(x, layer["query"], layer["key"], layer["value"], visible, softmax=False)
        counts = targets != IGNORED
        return F.mse_loss((x @ self.unembedding)[counts], F.one_hot(targets[counts], CLASSES).to(x))


class PatchTransformer(nn.Module):
    """The second paper's vision transformer: patches, one post-norm block, mean, classes."""

    def __init__(self, patch: int, tokens: int, width: int, classes: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.patches = normal(generator, patch, width, width=patch)
        self.positions = normal(generator, tokens, width, width=width)
        self.layer = Layer(width, 4 * width, "post", True, generator)
        self.head = normal(generator, width, classes, width=width)
        self.head_bias = nn.Parameter(torch.zeros(classes, dtype=torch.float64))

    def forward(self, images: Tensor) -> Tensor:  # (B, tokens, patch)
        """Return the logits."""
        x = images @ self.patches + self.positions
        x = self.layer(x, torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
        return x.mean(1) @ self.head + self.head_bias


def synthetic_images(number: int, *, pixel: float = 0.31, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return images of 12 x 12, as patches of 4 x 4 (number, 9, 16), and their classes (number,).

    Each of the 10 classes has a smooth pattern, the same for all seeds, which is shifted at random
    and gets noise. Pixels have mean 0 and the standard deviation `pixel`, by default that of MNIST.
    """
    drawn = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    smooth = {"mode": "bilinear", "align_corners": False}
    patterns = F.interpolate(torch.randn(10, 1, 6, 6, **drawn), size=(12, 12), **smooth).squeeze(1)
    generator = torch.Generator().manual_seed(seed + 1)
    labels = torch.randint(10, (number,), generator=generator)
    shifts = torch.randint(-1, 2, (number, 2), generator=generator).tolist()
    pairs = zip(labels.tolist(), shifts)
    images = torch.stack([patterns[label].roll(shift, (0, 1)) for label, shift in pairs])
    images = images + torch.randn(images.shape, generator=generator, dtype=torch.float64)
    images = pixel * (images - images.mean()) / images.std()
    patches = images.unfold(1, 4, 4).unfold(2, 4, 4)  # (B, 3, 3, 4, 4)
    return patches.flatten(3).flatten(1, 2), labels


def train(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    images: int,
    steps: int,
    seed: int,
    record: Collection[int] = (),
) -> dict[int, dict[str, Tensor]]:
    """Train with Adam on the loss of 128 random images per step, given by their numbers.

    Returns:
        The weights after the steps to record.
    """
    optimizer, recorded = torch.optim.Adam(model.parameters(), lr=3e-3), {}
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss(torch.randint(images, (128,), generator=generator)).backward()
        optimizer.step()
        if step in record:
            recorded[step] = weights_of(model)
    return recorded


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images whose class the model tells."""
    return float((model(images).argmax(-1) == labels).double().mean())


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all targets that count."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def last_layer_hessian(
    model: Transformer, inputs: Tensor, targets: Tensor, part: Part = "full"
) -> SelfAttentionHessian:
    """Return the exact Hessian of the last layer's attention: nothing above mixes positions."""
    with torch.no_grad():
        visible, x = causal(inputs.shape[1]), model.embed(inputs)
        for lower in model.layers[:-1]:
            x = lower(x, visible)
    layer = model.layers[-1]
    loss = PositionwiseLoss(
        lambda logits: cross_entropy(logits, targets),
        lambda attended: model.unembed(layer.above_attention(x, attended)),
        part=part,
        check=False,
    )
    weights = [getattr(layer, role).detach() for role in ("query", "key", "value", "output")]
    seen = layer.before(x).detach()
    activation = "softmax" if layer.softmax else "linear"
    return SelfAttentionHessian(
        seen, *weights[:3], W_U=weights[3], loss=loss, mask=visible, activation=activation
    )


def last_layer_norms(
    model: Transformer, inputs: Tensor, targets: Tensor, roles: Sequence[str]
) -> dict[BlockPart, float]:
    """Return exact Frobenius norms of H_o, H_f (split at the logits) and H of the last layer."""
    outer = last_layer_hessian(model, inputs, targets, "outer")
    # ReLU networks are linear between kinks: all second derivatives are those of attention.
    chosen = {part: (outer, part) for part in ("outer", "functional", "full")}
    if model.norm != "none":
        for part in ("functional", "full"):
            chosen[part] = (last_layer_hessian(model, inputs, targets, part), "full")
    return {
        BlockPart(name, role): float(hessian.factored(role, part=part).frobenius())
        for name, (hessian, part) in chosen.items()
        for role in roles
    }


def estimated_norms(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    layer: int,
    roles: Sequence[str],
    probes: int,
    seed: int,
) -> dict[BlockPart, float]:
    """Estimate these norms for any layer with random signs, as in the paper."""
    found = {}
    for role in roles:
        options = {"names": [f"layers.{layer}.{role}"], "check_deterministic": False}
        loss = functools.partial(model, inputs, targets)
        G = GaussNewtonOperator(model, loss, **options)
        functional = FunctionalOperator(model, loss, **options)
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(2, (G.shape[0], probes), generator=generator).mul(2).sub(1).double()
        products = {"outer": G @ signs, "functional": functional @ signs}
        products["full"] = products["outer"] + products["functional"]
        for part, p in products.items():
            found[BlockPart(part, role)] = float(p.square().sum(0).mean().sqrt())
    return found


def linear_mlp_norms(x: Tensor, weights: Sequence[Tensor]) -> list[float]:
    """Return exact norms of the diagonal blocks of `F.mse_loss(x W_1 ... W_D, any target)`.

    x is (N, d). A block is `2 / numel · BᵀB ⊗ A Aᵀ`, for what comes into a layer, B, and the
    product of the weights above it, A: its norm is the product of two.
    """
    above = [torch.eye(weights[-1].shape[1], dtype=x.dtype)]
    for W in reversed(weights[1:]):
        above.insert(0, W @ above[0])
    factor, norms = 2 / (len(x) * weights[-1].shape[1]), []
    for W, A in zip(weights, above):
        norms.append(float(factor * (x.mT @ x).norm() * (A @ A.mT).norm()))
        x = x @ W
    return norms
