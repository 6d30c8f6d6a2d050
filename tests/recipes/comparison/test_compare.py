"""The comparison as a whole: equal budgets, seeds, presets, flags, and a kill."""

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest
from rich.console import Console

from recipes import compare
from recipes.common.checkpoints import run_lock
from recipes.comparison.arms import ARMS
from recipes.comparison.studies import TEST_SEED, TUNING_SEED, presets
from recipes.comparison.workers import workers
from tests.helpers import ROOT
from tests.helpers.comparison import made_up, outcomes_of, study_of


def test_tuning_and_test_seeds_differ_and_lengths_have_runs_of_their_own():
    done = []
    study = study_of("adamw", "sgd")
    outcomes_of(study, on_result=lambda config, _: done.append(config))
    tuning = [config for config in done if config.seed == TUNING_SEED]
    tests = [config for config in done if config.seed != TUNING_SEED]
    assert {config.steps for config in tuning} == {100}
    for arm in study.arms:
        assert sum(config.arm == arm for config in tuning) == study.budget
        assert sum(config.arm == arm for config in done) == study.runs_per_arm()
        seeds = {
            steps: {c.seed for c in tests if c.arm == arm and c.steps == steps}
            for steps in (50, 100, 200)
        }
        assert seeds[100] == set(range(TEST_SEED, TEST_SEED + 4))
        assert seeds[50] == seeds[200] == {1, 2}
        assert len({config.values for config in tests if config.arm == arm}) == 1


def test_the_order_in_which_workers_finish_does_not_matter():
    study = study_of("adamw", "sgd", "block-muon")
    held = []

    def later(config):  # the last submitted finishes first
        future = Future()
        held.append((future, config))
        return future

    def release(waiting, return_when):
        future, config = held.pop()
        future.set_result(made_up(config))
        return argparse.Namespace(done=[future])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.comparison.workers.wait", release)
        shuffled = outcomes_of(study, later)
    assert shuffled == outcomes_of(study)


def test_a_failed_run_is_named():
    def fail(config):
        future = Future()
        future.set_exception(TypeError("no such thing"))
        return future

    with pytest.raises(RuntimeError, match=r"adamw with lr=0\.003.*no such thing"):
        outcomes_of(study_of("adamw"), fail)


def test_presets_are_sound():
    for studies in presets().values():
        for study in studies:
            assert {study.baseline} < set(study.arms) <= set(ARMS)
            assert ARMS[study.baseline].optimizer in ("adamw", "muon")
            assert study.seeds >= 4
    assert {"adamw-groups", "muon-groups"} < set(presets()["small"][0].arms)
    start = presets()["start"][0]
    kinds = {(arm.optimizer, arm.scales, arm.control) for arm in map(ARMS.get, start.arms)}
    for base in ("block-sgd", "block-adamw", "block-adamw-block", "block-muon"):
        assert {(base, scales, None) for scales in (None, "analytic", "newton")} <= kinds
    assert {("block-adamw", "newton", "shuffled"), ("block-adamw", "newton", "inverted")} <= kinds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"lengths": (0.5,)}, "hold 1"),
        ({"arms": ("adam",)}, "adam"),
        ({"budget": 0}, "budget=0"),
    ],
)
def test_bad_studies_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(study_of("adamw"), **changes)


@pytest.mark.parametrize(
    "flags",
    [
        *(["--arms", "adam"], ["--seeds", "0"], ["--workers", "0"], ["--preset", "huge"]),
        *(["--device", "guess"], ["--data", "missing.txt"]),
    ],
)
def test_bad_flags_are_refused_at_once(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags])
    with pytest.raises(SystemExit) as stop:
        compare.main()
    assert stop.value.code == 2
    assert "error" in capsys.readouterr().err


def test_bugs_keep_their_traceback(monkeypatch, tmp_path, capsys):
    """What the user can mend is one line, anything else is not caught."""
    flags = ["--data", "addition:1", "--cache", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags])
    for error in (RuntimeError("shapes do not match"), ValueError("bad"), OSError("bad")):
        monkeypatch.setattr(
            compare, "compare", lambda *_, error=error: (_ for _ in ()).throw(error)
        )
        with pytest.raises(type(error)) as caught:
            compare.main()
        assert caught.value is error
    with run_lock(tmp_path / "out"):
        monkeypatch.undo()
        monkeypatch.setattr(sys, "argv", ["compare.py", *flags])
        with pytest.raises(SystemExit, match="2"):
            compare.main()
    assert re.fullmatch(r"error: Another run trains in .*\n", capsys.readouterr().err)


@pytest.mark.distributed
def test_killed_in_the_middle_the_same_command_goes_on(tmp_path):
    text = "".join(f"{i * i % 97} plus {i % 31} is {i * i % 97 + i % 31}\n" for i in range(4000))
    (tmp_path / "text.txt").write_text(text)
    flags = ["--arms", "adamw", "block-adamw+newton", "--steps=4", "--seeds=2", "--budget=3"]
    flags += ["--data", str(tmp_path / "text.txt"), "--cache", str(tmp_path / "cache")]
    command = [sys.executable, str(ROOT / "recipes" / "compare.py"), *flags]
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, "--out", str(killed)], stdout=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 300
    while len(list((killed / "runs").glob("*.jsonl"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)  # the parent alone: workers end by themselves
    process.wait()
    before = {path.name: path.read_bytes() for path in (killed / "runs").glob("*.jsonl")}
    assert 3 <= len(before) < 14
    for out in (killed, tmp_path / "whole"):
        options = compare.arguments().parse_args(flags)
        studies, left_out = compare.chosen_studies(options)
        studies = [study.prepared(options.cache) for study in studies]
        compare.compare(studies, left_out, out, 1, Console(file=io.StringIO()))
    paths = sorted(path.name for path in (tmp_path / "whole" / "runs").glob("*"))
    assert paths == sorted(path.name for path in (killed / "runs").glob("*"))
    assert len(paths) == 2 * studies[0].runs_per_arm() == 18
    for name in paths:
        assert without_times(killed / "runs" / name) == without_times(
            tmp_path / "whole" / "runs" / name
        )
        assert (
            before.get(name, (killed / "runs" / name).read_bytes())
            == (killed / "runs" / name).read_bytes()
        )


def without_times(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0].pop("git")  # someone may commit while the tests run
    return [
        {name: value for name, value in line.items() if "seconds" not in name} for line in lines
    ]


def test_workers_must_be_at_least_one(tmp_path):
    with pytest.raises(ValueError, match="number=0"), workers(0, tmp_path, {}):
        pass
