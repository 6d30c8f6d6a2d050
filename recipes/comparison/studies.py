"""The protocol: what is trained for how long, how much each arm is tuned, and the test seeds.

Every arm of a study has the same model, data, batches, number of tokens and schedule to zero, the
same number of tuning runs on tuning seeds, and the same test seeds, which no tuning has seen. Test
runs come in several lengths, each with its own decay.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockopt.checks import check_count
from recipes.common.gpt2 import PRESETS as MODELS
from recipes.common.gpt2 import GPT2Config
from recipes.comparison.arms import ARMS, Arm
from recipes.comparison.pretraining import Pretraining, checkpoint, tokenizer_of
from recipes.comparison.run_config import DataConfig, RunConfig, Start
from recipes.comparison.run_loop import token_data
from recipes.comparison.runs import RunResult
from recipes.comparison.tuning import Axis, Tuned, tune

TUNING_SEED, TEST_SEED = 1000, 1  # the first of each


@dataclass(frozen=True)
class Study:
    """The comparison of some arms at one model size.

    Attributes:
        name: Size for titles, such as "1M".
        arms: Names of `ARMS`.
        model: Sizes; the vocabulary is that of the data.
        data: What to train on.
        steps: The main length, at which arms are tuned.
        lengths: All lengths of test runs, as factors of `steps`; 1 must be among them.
        batch_size: Sequences per step.
        budget: Tuning runs per arm.
        seeds: Test seeds at the main length.
        length_seeds: How many of them at the other lengths.
        baseline: The arm that all others are compared with.
        evaluation: Batches of held-out data.
        device: Where to train.
        threads: Threads of each run.
        pretraining: What trains the checkpoint that is fine-tuned, None for fresh weights.
        start: That checkpoint, once the study is prepared.
    """

    name: str
    arms: tuple[str, ...]
    model: GPT2Config
    data: DataConfig
    steps: int
    lengths: tuple[float, ...]
    batch_size: int
    budget: int
    seeds: int
    length_seeds: int
    baseline: str = "adamw"
    evaluation: int = 32
    device: str = "cpu"
    threads: int = 1
    pretraining: Pretraining | None = None
    start: Start | None = None

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "budget", "seeds", "length_seeds", "evaluation", "threads")
        for name in counts:
            check_count(name, getattr(self, name))
        if 1 not in self.lengths or min(self.lengths) * self.steps < 2:
            raise ValueError(
                f"Invalid lengths={self.lengths} of {self.steps} steps. "
                "Must hold 1, and give 2 steps or more."
            )
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown or not self.arms:
            raise ValueError(f"Invalid arms={unknown}. Must be some of {', '.join(ARMS)}.")

    def tests(self) -> list[tuple[int, int]]:
        """Return length and seed of all test runs of an arm, the main length first."""
        return [
            (round(length * self.steps), TEST_SEED + number)
            for length in sorted(self.lengths, key=lambda length: length != 1)
            for number in range(self.seeds if length == 1 else min(self.seeds, self.length_seeds))
        ]

    def runs_per_arm(self) -> int:
        """Return the number of tuning and test runs of each arm."""
        return self.budget + len(self.tests())

    def prepared(self, cache: Path | None) -> Study:
        """Load the data, and return the study with their vocabulary, context and key.

        A checkpoint that is to be fine-tuned is trained now, unless the cache has it.
        """
        config = replace(self.data, cache=None if cache is None else str(cache))
        if self.pretraining is not None:
            tokenizer = tokenizer_of(self.pretraining, self.model.vocab_size, cache)
            config = replace(config, tokenizer=tokenizer)
        data = token_data(config)
        context = data.context or self.model.context
        model = replace(self.model, vocab_size=data.vocab_size, context=context)
        prepared = replace(self, data=replace(config, key=data.key), model=model)
        if self.pretraining is None:
            return prepared
        start = checkpoint(self.pretraining, model, self.batch_size, cache)
        return replace(prepared, start=start)

    def config(
        self, arm: str, values: Mapping[str, float], seed: int, steps: int, purpose: str
    ) -> RunConfig:
        """Return one run of this study, whose purpose is "tuning" or "test"."""
        return RunConfig(
            arm=arm,
            values=tuple(sorted(values.items())),
            seed=seed,
            steps=steps,
            model=self.model,
            data=self.data,
            batch_size=self.batch_size,
            evaluation=self.evaluation,
            purpose=purpose,
            device=self.device,
            threads=self.threads,
            start=self.start,
        )


@dataclass(frozen=True)
class ArmOutcome:
    """All runs of an arm.

    Attributes:
        arm: The arm.
        tuned: What tuning found.
        tests: `{steps: {seed: result}}` of the test runs with the best hyperparameters.
        tuning: The tuning runs.
        space: What was tuned, from where.
        fixed: Hyperparameters that a control took from its base.
    """

    arm: Arm
    tuned: Tuned
    tests: dict[int, dict[int, RunResult]]
    tuning: list[RunResult]
    space: tuple[Axis, ...]
    fixed: Mapping[str, float]

    @property
    def values(self) -> dict[str, float]:
        """The hyperparameters of the test runs."""
        return {**self.tuned.best, **self.fixed}

    def test_runs(self) -> list[RunResult]:
        """Return the test runs of all lengths."""
        return [run for runs in self.tests.values() for run in runs.values()]


Campaign = Generator[list[RunConfig], list[RunResult], ArmOutcome]


def campaign(
    study: Study,
    arm: Arm,
    start: Mapping[str, float] | None = None,
    base: Mapping[str, float] | None = None,
) -> Campaign:
    """Tune an arm, then test it, as a generator that yields runs and is sent their results.

    Args:
        study: The protocol.
        arm: One of its arms.
        start: Where to start tuning instead of where the arm says, such as the best values of a
            smaller model.
        base: The tuned values of the arm that a control is for.

    Returns:
        The outcome.
    """
    space = [axis._replace(start=(start or {}).get(axis.name, axis.start)) for axis in arm.space]
    names = {axis.name for axis in space}
    fixed = {name: value for name, value in (base or {}).items() if name not in names}
    search = tune(space, study.budget, near=start is not None)
    points, tuning = next(search), []
    while True:
        results = yield [
            study.config(arm.name, fixed | point, TUNING_SEED, study.steps, "tuning")
            for point in points
        ]
        tuning += results
        try:
            points = search.send([result.final for result in results])
        except StopIteration as stop:
            tuned: Tuned = stop.value
            break
    planned, best = study.tests(), fixed | tuned.best
    results = yield [study.config(arm.name, best, seed, steps, "test") for steps, seed in planned]
    tests: dict[int, dict[int, RunResult]] = {}
    for (steps, seed), result in zip(planned, results, strict=True):
        tests.setdefault(steps, {})[seed] = result
    return ArmOutcome(arm, tuned, tests, tuning, tuple(space), fixed)


SHIPPED = tuple(name for name, arm in ARMS.items() if arm.shipped)
OURS = tuple(name for name, arm in ARMS.items() if arm.ours and not arm.shipped)
OTHERS = ("sgd", "adamw", "adamw-groups", "adamw-ratios", "adam-mini", "muon", "soap")
CONTROLS = ("block-adamw+newton-shuffled", "block-adamw+newton-inverted")
CONFIRMED = ("adamw", "adamw-groups", "muon", "block-adamw+newton", "block-adamw-block")
CONFIRMED += ("block-muon",)
BEST = ("adamw", "muon", "block-adamw+newton", "block-muon", "block-muon+newton")
BY_HAND = ("adamw-groups", "muon-groups", "sgd")  # more than lr is tuned
LONGER = ("shipped-adamw", "shipped-muon", "muon-groups", "shipped-block-adamw-whitened")
LONGER += ("shipped-block-muon",)
DEMO = ("adamw", "adam-mini", "muon", "block-adamw+newton", "block-adamw-block", "block-muon")
DEMO += ("block-muon+newton",)
TUNED_FURTHER = ("shipped-adamw", "shipped-muon", "shipped-block-adamw+newton")
TUNED_FURTHER += ("shipped-block-adamw-whitened", "shipped-block-muon")
SMALL = "Salesforce/wikitext:wikitext-2-raw-v1"
LARGE = "Salesforce/wikitext:wikitext-103-raw-v1"  # the standard library would be repeated often


def _study(
    name: str, arms: Sequence[str], model: GPT2Config, runs: Mapping[str, int], **more: Any
) -> Study:
    data = DataConfig(more.pop("source", "stdlib"), more.pop("tokenizer", None), model.vocab_size)
    more = {"lengths": (1.0,), "length_seeds": max(3, runs["seeds"] // 2)} | more
    return Study(name, tuple(arms), model, data, **runs, **more)


def presets() -> dict[str, tuple[Study, ...]]:
    """Return the studies of each preset. Later ones start tuning at the best of the one before."""
    tiny = GPT2Config(vocab_size=256, context=64, width=64, depth=3, heads=4)
    large = GPT2Config(vocab_size=8192, context=512, width=512, depth=8, heads=8)
    every = (*OTHERS, *OURS, *CONTROLS)
    tuned = [name for name in ARMS if name not in SHIPPED]
    short, long = {"lengths": (0.5, 1.0, 1.5)}, {"lengths": (0.5, 1.0, 2.0)}
    demo = {"steps": 100, "batch_size": 16, "budget": 5, "seeds": 4}
    small = {"steps": 1200, "batch_size": 8, "budget": 4, "seeds": 5}
    longer = {"steps": 2000, "batch_size": 4, "budget": 3, "seeds": 5}
    start = {"steps": 150, "batch_size": 8, "budget": 7, "seeds": 5}
    confirmed = {"steps": 300, "batch_size": 4, "budget": 3, "seeds": 4}
    full = {"steps": 4000, "batch_size": 32, "budget": 20, "seeds": 8}
    larger = {"steps": 8000, "batch_size": 32, "budget": 6, "seeds": 5}
    muon = {"baseline": "shipped-muon"}
    further = {"steps": 100, "batch_size": 8, "budget": 6, "seeds": 5}
    tuned_on = {"source": SMALL, "baseline": "shipped-adamw", "lengths": (0.5, 1.0, 3.0)}
    return {
        "demo": (_study("0.2M", DEMO, tiny, demo, tokenizer="bytes", **long),),
        "small": (
            _study("1M", (*BY_HAND, *SHIPPED), MODELS["1M"], small, lengths=(0.75, 1.0), **muon),
            _study("3M", LONGER, MODELS["3M"], longer, **muon),
        ),
        "start": (
            _study("1M", every, MODELS["1M"], start, **short),
            _study("3M", BEST, MODELS["3M"], confirmed),
        ),
        "fine-tune": tuple(
            _study(
                f"1M-{name}",
                TUNED_FURTHER,
                MODELS["1M"],
                further,
                pretraining=Pretraining(rank=rank),
                **tuned_on,
            )
            for name, rank in (("all-weights", 0), ("lora", 8))
        ),
        "full": (
            _study("10M", tuned, MODELS["10M"], full, source=LARGE, **long),
            _study("30M", CONFIRMED, large, larger, source=LARGE),
        ),
    }
