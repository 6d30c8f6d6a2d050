"""Curvature over training: spectra, traces and norms of blocks at chosen steps of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from blockopt.analysis.block_report import Probes
from blockopt.analysis.formatting import plain
from blockopt.analysis.model_report import HessianReport
from blockopt.analysis.plots.training import curvature_over_training
from blockopt.analysis.report import hessian_report
from blockopt.analysis.results import Result
from blockopt.blocks import Blocks, block_groups, block_sum, find_blocks
from blockopt.files import write_whole
from blockopt.measure.closures import Losses, trainable_parameters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Measure = Callable[[nn.Module, Losses], HessianReport]
QUICK = Probes(top=1, num_probes=4, num_steps=12, num_starts=1)


def by_head(model: nn.Module, losses: Losses) -> HessianReport:
    """Measure the Hessian of every head with few probes: about 40 products per block."""
    return hessian_report(model, losses, by="head", probes=QUICK)


class HessianRecorder(Result):
    """Measures the curvature of a model at chosen steps of its training, and keeps it.

    Args:
        model: The model that is trained.
        losses: As for `hessian_report`: the same batches at every step.
        steps: The steps after which to measure; 0 is before the first one.
        measure: Returns the report of a step. By default the Hessian by head with few probes; pass
            `functools.partial(sampled_report, num_samples=8)` for a large model.
        blocks: What `measure` was given as `blocks`, if it was: the weights are cut in the same way
            for their norms. Found in the model by default.
        path: A JSON file that is written, whole, after every measurement. If it is there, the
            recorder goes on from it.

    Attributes:
        records: `{"step", "loss", "blocks"}` of each measurement, the blocks as flat dictionaries
            with their role, layer and head, their numbers, the norm of their weights, and the
            `nodes` and `weights` of their spectrum.

    Example:
        >>> import torch
        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> recorder = HessianRecorder(model, lambda: model(x).square().sum(), steps=[0, 10])
        >>> for step in range(11):
        ...     measured = recorder.step(step)
        >>> [(record["step"], record["blocks"][0]["trace"]) for record in recorder.records]
        [(0, 50.0), (10, 50.0)]
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Losses,
        steps: Iterable[int],
        *,
        measure: Measure = by_head,
        blocks: Mapping[str, Blocks] | None = None,
        path: Path | str | None = None,
    ) -> None:
        self._model, self._measure, self._blocks = model, measure, blocks
        self._losses = losses if callable(losses) else list(losses)
        self._path, self._steps = None if path is None else Path(path), frozenset(steps)
        wrong = [step for step in self._steps if not isinstance(step, int) or step < 0]
        if wrong or not self._steps:
            raise ValueError(f"Invalid steps={sorted(wrong)}. Must be integers >= 0, at least one.")
        self.records: list[dict[str, Any]] = []
        if self._path is not None and self._path.exists():
            self.records = json.loads(self._path.read_text(encoding="utf-8"))["records"]

    def step(self, number: int) -> bool:
        """Measure if this step was chosen; call it after every step, and with 0 before the first.

        Records of this step and later ones, of a run that was resumed from before them, are
        replaced.

        Returns:
            Whether it measured.
        """
        if number not in self._steps:
            return False
        report = self._measure(self._model, self._losses)
        norms = self._weight_norms(report)
        blocks = []
        for (group, block), norm in zip(report.blocks.items(), norms):
            place = {"role": group.role, "layer": group.layer, "head": group.head}
            spectrum = block.spectrum
            blocks.append(
                {
                    "block": str(group),
                    **place,
                    **block.row(),
                    "weight_norm": norm,
                    "nodes": None if spectrum is None else plain(spectrum.nodes),
                    "weights": None if spectrum is None else plain(spectrum.weights),
                }
            )
        earlier = [record for record in self.records if record["step"] < number]
        self.records = [*earlier, {"step": number, "loss": report.loss, "blocks": blocks}]
        if self._path is not None:
            write_whole(self._path, self.to_json())
        return True

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat dictionary per step and block, without spectra."""
        return [
            {
                "step": record["step"],
                "loss": record["loss"],
                **{k: v for k, v in block.items() if k not in ("nodes", "weights")},
            }
            for record in self.records
            for block in record["blocks"]
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return all records as JSON has them."""
        return {"records": plain(self.records)}

    def plot(self) -> Figure:
        """Draw how curvature, spectra and heads move over training (needs matplotlib).

        Raises:
            ValueError: If nothing was measured.
        """
        return curvature_over_training(self.records)

    def _weight_norms(self, report: HessianReport) -> list[float]:
        """The norm of the weights of each block of the report."""
        blocks = self._blocks
        if blocks is None:
            blocks = find_blocks(self._model, per_head=report.by == "head", per_row=())
        groups, numbers = block_groups(blocks, report.by)  # type: ignore[arg-type]
        squares = dict.fromkeys(groups, 0.0)
        for name, p in trainable_parameters(self._model).items():
            sums = block_sum(p.detach().double().square(), blocks[name].split)
            for number, square in zip(numbers[name].tolist(), sums.tolist()):
                squares[groups[number]] += square
        unknown = [group for group in report.blocks if group not in squares]
        if unknown:
            raise ValueError(
                f"Invalid blocks: they have no {str(unknown[0])!r}, which was measured. Must be "
                "those that the measurement was given, HessianRecorder(..., blocks=blocks)."
            )
        return [squares[group] ** 0.5 for group in report.blocks]
