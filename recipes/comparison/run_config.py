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
        purpose: "tuning" or "test", which are evaluated on different parts of the held-out data.
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
    purpose: str = "test"
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
        return hashlib.sha256(json.dumps(self.described(), sort_keys=True).encode()).hexdigest()[
            :16
        ]
