"""How the norms of Hessian blocks grow with the scale σ of the data, and with which exponents.

Equation 5 of Ormaniec, Dangel and Singh (ICLR 2025): in one softmax attention layer the data enters
the blocks with different powers, outer query blocks with `X⁶` and the value block with `X²`, so
blocks that differ little at σ = 1 differ by orders of magnitude at the σ of an embedding. Here such
exponents are measured, on any model, and compared with the predicted ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.output_loss import CrossEntropy, OutputLoss, SquaredError
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian

Measure = Callable[[float, int], Mapping[str, Tensor | float]]
Activation = Literal["softmax", "linear"]
ROLES = ("query", "key", "value")
PARTS: tuple[Literal["outer", "functional", "full"], ...] = ("outer", "functional", "full")


class Exponent(NamedTuple):
    """A power law `norm = e^intercept · σ^value`.

    Attributes:
        value: The exponent, the slope in the log-log plot.
        standard_error: Of the exponent; NaN where one series of two scales leaves nothing to tell
            it from.
        intercept: The logarithm of the norm at σ = 1.
    """

    value: float
    standard_error: float
    intercept: float


def fit_exponent(scales: Sequence[float] | Tensor, norms: Sequence[float] | Tensor) -> Exponent:
    """The exponent with which norms grow: the slope of a least-squares line through `(log σ, log mean norm)`.

    Of several repeats the mean is taken before the logarithm, as in the paper. The standard error
    is then that of a jackknife over the repeats, which holds though the scales of one repeat share
    their random numbers; of a single series it is that of a regression with independent errors. The
    first tells how far other draws would move the slope, the second how far the points are from a
    line; neither tells that the law itself holds.

    Args:
        scales: (S,) at least two different ones, positive.
        norms: (S,), or (R, S) of R repeats, positive.

    Raises:
        ValueError: If the shapes do not fit, or a number is not positive and finite.

    Example:
        >>> fit_exponent([1.0, 2.0, 4.0], [3.0, 12.0, 48.0]).value
        2.0
    """
    scales, norms = (
        torch.as_tensor(t, dtype=torch.float64).detach().cpu() for t in (scales, norms)
    )
    if (
        scales.ndim != 1
        or norms.ndim not in (1, 2)
        or norms.shape[-1] != len(scales)
        or not norms.numel()
    ):
        given = f"{tuple(scales.shape)}, {tuple(norms.shape)}"
        raise ValueError(
            f"Invalid scales, norms of shapes {given}. Must be (scales,), and (scales,) or (repeats, scales)."
        )
    for what, values in (("scales", scales), ("norms", norms)):
        if not bool((torch.isfinite(values) & (values > 0)).all()):
            raise ValueError(
                f"Invalid {what}: {values[~(values > 0) | values.isinf()][:3].tolist()}. Must be positive and finite."
            )
    if len(scales.unique()) < 2:
        raise ValueError(f"Invalid scales={scales.tolist()}. Must be at least two different ones.")
    x = scales.log()
    weights = (x - x.mean()) / (
        x - x.mean()
    ).square().sum()  # their product with log norms is the slope
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
class Growth:
    """Norms at several scales, and the exponents they grow with; printed, it is a table of them.

    Attributes:
        scales: (S,) the scales σ, ascending.
        norms: `{label: (R, S) norms of R repeats}`.
    """

    scales: Tensor
    norms: dict[str, Tensor]

    def mean(self) -> dict[str, Tensor]:
        """`{label: (S,) mean over the repeats}`."""
        return {label: values.mean(0) for label, values in self.norms.items()}

    def standard_error(self) -> dict[str, Tensor]:
        """`{label: (S,) standard error of that mean}`, NaN for one repeat."""
        nan = torch.full_like(self.scales, math.nan)
        return {
            label: values.std(0) / math.sqrt(len(values)) if len(values) > 1 else nan
            for label, values in self.norms.items()
        }

    def exponents(self, low: float = 0.0, high: float = math.inf) -> dict[str, Exponent]:
        """The exponent of each label over `low <= σ < high`, by `fit_exponent`; labels with a norm of zero are left out.

        The paper calls σ < 1 the practical range.
        """
        chosen = self._range(low, high)
        return {
            label: fit_exponent(self.scales[chosen], values[:, chosen])
            for label, values in self.norms.items()
            if bool((values[:, chosen] > 0).all())
        }

    def local_slopes(self) -> dict[str, Tensor]:
        """`{label: (S - 1,) slopes between neighbouring scales}` of the means: constant where a power law holds."""
        return {
            label: values.log().diff() / self.scales.log().diff()
            for label, values in self.mean().items()
        }

    def differences(
        self, predicted: Mapping[str, float], low: float = 0.0, high: float = math.inf
    ) -> dict[str, float]:
        """The measured minus the predicted exponent of each label that has both."""
        return {
            k: e.value - predicted[k]
            for k, e in self.exponents(low, high).items()
            if k in predicted
        }

    def table(
        self, predicted: Mapping[str, float] | None = None, low: float = 0.0, high: float = math.inf
    ) -> str:
        """One line a label: the mean norms at both ends of the range, the exponent with its error, and the predicted one."""
        found, means, chosen = self.exponents(low, high), self.mean(), self._range(low, high)
        ends = self.scales[chosen][[0, -1]].tolist()
        rows = [
            [
                "label",
                *(f"σ={end:g}" for end in ends),
                "exponent",
                "error",
                *(["predicted"] if predicted else []),
            ]
        ]
        for label, values in means.items():
            row = [label, *(f"{value:.3g}" for value in values[chosen][[0, -1]].tolist())]
            row += (
                [f"{found[label].value:.3f}", f"{found[label].standard_error:.2g}"]
                if label in found
                else ["-", "-"]
            )
            rows.append(
                row
                + ([f"{predicted[label]:g}" if label in predicted else "-"] if predicted else [])
            )
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])
            for row in rows
        ]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def _range(self, low: float, high: float) -> Tensor:
        chosen = (self.scales >= low) & (self.scales < high)
        if int(chosen.sum()) < 2:
            raise ValueError(
                f"Invalid range {low} <= σ < {high}. Must hold at least two of the scales {self.scales.tolist()}."
            )
        return chosen


def growth(measure: Measure, scales: Sequence[float] | Tensor, *, repeats: int = 1) -> Growth:
    """Measure norms at each scale, several times.

    Args:
        measure: `measure(σ, seed)` returns `{label: norm}`; it draws all its random numbers from
            the seed, 0 to `repeats - 1`.
        scales: The σ to measure at.
        repeats: How often, each time with another seed.

    Raises:
        ValueError: If there is nothing to measure, or the labels change.

    Example:
        >>> print(growth(lambda sigma, seed: {"value": 2 * sigma**2}, [0.1, 1.0]).table({"value": 2}))
        label  σ=0.1  σ=1  exponent  error  predicted
        value   0.02    2     2.000    nan          2
    """
    if repeats < 1:
        raise ValueError(f"Invalid repeats={repeats}. Must be an integer >= 1.")
    ordered = torch.as_tensor(scales, dtype=torch.float64).unique()
    if len(ordered) < 2 or not bool((ordered > 0).all()):
        raise ValueError(
            f"Invalid scales={ordered.tolist()}. Must be at least two different ones, all positive."
        )
    found = [
        [{k: float(v) for k, v in measure(sigma, seed).items()} for sigma in ordered.tolist()]
        for seed in range(repeats)
    ]
    labels = list(found[0][0])
    for row in found:
        for entry in row:
            if entry.keys() != found[0][0].keys():
                wrong = sorted(entry.keys() ^ found[0][0].keys())[:3]
                raise ValueError(
                    f"Invalid measure: {wrong} are labels at some scales or seeds only. They must always be the same."
                )
            if not all(math.isfinite(norm) for norm in entry.values()):
                wrong = sorted(label for label, norm in entry.items() if not math.isfinite(norm))[
                    :3
                ]
                raise ValueError(
                    f"Invalid measure: the norms of {wrong} are not finite at some scale. Use smaller scales."
                )
    return Growth(
        ordered,
        {
            k: torch.tensor([[e[k] for e in row] for row in found], dtype=torch.float64)
            for k in labels
        },
    )


def attention_exponents(
    activation: Activation = "softmax", *, residual: float = 0.0
) -> dict[str, float]:
    """The exponents of one attention layer's blocks for small σ, `{"outer query key": 6, …}`, as in equation 5.

    Equation 5 leaves out the residual `F - Y`, which multiplies every functional block, and gives
    two powers for the functional query-key block, `X⁵ + X³`. For σ → 0 the lowest power leads. So
    with targets that do not shrink with σ the residual tends to `-Y` and adds nothing; with `Y =
    0`, or targets proportional to X, it is of order σ (σ³ for linear attention) and adds as much.
    The full block follows the lower exponent of its two parts: 5 for the query, as Figure 3a shows.
    The paper puts that down to factors other than the data; for small σ the lower power leads in
    any case. Functional blocks that are zero are left out.

    For softmax the limit is that of uniform attention; for σ ≫ 1 attention saturates and no power
    law holds. For linear attention (Remark 4.1) all powers are exact at any σ, except in the sum of
    two parts and in the residual.

    Args:
        activation: Of the layer.
        residual: The exponent of the residual, 0 where targets have a scale of their own.

    Example:
        >>> exponents = attention_exponents()
        >>> [exponents[f"{part} query query"] for part in ("outer", "functional", "full")]
        [6, 5, 5]
    """
    if activation not in ("softmax", "linear"):
        raise ValueError(f"Invalid activation={activation!r}. Must be 'softmax' or 'linear'.")
    jacobian = {"query": 3, "key": 3, "value": 1 if activation == "softmax" else 3}
    second = {"query query": 5, "query key": 3, "query value": 3, "key key": 5, "key value": 3}
    if activation == "linear":
        second = {"query key": 3, "query value": 3, "key value": 3}
    found: dict[str, float] = {}
    for a, b in combinations_with_replacement(ROLES, 2):
        pair = f"{a} {b}"
        found[f"outer {pair}"] = found[f"full {pair}"] = jacobian[a] + jacobian[b]
        if pair in second:
            found[f"functional {pair}"] = second[pair] + residual
            found[f"full {pair}"] = min(found[f"outer {pair}"], second[pair] + residual)
    return {label: int(value) if value == int(value) else value for label, value in found.items()}


PREDICTED = attention_exponents()


def linear_attention_exponents(depth: int) -> dict[str, int]:
    """The exponents of the diagonal blocks of `depth` linear attention layers: `2·3^D`, and `3^D` of functional ones.

    A layer uses its input three times, so the output and its derivatives by the weights are
    homogeneous of degree `3^D` in X, at any σ. The outer part of every block of every layer grows
    exactly with `2·3^D`. The functional part has the residual and one second derivative: `3^D`
    while targets of a fixed scale outweigh the output. It is zero in the diagonal blocks of the
    last layer, in which the output is linear in each matrix; in earlier layers it leads for small
    σ, where the complete block grows with `3^D` only. That is why in the paper's Figure 7 those
    follow `2·3^D` only for large σ.

    Example:
        >>> linear_attention_exponents(2)
        {'outer': 18, 'functional': 9}
    """
    if depth < 1:
        raise ValueError(f"Invalid depth={depth}. Must be an integer >= 1.")
    return {"outer": 2 * 3**depth, "functional": 3**depth}


def linear_mlp_exponents() -> dict[str, int]:
    """The exponents of a linear MLP of any depth: 2, and 1 of functional blocks, which are zero on the diagonal.

    Example:
        >>> linear_mlp_exponents()
        {'outer': 2, 'functional': 1}
    """
    return {"outer": 2, "functional": 1}


def attention_norms(hessian: SelfAttentionHessian, *, mixed: bool = False) -> dict[str, float]:
    """Exact Frobenius norms of the blocks of one attention layer, `{"outer query query": …}`, named as in `PREDICTED`.

    Diagonal blocks are never built, so layers of any width will do. Of several heads, each head's
    own block counts: `sqrt(Σ_h ‖H(h, h)‖²)`.

    Args:
        hessian: Of the layer, with separate queries and keys.
        mixed: Whether to add the blocks between two roles, which are built: `d dk` entries squared
            each.

    Example:
        >>> X, W = torch.eye(2), torch.eye(2)
        >>> norms = attention_norms(SelfAttentionHessian(X, W, W, W, Y=torch.zeros(2, 2)))
        >>> norms["full value value"] == norms["outer value value"], norms["functional value value"]
        (True, 0.0)
    """
    found = {}
    heads = range(hessian.num_heads)
    for part in PARTS:
        for a, b in combinations_with_replacement(ROLES, 2):
            if a == b:
                squares = [
                    hessian.factored(a, head, part).squared_frobenius().clamp(min=0)
                    for head in heads
                ]
            elif mixed:
                squares = [hessian.block(a, b, part, (head, head)).square().sum() for head in heads]
            else:
                continue
            found[f"{part} {a} {b}"] = float(torch.stack(squares).sum().sqrt())
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
) -> Measure:
    """What `growth` needs for one attention layer with random weights: exact norms, without sampling noise in them.

    Tokens are `σ N(0, 1)`; weights `N(0, 0.64 / width)` as in the paper's appendix F. A seed draws
    the same numbers at all σ.

    Args:
        tokens: Length of a sequence.
        width: Of the tokens and of the output.
        key_width: Of queries and keys, the width by default.
        sequences: Number of them.
        activation: "softmax" or "linear".
        causal: Whether a position sees only itself and those before it.
        classes: For cross-entropy on random classes, of a random head; the squared error otherwise.
        target_scale: Standard deviation of the targets of the squared error. With 0 the residual
            shrinks with σ, and functional blocks have exponents larger by one (linear attention: by
            three); see `attention_exponents`.
        mixed: See `attention_norms`.

    Example:
        >>> found = growth(attention_measure(tokens=5, width=4), [0.01, 0.02, 0.04])
        >>> {label: round(exponent.value) for label, exponent in found.exponents().items() if "query" in label}
        {'outer query query': 6, 'functional query query': 5, 'full query query': 5}
    """
    key_width = width if key_width is None else key_width

    def measure(sigma: float, seed: int) -> dict[str, float]:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float = 0.8 / math.sqrt(width)) -> Tensor:
            return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

        X = normal(sequences, tokens, width, scale=sigma)
        W_Q, W_K, W_V = normal(width, key_width), normal(width, key_width), normal(width, width)
        loss: OutputLoss = SquaredError(normal(sequences, tokens, width, scale=target_scale))
        if classes is not None:
            loss = CrossEntropy(
                normal(width, classes),
                torch.randint(classes, (sequences, tokens), generator=generator),
            )
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril() if causal else None
        return attention_norms(
            SelfAttentionHessian(X, W_Q, W_K, W_V, loss=loss, mask=mask, activation=activation),
            mixed=mixed,
        )

    return measure
