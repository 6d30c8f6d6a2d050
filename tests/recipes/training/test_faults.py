"""What kills ranks, one after another: the others say who is gone, and the run goes on exactly."""

import signal
import time

import pytest

from blockopt.optim import divided_work
from recipes import train
from recipes.common import checkpoints as files
from recipes.common.checkpoints import Checkpoints
from recipes.common.errors import DiskError
from recipes.common.training import Training
from recipes.training import training_state
from recipes.training.run_log import RunLog
from tests.helpers.faulty_ranks import KINDS, at, on_rank, run_ranks, send
from tests.helpers.training import flags, read_log

pytestmark = pytest.mark.distributed
STEPS = 12
OPTIONS = f"--steps {STEPS} --checkpoint-every 3 --curvature newton --curvature-every 2"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cache):
    """The log of a run of each kind that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    for kind in KINDS:
        endings, said = run_ranks(flags(folder / kind, cache, OPTIONS), kind)
        assert endings == [0, 0], said
    return {kind: folder / kind / "log.jsonl" for kind in KINDS}


def assert_same_log(one, other):
    """The same losses in each step, once each, and the same evaluations and scales."""
    for kind in ("step", "evaluation", "scales", "end"):
        found = []
        for path in (one, other):
            lines = [line for line in read_log(path) if line["kind"] == kind]
            timed = ("tokens_per_second", "seconds")
            found.append([{k: v for k, v in line.items() if k not in timed} for line in lines])
        assert found[0] == found[1]
        assert found[0]


def places(act):
    """Where a rank may be when it ends, as far as the others are concerned."""
    return {
        "in a step, before its gradients": at(train, "token_loss", 2, act),
        "in a step, after its gradients": at(train.Run, "clip", 2, act),
        "between the step and a refresh": at(Training, "_refresh", 2, act),
        "between a refresh and the next step": at(train, "schedule", 3, act),
        "while the others gather a checkpoint": at(train, "training_state", 1, act),
        "while it writes a checkpoint": at(Checkpoints, "save", 1, act),
        "in an evaluation": at(train.Run, "evaluate", 1, act),
    }


def goes_on_after(again, kind, acts):
    """Hit one rank in one place after another; the other names it, and the next run goes on."""
    for number, (place, plan) in enumerate(acts.items()):
        lost = 0 if "writes" in place else number % 2
        endings, said = run_ranks(again, kind, fault=on_rank(lost, plan))
        assert (endings[lost], endings[1 - lost]) == (-signal.SIGKILL, 1), (place, said)
        assert f"error: No answer from rank {lost} (process " in said, (place, said)
        assert said.count("error:") == 1, (place, said)
        assert "The last checkpoint:" in said
    endings, said = run_ranks(again, kind)
    assert endings == [0, 0], said


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_is_killed(kind, tmp_path, cache, whole):
    again = flags(tmp_path / "run", cache, OPTIONS, "--resume --timeout 60")
    goes_on_after(again, kind, places(send(signal.SIGKILL)))
    assert_same_log(tmp_path / "run" / "log.jsonl", whole[kind])


def test_a_rank_is_killed_while_matrices_travel(tmp_path, cache):
    """BlockMuon under FSDP2: parts are on their way to owners, or results on their way back."""
    options = f"{OPTIONS} --optimizer block-muon --timeout 60"
    again = flags(tmp_path / "run", cache, options, "--resume")
    kill = send(signal.SIGKILL)
    stages = {name: at(divided_work._Exchange, name, 4, kill) for name in ("work", "share")}
    goes_on_after(again, "fsdp2", stages)
    assert run_ranks(flags(tmp_path / "whole", cache, options), "fsdp2")[0] == [0, 0]
    assert_same_log(*(tmp_path / name / "log.jsonl" for name in ("run", "whole")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_hangs(kind, tmp_path, cache, whole):
    """It is stopped, and nothing closes its connections: the others wait, but not for ever."""
    again = flags(tmp_path / "run", cache, OPTIONS, "--resume --timeout 5")
    acts = places(send(signal.SIGSTOP))  # all of them pass; these take the least time
    some = ("after its gradients", "between the step", "while it writes")
    goes_on_after(again, kind, {k: v for k, v in acts.items() if any(place in k for place in some)})
    assert_same_log(tmp_path / "run" / "log.jsonl", whole[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_preempted(kind, tmp_path, cache, whole):
    """One rank gets SIGTERM; both stop after the same step, with a checkpoint of it."""
    again = flags(tmp_path / "run", cache, OPTIONS, "--resume")
    for number, place in enumerate(("clip", "step"), start=1):
        plan = at(train.Run, place, 4, send(signal.SIGTERM))
        endings, said = run_ranks(again, kind, fault=on_rank(number % 2, plan))
        assert endings == [143, 143], said
        assert Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1] == 5 * number
        assert f"of step {5 * number}. The same command with --resume goes on." in said
        assert said.count("stopped.") == 1
    assert run_ranks(again, kind)[0] == [0, 0]
    log = tmp_path / "run" / "log.jsonl"
    assert_same_log(log, whole[kind])
    told = [line for line in read_log(log) if line["kind"] == "stopped"]
    assert told == [{"kind": "stopped", "step": n, "signal": "SIGTERM"} for n in (5, 10)]


def test_a_checkpoint_is_asked_for(tmp_path, cache, whole):
    """One rank gets SIGUSR1; a checkpoint is written after the next step, and the run goes on."""
    arguments = flags(tmp_path / "run", cache, OPTIONS, "--keep 9")
    plan = at(train.Run, "clip", 4, send(signal.SIGUSR1))
    endings, said = run_ranks(arguments, "ddp", fault=on_rank(1, plan))
    assert endings == [0, 0], said
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [3, 5, 6, 9, 12]
    assert_same_log(tmp_path / "run" / "log.jsonl", whole["ddp"])


def test_of_four_ranks_the_right_one_is_named(tmp_path, cache):
    """The others exchange with their neighbours, and not all of those are gone."""
    arguments = flags(tmp_path / "run", cache, "--steps 4 --timeout 30")
    plan = at(train.Run, "clip", 2, send(signal.SIGKILL))
    endings, said = run_ranks(arguments, "ddp", 4, on_rank(2, plan))
    assert endings == [1, 1, -signal.SIGKILL, 1], said
    assert "error: No answer from rank 2 (process " in said
    assert said.count("error:") == 1


def mistake():
    raise KeyError("labels")


@pytest.mark.parametrize("kind", KINDS)
def test_a_bug_on_one_rank_ends_both(kind, tmp_path, cache):
    arguments = flags(tmp_path / "run", cache, OPTIONS, "--timeout 60")
    plan = at(train.Run, "clip", 2, mistake)
    endings, said = run_ranks(arguments, kind, fault=on_rank(1, plan))
    assert endings == [1, 1]
    assert said.count("Traceback") == 1
    assert "error: Rank 1 has failed: KeyError: 'labels'" in said


def no_room():
    raise OSError(28, "No space left on device")


def no_room_for_the_log():
    raise DiskError("no room for the log")


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_ends_both_ranks(kind, tmp_path, cache, whole):
    """Under a checkpoint, its gathering on the other rank, or the log: the one before it stays."""
    again = flags(tmp_path / "run", cache, OPTIONS, "--resume --timeout 60")
    for rank, plan, reason in (
        (0, at(files, "sha256", 2, no_room), "The checkpoint of step 6 could not be written"),
        (1, at(training_state, "random_state", 1, no_room), "error: Rank 1 has failed: OSError"),
        (0, at(RunLog, "sync", 1, no_room_for_the_log), "error: no room for the log"),
    ):
        endings, said = run_ranks(again, kind, fault=on_rank(rank, plan))
        assert endings[0] == endings[1] != 0, said
        assert said.count(reason) == 1, said
        assert Checkpoints(tmp_path / "run" / "checkpoints").load_latest()[0] == 3
    assert run_ranks(again, kind)[0] == [0, 0]
    assert_same_log(tmp_path / "run" / "log.jsonl", whole[kind])


def slow_disk():
    time.sleep(8)


def test_a_disk_slower_than_the_timeout_is_told(tmp_path, cache):
    arguments = flags(tmp_path / "run", cache, "--steps 4 --timeout 4")
    plan = at(Checkpoints, "save", 1, slow_disk)
    endings, said = run_ranks(arguments, "ddp", fault=on_rank(0, plan))
    assert endings == [1, 1]
    assert "All ranks answer, but one is slower than --timeout" in said
    assert "rank 0 in test_faults.py" in said
