"""How norms grow with the scale σ of the data: power laws, measured on any model."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.exponents import Exponent, fit_exponent
from blockopt.analysis.plots.growth import growth_lines
from blockopt.analysis.results import Result, figure_of
from blockopt.checks import check_count
from blockopt.tables import aligned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Label = TypeVar("Label", bound=Hashable)
Measure = Callable[[float, int], Mapping[Label, Tensor | float]]


@dataclass(frozen=True)
class Growth(Result, Generic[Label]):
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

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per label and scale."""
        errors, scales = self.standard_error(), self.scales.tolist()
        return [
            {"label": str(label), "scale": scale, "norm": norm, "standard_error": error}
            for label, mean in self.mean().items()
            for scale, norm, error in zip(scales, mean.tolist(), errors[label].tolist())
        ]

    def plot(self, *, title: str = "Growth with the scale of the data") -> Figure:
        """Draw all norms with the exponents fitted over all scales (needs matplotlib)."""
        return figure_of(growth_lines(self.scales, self.norms, high=math.inf, title=title))

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
