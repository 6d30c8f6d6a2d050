"""One run: a pure function of its configuration, written once, whole or not at all."""

import json
import math
from dataclasses import replace

import pytest
import torch

from recipes.common.gpt2 import GPT2Config
from recipes.common.training import Training
from recipes.comparison import run_loop, runs
from recipes.comparison.arms import ARMS
from recipes.comparison.run_config import DataConfig, RunConfig
from recipes.comparison.run_loop import token_data
from recipes.comparison.runs import finished, path_of, provenance, read_run, run_once

MODEL = GPT2Config(vocab_size=256, context=16, width=16, depth=1, heads=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    words = ["def", "return", "self", "class", "import", "for", "in", "range"]
    text = "".join(f"{words[i * i % 8]} {words[i % 7]}\n" for i in range(1500))
    (folder / "text.txt").write_text(text)
    config = DataConfig(str(folder / "text.txt"), "bytes", 256, cache=str(folder / "cache"))
    return replace(config, key=token_data(config).key)


def starts(arm, **changes):
    spaces = (ARMS[arm].space, () if ARMS[arm].base is None else ARMS[ARMS[arm].base].space)
    return tuple(
        sorted(({axis.name: axis.start for space in spaces for axis in space} | changes).items())
    )


def config_of(data, arm="adamw", *, seed=1, steps=3, **changes):
    return RunConfig(
        arm, starts(arm, **changes), seed, steps, MODEL, data, batch_size=4, evaluation=2
    )


def lines_without_times(path):
    """What must not depend on when and where a run was done."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if "seconds" not in name} for line in lines
    ]


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_runs_two_steps(arm, data, tmp_path):
    result = run_once(config_of(data, arm, steps=2), tmp_path, provenance())
    assert math.isfinite(result.final)
    assert result.diverged is None
    assert len(result.losses) == 2
    assert result.losses[0] == pytest.approx(math.log(256), abs=0.1)
    by_curvature = ARMS[arm].scales not in (None, "ratios")
    assert bool(result.scales) == by_curvature
    assert (result.gradient_evaluations > 2) == by_curvature


def test_a_run_gives_the_same_numbers_again_and_is_done_once(data, tmp_path, monkeypatch):
    config = config_of(data, "block-adamw+newton")
    first = run_once(config, tmp_path / "a", provenance())
    run_once(config, tmp_path / "b", provenance())
    assert lines_without_times(path_of(tmp_path / "a", config)) == lines_without_times(
        path_of(tmp_path / "b", config)
    )
    monkeypatch.setattr(runs, "train", lambda *_: pytest.fail("a finished run was done again"))
    assert (
        run_once(config, tmp_path / "a", provenance()) == first == finished(tmp_path / "a", config)
    )


def test_the_file_says_what_was_run(data, tmp_path):
    config = config_of(data, "block-muon+newton", seed=7)
    result = run_once(config, tmp_path, provenance())
    header = result.header
    assert header["config"]["values"] == dict(config.values)
    assert header["config"]["data"]["key"] == data.key
    assert header["config"]["recipe"]["scales"] == "newton"
    assert header["seeds"] == {"model": 7, "data": 7, "curvature": 7}
    assert header["versions"]["torch"] == torch.__version__
    assert header["git"]
    assert data.cache not in path_of(tmp_path, config).read_text()


def test_arms_with_one_seed_see_the_same_weights_and_batches(data, tmp_path):
    first = [
        run_once(config_of(data, arm, steps=2), tmp_path, {}).losses[0]
        for arm in ("sgd", "adamw", "block-muon")
    ]
    assert len(set(first)) == 1
    other = run_once(config_of(data, "adamw", seed=2, steps=2), tmp_path, {}).losses[0]
    assert other != first[0]


def test_block_optimizers_without_scales_are_those_of_torch(data, tmp_path):
    for ours, theirs in (("block-adamw", "adamw"),):
        a, b = (run_once(config_of(data, arm, steps=5), tmp_path, {}) for arm in (ours, theirs))
        assert a.losses == pytest.approx(b.losses, rel=1e-5)
        assert a.final == pytest.approx(b.final, rel=1e-5)


def test_the_key_depends_on_all_but_the_cache(data):
    config = config_of(data)
    changed = [
        replace(config, seed=2),
        replace(config, steps=4),
        replace(config, values=starts("adamw", lr=1e-3)),
        replace(config, model=replace(MODEL, width=32)),
        replace(config, data=replace(data, key="other")),
        replace(config, batch_size=8),
        replace(config, threads=2),
        config_of(data, "block-adamw"),
    ]
    keys = [c.key for c in (config, *changed)]
    assert len(set(keys)) == len(keys)
    assert replace(config, data=replace(data, cache="elsewhere")).key == config.key


def test_tuning_and_test_are_evaluated_on_different_text(data):
    seen = {"tuning": set(), "test": set()}

    class Model(torch.nn.Module):
        def forward(self, tokens):
            seen[purpose].update(map(tuple, tokens.tolist()))
            return torch.zeros(*tokens.shape, 256)

    training = Training(Model(), torch.optim.SGD([torch.nn.Parameter(torch.ones(()))]), None)
    for purpose in seen:
        run_loop.evaluate(training, replace(config_of(data), purpose=purpose))
    assert len(seen["tuning"]) == len(seen["test"]) == 8
    assert not seen["tuning"] & seen["test"]


def test_a_checkpoint_of_other_code_is_left_aside(data, tmp_path, monkeypatch):
    config = config_of(data, steps=4)
    monkeypatch.setattr(run_loop, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    run_loop.train(config, tmp_path, "old")
    taken, step = [], Training.step
    monkeypatch.setattr(Training, "step", lambda *a: taken.append(1) or step(*a))
    run_loop.train(config, tmp_path, "old")
    assert len(taken) == 0
    run_loop.train(config, tmp_path, "new")
    assert len(taken) == 4


def test_gradient_evaluations_count_those_of_the_curvature(data, tmp_path):
    plain = run_once(config_of(data, "block-adamw", steps=40), tmp_path, {})
    newton = run_once(config_of(data, "block-adamw+newton", steps=40), tmp_path, {})
    analytic = run_once(config_of(data, "block-adamw+analytic", steps=40), tmp_path, {})
    assert plain.gradient_evaluations == 40
    assert plain.curvature_seconds == 0
    assert len(newton.scales) == 20  # every second step
    assert newton.gradient_evaluations == analytic.gradient_evaluations == 40 + 20 * 2
    assert 0 < newton.curvature_seconds < newton.seconds
    assert plain.state_bytes == pytest.approx(8, abs=0.5)


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_that_is_cut_off_goes_on_where_it_was(arm, data, tmp_path, monkeypatch):
    config = config_of(data, arm, steps=6)
    run_once(config, tmp_path / "whole", {})
    monkeypatch.setattr(run_loop, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    taken, step = [], Training.step

    def cut_off(*arguments):
        if len(taken) == 4:
            raise KeyboardInterrupt
        taken.append(1)
        return step(*arguments)

    monkeypatch.setattr(Training, "step", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run_once(config, tmp_path / "cut", {})
    taken[:] = [1, 1]  # two more steps are all that is left
    run_once(config, tmp_path / "cut", {})
    assert len(taken) == 4
    assert lines_without_times(path_of(tmp_path / "cut", config)) == lines_without_times(
        path_of(tmp_path / "whole", config)
    )
    assert [path.name for path in (tmp_path / "cut").iterdir()] == [f"{config.key}.jsonl"]


def test_a_run_whose_checkpoints_are_broken_starts_again(data, tmp_path, monkeypatch):
    config = config_of(data, "block-muon", steps=3)
    whole = run_once(config, tmp_path / "whole", {})
    folder = tmp_path / "cut" / f"{config.key}.checkpoints"
    folder.mkdir(parents=True)
    (folder / "step-00000002.pt").write_bytes(b"half of it")
    with pytest.warns(UserWarning, match="cannot be read"):
        again = run_once(config, tmp_path / "cut", {})
    assert again.losses == whole.losses
    assert again.final == whole.final


@pytest.mark.parametrize(
    ("arm", "lr"),
    [
        ("sgd", 1e12),
        ("adamw", 1e30),
        ("block-sgd", 1e12),
        ("block-adamw+newton", 1e30),
        ("block-muon", 1e30),
    ],
)
def test_a_run_that_diverges_is_a_result(arm, lr, data, tmp_path):
    config = config_of(data, arm, steps=8, lr=lr)
    result = run_once(config, tmp_path, {})
    assert result.final == math.inf
    assert result.diverged.startswith("step ")
    assert finished(tmp_path, config) == result
    assert "Infinity" not in path_of(tmp_path, config).read_text()
    assert "NaN" not in path_of(tmp_path, config).read_text()


def test_an_error_of_the_program_is_not_taken_for_divergence(data, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(Training, "step", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        run_once(config_of(data), tmp_path, {})
    assert list(tmp_path.iterdir()) == []


def test_other_data_than_those_of_the_configuration_are_refused(data, tmp_path):
    config = replace(config_of(data), data=replace(data, key="0" * 32))
    with pytest.raises(ValueError, match="have changed"):
        run_once(config, tmp_path, {})


def test_a_broken_file_is_named(data, tmp_path):
    config = config_of(data, steps=2)
    run_once(config, tmp_path, {})
    path = path_of(tmp_path, config)
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    with pytest.raises(ValueError, match="not the file of a finished run"):
        read_run(path)
