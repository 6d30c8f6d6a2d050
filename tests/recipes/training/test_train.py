"""The training script: what it logs, what it refuses, how it stops, what its options do."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers

import blockopt
from recipes import train
from recipes.common.checkpoints import CheckpointError, Checkpoints, RunIsLockedError, run_lock
from recipes.common.gpt2 import GPT2, GPT2Config, to_huggingface
from recipes.common.optimizers import build_optimizer
from recipes.common.schedules import schedule
from recipes.common.training import token_loss
from recipes.training.arguments import parse
from recipes.training.run_log import RunLog
from tests.helpers import ROOT
from tests.helpers.training import die, flags, forget, in_child, losses_of, read_log, run


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def sized(arguments, *more):
    """Without the sizes of our GPT-2, for models of transformers."""
    first = arguments.index("--width")
    return [*arguments[:first], *arguments[first + 6 :], *" ".join(map(str, more)).split()]


def test_the_hessian_is_recorded_at_chosen_steps_and_changes_nothing(tmp_path, cache):
    plain = run(flags(tmp_path / "plain", cache, "--steps 3"))
    log = run(flags(tmp_path / "recorded", cache, "--steps 3 --record-hessian 0 3"))
    assert losses_of(log) == losses_of(plain)
    found = json.loads((tmp_path / "recorded" / "hessian.json").read_text())["records"]
    assert [record["step"] for record in found] == [0, 3]
    assert {block["role"] for block in found[0]["blocks"]} >= {"query", "key", "value", "mlp_in"}
    assert (tmp_path / "recorded" / "hessian.png").stat().st_size > 10_000
    with pytest.raises(SystemExit):
        parse(flags(tmp_path, cache, "--steps 3 --record-hessian 4"))


def test_the_losses_are_those_of_a_plain_loop(tmp_path, cache):
    """Written out without accelerate: same model, batches, schedule, clipping and steps."""
    options = "--steps 6 --schedule linear --warmup 2 --clip 0.5 --seed 3"
    log = run(flags(tmp_path, cache, options))
    data, _, _ = train.load_batches(parse(flags(tmp_path, cache)), print)
    batches = data.batches("train", batch_size=8, context=5, seed=3)
    torch.manual_seed(3)
    model = GPT2(GPT2Config(data.vocab_size, 5, 16, 2, 2))
    optimizer = build_optimizer("block-adamw", model, 1e-2)
    expected = []
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * schedule("linear", step, 6, warmup=2)
        loss = model(*batches[step])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        expected.append(loss.item())
    assert list(losses_of(log).values()) == expected
    model.eval()
    held_out = data.batches("validation", batch_size=8, context=5, seed=0)
    with torch.no_grad():
        final = sum(model(*held_out[n]).item() for n in range(2)) / 2
    assert read_log(log)[-1] == {"kind": "end", "step": 6, "loss": pytest.approx(final, rel=1e-6)}


def test_the_log_says_what_was_run(tmp_path, cache):
    lines = read_log(
        run(flags(tmp_path, cache, "--steps", 4, "--curvature", "gradient", "--curvature-every", 2))
    )
    config = lines[0]
    assert config["kind"] == "config"
    assert config["arguments"]["optimizer"] == "block-adamw"
    assert len(config["arguments"]["data_key"]) == 32
    assert config["versions"]["torch"] == torch.__version__
    assert config["versions"]["blockopt"] == blockopt.__version__
    assert config["seeds"] == {"model": 0, "data": 0, "curvature": 0}
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    assert (config["git"] or "").startswith(head[:12])
    model = GPT2(GPT2Config(12, 5, 16, 2, 2))
    assert config["parameters"] == sum(p.numel() for p in model.parameters())
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["lr"] for line in steps] == [
        1e-2 * schedule("cosine", step, 4) for step in range(4)
    ]
    assert all(line["tokens_per_second"] > 0 and line["gradient_norm"] > 0 for line in steps)
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [3, 4]
    scales = {line["step"]: line["scales"] for line in lines if line["kind"] == "scales"}
    assert list(scales) == [1, 3]
    assert max(scales[3].values()) > 1.1
    assert "query+key+value" in scales[3] or "query" in scales[3]


@pytest.mark.parametrize("options", [(), ("--curvature", "newton", "--curvature-every", 2)])
def test_accumulation_changes_nothing_but_rounding(options, tmp_path, cache):
    one, four = (
        run(flags(tmp_path / n, cache, "--steps", 8, "--accumulate", n, *options))
        for n in ("1", "4")
    )
    assert list(losses_of(four).values()) == pytest.approx(list(losses_of(one).values()), abs=1e-5)
    scales = [
        [line["scales"] for line in read_log(log) if line["kind"] == "scales"]
        for log in (one, four)
    ]
    assert len(scales[0]) == (4 if options else 0)
    for a, b in zip(*scales, strict=True):
        assert b == pytest.approx(a, rel=1e-3)
        assert max(a.values()) > 1.01  # from 1 on, by a tenth of what is measured


@pytest.mark.parametrize(
    "options",
    [
        ("--precision", "bf16"),
        ("--compile", "aot_eager", "--curvature", "newton", "--curvature-every", 2),
        ("--norm", "post", "--attention", "linear"),
        ("--optimizer", "schedulefree"),
        ("--optimizer", "torch_optimizer:Yogi", "--schedule", "wsd"),
        ("--optimizer", "adam-mini", "--curvature", "secant", "--curvature-every", 2),
    ],
)
def test_options_train(options, tmp_path, cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", "ignore")
        losses = list(
            losses_of(run(flags(tmp_path, cache, "--steps", 12, "--clip", 0, *options))).values()
        )
    assert losses[-1] < losses[0] - 0.1
    if "bf16" in options:
        plain = list(
            losses_of(run(flags(tmp_path / "plain", cache, "--steps", 12, "--clip", 0))).values()
        )
        assert losses != plain
        assert losses == pytest.approx(plain, abs=0.05)


def test_a_loss_is_never_of_half_precision():
    model = GPT2(GPT2Config(12, 5, 16, 2, 2)).bfloat16()
    tokens = torch.randint(12, (2, 5), generator=torch.Generator().manual_seed(0))
    loss = token_loss(model, tokens, tokens)
    assert loss.dtype == torch.float32
    assert loss == torch.nn.functional.cross_entropy(
        model(tokens).float().flatten(0, 1), tokens.flatten()
    )
    assert token_loss(model.double(), tokens, tokens).dtype == torch.float64


def test_a_compiled_run_resumes(tmp_path, cache):
    arguments = flags(
        tmp_path / "whole", cache, "--steps", 5, "--checkpoint-every", 2, "--compile", "aot_eager"
    )
    whole = run(arguments)
    again = [
        *flags(tmp_path / "again", cache),
        *arguments[len(flags(tmp_path, cache)) :],
        "--resume",
    ]

    def task():
        step = train.Run.step
        count = iter(range(1, 9))
        train.Run.step = lambda self, *a: die() if next(count) == 4 else step(self, *a)
        run(again)

    assert in_child(task) == -signal.SIGKILL
    assert losses_of(run(again)) == losses_of(whole)


def test_a_model_of_transformers_from_its_config(tmp_path, cache):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 99,
    }
    transformers.LlamaConfig(
        **sizes, num_key_value_heads=1, max_position_embeddings=8
    ).save_pretrained(tmp_path / "config")
    log = run(
        sized(flags(tmp_path / "run", cache, "--steps", 12), "--hf-config", tmp_path / "config")
    )
    losses = list(losses_of(log).values())
    assert losses[0] == pytest.approx(math.log(12), abs=0.1)  # the vocabulary is that of the data
    assert losses[-1] < losses[0] - 0.05


def test_a_checkpoint_of_transformers_is_fine_tuned(tmp_path, cache):
    torch.manual_seed(0)
    trained = run(flags(tmp_path / "first", cache, "--steps", 40))
    state = Checkpoints(tmp_path / "first" / "checkpoints").load_latest()[1]
    model = GPT2(GPT2Config(12, 5, 16, 2, 2))
    model.load_state_dict(state["model"])
    to_huggingface(model).save_pretrained(tmp_path / "saved")
    saved = f"--hf-checkpoint {tmp_path / 'saved'}"
    tuned = run(sized(flags(tmp_path / "second", cache, "--steps 3 --lr 1e-5"), saved))
    before, after = list(losses_of(trained).values()), list(losses_of(tuned).values())
    assert after[0] < before[0] - 0.3
    assert after[0] == pytest.approx(before[-1], abs=0.3)
    text = tmp_path / "text.txt"
    text.write_text("1+2=3\n" * 500)
    words = ("--data", text, "--tokenizer", "bytes", "--context", 8)
    with pytest.raises(ValueError, match=r"at most 5|knows 12"):
        run(sized(flags(tmp_path / "third", cache, "--steps 3"), saved, *words))


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
    assert "There are 7 sequences to train on, and a step takes 8: some again." in out
    assert "held-out" not in out


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


def test_overrides_reach_the_optimizer_the_scales_and_the_resumption(tmp_path, cache, capsys):
    plain = run(flags(tmp_path / "plain", cache, "--steps 4 --curvature gradient"))
    options = "--steps 4 --curvature gradient --curvature-every 2"
    options += " --override wpe.weight=other --override h.*.mlp.c_fc.weight=mlp_out"
    log = run(flags(tmp_path / "run", cache, options))
    roles = [
        {role for line in read_log(path) if line["kind"] == "scales" for role in line["scales"]}
        for path in (plain, log)
    ]
    assert roles[0] - roles[1] == {"mlp_in", "position"}
    assert roles[1] - roles[0] == {"other"}
    without = options.replace(" --override wpe.weight=other", "")
    with pytest.raises(CheckpointError, match=r"had override \['wpe.weight=other', .*, now \['h"):
        run(flags(tmp_path / "run", cache, without, "--resume"))
    with pytest.raises(SystemExit) as caught:
        train.main(flags(tmp_path / "typo", cache, "--steps 2 --override wp.weight=position"))
    forget()
    assert caught.value.code == 2
    assert "'wp.weight': it matches no trainable parameter" in capsys.readouterr().err


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


def test_tensorboard(tmp_path, cache):
    """The figures, read back from its file, are those of the log."""
    log = run(flags(tmp_path, cache, "--steps", 4, "--track", "tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(next(tmp_path.rglob("events.out.tfevents*")).parent))
    read.Reload()
    for tag, kind, name in (
        ("loss", "step", "loss"),
        ("lr", "step", "lr"),
        ("held_out", "evaluation", "loss"),
    ):
        logged = {line["step"]: line[name] for line in read_log(log) if line["kind"] == kind}
        assert {event.step: event.value for event in read.Scalars(tag)} == pytest.approx(
            logged, rel=1e-6
        )


def test_the_context_of_examples(tmp_path, cache):
    with pytest.raises(ValueError, match=r"--context=9.*need 5"):
        run(flags(tmp_path, cache, "--steps", 3, "--context", 9))


def test_the_script_on_text(tmp_path, cache):
    """The real script, on a file of text."""
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(path.read_text() for path in sorted((ROOT / "recipes").glob("*.py")))[:60_000]
    )
    options = f"--data {text} --tokenizer bytes --cache {cache} --output {tmp_path / 'run'}"
    options += " --steps 20 --width 16 --depth 1 --heads 2 --context 16 --print-every 5"
    options += " --eval-every 8 --cpu"
    command = [sys.executable, str(ROOT / "recipes" / "train.py"), *options.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    streams = {"capture_output": True, "text": True}
    done = subprocess.run(command, env=environment, timeout=120, **streams)
    assert done.returncode == 0, done.stderr
    assert "step 10/20  loss" in done.stdout
    assert "tokens/s" in done.stdout
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"Reading {text}", f"{text}: tokenizing"]
    assert lines[3] == "Building the model and the optimizer"
    assert lines[4].endswith("tokens to train on")
    assert lines[5] == "Taking step 1 of 20"
    assert lines[6].startswith("step 1/20  loss")
    assert re.search(r"step 20/20 .* held out \d\.\d+$", lines[-2])
    assert lines[-1] == f"The model is in {tmp_path / 'run' / 'model'}."
    assert re.search(
        r"step 10/20 .* held out \d\.\d+ \(step 8\)$", done.stdout, re.MULTILINE
    )  # not of this step
    losses = [
        json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    ]
    assert losses[1]["loss"] == pytest.approx(math.log(256), abs=0.2)
    assert losses[-1]["loss"] < losses[1]["loss"] - 0.3
