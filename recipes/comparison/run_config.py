"""The frozen configuration of a run, and the hash that names its file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from recipes.common.gpt2 import GPT2Config
from recipes.comparison.arms import ARMS


@dataclass(frozen=True)
class DataConfig:
    """What `load_data` is given, and the key of what it gave."""

    source: str
    tokenizer: str | None
    vocab_size: int
    key: str = ""
    cache: str | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Start:
    """A checkpoint to fine-tune.

    Attributes:
        key: Of the run that trained it.
        file: Where its weights are.
        rank: Of the matrices that LoRA adds and trains, 0 to train all weights.
    """

    key: str
    file: str = field(compare=False)
    rank: int = 0


@dataclass(frozen=True)
class RunConfig:
    """All that decides the outcome of a run.

    Attributes:
        arm: Name of one of `ARMS`.
        values: Its hyperparameters, as sorted pairs.
        seed: For the initial weights, the order of the data and the samples of the curvature.
        steps: Length of the run, which its schedule decays over.
        model: Sizes.
        data: Where the tokens come from.
        batch_size: Sequences per step.
        evaluation: Batches of held-out data in the final evaluation.
        purpose: "tuning" or "test", which are evaluated on different parts of the held-out data.
        schedule: Schedule of the learning rate.
        device: Where to train.
        threads: Threads that train; another number adds in another order and rounds differently.
        start: The checkpoint to start from, None for fresh weights.
    """

    arm: str
    values: tuple[tuple[str, float], ...]
    seed: int
    steps: int
    model: GPT2Config
    data: DataConfig
    batch_size: int = 16
    evaluation: int = 16
    purpose: str = "test"
    schedule: str = "linear"
    device: str = "cpu"
    threads: int = 1
    start: Start | None = None

    def described(self) -> dict[str, Any]:
        """Return the configuration as plain data, with what the name of the arm stands for."""
        config = asdict(self) | {"values": dict(self.values), "recipe": ARMS[self.arm].recipe()}
        config["data"].pop("cache")
        if self.start is None:
            config.pop("start")
        else:
            config["start"].pop("file")
            config["data"].pop("tokenizer")  # a path; the key of the data tells what is in it
        return config

    @property
    def key(self) -> str:
        """Hash of the configuration."""
        text = json.dumps(self.described(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
