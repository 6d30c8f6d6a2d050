"""The training loop of one run: from a configuration to the lines of its file, exactly, also through a kill.

A run that takes long keeps a checkpoint, from which it goes on as if it had never stopped.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockopt.curvature import ESTIMATORS
from recipes.common.checkpoints import CheckpointError, Checkpoints
from recipes.common.gpt2 import GPT2
from recipes.common.schedules import schedule
from recipes.comparison.arms import ARMS, Training, build
from recipes.comparison.run_config import DataConfig, RunConfig
from recipes.data.token_data import TokenData, load_data

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
    refreshes: int = 0  # of which there are lines
    lines: list[str] = field(default_factory=list)

    def write(self, line: dict[str, Any]) -> None:
        self.lines.append(json.dumps(line, allow_nan=False))


def train(config: RunConfig, folder: Path, code: str) -> list[str]:
    """Train to the end, and return the lines of the run's file: one a step, one a refresh of the scales, and the last one.

    Args:
        config: What to run.
        folder: For checkpoints. If there is one, the run goes on from it.
        code: Hash of the sources. A checkpoint that other code has made is left aside.
    """
    torch.set_num_threads(config.threads)
    data = token_data(config.data)
    torch.manual_seed(config.seed)
    model = GPT2(config.model).to(config.device)  # drawn on the CPU: the same weights everywhere
    batches = data.batches(
        "train", batch_size=config.batch_size, context=config.model.context, seed=config.seed
    )
    diverged, checkpoints = None, Checkpoints(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Curvature|The refresh of the block learning rates"
        )  # counted instead
        training = build(
            ARMS[config.arm], model, dict(config.values), steps=config.steps, seed=config.seed
        )
        estimator = ESTIMATORS.get(ARMS[config.arm].scales or "")
        cost = 0 if estimator is None else estimator.gradients
        peaks = [group["lr"] for group in training.optimizer.param_groups]
        progress = _resume(checkpoints, model, training, code)
        saved = time.perf_counter()
        for step in range(progress.step + 1, config.steps + 1):
            tokens = _to(batches[step - 1], config.device)
            factor = schedule(
                config.schedule, step - 1, config.steps, warmup=max(1, round(WARMUP * config.steps))
            )
            diverged = _take_step(
                training, model, tokens, [peak * factor for peak in peaks], cost, progress
            )
            if diverged is not None:
                break
            if time.perf_counter() - saved > SECONDS_BETWEEN_CHECKPOINTS:
                checkpoints.save(step, _state(model, training, progress, code))
                saved = time.perf_counter()
    final = evaluate(model, data, config) if diverged is None else math.inf
    if diverged is None and not math.isfinite(final):
        diverged = f"evaluation: the loss is {final}"
    numel = sum(p.numel() for p in model.parameters())
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
    return progress.lines


def _take_step(
    training: Training,
    model: nn.Module,
    tokens: tuple[Tensor, Tensor],
    rates: list[float],
    cost: int,
    progress: _Progress,
) -> str | None:
    """One step with its refresh, counted and written; why it diverged, if it did. A refresh counts as `cost` gradients."""
    block_lr, step, calls = training.block_lr, progress.step + 1, 0

    def loss_of_batch() -> Tensor:
        nonlocal calls
        calls += 1
        return model(*tokens)

    started = time.perf_counter()
    try:
        loss = _step(training, model, tokens, rates)
        refreshing = time.perf_counter()
        if block_lr is not None and math.isfinite(loss):
            block_lr.step(loss_of_batch)
            progress.curvature_seconds += time.perf_counter() - refreshing if calls else 0.0
        training.optimizer.zero_grad()
    except (FloatingPointError, torch.linalg.LinAlgError, RuntimeError) as error:
        if not _is_divergence(error):
            raise
        return f"step {step}: {str(error).splitlines()[0][:200]}"
    progress.step = step
    progress.seconds += time.perf_counter() - started
    progress.gradient_evaluations += 1 + (cost if calls else 0)
    if not math.isfinite(loss):
        return f"step {step}: the loss is {loss}"
    progress.write({"step": step, "loss": float(f"{loss:.6g}")})
    if block_lr is not None:
        for refresh in block_lr.history[progress.refreshes :]:
            progress.write(
                {
                    "step": refresh.step,
                    "scales": {str(group): float(f"{s:.5g}") for group, s in refresh.scale.items()},
                }
            )
        progress.refreshes = len(block_lr.history)
    return None


def _state(model: nn.Module, training: Training, progress: _Progress, code: str) -> dict[str, Any]:
    return {
        "code": code,
        "model": model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "block_lr": None if training.block_lr is None else training.block_lr.state_dict(),
        "progress": asdict(progress),
    }


def _resume(checkpoints: Checkpoints, model: nn.Module, training: Training, code: str) -> _Progress:
    """Go on from the last checkpoint, or from the start if there is none that is whole and of the same code."""
    with suppress(CheckpointError):
        found = checkpoints.load_latest()
        if found is not None and found[1]["code"] == code:
            state = found[1]
            model.load_state_dict(state["model"])
            training.optimizer.load_state_dict(state["optimizer"])
            if training.block_lr is not None:
                training.block_lr.load_state_dict(state["block_lr"])
            return _Progress(**state["progress"])
    return _Progress()


def _step(
    training: Training, model: nn.Module, tokens: tuple[Tensor, Tensor], rates: list[float]
) -> float:
    """One optimizer step; returns the loss before it."""
    for group, rate in zip(training.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    loss = model(*tokens)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    if math.isfinite(value := loss.item()):
        training.optimizer.step()
    return value


def _is_divergence(error: BaseException | None) -> bool:
    """Whether the numbers gave out, which is a result; anything else is an error of the program."""
    while error is not None:
        if isinstance(error, (FloatingPointError, torch.linalg.LinAlgError)):
            return True
        error = error.__cause__
    return False


def _to(tokens: tuple[Tensor, Tensor], device: str) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens
    return inputs.to(device), targets.to(device)


@torch.no_grad()
def evaluate(model: nn.Module, data: TokenData, config: RunConfig) -> float:
    """Mean loss on held-out windows, the same for all tuning runs, and others for all test runs."""
    model.eval()
    batches = data.batches(
        "validation", batch_size=config.batch_size, context=config.model.context, seed=0
    )
    number = max(1, min(config.evaluation, batches.steps_per_epoch // 2))
    first = number if config.purpose == "tuning" and batches.steps_per_epoch > 1 else 0
    return (
        math.fsum(
            model(*_to(batches[first + index], config.device)).item() for index in range(number)
        )
        / number
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in an optimizer's state."""
    return sum(
        tensor.numel() * tensor.element_size()
        for tensor in _tensors(list(optimizer.state.values()))
    )


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
    """The tokens, once a process.

    Raises:
        ValueError: If they are not those that the configuration was made for.
    """
    cache = None if config.cache is None else Path(config.cache)
    data = load_data(
        config.source, vocab_size=config.vocab_size, tokenizer=config.tokenizer, cache=cache
    )
    if config.key not in ("", data.key):
        raise ValueError(
            f"The data {config.source!r} have changed: their key is {data.key}, and the runs are for {config.key}."
        )
    return data
