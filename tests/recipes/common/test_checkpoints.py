"""Checkpoints survive kills, full disks and broken files; a folder has one run at a time."""

import doctest
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from recipes.common import checkpoints
from recipes.common.checkpoints import (
    CheckpointError,
    Checkpoints,
    RunIsLockedError,
    load_checkpoint,
    run_lock,
)
from recipes.common.errors import DiskError
from tests.helpers import ROOT


def state(step, size=1000):
    generator = torch.Generator().manual_seed(step)
    return {
        "step": step,
        "nested": {"weights": [torch.randn(size, generator=generator)]},
        "name": "run",
    }


def assert_state(found, step, size=1000):
    assert found["step"] == step
    assert torch.equal(found["nested"]["weights"][0], state(step, size)["nested"]["weights"][0])


def python(code, *arguments, **options):
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes, **options)


def test_doctests():
    assert doctest.testmod(checkpoints).failed == 0


def test_the_last_ones_are_kept_with_checksums(tmp_path):
    saved = Checkpoints(tmp_path / "made" / "here", keep=3)
    assert saved.load_latest() is None
    for step in (5, 10, 15, 20, 100_000_000):
        path = saved.save(step, state(step))
    assert saved.steps() == [15, 20, 100_000_000]
    assert sorted(p.name for p in path.parent.iterdir()) == sorted(
        [saved.path(step).name + end for step in saved.steps() for end in ("", ".sha256")]
    )
    checksum = path.with_name(path.name + ".sha256").read_text()
    assert checksum == f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
    step, found = saved.load_latest()
    assert step == 100_000_000
    assert_state(found, step)


def test_saving_a_step_again_replaces_it(tmp_path):
    saved = Checkpoints(tmp_path)
    saved.save(1, state(7))
    saved.save(1, state(1))
    assert saved.steps() == [1]
    assert_state(saved.load_latest()[1], 1)


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "flip", "append", "no checksum", "empty checksum", "binary checksum"]
)
def test_a_broken_checkpoint_is_passed_over(tmp_path, damage):
    saved = Checkpoints(tmp_path)
    for step in (1, 2):
        path = saved.save(step, state(step))
    data, checksum = bytearray(path.read_bytes()), path.with_name(path.name + ".sha256")
    if damage == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes({"cut": data[:-100], "empty": b"", "append": data + b"\0"}.get(damage, data))
    if damage == "no checksum":
        checksum.unlink()
    elif "checksum" in damage:
        checksum.write_bytes(b"" if "empty" in damage else b"\xff\xfe")
    with pytest.warns(UserWarning, match=r"step-00000002\.pt.*Going on from step 1 instead"):
        step, found = saved.load_latest()
    assert step == 1
    assert_state(found, 1)


def test_without_a_whole_checkpoint_nothing_is_guessed(tmp_path):
    saved = Checkpoints(tmp_path)
    path = saved.save(1, state(1))
    path.write_bytes(path.read_bytes()[:50])
    with (
        pytest.warns(UserWarning, match=r"50 bytes.*There is none before it"),
        pytest.raises(CheckpointError, match="None of the 1"),
    ):
        saved.load_latest()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_checkpoint(tmp_path / "step-00000009.pt")


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    path = Checkpoints(tmp_path).save(1, {"code": Path("x")})
    with pytest.raises(Exception, match=r"weights_only|Weights only"):
        load_checkpoint(path)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    """A real error of the system: no file may grow beyond 64 kB."""
    saved = Checkpoints(tmp_path)
    saved.save(1, state(1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    code = f"""
        import resource, signal
        from pathlib import Path
        from tests.recipes.common.test_checkpoints import Checkpoints, CheckpointError, state
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            Checkpoints(Path({str(tmp_path)!r})).save(2, state(2, 1_000_000))
        except CheckpointError as error:
            print(error)
    """
    out, err = python(code).communicate(timeout=60)
    assert "step 2 could not be written" in out, err
    assert "That of step 1 is as it was" in out
    assert {
        path.name: path.read_bytes() for path in tmp_path.iterdir()
    } == before  # nothing half-written lies around
    assert_state(saved.load_latest()[1], 1)


def test_no_space_for_the_first_checkpoint(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        CheckpointError, match=r"step 3 .*No space left on device.*There is no other"
    ):
        Checkpoints(tmp_path).save(3, state(3))
    assert list(tmp_path.iterdir()) == []


WRITERS = """
    import os, signal, sys
    from pathlib import Path
    from tests.recipes.common.test_checkpoints import Checkpoints, state

    def write(folder, deadly):
        saved, count = Checkpoints(folder), 0
        saved.save(1, state(1))

        def event(name, arguments):  # dies right before a chosen operation on files
            nonlocal count
            opened = Path(str(arguments[0])).name if name == "open" else ""
            if opened.startswith("step-") and "w" in str(arguments[1]):
                os._exit(3)  # only a rename may give a file its final name
            if name in ("open", "os.rename", "os.remove") and str(folder) in str(arguments[0]):
                count += 1
                if count == deadly:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(event)
        for step in (2, 3):
            saved.save(step, state(step))

    deadly, status = 0, None
    while status != 0:
        deadly += 1
        if os.fork() == 0:
            write(Path(sys.argv[1]) / str(deadly), deadly)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.wait()[1])
        print(status)
"""


def test_killed_before_each_operation_on_files(tmp_path):
    """Whenever it dies, an intact checkpoint is found, never older than the last finished one."""
    out, err = python(WRITERS, tmp_path).communicate(timeout=60)
    endings = [int(line) for line in out.split()]
    assert len(endings) >= 12, err
    assert endings == [-signal.SIGKILL] * (len(endings) - 1) + [0]
    found = []
    for n in range(1, len(endings) + 1):
        step, loaded = Checkpoints(tmp_path / str(n)).load_latest()  # a warning would be an error
        assert_state(loaded, step)
        assert not list((tmp_path / str(n)).glob(".*"))
        found.append(step)
    assert found == sorted(found)
    assert set(found) == {1, 2, 3}


def test_two_runs_in_one_folder_are_refused(tmp_path):
    code = """
        import sys, time
        from pathlib import Path
        from recipes.common.checkpoints import run_lock
        with run_lock(Path(sys.argv[1])):
            print("locked", flush=True)
            time.sleep(60)
    """
    other = python(code, tmp_path)
    try:
        assert other.stdout.readline() == "locked\n"
        with (
            pytest.raises(RunIsLockedError, match=f"process {other.pid} on .* since"),
            run_lock(tmp_path),
        ):
            pass
    finally:
        other.kill()  # SIGKILL: nothing is tidied up
        other.communicate()
    assert json.loads((tmp_path / "run.holder").read_text())["pid"] == other.pid
    with run_lock(tmp_path):  # the lock of a dead process is no lock
        assert json.loads((tmp_path / "run.holder").read_text())["pid"] == os.getpid()
        with pytest.raises(RunIsLockedError), run_lock(tmp_path):
            pass
    with run_lock(tmp_path):
        pass


def test_bad_options_are_refused(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    wrong = pytest.raises(DiskError, match=r"Cannot write to the folder .*file: File exists")
    with wrong, run_lock(tmp_path / "file"):
        pass
