"""One training run, from a frozen configuration to a JSONL file that is named by the hash of it.

A run is a pure function of its configuration: model and data order come from the seed, the number of threads is fixed, and it
is evaluated once, after its last step. So a finished run is never done again, and a run that was killed starts again and gives
the same numbers.

    results/runs/<key>.jsonl        {"config": …, "arm": …, "git": …, "versions": …, "seeds": …}
                                    {"step": 1, "loss": 5.62} …
                                    {"step": 7, "scales": {"query": 1.3, …}} …
                                    {"final": 2.31, "seconds": 12.1, "gradient_evaluations": 340, …}
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import blockopt
from recipes.arms import ARMS, Training, build
from recipes.data import TokenData, load_data
from recipes.gpt2 import GPT2, GPT2Config
from recipes.schedules import schedule

CLIP = 1.0
WARMUP = 0.1  # of the steps
CALLS = {"analytic": 2}  # gradients a call of the closure, rounded up: one forward pass, two backward; all others: one of each


@dataclass(frozen=True)
class DataConfig:
    """What `load_data` is given, and the key of what it gave."""

    source: str
    tokenizer: str | None
    vocab_size: int
    key: str = ""
    cache: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RunConfig:
    """All that decides the outcome of a run.

    Attributes:
        arm: Name of one of `ARMS`.
        values: Its hyperparameters, as sorted pairs.
        seed: Of the initial weights, the order of the data and the probes of the curvature.
        steps: Length of the run, which its schedule decays over.
        model: Sizes.
        data: Where the tokens come from.
        batch_size: Sequences a step.
        evaluation: Batches of held-out data in the final evaluation.
        schedule: Of the learning rate.
        device: Where to train.
        threads: Of the process that trains; sums in another order round otherwise.
    """

    arm: str
    values: tuple[tuple[str, float], ...]
    seed: int
    steps: int
    model: GPT2Config
    data: DataConfig
    batch_size: int = 16
    evaluation: int = 16
    schedule: str = "linear"
    device: str = "cpu"
    threads: int = 1

    def described(self) -> dict[str, Any]:
        """The configuration as JSON has it, with what the name of the arm stands for; without where the cache lies."""
        config = asdict(self) | {"values": dict(self.values), "recipe": ARMS[self.arm].recipe()}
        config["data"].pop("cache")
        return config

    @property
    def key(self) -> str:
        """Hash of the configuration."""
        return hashlib.sha256(json.dumps(self.described(), sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class RunResult:
    """What came of a run.

    Attributes:
        final: Loss on held-out data after the last step; infinite if the run diverged.
        losses: Training loss of each step.
        diverged: Why and when it diverged, or None.
        gradient_evaluations: Forward and backward passes, with those of the curvature.
        seconds: Of training with curvature, without loading and evaluation.
        curvature_seconds: Part of it.
        state_bytes: Of the optimizer's state, a parameter.
        parameters: Number of weights.
        scales: `(step, {role: scale})` after each refresh.
        failed_refreshes: How many refreshes of the scales gave no curvature to use.
        header: First line of the file.
    """

    final: float = math.inf
    losses: list[float] = field(default_factory=list)
    diverged: str | None = None
    gradient_evaluations: int = 0
    seconds: float = 0.0
    curvature_seconds: float = 0.0
    state_bytes: float = 0.0
    parameters: int = 0
    scales: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    failed_refreshes: int = 0
    header: dict[str, Any] = field(default_factory=dict)


def provenance() -> dict[str, Any]:
    """Which code and which libraries make a result."""
    here = Path(__file__).parent
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        git = "unknown"
    versions = {"blockopt": blockopt.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in ("adam-mini", "pytorch-optimizer"):  # which arms come from
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"git": git, "versions": versions, "machine": f"{platform.system()} {platform.machine()}"}


def path_of(folder: Path, config: RunConfig) -> Path:
    """The file of a run; it exists only once the run is finished."""
    return folder / f"{config.key}.jsonl"


def read_run(path: Path) -> RunResult:
    """Read the file of a finished run.

    Raises:
        ValueError: If it is not one.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not lines or "config" not in lines[0] or "final" not in lines[-1]:
        raise ValueError(f"{path} is not the file of a finished run. Delete it, and the run is done again.")
    end = dict(lines[-1])
    end["final"] = math.inf if end["final"] is None else end["final"]
    losses = [line["loss"] for line in lines[1:-1] if "loss" in line]
    scales = [(line["step"], line["scales"]) for line in lines[1:-1] if "scales" in line]
    return RunResult(**end, losses=losses, scales=scales, header=lines[0])


