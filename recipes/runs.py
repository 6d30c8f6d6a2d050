"""One training run, from a frozen configuration to a JSONL file that is named by the hash of it.

A run is a pure function of its configuration: model and data order come from the seed, the number of threads is fixed, and it
is evaluated once, after its last step. So a finished run is never done again, and a run that was killed gives the same numbers
when it goes on from its checkpoint, or starts again if it was too short to have one.

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
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import blockopt
from recipes.run_config import RunConfig
from recipes.run_loop import train

SOURCES = ("addition.py", "arms.py", "controls.py", "data.py", "gpt2.py", "optimizers.py", "run_loop.py", "schedules.py")


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
    """Which code, libraries and machine make a result; "code" is a hash of the sources that decide it, committed or not."""
    here = Path(__file__).parent
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        git = "unknown"
    sources = [*(here.parent / "blockopt").rglob("*.py"), *(here / name for name in SOURCES)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources)))
    versions = {"blockopt": blockopt.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in ("adam-mini", "pytorch-optimizer"):  # which arms come from
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {_processor()}"
    return {"git": git, "code": digest.hexdigest()[:16], "versions": versions, "machine": machine}


def _processor() -> str:
    """The name of the CPU, where Linux tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"


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
    partial, checkpoints = path.with_suffix(f".{os.getpid()}.partial"), path.with_suffix(".checkpoints")
    seeds = {"model": config.seed, "data": config.seed, "curvature": config.seed}
    header = {"key": config.key, "config": config.described(), "seeds": seeds, **about}
    lines = [json.dumps(header, allow_nan=False), *train(config, checkpoints, about.get("code", ""))]
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)  # atomic: a file under its final name is whole
    finally:
        partial.unlink(missing_ok=True)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return read_run(path)
