"""The protocol: what is trained for how long, how much tuning each arm gets, and which seeds it is tested on.

Every arm of a study has the same model, data, batches, number of tokens and schedule to zero, the
same number of tuning runs on tuning seeds, and the same test seeds, which no tuning has seen. Test
runs come in several lengths, each with its own decay.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.common.gpt2 import PRESETS as MODELS
from recipes.common.gpt2 import GPT2Config
from recipes.comparison.arms import ARMS, Arm
from recipes.comparison.run_config import DataConfig, RunConfig
from recipes.comparison.run_loop import token_data
from recipes.comparison.runs import RunResult
from recipes.comparison.tuning import Axis, Tuned, tune

TUNING_SEED, TEST_SEED = 1000, 1  # the first of each


@dataclass(frozen=True)
class Study:
    """One model size.

    Attributes:
        name: For titles.
        arms: Names of `ARMS`.
        model: Sizes; the vocabulary is that of the data.
        data: What to train on.
        steps: Of the main length, at which arms are tuned.
        lengths: All lengths of test runs, as factors of `steps`; 1 must be among them.
        batch_size: Sequences a step.
        budget: Tuning runs an arm.
        seeds: Test seeds at the main length.
        length_seeds: How many of them at the other lengths.
        evaluation: Batches of held-out data.
        device: Where to train.
        threads: Of each run.
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
    evaluation: int = 32
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_size",
            "budget",
            "seeds",
            "length_seeds",
            "evaluation",
            "threads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"Invalid {name}={getattr(self, name)}. Must be an integer >= 1.")
        if 1 not in self.lengths or min(self.lengths) * self.steps < 2:
            raise ValueError(
                f"Invalid lengths={self.lengths} of {self.steps} steps. Must hold 1, and give 2 steps or more."
            )
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown or not self.arms:
            raise ValueError(f"Invalid arms={unknown}. Must be some of {', '.join(ARMS)}.")

    def runs_per_arm(self) -> int:
        """Tuning and test runs of each arm."""
        return self.budget + sum(
            self.seeds if length == 1 else min(self.seeds, self.length_seeds)
            for length in self.lengths
        )

    def prepared(self, cache: Path | None) -> Study:
        """The same study with the vocabulary, the context and the key of its data, which are loaded or made now."""
        config = replace(self.data, cache=None if cache is None else str(cache))
        data = token_data(config)
        model = replace(
            self.model, vocab_size=data.vocab_size, context=data.context or self.model.context
        )
        return replace(self, data=replace(config, key=data.key), model=model)

    def config(
        self, arm: str, values: Mapping[str, float], seed: int, steps: int, purpose: str
    ) -> RunConfig:
        """One run of this study, of which the purpose is "tuning" or "test"."""
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
        )


@dataclass(frozen=True)
class ArmOutcome:
    """All runs of an arm.

    Attributes:
        arm: Which one.
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
        """All hyperparameters of the test runs."""
        return {**self.tuned.best, **self.fixed}

    def test_runs(self) -> list[RunResult]:
        """Those of all lengths."""
        return [run for runs in self.tests.values() for run in runs.values()]


Campaign = Generator[list[RunConfig], list[RunResult], ArmOutcome]


def campaign(
    study: Study,
    arm: Arm,
    start: Mapping[str, float] | None = None,
    base: Mapping[str, float] | None = None,
) -> Campaign:
    """Tune an arm, then test it: a generator that yields runs to do, is sent their results, and returns the outcome.

    Args:
        study: The protocol.
        arm: One of its arms.
        start: Where to start tuning in place of what the arm declares, such as the best of a
            smaller model.
        base: Of a control, the tuned values of the arm that it controls.
    """
    space = [axis._replace(start=(start or {}).get(axis.name, axis.start)) for axis in arm.space]
    fixed = {
        name: value
        for name, value in (base or {}).items()
        if name not in {axis.name for axis in space}
    }
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
    planned = [
        (round(length * study.steps), TEST_SEED + number)
        for length in sorted(study.lengths, key=lambda length: length != 1)
        for number in range(study.seeds if length == 1 else min(study.seeds, study.length_seeds))
    ]
    results = yield [
        study.config(arm.name, fixed | tuned.best, seed, steps, "test") for steps, seed in planned
    ]
    tests: dict[int, dict[int, RunResult]] = {}
    for (steps, seed), result in zip(planned, results, strict=True):
        tests.setdefault(steps, {})[seed] = result
    return ArmOutcome(arm, tuned, tests, tuning, tuple(space), fixed)


OURS = tuple(name for name, arm in ARMS.items() if arm.ours)
OTHERS = ("sgd", "adamw", "adamw-groups", "adamw-ratios", "adam-mini", "muon", "soap")
CONTROLS = ("block-adamw+newton-shuffled", "block-adamw+newton-inverted")
CONFIRMED = (
    "adamw",
    "adamw-groups",
    "muon",
    "block-adamw+newton",
    "block-adamw-block",
    "block-muon",
)
BEST = ("adamw", "muon", "block-adamw+newton", "block-muon", "block-muon+newton")
DEMO_ARMS = (
    "sgd",
    "adamw",
    "adam-mini",
    "muon",
    "block-adamw+newton",
    "block-adamw-block",
    "block-muon",
)


LARGE = "Salesforce/wikitext:wikitext-103-raw-v1"  # of the hub; the standard library would be read many times over


def _study(
    name: str,
    arms: Sequence[str],
    model: GPT2Config,
    *,
    steps: int,
    batch_size: int,
    budget: int,
    seeds: int,
    source: str = "stdlib",
) -> Study:
    data = DataConfig(source, None, model.vocab_size)
    lengths = (0.5, 1.0, 2.0)
    return Study(
        name,
        tuple(arms),
        model,
        data,
        steps,
        lengths,
        batch_size,
        budget,
        seeds,
        length_seeds=max(3, seeds // 2),
    )


def presets() -> dict[str, tuple[Study, ...]]:
    """The studies of each preset. Later ones start tuning at the best of the one before."""
    every = (*OTHERS, *OURS, *CONTROLS)
    demo = GPT2Config(vocab_size=256, context=64, width=64, depth=3, heads=4)
    confirmed = _study("3M", BEST, MODELS["3M"], steps=300, batch_size=4, budget=3, seeds=4)
    middle = _study(
        "10M", ARMS, MODELS["10M"], steps=4000, batch_size=32, budget=20, seeds=8, source=LARGE
    )
    model = GPT2Config(vocab_size=8192, context=512, width=512, depth=8, heads=8)
    larger = _study(
        "30M", CONFIRMED, model, steps=8000, batch_size=32, budget=6, seeds=5, source=LARGE
    )
    return {
        "demo": (
            replace(
                _study("0.2M", DEMO_ARMS, demo, steps=100, batch_size=16, budget=5, seeds=4),
                data=DataConfig("stdlib", "bytes", 256),
            ),
        ),
        "small": (
            replace(
                _study("1M", every, MODELS["1M"], steps=150, batch_size=8, budget=7, seeds=5),
                lengths=(0.5, 1.0, 1.5),
            ),
            replace(confirmed, lengths=(1.0,)),
        ),
        "full": (middle, replace(larger, lengths=(1.0,))),
    }
