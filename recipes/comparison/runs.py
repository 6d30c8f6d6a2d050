"""One training run, from a frozen configuration to a JSONL file named by its hash.

A run is a pure function of its configuration: model and data order come from the seed, the number
of threads is fixed, and it is evaluated once, after its last step. So a finished run is never done
again, and a killed run gives the same numbers when it continues from its checkpoint, or starts
again if it was too short to have one.

    results/runs/<key>.jsonl        {"config": …, "arm": …, "git": …, "versions": …, "seeds": …}
                                    {"step": 1, "loss": 5.62} …
                                    {"step": 7, "scales": {"query": 1.3, …}} …
                                    {"final": 2.31, "seconds": 12.1, "gradient_evaluations": 340, …}
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockopt.files import write_whole
from recipes.common.errors import UsageError
from recipes.common.provenance import code_hash, git_commit, machine, versions
from recipes.comparison.run_config import RunConfig
from recipes.comparison.run_loop import train


@dataclass
class RunResult:
    """The result of a run.

    Attributes:
        final: Loss on held-out data after the last step; infinite if the run diverged.
        losses: Training loss of each step.
        diverged: Why and when it diverged, or None.
        gradient_evaluations: Forward and backward passes, with those of the curvature.
        seconds: Seconds of training with curvature, without loading and evaluation.
        curvature_seconds: The part of them that curvature takes.
        state_bytes: Bytes of optimizer state per parameter.
        parameters: Number of weights.
        scales: `(step, {role: scale})` after each refresh.
        failed_refreshes: How many refreshes of the scales gave no curvature to use.
        header: The first line of the file.
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
    """Return which code, libraries and machine make a result; "code" hashes what decides it."""
    return {
        "git": git_commit() or "unknown",
        "code": code_hash("recipes.comparison.run_loop"),
        "versions": versions("torch", "adam-mini", "pytorch-optimizer"),
        "machine": machine(),
    }


def path_of(folder: Path, config: RunConfig) -> Path:
    """Return the file of a run, which exists only once the run is finished."""
    return folder / f"{config.key}.jsonl"


def read_run(path: Path) -> RunResult:
    """Read the file of a finished run.

    Raises:
        UsageError: If it is not one.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not lines or "config" not in lines[0] or "final" not in lines[-1]:
        raise UsageError(
            f"{path} is not the file of a finished run. Delete it, and the run is done again."
        )
    end = dict(lines[-1])
    end["final"] = math.inf if end["final"] is None else end["final"]
    losses = [line["loss"] for line in lines[1:-1] if "loss" in line]
    scales = [(line["step"], line["scales"]) for line in lines[1:-1] if "scales" in line]
    return RunResult(**end, losses=losses, scales=scales, header=lines[0])


def finished(folder: Path, config: RunConfig) -> RunResult | None:
    """Return the result of a run, if it is finished."""
    path = path_of(folder, config)
    return read_run(path) if path.exists() else None


def run_once(config: RunConfig, folder: Path, about: dict[str, Any]) -> RunResult:
    """Train, write the file, and return what it says; a finished run is only read.

    Args:
        config: What to run.
        folder: Where the files lie.
        about: What `provenance` returns.
    """
    if (known := finished(folder, config)) is not None:
        return known
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, config)
    checkpoints = path.with_suffix(".checkpoints")
    seeds = {"model": config.seed, "data": config.seed, "curvature": config.seed}
    header = {"key": config.key, "config": config.described(), "seeds": seeds, **about}
    lines = [json.dumps(header, allow_nan=False)]
    lines += train(config, checkpoints, about.get("code", ""))
    write_whole(path, "\n".join(lines) + "\n")
    shutil.rmtree(checkpoints, ignore_errors=True)
    return read_run(path)
