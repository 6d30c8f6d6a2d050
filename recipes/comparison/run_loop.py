"""The training loop of one run: from a configuration to the lines of its file.

A run that takes long keeps a checkpoint, from which it continues as if it had never stopped.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockopt.curvature import ESTIMATORS
from blockopt.files import whole_file
from recipes.common.checkpoints import CheckpointError, Checkpoints
from recipes.common.errors import UsageError
from recipes.common.schedules import schedule
from recipes.common.training import Batch, Training, token_loss
from recipes.comparison.arms import ARMS, build
from recipes.comparison.run_config import DataConfig, RunConfig
from recipes.comparison.starting_model import starting_model
from recipes.data.token_data import Batches, TokenData, load_data

CLIP = 1.0
WARMUP = 0.1  # of the steps
SECONDS_BETWEEN_CHECKPOINTS = 120.0  # so that short runs, which are done again as fast, have none


@dataclass
class _Progress:
    """What a run has done so far, which its checkpoint holds beside weights and moments."""

    step: int = 0
    gradient_evaluations: int = 0
    seconds: float = 0.0
    curvature_seconds: float = 0.0
    refreshes: int = 0  # that have been written
    lines: list[str] = field(default_factory=list)

    def write(self, line: dict[str, Any]) -> None:
        self.lines.append(json.dumps(line, allow_nan=False))


def train(config: RunConfig, folder: Path, code: str, weights: Path | None = None) -> list[str]:
    """Train to the end, and return the lines of the run's file, one per step and per refresh.

    Args:
        config: What to run.
        folder: Where checkpoints lie. If there is one, the run continues from it.
        code: Hash of the sources. Checkpoints of other code are ignored.
        weights: Where to keep the trained weights, None for nowhere.
    """
    torch.set_num_threads(config.threads)
    arm, batches, model = ARMS[config.arm], training_batches(config), starting_model(config)
    diverged, checkpoints = None, Checkpoints(folder)
    with warnings.catch_warnings():
        # What these warn about is counted in `failed_refreshes`.
        warnings.filterwarnings("ignore", "No block had a positive|The (refresh|curvature) of")
        text = token_data(config.data).train
        options = {"steps": config.steps, "seed": config.seed, "tokens": text}
        training = build(arm, model, dict(config.values), **options)
        set_rates = scheduled(training.optimizer, config)
        cost = ESTIMATORS[arm.scales].gradients if arm.scales in ESTIMATORS else 0
        progress = _resume(checkpoints, training, code)
        saved = time.perf_counter()
        while progress.step < config.steps and diverged is None:
            batch = _to(batches[progress.step], config.device)
            set_rates(progress.step)
            diverged = _take_step(training, batch, cost, progress)
            if diverged is None and time.perf_counter() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                state = {"code": code, "progress": asdict(progress), **training.state_dict()}
                checkpoints.save(progress.step, state)
                saved = time.perf_counter()
    final = evaluate(training, config) if diverged is None else math.inf
    if diverged is None and not math.isfinite(final):
        diverged = f"evaluation: the loss is {final}"
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    progress.write(
        {
            "final": final if math.isfinite(final) else None,
            "diverged": diverged,
            "gradient_evaluations": progress.gradient_evaluations,
            "seconds": round(progress.seconds, 3),
            "curvature_seconds": round(progress.curvature_seconds, 3),
            "state_bytes": state_bytes(training.optimizer) / numel,
            "parameters": numel,
            "failed_refreshes": 0 if training.block_lr is None else training.block_lr.failures,
        }
    )
    if weights is not None:
        weights.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(weights) as file:
            torch.save(model.state_dict(), file)
    return progress.lines


def training_batches(config: RunConfig) -> Batches:
    """Return what a run trains on."""
    sizes = {"batch_size": config.batch_size, "context": config.model.context}
    return token_data(config.data).batches("train", seed=config.seed, **sizes)


def scheduled(optimizer: torch.optim.Optimizer, config: RunConfig) -> Callable[[int], None]:
    """Return what sets the learning rates of a step, counted from 0; they are at their peak now."""
    peaks = [group["lr"] for group in optimizer.param_groups]
    warmup = max(1, round(WARMUP * config.steps))

    def set_rates(step: int) -> None:
        factor = schedule(config.schedule, step, config.steps, warmup=warmup)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor

    return set_rates


def _take_step(training: Training, batch: Batch, cost: int, progress: _Progress) -> str | None:
    """Take one step, count and write it, and return why it diverged, if it did.

    A refresh of the block learning rates counts as `cost` gradients.
    """
    begun, refresh, step = time.perf_counter(), 0.0, progress.step + 1
    try:
        loss = token_loss(training.model, *batch)
        loss.backward()
        training.clip(CLIP)
        value = loss.item()
        if math.isfinite(value):
            refresh = training.step([batch])
    except (FloatingPointError, torch.linalg.LinAlgError, RuntimeError) as error:
        if not _is_divergence(error):
            raise
        return f"step {step}: {str(error).splitlines()[0][:200]}"
    progress.step = step
    progress.seconds += time.perf_counter() - begun
    progress.curvature_seconds += refresh
    progress.gradient_evaluations += 1 + (cost if refresh else 0)
    if not math.isfinite(value):
        return f"step {step}: the loss is {value}"
    progress.write({"step": step, "loss": float(f"{value:.6g}")})
    history = [] if training.block_lr is None else training.block_lr.history
    for found in history[progress.refreshes :]:
        scales = {str(group): float(f"{scale:.5g}") for group, scale in found.scale.items()}
        progress.write({"step": found.step, "scales": scales})
    progress.refreshes = len(history)
    return None


def _resume(checkpoints: Checkpoints, training: Training, code: str) -> _Progress:
    """Load the last checkpoint, if there is one that is intact and of the same code."""
    with suppress(CheckpointError):
        found = checkpoints.load_latest()
        if found is not None and found[1]["code"] == code:
            training.load_state_dict(found[1])
            return _Progress(**found[1]["progress"])
    return _Progress()


def _is_divergence(error: BaseException | None) -> bool:
    """Whether numbers became too large, which is a result; anything else is a bug."""
    while error is not None:
        if isinstance(error, (FloatingPointError, torch.linalg.LinAlgError)):
            return True
        error = error.__cause__
    return False


def _to(batch: Batch, device: str) -> Batch:
    inputs, targets = batch
    return inputs.to(device), targets.to(device)


def evaluate(training: Training, config: RunConfig) -> float:
    """Return the mean loss on held-out windows: some for all tuning runs, others for test runs."""
    sizes = {"batch_size": config.batch_size, "context": config.model.context}
    batches = token_data(config.data).batches("validation", seed=0, **sizes)
    number = max(1, min(config.evaluation, batches.steps_per_epoch // 2))
    first = number if config.purpose == "tuning" and batches.steps_per_epoch > 1 else 0
    chosen = (_to(batches[first + index], config.device) for index in range(number))
    return math.fsum(loss.item() for loss in training.losses(chosen)) / number


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of all tensors in an optimizer's state."""
    tensors = _tensors(list(optimizer.state.values()))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


@lru_cache(maxsize=2)
def token_data(config: DataConfig) -> TokenData:
    """Return the tokens, loaded once per process.

    Raises:
        UsageError: If they are not those that the configuration was made for.
    """
    data = load_data(
        config.source,
        vocab_size=config.vocab_size,
        tokenizer=config.tokenizer,
        cache=None if config.cache is None else Path(config.cache),
    )
    if config.key not in ("", data.key):
        raise UsageError(
            f"The data {config.source!r} have changed: their key is {data.key}, and the runs are "
            f"for {config.key}."
        )
    return data
