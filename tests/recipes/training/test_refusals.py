"""What the training script refuses, and how it stops and goes on: in words, not in tracebacks."""

import os
import re
from types import SimpleNamespace

import pytest
import torch

from recipes import train
from recipes.common.checkpoints import CheckpointError, RunIsLockedError, run_lock
from recipes.common.gpt2 import GPT2, GPT2Config, to_huggingface
from recipes.training.run_log import RunLog
from tests.helpers.training import flags, forget, losses_of, run, sized

pytestmark = pytest.mark.usefixtures("one_thread")


def test_too_small_a_vocabulary_is_refused(tmp_path, cache):
    to_huggingface(GPT2(GPT2Config(3, 8, 16, 2, 2))).save_pretrained(tmp_path / "saved")
    saved = f"--hf-checkpoint {tmp_path / 'saved'}"
    with pytest.raises(ValueError, match=r"The data have 12 tokens, and .* knows 3"):
        run(sized(flags(tmp_path / "run", cache, "--steps 3"), saved))


def test_a_full_disk_stops_the_run_and_leaves_a_checkpoint(tmp_path, cache, monkeypatch):
    save = torch.save

    def full(content, file):
        if content["step"] == 6:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        save(content, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        CheckpointError, match=r"step 6 could not be written: .*No space left.*step 4 is as it was"
    ):
        run(flags(tmp_path, cache, "--steps", 8, "--checkpoint-every", 2))
    monkeypatch.undo()
    again = run(flags(tmp_path, cache, "--steps", 8, "--checkpoint-every", 2, "--resume"))
    assert losses_of(again) == losses_of(run(flags(tmp_path / "whole", cache, "--steps", 8)))


def test_a_truncated_checkpoint_falls_back_to_the_one_before(tmp_path, cache):
    whole = losses_of(run(flags(tmp_path, cache, "--steps", 6, "--checkpoint-every", 2)))
    path = tmp_path / "checkpoints" / "step-00000006.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.warns(
        UserWarning, match=r"step-00000006.*cut off or damaged.*Going on from step 4"
    ):
        again = run(flags(tmp_path, cache, "--steps", 6, "--checkpoint-every", 2, "--resume"))
    assert losses_of(again) == whole


def test_a_full_disk_under_the_log(tmp_path, cache, monkeypatch):
    """The system refuses a line that is half written; the run says so, and goes on from it."""
    write = RunLog.write

    def full(self, kind, **values):
        if values.get("step") != 5:
            return write(self, kind, **values)
        file = self._file
        file.write(b'{"kind": "st')
        self._file = SimpleNamespace(write=no_space, close=file.close)
        return write(self, kind, **values)

    def no_space(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunLog, "write", full)
    arguments = flags(tmp_path, cache, "--steps", 8, "--checkpoint-every", 2)
    with pytest.raises(
        OSError, match=r"log\.jsonl could not be written \(No space left.*make room, and --resume"
    ):
        run(arguments)
    monkeypatch.undo()
    assert losses_of(run([*arguments, "--resume"])) == losses_of(
        run(flags(tmp_path / "whole", cache, "--steps", 8))
    )


def test_an_interrupt_says_how_to_go_on(tmp_path, cache, capsys, monkeypatch):
    step = train.Run.step
    count = iter(range(1, 99))

    def interrupted(self, *arguments):
        if next(count) == 4:
            raise KeyboardInterrupt
        step(self, *arguments)

    monkeypatch.setattr(train.Run, "step", interrupted)
    with pytest.raises(SystemExit) as caught:
        train.main(flags(tmp_path, cache, "--steps", 8, "--checkpoint-every", 2))
    forget()
    assert caught.value.code == 130
    error = capsys.readouterr().err
    assert f"{tmp_path / 'checkpoints' / 'step-00000002.pt'}, of step 2" in error
    assert "--resume" in error


def test_too_short_a_part_is_named_before_the_run_begins(tmp_path, cache, capsys):
    text = tmp_path / "text.txt"
    text.write_text("1+2=3\n" * 80)
    words = ("--data", text, "--tokenizer", "bytes", "--context", 64, "--steps", 2)
    output = tmp_path / "run"
    with pytest.raises(
        ValueError,
        match=r"validation part of .* has \d+ tokens, and one window takes 65.*--context",
    ):
        run(flags(output, cache, *words))
    with pytest.raises(ValueError, match="train part of"):
        run(flags(output, cache, *words, "--context", 900))
    run(
        flags(output, cache, *words, "--eval-batches", 0)
    )  # in the same folder, and without what is too short
    out = capsys.readouterr().out
    assert "Sequences to train on: 7. A step takes 8, so some repeat." in out
    assert "Held-out" not in out


