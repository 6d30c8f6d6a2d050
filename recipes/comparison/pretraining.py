"""Checkpoints for comparisons of fine-tuning: trained once, kept in the cache beside the tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from recipes.common.gpt2 import GPT2Config
from recipes.comparison.run_config import DataConfig, RunConfig, Start
from recipes.comparison.run_loop import token_data, train
from recipes.data.token_data import default_cache


@dataclass(frozen=True)
class Pretraining:
    """What a model learns before it is fine-tuned.

    Attributes:
        source: The corpus, whose tokenizer the fine-tuning takes over.
        arm: What it is trained with.
        lr: The learning rate of that.
        steps: For how long.
        rank: Of LoRA's matrices in the fine-tuning, 0 to train all weights.
    """

    source: str = "stdlib"
    arm: str = "shipped-adamw"
    lr: float = 3e-3
    steps: int = 1200
    rank: int = 0


def tokenizer_of(pretraining: Pretraining, vocab_size: int, cache: Path | None) -> str:
    """Return the tokenizer's file of the corpus that a checkpoint is trained on."""
    return str(token_data(_corpus(pretraining, vocab_size, cache)).tokenizer)


def checkpoint(
    pretraining: Pretraining, model: GPT2Config, batch_size: int, cache: Path | None
) -> Start:
    """Return the checkpoint to fine-tune, after training it if it is not in the cache."""
    data = _corpus(pretraining, model.vocab_size, cache)
    run = RunConfig(
        arm=pretraining.arm,
        values=(("lr", pretraining.lr),),
        seed=0,
        steps=pretraining.steps,
        model=model,
        data=replace(data, key=token_data(data).key),
        batch_size=batch_size,
    )
    folder = (default_cache() if cache is None else Path(cache)) / "pretrained"
    file = folder / f"{run.key}.pt"
    if not file.exists():
        what = f"Training the checkpoint: {pretraining.steps:,} steps on {pretraining.source}"
        with Console(stderr=True).status(what):
            train(run, folder / run.key, run.key, weights=file)
    return Start(run.key, str(file), pretraining.rank)


def _corpus(pretraining: Pretraining, vocab_size: int, cache: Path | None) -> DataConfig:
    kept = None if cache is None else str(cache)
    return DataConfig(pretraining.source, None, vocab_size, cache=kept)
