"""kill -9 at any moment, then resume: the losses of a run that was never killed, bit by bit."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from recipes import train
from recipes.common.checkpoints import Checkpoints
from recipes.training import run_log
from tests.helpers import ROOT
from tests.helpers.faulty_ranks import at, send
from tests.helpers.training import OURS, die, flags, forget, in_child, losses_of, read_log, run

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 9
RUNS = {
    **{name: name for name in OURS},
    "newton": "block-adamw --curvature newton --curvature-every 2",
    "gauss_newton on muon": "block-muon --curvature gauss_newton --curvature-every 3",
    "newton on torch": "adamw --curvature newton --curvature-every 2",
    "muon of torch": "muon",
    "schedulefree": "schedulefree",
    "accumulated": "block-adamw --accumulate 2 --schedule wsd",
}


def options(name, output, cache, *more):
    every = f"--steps {STEPS} --checkpoint-every 2 --optimizer {RUNS[name]}"
    return flags(output, cache, every, *more)


def in_step(number):
    """Dies in the middle of a step, after the gradients."""

    def plan(patch):
        step = train.Run.step
        count = iter(range(1, 100))
        patch.setattr(
            train.Run, "step", lambda self, *a: die() if next(count) == number else step(self, *a)
        )

    return plan


def in_write(number):
    """Dies when a line of the log is half written."""

    def plan(patch):
        write = run_log.RunLog.write
        count = iter(range(1, 100))

        def half(self, kind, **values):
            if next(count) == number:
                self._file.write(b'{"kind": "step", "st')
                die()
            write(self, kind, **values)

        patch.setattr(run_log.RunLog, "write", half)

    return plan


def in_checkpoint(number, operation):
    """Dies in the middle of writing a checkpoint, before an operation on its files."""

    def plan(patch):
        save = Checkpoints.save

        def deadly(self, step, state):
            if step == number:
                count = iter(range(1, 100))

                def event(name, arguments):
                    if (
                        name in ("open", "os.rename", "os.remove")
                        and "step-" in str(arguments[0])
                        and next(count) == operation
                    ):
                        die()

                sys.addaudithook(event)
            return save(self, step, state)

        patch.setattr(Checkpoints, "save", deadly)

    return plan


def killed(arguments, plan):
    def task():
        patch = pytest.MonkeyPatch()
        plan(patch)
        run(arguments)

    assert in_child(task) == -signal.SIGKILL


def assert_same_log(one, other):
    """The same losses in each step, once each, and the same evaluations and scales."""
    assert losses_of(one) == losses_of(other)
    for kind in ("step", "evaluation", "scales", "end"):
        lines, others = (
            [line for line in read_log(path) if line["kind"] == kind] for path in (one, other)
        )
        timed = ("tokens_per_second", "seconds")
        assert [{k: v for k, v in line.items() if k not in timed} for line in lines] == [
            {k: v for k, v in line.items() if k not in timed} for line in others
        ]


def assert_same_weights(one, other):
    a, b = (
        torch.load(next(folder.glob("checkpoints/step-*9.pt")), weights_only=True)
        for folder in (one, other)
    )
    assert all(torch.equal(value, b["model"][name]) for name, value in a["model"].items())


@pytest.mark.parametrize("name", RUNS)
def test_killed_runs_are_as_whole_ones(name, tmp_path, cache):
    whole = run(options(name, tmp_path / "whole", cache))
    assert list(losses_of(whole)) == list(range(1, STEPS + 1))
    output = tmp_path / "killed"
    again = options(name, output, cache, "--resume")
    killed(again, in_step(2))  # before the first checkpoint
    killed(again, in_checkpoint(2, 1))
    killed(again, in_step(6))
    killed(again, in_checkpoint(6, 2))
    run(again)
    assert_same_log(whole, output / "log.jsonl")
    assert_same_weights(tmp_path / "whole", output)
    assert [
        line["step"] for line in read_log(output / "log.jsonl") if line["kind"] == "resumed"
    ] == [4, 4]


def test_killed_at_many_points(tmp_path, cache):
    """In eleven places: steps, lines of the log, and operations on the files of a checkpoint."""
    whole = run(options("newton", tmp_path / "whole", cache))
    output = tmp_path / "killed"
    again = options("newton", output, cache, "--resume")
    plans = [
        in_write(1),
        in_write(3),
        in_checkpoint(2, 3),
        in_step(3),
        in_checkpoint(4, 4),
        in_write(2),
        in_checkpoint(6, 5),
    ]
    plans += [in_checkpoint(8, 1), in_checkpoint(8, 6), in_write(4), in_checkpoint(9, 2)]
    for plan in plans:
        killed(again, plan)
    run(again)
    assert_same_log(whole, output / "log.jsonl")
    assert_same_weights(tmp_path / "whole", output)


def test_random_numbers_go_on(tmp_path, cache):
    """A model of transformers with dropout draws numbers in each step."""
    config = tmp_path / "config.json"
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    config.write_text(json.dumps({"model_type": "gpt2", **sizes, "resid_pdrop": 0.5}))
    plain = options("block-adamw", tmp_path / "whole", cache, "--hf-config", config)
    first = plain.index("--width")
    plain = plain[:first] + plain[first + 6 :]  # sizes are in the config
    whole = run(plain)
    again = [flag.replace("whole", "killed") for flag in plain] + ["--resume"]
    killed(again, in_step(5))
    run(again)
    assert_same_log(whole, tmp_path / "killed" / "log.jsonl")
    still = config.with_name("still.json")
    still.write_text(config.read_text().replace("0.5", "0.0"))
    without = run(
        [flag.replace("whole", "without").replace("config.json", "still.json") for flag in plain]
    )
    assert losses_of(without) != losses_of(whole)


def test_the_script_killed_from_outside(tmp_path, cache):
    """The real script, killed by another process whenever it happens to be."""
    options = "--steps 60 --checkpoint-every 5 --curvature newton --resume"
    arguments = flags(tmp_path / "killed", cache, options)
    command = [sys.executable, str(ROOT / "recipes" / "train.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    log = tmp_path / "killed" / "log.jsonl"
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 100
    while (
        not (log.exists() and len(log.read_bytes().splitlines()) >= 30)
        and time.monotonic() < deadline
    ):
        time.sleep(0.002)
        assert process.poll() is None
    process.kill()
    process.wait()
    assert 30 <= len(log.read_bytes().splitlines()) < 80
    run(arguments)
    arguments[arguments.index(str(tmp_path / "killed"))] = str(tmp_path / "whole")
    assert_same_log(run(arguments), log)


def test_a_run_that_is_asked_to_stop_goes_on_exactly(tmp_path, cache):
    """SIGTERM in step 4: a checkpoint after step 5, exit code 143."""
    whole = run(options("newton", tmp_path / "whole", cache))
    again = options("newton", tmp_path / "run", cache, "--resume")

    def task():
        patch = pytest.MonkeyPatch()
        at(train.Run, "clip", 4, send(signal.SIGTERM))(patch)
        forget()
        train.main(again)

    assert in_child(task) == 143
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1] == 5
    assert_same_log(whole, run(again))


def test_a_finished_run_is_not_done_again(tmp_path, cache):
    arguments = options("block-sgd", tmp_path, cache, "--resume")
    before = [line for line in read_log(run(arguments)) if line["kind"] != "resumed"]
    after = [line for line in read_log(run(arguments)) if line["kind"] != "resumed"]
    assert after == before
