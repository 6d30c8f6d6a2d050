"""How the norms of Hessian blocks grow with the scale σ of the data, and with which exponents.

Equation 5 of Ormaniec, Dangel and Singh (ICLR 2025): in one softmax attention layer the data enters
the blocks with different powers, outer query blocks with `X⁶` and the value block with `X²`. So
blocks that differ little at σ = 1 differ by orders of magnitude at the σ of an embedding. This file
measures such exponents on any model and compares them with the predicted ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.checks import Part
from blockopt.analysis.closed_forms.output_loss import CrossEntropy, OutputLoss, SquaredError
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from blockopt.checks import check_choice, check_count
from blockopt.tables import aligned

Label = TypeVar("Label", bound=Hashable)
Measure = Callable[[float, int], Mapping[Label, Tensor | float]]
Activation = Literal["softmax", "linear"]
ROLES = ("query", "key", "value")
PARTS: tuple[Part, ...] = ("outer", "functional", "full")


class BlockPart(NamedTuple):
    """The label of a part of a Hessian block.

    Attributes:
        part: "outer", "functional" or "full".
        role: The role of its rows.
        column: The role of its columns, or None where only diagonal blocks are meant.
        layer: The number of its layer, or None if there is one.

    Example:
        >>> print(BlockPart("outer", "query", "key"))
        outer query key
    """

    part: Part
    role: str
    column: str | None = None
    layer: int | None = None

    def __str__(self) -> str:
        layer = None if self.layer is None else f"layer {self.layer}"
        return " ".join(word for word in (self.part, self.role, self.column, layer) if word)


class Exponent(NamedTuple):
    """A power law `norm = e^intercept · σ^value`.

    Attributes:
        value: The exponent, the slope in the log-log plot.
        standard_error: The standard error of the exponent; NaN for one series of two scales.
        intercept: The logarithm of the norm at σ = 1.
    """

    value: float
    standard_error: float
    intercept: float


def fit_exponent(scales: Sequence[float] | Tensor, norms: Sequence[float] | Tensor) -> Exponent:
    """Fit the exponent with which norms grow: a line through `(log σ, log mean norm)`.

    Repeats are averaged before the logarithm, as in the paper. The standard error is then that of a
    jackknife over the repeats, which holds although the scales of one repeat share their random
    numbers; for a single series it is that of a regression with independent errors. The first says
    how far other draws would move the slope, the second how far the points are from a line. Neither
    says that the law itself holds.

    Args:
        scales: (S,) at least two different ones, positive.
        norms: (S,), or (R, S) for R repeats, positive.

    Raises:
        ValueError: If the shapes do not fit, or a number is not positive and finite.

    Example:
        >>> fit_exponent([1.0, 2.0, 4.0], [3.0, 12.0, 48.0]).value
        2.0
    """
    scales, norms = (
        torch.as_tensor(t, dtype=torch.float64).detach().cpu() for t in (scales, norms)
    )
    vectors = scales.ndim == 1 and norms.ndim in (1, 2)
    if not vectors or norms.shape[-1] != len(scales) or not norms.numel():
        given = f"{tuple(scales.shape)}, {tuple(norms.shape)}"
        raise ValueError(
            f"Invalid scales, norms of shapes {given}. Must be (scales,), and (scales,) or "
            "(repeats, scales)."
        )
    for what, values in (("scales", scales), ("norms", norms)):
        wrong = values[~(values > 0) | values.isinf()]
        if len(wrong):
            given = str(wrong[:3].tolist())
            raise ValueError(f"Invalid {what}: {given}. Must be positive and finite.")
    if len(scales.unique()) < 2:
        raise ValueError(f"Invalid scales={scales.tolist()}. Must be at least two different ones.")
    x = scales.log()
    centred = x - x.mean()
    weights = centred / centred.square().sum()  # their product with log norms is the slope
    repeats = norms.reshape(-1, len(x))
    y = repeats.mean(0).log()
    slope = torch.dot(weights, y)
    intercept = y.mean() - slope * x.mean()
    number = len(repeats)
    if number > 1:
        without_one = ((repeats.sum(0) - repeats) / (number - 1)).log() @ weights
        error = math.sqrt((number - 1) * float(without_one.var(correction=0)))
    elif len(x) > 2:
        variance = (y - intercept - slope * x).square().sum() / (len(x) - 2)
        error = float((variance * weights.square().sum()).sqrt())
    else:
        error = math.nan
    return Exponent(float(slope), error, float(intercept))


@dataclass(frozen=True)
class Growth(Generic[Label]):
    """Norms at several scales, and the exponents with which they grow; printed, a table of them.

    Attributes:
        scales: (S,) the scales σ, ascending.
        norms: `{label: (R, S) norms of R repeats}`. A label is a string, or a `BlockPart`.
    """

    scales: Tensor
    norms: dict[Label, Tensor]

    def mean(self) -> dict[Label, Tensor]:
        """Return `{label: (S,) mean over the repeats}`."""
        return {label: values.mean(0) for label, values in self.norms.items()}

    def standard_error(self) -> dict[Label, Tensor]:
        """Return `{label: (S,) standard error of that mean}`, NaN for one repeat."""
        nan = torch.full_like(self.scales, math.nan)
        return {
            label: values.std(0) / math.sqrt(len(values)) if len(values) > 1 else nan
            for label, values in self.norms.items()
        }

    def exponents(self, low: float = 0.0, high: float = math.inf) -> dict[Label, Exponent]:
        """Return the exponent of each label over `low <= σ < high`, by `fit_exponent`.

        Labels with a norm of zero are left out. The paper calls σ < 1 the practical range.
        """
        chosen = self._range(low, high)
        return {
            label: fit_exponent(self.scales[chosen], values[:, chosen])
            for label, values in self.norms.items()
            if bool((values[:, chosen] > 0).all())
        }

    def local_slopes(self) -> dict[Label, Tensor]:
        """Return `{label: (S - 1,) slopes of the means}`, constant where a power law holds."""
        steps = self.scales.log().diff()
        return {label: values.log().diff() / steps for label, values in self.mean().items()}

    def differences(
        self, predicted: Mapping[Label, float], low: float = 0.0, high: float = math.inf
    ) -> dict[Label, float]:
        """Return the measured minus the predicted exponent of each label that has both."""
        found = self.exponents(low, high)
        return {k: e.value - predicted[k] for k, e in found.items() if k in predicted}

    def table(
        self,
        predicted: Mapping[Label, float] | None = None,
        low: float = 0.0,
        high: float = math.inf,
    ) -> str:
        """Return one line per label: norms at both ends, exponent, error and predicted exponent."""
        found, means, chosen = self.exponents(low, high), self.mean(), self._range(low, high)
        ends = self.scales[chosen][[0, -1]].tolist()
        rows = [["label", *(f"σ={end:g}" for end in ends), "exponent", "error"]]
        if predicted:
            rows[0].append("predicted")
        for label, values in means.items():
            row = [str(label), *(f"{value:.3g}" for value in values[chosen][[0, -1]].tolist())]
            exponent = found.get(label)
            row += ["-", "-"]
            if exponent is not None:
                row[-2:] = f"{exponent.value:.3f}", f"{exponent.standard_error:.2g}"
            if predicted:
                row.append(f"{predicted[label]:g}" if label in predicted else "-")
            rows.append(row)
        return aligned(rows)

    def __str__(self) -> str:
        return self.table()

    def _range(self, low: float, high: float) -> Tensor:
        chosen = (self.scales >= low) & (self.scales < high)
        if int(chosen.sum()) < 2:
            raise ValueError(
                f"Invalid range {low} <= σ < {high}. Must hold at least two of the scales "
                f"{self.scales.tolist()}."
            )
        return chosen


def growth(
    measure: Measure[Label], scales: Sequence[float] | Tensor, *, repeats: int = 1
) -> Growth[Label]:
    """Measure norms at each scale, several times.

    Args:
        measure: `measure(σ, seed)` returns `{label: norm}`, with all random numbers drawn from the
            seed.
        scales: The scales σ to measure at.
        repeats: How often to measure, with the seeds 0 to `repeats - 1`.

    Raises:
        ValueError: If there is nothing to measure, or the labels change.

    Example:
        >>> found = growth(lambda sigma, seed: {"value": 2 * sigma**2}, [0.1, 1.0])
        >>> print(found.table({"value": 2}))
        label  σ=0.1  σ=1  exponent  error  predicted
        value   0.02    2     2.000    nan          2
    """
    check_count("repeats", repeats)
    ordered = torch.as_tensor(scales, dtype=torch.float64).unique()
    if len(ordered) < 2 or not bool((ordered > 0).all()):
        raise ValueError(
            f"Invalid scales={ordered.tolist()}. Must be at least two different ones, all positive."
        )
    found = [
        [{k: float(v) for k, v in measure(sigma, seed).items()} for sigma in ordered.tolist()]
        for seed in range(repeats)
    ]
    labels = found[0][0].keys()
    for entry in (entry for row in found for entry in row):
        if entry.keys() != labels:
            wrong = sorted(str(label) for label in entry.keys() ^ labels)[:3]
            raise ValueError(
                f"Invalid measure: {wrong} are labels at some scales or seeds only. They must "
                "always be the same."
            )
        wrong = sorted(str(label) for label, norm in entry.items() if not math.isfinite(norm))[:3]
        if wrong:
            raise ValueError(
                f"Invalid measure: the norms of {wrong} are not finite at some scale. Use smaller "
                "scales."
            )
    norms = {
        label: torch.tensor([[entry[label] for entry in row] for row in found], dtype=torch.float64)
        for label in labels
    }
    return Growth(ordered, norms)


def attention_exponents(
    activation: Activation = "softmax", *, residual: float = 0.0
) -> dict[BlockPart, float]:
    """Return the exponents of one attention layer's blocks for small σ, as in equation 5.

    Equation 5 leaves out the residual `F - Y`, which multiplies every functional block, and gives
    two powers for the functional query-key block, `X⁵ + X³`. For σ → 0 the lowest power leads. So
    with targets that do not shrink with σ, the residual tends to `-Y` and adds nothing; with `Y =
    0`, or targets proportional to X, it is of order σ (σ³ for linear attention) and adds as much.
    The full block follows the lower exponent of its two parts: 5 for the query, as Figure 3a shows.
    The paper attributes that to factors other than the data; for small σ the lower power leads in
    any case. Functional blocks that are zero are left out.

    For softmax the limit is that of uniform attention; for σ ≫ 1 attention saturates and no power
    law holds. For linear attention (Remark 4.1) all powers are exact at any σ, except in the sum of
    two parts and in the residual.

    Args:
        activation: "softmax" or "linear".
        residual: The exponent of the residual, 0 where targets have a scale of their own.

    Example:
        >>> exponents = attention_exponents()
        >>> [exponents[BlockPart(part, "query", "query")] for part in PARTS]
        [6, 5, 5]
    """
    check_choice("activation", activation, get_args(Activation))
    jacobian = {"query": 3, "key": 3, "value": 1 if activation == "softmax" else 3}
    second = {("query", "key"): 3, ("query", "value"): 3, ("key", "value"): 3}
    if activation == "softmax":
        second |= {("query", "query"): 5, ("key", "key"): 5}
    found: dict[BlockPart, float] = {}
    for pair in combinations_with_replacement(ROLES, 2):
        outer = full = float(sum(jacobian[role] for role in pair))
        if pair in second:
            functional = second[pair] + residual
            found[BlockPart("functional", *pair)] = functional
            full = min(outer, functional)
        found[BlockPart("outer", *pair)], found[BlockPart("full", *pair)] = outer, full
    return {label: int(value) if value == int(value) else value for label, value in found.items()}


PREDICTED = attention_exponents()


def linear_attention_exponents(depth: int) -> dict[str, int]:
    """Return the exponents of the diagonal blocks of `depth` linear attention layers.

    A layer uses its input three times, so the output and its derivatives by the weights are
    homogeneous of degree `3^D` in X, at any σ. The outer part of every block of every layer grows
    exactly with `2·3^D`. The functional part has the residual and one second derivative: `3^D`
    while targets of a fixed scale outweigh the output. It is zero in the diagonal blocks of the
    last layer, in which the output is linear in each matrix. In earlier layers it leads for small
    σ, where the full block grows with `3^D` only. That is why those follow `2·3^D` only for large σ
    in the paper's Figure 7.

    Example:
        >>> linear_attention_exponents(2)
        {'outer': 18, 'functional': 9}
    """
    check_count("depth", depth)
    return {"outer": 2 * 3**depth, "functional": 3**depth}


def linear_mlp_exponents() -> dict[str, int]:
    """Return the exponents of a linear MLP of any depth; functional diagonal blocks are zero.

    Example:
        >>> linear_mlp_exponents()
        {'outer': 2, 'functional': 1}
    """
    return {"outer": 2, "functional": 1}


def attention_norms(
    hessian: SelfAttentionHessian, *, mixed: bool = False
) -> dict[BlockPart, float]:
    """Return exact Frobenius norms of the blocks of one attention layer, labelled as `PREDICTED`.

    Diagonal blocks are never built, so any width will do. With several heads, only the blocks of
    each head with itself count: `sqrt(Σ_h ‖H(h, h)‖²)`.

    Args:
        hessian: The Hessian of a layer with separate queries and keys.
        mixed: Whether to add the blocks between two roles, which are built with (d · dk)² entries.

    Example:
        >>> X, W = torch.eye(2), torch.eye(2)
        >>> norms = attention_norms(SelfAttentionHessian(X, W, W, W, Y=torch.zeros(2, 2)))
        >>> norms[BlockPart("functional", "value", "value")]
        0.0
    """
    found = {}
    heads = range(hessian.num_heads)
    for part in PARTS:
        for a, b in combinations_with_replacement(ROLES, 2):
            if a == b:
                factored = [hessian.factored(a, head, part) for head in heads]
                squares = [block.squared_frobenius().clamp(min=0) for block in factored]
            elif mixed:
                squares = [hessian.block(a, b, part, (head, head)).square().sum() for head in heads]
            else:
                continue
            found[BlockPart(part, a, b)] = float(torch.stack(squares).sum().sqrt())
    return found


def attention_measure(
    *,
    tokens: int = 17,
    width: int = 16,
    key_width: int | None = None,
    sequences: int = 1,
    activation: Activation = "softmax",
    causal: bool = False,
    classes: int | None = None,
    target_scale: float = 1.0,
    mixed: bool = False,
) -> Measure[BlockPart]:
    """Return what `growth` needs for one attention layer with random weights: exact norms.

    Tokens are `σ N(0, 1)`, weights `N(0, 0.64 / width)` as in the paper's appendix F. A seed draws
    the same numbers at all σ.

    Args:
        tokens: The length of a sequence.
        width: The width of the tokens and of the output.
        key_width: The width of queries and keys, by default `width`.
        sequences: The number of sequences.
        activation: "softmax" or "linear".
        causal: Whether a position sees only itself and those before it.
        classes: The number of random classes for cross-entropy with a random head; by default the
            loss is the squared error.
        target_scale: The standard deviation of the targets of the squared error. With 0 the
            residual shrinks with σ, and the exponents of functional blocks are larger by one (three
            for linear attention); see `attention_exponents`.
        mixed: See `attention_norms`.

    Example:
        >>> found = growth(attention_measure(tokens=5, width=4), [0.01, 0.02, 0.04]).exponents()
        >>> [round(found[BlockPart(part, "query", "query")].value) for part in PARTS]
        [6, 5, 5]
    """
    key_width = width if key_width is None else key_width

    def measure(sigma: float, seed: int) -> dict[BlockPart, float]:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float = 0.8 / math.sqrt(width)) -> Tensor:
            return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

        X = normal(sequences, tokens, width, scale=sigma)
        W_Q, W_K, W_V = normal(width, key_width), normal(width, key_width), normal(width, width)
        loss: OutputLoss = SquaredError(normal(sequences, tokens, width, scale=target_scale))
        if classes is not None:
            targets = torch.randint(classes, (sequences, tokens), generator=generator)
            loss = CrossEntropy(normal(width, classes), targets)
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril() if causal else None
        hessian = SelfAttentionHessian(
            X, W_Q, W_K, W_V, loss=loss, mask=mask, activation=activation
        )
        return attention_norms(hessian, mixed=mixed)

    return measure