def test_two_runs_in_one_folder_are_refused(tmp_path, cache):
    log = run(flags(tmp_path, cache, "--steps", 2))
    with pytest.raises(CheckpointError, match=r"There is a run in .*--resume"):
        run(flags(tmp_path, cache, "--steps", 2))
    log.unlink()  # its checkpoints are left, which no new run may take for its own
    with pytest.raises(CheckpointError, match=r"There is a run in .*--resume"):
        run(flags(tmp_path, cache, "--steps", 2))
    with pytest.raises(CheckpointError, match=r"There are checkpoints in .*no log\.jsonl"):
        run(flags(tmp_path, cache, "--steps", 2, "--resume"))
    with (
        run_lock(tmp_path),
        pytest.raises(RunIsLockedError, match=rf"Another run trains in .*process {os.getpid()}"),
    ):
        run(flags(tmp_path, cache, "--steps", 2, "--resume"))


def test_errors_come_without_a_traceback(tmp_path, cache, capsys):
    arguments = flags(tmp_path, cache, "--steps", 2)
    train.main(arguments)
    forget()
    with pytest.raises(SystemExit) as caught:
        train.main(arguments)
    forget()
    assert caught.value.code == 2
    assert re.fullmatch(r"error: There is a run in .*\n", capsys.readouterr().err)


def test_bugs_keep_their_traceback(tmp_path, cache, monkeypatch):
    """Also those of the kinds that Python raises for a wrong value."""

    def broken(*_):
        raise ValueError("not what the user did")

    monkeypatch.setattr(train, "build_model", broken)
    with pytest.raises(ValueError, match="not what the user did"):
        train.main(flags(tmp_path, cache, "--steps", 2))
    forget()


def test_the_hub_out_of_reach(tmp_path, cache, capsys, monkeypatch):
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # as the variable of this name does at the start
    for flag in ("--hf-config", "--hf-checkpoint"):
        with pytest.raises(SystemExit) as caught:
            train.main(sized(flags(tmp_path / flag, cache, "--steps", 2), flag, "nobody/nothing"))
        forget()
        assert caught.value.code == 2
        assert "error: 'nobody/nothing' is no folder or file here" in capsys.readouterr().err


def test_a_run_goes_on_with_the_same_settings_only(tmp_path, cache, monkeypatch):
    run(flags(tmp_path, cache, "--steps", 2))
    with pytest.raises(CheckpointError, match=r"had lr 0\.01, now 0\.02, steps 2, now 3"):
        run([*flags(tmp_path, cache, "--steps", 3, "--resume"), "--lr", "2e-2"])
    with pytest.raises(CheckpointError, match=r"had precision 'no', now 'bf16'"):
        run(flags(tmp_path, cache, "--steps", 2, "--resume", "--precision", "bf16"))
    with pytest.raises(
        CheckpointError, match=r"had data 'addition:1', now 'addition:2' \(not the same tokens\)"
    ):
        run(flags(tmp_path, cache, "--steps", 2, "--resume", "--data", "addition:2"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(CheckpointError, match=r"had precision 'no', now 'bf16'"):
        run(flags(tmp_path, cache, "--steps", 2, "--resume"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    run(flags(tmp_path, cache, "--steps", 2, "--resume", "--keep", 5, "--eval-every", 1))


def test_the_same_file_by_another_name_is_the_same_data(tmp_path, cache, monkeypatch):
    (tmp_path / "text.txt").write_text("1+2=3\n" * 500)
    monkeypatch.chdir(tmp_path)
    words = ("--tokenizer", "bytes", "--context", 8, "--steps", 2)
    run(flags(tmp_path / "run", cache, *words, "--data", "text.txt"))
    run(flags(tmp_path / "run", cache, *words, "--data", "./text.txt", "--resume"))


def test_the_context_of_examples(tmp_path, cache):
    with pytest.raises(ValueError, match=r"--context=9.*need 5"):
        run(flags(tmp_path, cache, "--steps", 3, "--context", 9))
