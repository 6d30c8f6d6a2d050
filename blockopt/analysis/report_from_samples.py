"""A report on all Gauss-Newton blocks of a model at once, from sampled gradients alone.

A sampled gradient is `f = Jᵀ s` with `E[s sᵀ] = Λ`, one backward pass, and `E[f fᵀ] = G`. Let
`f_b` be its part in block b. For independent samples f and f'

    tr G_bb = E ‖f_b‖²,        ‖G_bc‖_F² = E (f_b·f'_b) (f_c·f'_c),

so the inner products of the samples, block by block, hold the traces and norms of all blocks and
of all pairs of blocks: no product `G @ v` is needed, whatever the number of blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockopt.analysis.block_report import BlockReport
from blockopt.analysis.memory import GIB, NOT_COMPARED, TooLargeError, free_memory
from blockopt.analysis.model_report import Cost, HessianReport, heterogeneity
from blockopt.analysis.partial_results import PartialResults, fingerprint
from blockopt.analysis.progress import progress_bar
from blockopt.analysis.report import blocks_and_names
from blockopt.analysis.sampled_gradients import SampledGradients, Trial, block_grams
from blockopt.analysis.spectral.block_mass import BlockMass
from blockopt.analysis.spectral.estimate import Estimate, from_probes, root
from blockopt.analysis.spectral.heterogeneity import NegativeShare
from blockopt.blocks import BlockGroup, Blocks, Level, block_groups, block_numel
from blockopt.checks import check_count
from blockopt.measure.closures import Losses, refuse_sharded


def sampled_report(
    model: nn.Module,
    losses: Losses,
    *,
    by: Level = "head",
    only: Sequence[str] = (),
    blocks: Mapping[str, Blocks] | None = None,
    num_samples: int = 16,
    seed: int = 0,
    max_bytes: int | None = None,
    partial: Path | str | None = None,
    progress: bool = False,
    announce: Callable[[Cost], None] | None = None,
) -> HessianReport:
    """Measure all Gauss-Newton blocks of a model from sampled gradients, without any product.

    It takes `num_samples` backward passes per batch, however many blocks there are. Traces, norms,
    and the shares of pairs of blocks are unbiased; their standard errors are those of the
    jackknife. The top eigenvalue of a block lies, up to the noise of the samples, between the mean
    of `(u·f)²`, u being the best direction of the other samples, and the smaller of the Frobenius
    norm and the largest eigenvalue of the mean of `f fᵀ`. The middle is reported, with half of the
    range as its `residual`. There are no spectra: `hessian_report` has them.

    Every batch gives samples of its own, so small batches tell more for the same cost. The samples
    that fit into memory are compared with each other. With fewer than all, only pairs within such a
    group count, which makes the norms noisier, not wrong.

    Args:
        model: Any module with whole parameters.
        losses: As for `hessian_report`. The loss must call `F.cross_entropy`, `F.mse_loss` or
            `F.binary_cross_entropy_with_logits`.
        by: As for `hessian_report`.
        only: As for `hessian_report`.
        blocks: As for `hessian_report`.
        num_samples: Samples per batch, at least 2.
        seed: The seed of all samples.
        max_bytes: Memory that the process may take in all; by default what is free now.
        partial: A file that keeps finished groups of samples. If it is there, the measurement goes
            on from it, with the same numbers.
        progress: Whether to show progress.
        announce: Called with the `Cost` before the long part; a product is a sample of all batches.

    Raises:
        ValueError: If an option is wrong, the loss calls none of these functions, two samples do
            not fit into memory, or `partial` is of another measurement.

    Example:
        The loss `(w·x)²` with x = (3, 4) has the Gauss-Newton matrix `2 x xᵀ`:

        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 4.0]])
        >>> zero = torch.zeros(1, 1)
        >>> report = sampled_report(model, lambda: nn.functional.mse_loss(model(x), zero))
        >>> round(report.whole.trace.value, 3), round(report.whole.frobenius.value, 3)
        (50.0, 50.0)
    """
    check_count("num_samples", num_samples, 2)
    refuse_sharded(model, "sampled_report")
    start = time.perf_counter()
    found, names = blocks_and_names(model, blocks, by, only)
    chosen = {name: found[name] for name in names}
    groups, numbers = block_groups(chosen, by)
    closures = [losses] if callable(losses) else list(losses)
    gradients = SampledGradients(model, closures, names)
    trial = gradients.try_one(seed, max_bytes)
    room = _room(gradients, trial, max_bytes)
    plan = Plan.fitting(num_samples, len(closures), room)
    cost = Cost(num_samples, trial.seconds * len(closures))
    if announce is not None:
        announce(cost)
    first_loss = gradients.losses[0][0]
    settings = (by, chosen, num_samples, seed, f"{first_loss:.9g}", len(closures))
    kept = PartialResults(partial, fingerprint(model, *settings))
    if PLAN in kept.pieces:  # of an earlier run, which may have had other memory
        plan = Plan(*kept.pieces[PLAN])
    kept.pieces[PLAN] = tuple(plan)
    with progress_bar(progress, "gauss-newton", num_samples * len(closures)) as advance:
        for window, rounds in enumerate(plan.rounds):
            if window in kept.pieces:
                advance(rounds * len(closures))
                continue
            generator = torch.Generator().manual_seed(seed + 1_000_003 * (window + 1))
            samples = gradients.draw(rounds, plan.chunks, generator, advance)
            grams = block_grams(samples, chosen, numbers, len(groups))
            del samples
            kept.save(window, {"grams": grams, "losses": dict(gradients.losses)})
    pieces = [kept.pieces[window] for window in range(len(plan.rounds))]
    weighted = pieces[0]["losses"].values()
    weight = sum(tokens for _, tokens in weighted)
    windows = [piece["grams"] / weight for piece in pieces]
    sizes = dict.fromkeys(groups, 0)
    for name, entry in chosen.items():
        numel = block_numel(tuple(gradients.parameters[name].shape), entry.split)
        for group, size in zip(numbers[name].tolist(), numel.tolist()):
            sizes[groups[group]] += size
    count = num_samples * len(closures)
    mass = _mass(tuple(groups), windows, plan.chunks, count)
    norms = zip(mass.matrix.diagonal().tolist(), mass.standard_error.diagonal().tolist())
    blocks_of = {
        group: _block(sizes[group], [grams[i] for grams in windows], plan.chunks, trace, norm)
        for i, (group, trace, norm) in enumerate(
            zip(groups, mass.traces, (root(Estimate(*norm, count)) for norm in norms))
        )
    }
    total = [grams.sum(0) for grams in windows]
    trace = _trace(total, plan.chunks, count)
    whole = _block(sum(sizes.values()), total, plan.chunks, trace, mass.frobenius)
    noise = torch.finfo(gradients.dtype).eps * whole.frobenius.value
    notes = () if len(windows) == 1 else (plan.describe(),)
    in_doubt = trial.rounding is None and gradients.dtype != torch.float64 and max_bytes is not None
    return HessianReport(
        matrix="gauss-newton",
        by=by,
        loss=sum(loss * tokens for loss, tokens in weighted) / weight,
        whole=whole,
        blocks=blocks_of,
        mass=mass,
        spread=heterogeneity(blocks_of, noise)[0],
        distance={},
        asymmetry=None,
        rounding=trial.rounding,
        cost=cost,
        seconds=time.perf_counter() - start,
        notes=(*notes, NOT_COMPARED) if in_doubt else notes,
    )


PLAN = -1  # its place among the partial results
MOST_VECTORS = 128  # compared with each other; the cost of more would exceed that of drawing them
FOLDS = 8  # of rounds, left out in turn


class Plan(NamedTuple):
    """How the samples are grouped.

    Attributes:
        chunks: The batches are summed to so many vectors per round.
        rounds: The rounds of each group of samples that are in memory together.
    """

    chunks: int
    rounds: tuple[int, ...]

    @classmethod
    def fitting(cls, num_samples: int, num_batches: int, room: int) -> Plan:
        """Return the plan for a memory of `room` vectors, with at least two rounds per group.

        Example:
            >>> Plan.fitting(16, 4, 1000), Plan.fitting(16, 4, 11)
            (Plan(chunks=4, rounds=(16,)), Plan(chunks=4, rounds=(2, 2, 2, 2, 2, 2, 2, 2)))
            >>> Plan.fitting(7, 4, 3)
            Plan(chunks=1, rounds=(3, 2, 2))
        """
        room = min(room, MOST_VECTORS)
        chunks = max(1, min(num_batches, room // 2))
        groups = math.ceil(num_samples / min(num_samples, max(2, room // chunks)))
        groups = min(groups, num_samples // 2)
        each, more = divmod(num_samples, groups)
        return cls(chunks, tuple(each + (number < more) for number in range(groups)))

    def describe(self) -> str:
        """Return a note on how many samples are compared with each other."""
        return (
            f"Memory holds {self.rounds[0] * self.chunks} of {sum(self.rounds) * self.chunks} "
            "sampled gradients at a time, so that norms come from fewer pairs of them."
        )


def _room(gradients: SampledGradients, trial: Trial, max_bytes: int | None) -> int:
    """Return how many sampled gradients fit into memory besides a backward pass.

    Raises:
        TooLargeError: If two do not.
    """
    size = sum(p.numel() * p.dtype.itemsize for p in gradients.parameters.values())
    free = free_memory(gradients.device)
    left = 64.0 * size if free is None else 0.8 * free
    if max_bytes is not None:
        # Besides a pass: one more gradient, and 256 MiB for the products of samples
        left = min(left, max_bytes - trial.peak - size - 2**28)
    if left < 2 * size:
        raise TooLargeError(
            f"Two sampled gradients need {2 * size / GIB:,.1f} GiB besides the "
            f"{trial.peak / GIB:,.1f} GiB of a backward pass, and {max(0.0, left) / GIB:,.1f} GiB "
            "are left. Allow more memory, or choose fewer parameters (only) or smaller batches."
        )
    return int(left // size)


def _trace(windows: list[Tensor], chunks: int, count: int) -> Estimate:
    """Return the mean over rounds of the squared norms, with grams (m, m) of each window."""
    values = [grams.diagonal().reshape(-1, chunks).sum(1) for grams in windows]
    return from_probes(torch.cat(values), exact=False)._replace(num_products=count)


def _block(
    dimension: int, windows: list[Tensor], chunks: int, trace: Estimate, norm: Estimate
) -> BlockReport:
    lows, highs = zip(*(_top_range(grams, chunks) for grams in windows))
    high = min(sum(highs) / len(highs), norm.value)
    low = min(sum(lows) / len(lows), high)
    middle, half = torch.tensor([(low + high) / 2, (high - low) / 2]).double().split(1)
    never = NegativeShare(0.0, 0.0)  # G has no negative eigenvalues
    return BlockReport(dimension, trace, norm, middle, half, None, never, exact=False)


def _top_range(gram: Tensor, chunks: int) -> tuple[float, float]:
    """Return estimates below and above the largest eigenvalue, from inner products (m, m).

    Below: the mean over rounds of `uᵀ f fᵀ u`, with the best direction u of other rounds, has the
    mean `uᵀ G u`. Above: the largest eigenvalue is convex, so that the mean of that of the
    samples is at least that of G.
    """
    rounds = len(gram) // chunks
    high = float(torch.linalg.eigvalsh(gram)[-1]) / rounds
    total = 0.0
    for steps in torch.arange(rounds).chunk(FOLDS):
        own = torch.isin(torch.arange(len(gram)) // chunks, steps)
        value, vector = torch.linalg.eigh(gram[~own][:, ~own])
        if float(value[-1]) > 0:
            along = gram[own][:, ~own] @ vector[:, -1]
            total += float(along.square().sum() / value[-1])
    return total / rounds, high


def _mass(
    labels: tuple[BlockGroup, ...], windows: list[Tensor], chunks: int, count: int
) -> BlockMass:
    """Return the squared norms of all pairs of blocks with jackknife errors.

    With several windows one of them is left out at a time, otherwise a few rounds.
    """
    sums = [_PairSums(grams, chunks) for grams in windows]
    rounds = torch.tensor([grams.shape[1] // chunks for grams in windows], dtype=torch.float64)

    def mean(without: int | None = None) -> Tensor:
        weights = rounds.clone()
        if without is not None:
            weights[without] = 0
        weights /= weights.sum()
        found = torch.zeros(len(labels), len(labels), dtype=torch.float64)
        for weight, pairs in zip(weights.tolist(), sums):
            found += weight * pairs.mean()
        return found

    matrix = mean()
    if len(windows) > 1:
        replicates = (mean(without) for without in range(len(windows)))
        number = len(windows)
    else:
        steps = torch.arange(int(rounds[0]))
        folds = steps.chunk(FOLDS) if len(steps) > 2 else ()
        replicates, number = (sums[0].mean(without) for without in folds), len(folds)
    variance, of_norm, of_share = torch.zeros_like(matrix), 0.0, 0.0
    share, norm = _off_diagonal(matrix), float(matrix.sum())
    for replicate in replicates:
        variance += (replicate - matrix).square()
        of_norm += (float(replicate.sum()) - norm) ** 2
        of_share += (_off_diagonal(replicate) - share) ** 2
    factor = (number - 1) / number if number else math.inf
    errors = [math.sqrt(factor * v) if v > 0 else 0.0 for v in (of_norm, of_share)]
    if not number:
        errors, variance = [math.inf, math.inf], torch.full_like(matrix, math.inf)
    traces = [_trace([grams[i] for grams in windows], chunks, count) for i in range(len(labels))]
    return BlockMass(
        labels,
        matrix,
        variance.mul(factor if number else 1.0).sqrt(),
        Estimate(min(max(share, 0.0), 1.0), errors[1], count),
        tuple(traces),
        root(Estimate(norm, errors[0], count)),
    )


def _off_diagonal(matrix: Tensor) -> float:
    total = float(matrix.sum())
    return 1 - float(matrix.diagonal().sum()) / total if total > 0 else 0.0


class _PairSums:
    """The means of `(f_b·f'_b) (f_c·f'_c)` over pairs of independent samples, for all blocks b, c.

    Pairs of one chunk of batches must be of two rounds; those of two chunks may be of the same.
    """

    def __init__(self, grams: Tensor, chunks: int) -> None:
        self._grams, self._rounds = grams, grams.shape[1] // chunks
        step, chunk = (
            torch.arange(grams.shape[1]) // chunks,
            torch.arange(grams.shape[1]) % chunks,
        )
        alike = chunk[:, None] == chunk
        self._steps = step
        self._within = alike & (step[:, None] != step)
        self._between = ~alike
        self._sums = [self._sum(pairs) for pairs in (self._within, self._between)]

    def _sum(self, pairs: Tensor) -> Tensor:
        chosen = self._grams[:, pairs]  # (blocks, pairs)
        return chosen @ chosen.T

    def mean(self, without: Tensor | None = None) -> Tensor:
        """The mean over all pairs, or over those without some rounds."""
        (within, between), rounds = self._sums, self._rounds
        if without is not None:
            left_out = torch.isin(self._steps, without)
            touched = left_out[:, None] | left_out
            within = within - self._sum(self._within & touched)
            between = between - self._sum(self._between & touched)
            rounds -= len(without)
        return within / (rounds * (rounds - 1)) + between / rounds**2