def finished(folder: Path, config: RunConfig) -> RunResult | None:
    """The result of a run, if it is finished."""
    path = path_of(folder, config)
    return read_run(path) if path.exists() else None


def run_once(config: RunConfig, folder: Path, about: dict[str, Any]) -> RunResult:
    """Train, write the file, and return what it says; a finished run is only read.

    Args:
        config: What to run.
        folder: Of the files.
        about: What `provenance` returns.
    """
    if (known := finished(folder, config)) is not None:
        return known
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, config)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    seeds = {"model": config.seed, "data": config.seed, "curvature": config.seed}
    try:
        with partial.open("w", encoding="utf-8") as file:

            def write(line: dict[str, Any]) -> None:
                file.write(json.dumps(line, allow_nan=False) + "\n")

            write({"key": config.key, "config": config.described(), "seeds": seeds, **about})
            write(_train(config, write))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)  # atomic: a file under its final name is whole
    finally:
        partial.unlink(missing_ok=True)
    return read_run(path)


def _train(config: RunConfig, write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Train, write a line a step, and return the last line."""
    torch.set_num_threads(config.threads)
    data = token_data(config.data)
    torch.manual_seed(config.seed)
    model = GPT2(config.model).to(config.device)  # drawn on the CPU: the same weights everywhere
    batches = data.batches("train", batch_size=config.batch_size, context=config.model.context, seed=config.seed)
    evaluations = seconds = curvature_seconds = 0.0
    diverged, written = None, 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Curvature|The refresh of the block learning rates")  # counted instead
        training = build(ARMS[config.arm], model, dict(config.values), steps=config.steps, seed=config.seed)
        cost = CALLS.get(ARMS[config.arm].scales or "", 1)
        peaks = [group["lr"] for group in training.optimizer.param_groups]
        for step in range(1, config.steps + 1):
            tokens = _to(batches[step - 1], config.device)
            started, calls = time.perf_counter(), 0

            def loss_of_batch(tokens: tuple[Tensor, Tensor] = tokens) -> Tensor:
                nonlocal calls
                calls += 1
                return model(*tokens)

            factor = schedule(config.schedule, step - 1, config.steps, warmup=max(1, round(WARMUP * config.steps)))
            try:
                loss = _step(training, model, tokens, [peak * factor for peak in peaks])
                refreshing = time.perf_counter()
                if training.block_lr is not None and math.isfinite(loss):
                    training.block_lr.step(loss_of_batch)
                    curvature_seconds += time.perf_counter() - refreshing if calls else 0.0
                training.optimizer.zero_grad()
            except (FloatingPointError, torch.linalg.LinAlgError, RuntimeError) as error:
                if not _is_divergence(error):
                    raise
                diverged = f"step {step}: {str(error).splitlines()[0][:200]}"
                break
            seconds += time.perf_counter() - started
            evaluations += 1 + cost * calls
            if not math.isfinite(loss):
                diverged = f"step {step}: the loss is {loss}"
                break
            write({"step": step, "loss": float(f"{loss:.6g}")})
            if training.block_lr is not None:
                for refresh in training.block_lr.history[written:]:
                    write({"step": refresh.step, "scales": {role: float(f"{s:.5g}") for role, s in refresh.scale.items()}})
                written = len(training.block_lr.history)
    final = evaluate(model, data, config) if diverged is None else math.inf
    if diverged is None and not math.isfinite(final):
        diverged = f"evaluation: the loss is {final}"
    return {
        "final": final if math.isfinite(final) else None,
        "diverged": diverged,
        "gradient_evaluations": int(evaluations),
        "seconds": round(seconds, 3),
        "curvature_seconds": round(curvature_seconds, 3),
        "state_bytes": state_bytes(training.optimizer) / sum(p.numel() for p in model.parameters()),
        "parameters": sum(p.numel() for p in model.parameters()),
        "failed_refreshes": 0 if training.block_lr is None else training.block_lr.failures,
    }


def _step(training: Training, model: nn.Module, tokens: tuple[Tensor, Tensor], rates: list[float]) -> float:
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
    """Mean loss on held-out windows, the same for all runs."""
    model.eval()
    batches = data.batches("validation", batch_size=config.batch_size, context=config.model.context, seed=0)
    number = min(config.evaluation, batches.steps_per_epoch)
    return math.fsum(model(*_to(batches[index], config.device)).item() for index in range(number)) / number


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in an optimizer's state."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(list(optimizer.state.values())))


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
    data = load_data(config.source, vocab_size=config.vocab_size, tokenizer=config.tokenizer, cache=cache)
    if config.key not in ("", data.key):
        raise ValueError(
            f"The data {config.source!r} have changed: their key is {data.key}, and the runs are for {config.key}."
        )
    return data
