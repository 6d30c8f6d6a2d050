"""A comparison whose losses are made up, so that the right answer is known."""

import math
from concurrent.futures import Future
from dataclasses import replace

from recipes.common.gpt2 import GPT2Config
from recipes.comparison.run_config import DataConfig
from recipes.comparison.runs import RunResult
from recipes.comparison.studies import Study
from recipes.comparison.workers import run_study

MODEL = GPT2Config(vocab_size=256, context=16, width=16, depth=1, heads=2)


def study_of(*arms, budget=6, seeds=4, **changes):
    data = DataConfig("none", "bytes", 256, key="k")
    study = Study("tiny", arms, MODEL, data, 100, (0.5, 1.0, 2.0), 4, budget, seeds, length_seeds=2)
    return replace(study, **changes)


def made_up(config):
    """A loss that is lowest at lr 0.05, falls with the steps, and depends on arm and seed."""
    values = dict(config.values)
    if config.arm == "sgd" and values["lr"] > 1:
        return RunResult(
            final=math.inf, diverged="step 3: the loss is nan", seconds=1.0, header={"git": "x"}
        )
    gain = {"block-muon": -0.3, "adamw": 0.0, "sgd": 0.4}.get(
        config.arm, 0.01 * math.sin(config.seed)
    )
    loss = 3 + gain - 0.2 * math.log2(config.steps / 100) + 0.1 * math.log(values["lr"] / 0.05) ** 2
    loss += 0.05 * math.sin(12.9 * config.seed) + 0.004 * math.sin(
        config.seed * 7.1 + len(config.arm)
    )
    scales = [(step, {"query": 2.0, "norm": 0.5}) for step in (1, 6)] if "+" in config.arm else []
    losses = [loss + 3 / step for step in range(1, config.steps + 1)]
    evaluations = round(1.5 * config.steps) if "+" in config.arm else config.steps
    return RunResult(loss, losses, None, evaluations, 2.0, 0.1, 8.0, 4000, scales, 0, {"git": "x"})


def submit_made_up(config):
    future = Future()
    future.set_result(made_up(config))
    return future


def outcomes_of(study, submit=submit_made_up, on_result=lambda *_: None):
    return run_study(study, submit, {}, on_result)
