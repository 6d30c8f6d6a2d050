"""Sampled gradients `f = Jᵀ s` with `E[f fᵀ] = G`, and their inner products block by block."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockopt.analysis.memory import peak_memory, reset_peak_memory
from blockopt.analysis.operators.precision import measured_in_float64
from blockopt.blocks import Blocks, expand
from blockopt.measure.closures import (
    Evaluation,
    LossClosure,
    average_over_batches,
    trainable_parameters,
)
from blockopt.measure.loss_curvature import CaptureLosses, LossCurvature

Gradients = Sequence[Tensor | None]  # of each parameter, None if it has no part
ENTRIES = 2**22  # of all samples that are multiplied at a time, in float64: 32 MiB


class Trial(NamedTuple):
    """What one sample of the first batch tells before the long part.

    Attributes:
        seconds: How long it took.
        peak: The most bytes that the process held.
        rounding: The relative error of the gradient against float64, None in float64, and if
            memory does not suffice to compare.
    """

    seconds: float
    peak: int
    rounding: float | None


class SampledGradients:
    """Draws gradients `f` of some parameters of a model with `E[f fᵀ] = G`.

    Args:
        model: Any module with whole parameters.
        closures: The loss of each batch.
        names: The parameters.

    Attributes:
        parameters: The parameters by name.
        losses: The loss of each batch, and its weight, once it has been run.
    """

    def __init__(self, model: nn.Module, closures: list[LossClosure], names: list[str]) -> None:
        self._model, self._closures = model, closures
        found = trainable_parameters(model)
        self.parameters = {name: found[name] for name in names}
        self.losses: dict[int, tuple[float, float]] = {}

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(iter(self.parameters.values())).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter."""
        return next(iter(self.parameters.values())).dtype

    def try_one(self, seed: int, max_bytes: int | None = None) -> Trial:
        """Draw one sample of the first batch, and the same in float64 if twice the memory fits."""
        generator = torch.Generator().manual_seed(seed)
        reset_peak_memory(self.device)
        begun = time.perf_counter()
        vectors: list[Tensor] = []
        found: list[Tensor | None] = []

        def keep(curvature: LossCurvature) -> list[Tensor]:
            vectors.extend(curvature.sample(generator))
            return vectors

        self._run(0, 1, keep, lambda _, gradients, weight: found.extend(gradients))
        seconds, peak = time.perf_counter() - begun, peak_memory(self.device)
        if self.dtype == torch.float64 or (max_bytes is not None and 2 * peak > max_bytes):
            return Trial(seconds, peak, None)
        squares = torch.zeros(2, dtype=torch.float64)  # of the error, and of the gradient

        def compare(_: int, gradients: Gradients, weight: float) -> None:
            for rounded, gradient in zip(found, gradients):
                if gradient is not None and rounded is not None:
                    pair = (gradient - rounded, gradient)
                    squares.add_(torch.stack([x.double().square().sum() for x in pair]).cpu())

        def error() -> float:
            self._run(0, 1, lambda curvature: [v.double() for v in vectors], compare)
            return float((squares[0] / squares[1]).sqrt()) if squares[1] > 0 else 0.0

        return Trial(seconds, peak, measured_in_float64(self._model, error))

    def draw(
        self, rounds: int, chunks: int, generator: torch.Generator, advance: Callable[[int], None]
    ) -> dict[str, Tensor]:
        """Draw `rounds` samples of each batch, and sum them over the batches of each chunk.

        The samples of different batches are independent with mean 0, so that their sum, each
        weighted by the root of its tokens, is a sample of all of them.

        Returns:
            `{name: (rounds · chunks, *shape)}`, round by round.
        """
        samples = {
            name: torch.zeros(rounds * chunks, *p.shape, dtype=p.dtype, device=p.device)
            for name, p in self.parameters.items()
        }

        def sample(curvature: LossCurvature) -> list[Tensor]:
            return curvature.sample(generator)

        for number in range(len(self._closures)):
            chunk = number * chunks // len(self._closures)

            def add(step: int, gradients: Gradients, weight: float, chunk: int = chunk) -> None:
                for name, gradient in zip(self.parameters, gradients):
                    if gradient is not None:
                        row = samples[name][step * chunks + chunk]
                        row.add_(gradient, alpha=math.sqrt(weight))
                advance(1)

            self._run(number, rounds, sample, add)
        return samples

    def _run(
        self,
        number: int,
        rounds: int,
        vectors_of: Callable[[LossCurvature], list[Tensor]],
        use: Callable[[int, Gradients, float], None],
    ) -> None:
        """Run one batch, and use the gradients along the vectors of each round, one forward."""

        def measure(evaluation: Evaluation) -> dict[str, Tensor]:
            with torch.compiler.set_stance("force_eager"), CaptureLosses() as seen:
                loss = evaluation()
            curvature, parameters = LossCurvature(loss, seen.calls), list(self.parameters.values())
            weight = 1.0 if evaluation.tokens is None else evaluation.tokens
            self.losses[number] = (float(loss.detach()), weight)
            for step in range(rounds):
                gradients = torch.autograd.grad(
                    curvature.predictions,
                    parameters,
                    vectors_of(curvature),  # type: ignore[arg-type]
                    retain_graph=step + 1 < rounds,
                    allow_unused=True,
                )
                use(step, gradients, weight)
            return {"loss": loss}

        average_over_batches(self._model, self._closures[number], measure)


def block_grams(
    samples: Mapping[str, Tensor],
    blocks: Mapping[str, Blocks],
    groups: Mapping[str, Tensor],
    number: int,
) -> Tensor:
    """Return the inner products of samples over each group of blocks, (groups, m, m), in float64.

    Args:
        samples: `{name: (m, *shape)}`.
        blocks: The blocks of each parameter.
        groups: The group of each block, as `block_groups` returns it.
        number: How many groups there are.

    Example:
        >>> samples = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
        >>> whole = {"w": Blocks(("other",), None, None)}
        >>> block_grams(samples, whole, {"w": torch.tensor([0])}, 1)
        tensor([[[ 5., 11.],
                 [11., 25.]]], dtype=torch.float64)
    """
    m = len(next(iter(samples.values())))
    grams = torch.zeros(number, m, m, dtype=torch.float64)
    for name, values in samples.items():
        split, pieces = blocks[name].split, [values]
        if split is not None:
            numbers = torch.arange(split.num_blocks, device=values.device)
            along = expand(numbers, split, values.ndim - 1).flatten()
            rows = values.movedim(split.dim + 1, 1)
            pieces = [rows[:, along == index] for index in range(split.num_blocks)]
        for group, piece in zip(groups[name].tolist(), pieces):
            for part in piece.reshape(m, -1).split(max(1, ENTRIES // m), dim=1):
                wide = part.double()
                grams[group] += (wide @ wide.T).cpu()
    return grams
