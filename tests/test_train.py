"""The training script: what it logs, what it refuses, how it stops, and that its options do what they say."""

import doctest
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from training import die, flags, forget, in_child, losses_of, read_log, run

import blockopt
from recipes import nonfinite, train
from recipes.checkpoints import CheckpointError, Checkpoints, run_lock
from recipes.gpt2 import GPT2, GPT2Config, to_huggingface
from recipes.models import token_loss
from recipes.nonfinite import nonfinite_blocks
from recipes.optimizers import build_optimizer
from recipes.schedules import schedule
from recipes.train_arguments import parse

ROOT = Path(__file__).parent.parent


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
    return [*arguments[:first], *arguments[first + 6 :], *map(str, more)]


def test_the_losses_are_those_of_a_plain_loop(tmp_path, cache):
    """Written out without accelerate: same model, batches, schedule, clipping and steps."""
    log = run(flags(tmp_path, cache, "--steps", 6, "--schedule", "linear", "--warmup", 2, "--clip", 0.5, "--seed", 3))
    data = train.load_from_arguments(parse(flags(tmp_path, cache)))
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
    lines = read_log(run(flags(tmp_path, cache, "--steps", 4, "--curvature", "gradient", "--curvature-every", 2)))
    config = lines[0]
    assert config["kind"] == "config"
    assert config["arguments"]["optimizer"] == "block-adamw"
    assert len(config["arguments"]["data_key"]) == 32
    assert config["versions"]["torch"] == torch.__version__
    assert config["versions"]["blockopt"] == blockopt.__version__
    assert config["seeds"] == {"model": 0, "data": 0, "curvature": 0}
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert (config["git"] or "").startswith(head)
    model = GPT2(GPT2Config(12, 5, 16, 2, 2))
    assert config["parameters"] == sum(p.numel() for p in model.parameters())
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["lr"] for line in steps] == [1e-2 * schedule("cosine", step, 4) for step in range(4)]
    assert all(line["tokens_per_second"] > 0 and line["gradient_norm"] > 0 for line in steps)
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [3, 4]
    scales = {line["step"]: line["scales"] for line in lines if line["kind"] == "scales"}
    assert list(scales) == [1, 3]
    assert max(scales[3].values()) > 1.1
    assert "query+key+value" in scales[3] or "query" in scales[3]


def test_accumulation_changes_nothing_but_rounding(tmp_path, cache):
    one, four = (run(flags(tmp_path / n, cache, "--steps", 5, "--accumulate", n)) for n in ("1", "4"))
    assert list(losses_of(four).values()) == pytest.approx(list(losses_of(one).values()), abs=1e-5)


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
        losses = list(losses_of(run(flags(tmp_path, cache, "--steps", 12, "--clip", 0, *options))).values())
    assert losses[-1] < losses[0] - 0.1
    if "bf16" in options:
        plain = list(losses_of(run(flags(tmp_path / "plain", cache, "--steps", 12, "--clip", 0))).values())
        assert losses != plain
        assert losses == pytest.approx(plain, abs=0.05)


def test_a_loss_is_never_of_half_precision():
    model = GPT2(GPT2Config(12, 5, 16, 2, 2)).bfloat16()
    tokens = torch.randint(12, (2, 5), generator=torch.Generator().manual_seed(0))
    loss = token_loss(model, tokens, tokens)
    assert loss.dtype == torch.float32
    assert loss == torch.nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    assert token_loss(model.double(), tokens, tokens).dtype == torch.float64


def test_a_compiled_run_resumes(tmp_path, cache):
    arguments = flags(tmp_path / "whole", cache, "--steps", 5, "--checkpoint-every", 2, "--compile", "aot_eager")
    whole = run(arguments)
    again = [*flags(tmp_path / "again", cache), *arguments[len(flags(tmp_path, cache)) :], "--resume"]

    def task():
        step = train.Run.step
        count = iter(range(1, 9))
        train.Run.step = lambda self, *a: die() if next(count) == 4 else step(self, *a)
        run(again)

    assert in_child(task) == -signal.SIGKILL
    assert losses_of(run(again)) == losses_of(whole)


def test_a_model_of_transformers_from_its_config(tmp_path, cache):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 99}
    transformers.LlamaConfig(**sizes, num_key_value_heads=1, max_position_embeddings=8).save_pretrained(tmp_path / "config")
    log = run(sized(flags(tmp_path / "run", cache, "--steps", 12), "--hf-config", tmp_path / "config"))
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
    tuned = run(sized(flags(tmp_path / "second", cache, "--steps", 3, "--lr", 1e-5), "--hf-checkpoint", tmp_path / "saved"))
    before, after = list(losses_of(trained).values()), list(losses_of(tuned).values())
    assert after[0] < before[0] - 0.3
    assert after[0] == pytest.approx(before[-1], abs=0.3)
    text = tmp_path / "text.txt"
    text.write_text("1+2=3\n" * 500)
    words = ("--data", text, "--tokenizer", "bytes", "--context", 8)
    with pytest.raises(ValueError, match=r"at most 5|knows 12"):
        run(sized(flags(tmp_path / "third", cache, "--steps", 3), "--hf-checkpoint", tmp_path / "saved", *words))


def test_too_small_a_vocabulary_is_refused(tmp_path, cache):
    to_huggingface(GPT2(GPT2Config(3, 8, 16, 2, 2))).save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"The data have 12 tokens, and .* knows 3"):
        run(sized(flags(tmp_path / "run", cache, "--steps", 3), "--hf-checkpoint", tmp_path / "saved"))


def broken(patch, step, name, index):
    """From a step on, the gradient of one entry is not a number."""
    backward = train.Run.backward
    count = iter(range(1, 99))

    def spoiled(self, micro_batches):
        loss = backward(self, micro_batches)
        if next(count) >= step:
            dict(self.model.named_parameters())[name].grad[index] = math.nan
        return loss

    patch.setattr(train.Run, "backward", spoiled)


@pytest.mark.parametrize("optimizer", ["block-adamw", "adamw"])
def test_not_a_number_stops_the_run_and_says_where(optimizer, tmp_path, cache, monkeypatch):
    broken(monkeypatch, 6, "h.1.attn.c_attn.weight", (16 + 8, 3))  # row 24: the second head of the key
    with pytest.raises(FloatingPointError) as caught:
        run(flags(tmp_path, cache, "--steps", 9, "--checkpoint-every", 2, "--optimizer", optimizer))
    message = str(caught.value)
    assert "Step 6" in message
    assert "1 gradients are not finite" in message
    assert "gradient h.1.attn.c_attn.weight: key 1\n" in message
    assert f"{tmp_path / 'checkpoints' / 'step-00000004.pt'}, of step 4" in message
    lines = read_log(tmp_path / "log.jsonl")
    assert lines[-1]["kind"] == "nonfinite"
    assert lines[-1]["step"] == 6
    monkeypatch.undo()
    resumed = run(flags(tmp_path, cache, "--steps", 9, "--checkpoint-every", 2, "--optimizer", optimizer, "--resume"))
    assert list(losses_of(resumed)) == list(range(1, 10))


def test_a_loss_that_is_no_number_names_the_weights(tmp_path, cache, monkeypatch):
    make = train.make_run

    def spoiled(*arguments):
        run = make(*arguments)
        with torch.no_grad():
            run.model.h[0].mlp.c_fc.weight[5, 0] = math.inf
        return run

    monkeypatch.setattr(train, "make_run", spoiled)
    with pytest.raises(
        FloatingPointError, match=r"(?s)Step 1: the loss is nan.*weight h\.0\.mlp\.c_fc\.weight: mlp_in 5\n.*none was"
    ):
        run(flags(tmp_path, cache, "--steps", 3))


def test_weights_that_are_no_numbers_are_not_kept(tmp_path, cache, monkeypatch):
    """A step may break the weights while its loss and gradients are fine."""
    step = train.Run.step
    count = iter(range(1, 99))

    def spoiled(self, *arguments):
        step(self, *arguments)
        if next(count) == 4:
            with torch.no_grad():
                self.model.ln_f.weight[3] = math.nan

    monkeypatch.setattr(train.Run, "step", spoiled)
    with pytest.raises(
        FloatingPointError, match=r"(?s)Step 4: 1 weights.*weight ln_f\.weight: norm\n.*step-00000002\.pt, of step 2"
    ):
        run(flags(tmp_path, cache, "--steps", 8, "--checkpoint-every", 2, "--eval-batches", 0))
    assert Checkpoints(tmp_path / "checkpoints").steps() == [2]


def test_doctests():
    assert doctest.testmod(nonfinite).failed == 0


def test_many_blocks_are_counted():
    model = GPT2(GPT2Config(12, 5, 16, 2, 2))
    model.wte.weight.grad = torch.full_like(model.wte.weight, math.nan)
    model.ln_f.bias.grad = torch.full_like(model.ln_f.bias, math.inf)
    model.h[0].ln_1.weight.grad = torch.zeros(16)
    assert nonfinite_blocks(model) == {"wte.weight": "12 of 12 blocks of embedding", "ln_f.bias": "norm"}


def test_a_full_disk_stops_the_run_and_leaves_a_checkpoint(tmp_path, cache, monkeypatch):
    save = torch.save

    def full(content, file):
        if content["step"] == 6:
            file.write(b"half")
            raise OSError(28, "No space left on device")
        save(content, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"step 6 could not be written: .*No space left.*step 4 is as it was"):
        run(flags(tmp_path, cache, "--steps", 8, "--checkpoint-every", 2))
    monkeypatch.undo()
    again = run(flags(tmp_path, cache, "--steps", 8, "--checkpoint-every", 2, "--resume"))
    assert losses_of(again) == losses_of(run(flags(tmp_path / "whole", cache, "--steps", 8)))


def test_a_truncated_checkpoint_falls_back_to_the_one_before(tmp_path, cache):
    whole = losses_of(run(flags(tmp_path, cache, "--steps", 6, "--checkpoint-every", 2)))
    path = tmp_path / "checkpoints" / "step-00000006.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.warns(UserWarning, match=r"step-00000006.*cut off or damaged.*Going on from step 4"):
        again = run(flags(tmp_path, cache, "--steps", 6, "--checkpoint-every", 2, "--resume"))
    assert losses_of(again) == whole


def test_two_runs_in_one_folder_are_refused(tmp_path, cache):
    run(flags(tmp_path, cache, "--steps", 2))
    with pytest.raises(CheckpointError, match=r"There is a run in .*--resume"):
        run(flags(tmp_path, cache, "--steps", 2))
    with run_lock(tmp_path), pytest.raises(CheckpointError, match=rf"Another run trains in .*process {os.getpid()}"):
        run(flags(tmp_path, cache, "--steps", 2, "--resume"))


def test_errors_come_without_a_traceback(tmp_path, cache, capsys):
    arguments = flags(tmp_path, cache, "--steps", 2)
    train.main(arguments)
    forget()
    with pytest.raises(SystemExit) as caught:
        train.main(arguments)
    forget()
    assert caught.value.code == 1
    assert capsys.readouterr().err.startswith("error: There is a run in")


def test_the_hub_out_of_reach(tmp_path, cache, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # as the variable of this name does at the start
    for flag in ("--hf-config", "--hf-checkpoint"):
        with pytest.raises(SystemExit) as caught:
            train.main(sized(flags(tmp_path / flag, cache, "--steps", 2), flag, "nobody/nothing"))
        forget()
        assert caught.value.code == 1
        assert "error: 'nobody/nothing' is no folder or file here" in capsys.readouterr().err


def test_a_run_goes_on_with_the_same_settings_only(tmp_path, cache):
    run(flags(tmp_path, cache, "--steps", 2))
    with pytest.raises(CheckpointError, match=r"had lr 0\.01, now 0\.02, steps 2, now 3"):
        run([*flags(tmp_path, cache, "--steps", 3, "--resume"), "--lr", "2e-2"])
    run(flags(tmp_path, cache, "--steps", 2, "--resume", "--keep", 5, "--eval-every", 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--optimizer", "adam"), "Invalid optimizer 'adam'. Must be one of block-adamw"),
        (("--optimizer", "torch_optimizer:Yogurt"), "torch-optimizer has"),
        (("--steps", "0"), "Invalid --steps=0"),
        (("--lr", "-1"), "Invalid --lr=-1"),
        (("--lr", "nan"), "Invalid --lr=nan"),
        (("--warmup", "1000"), "Invalid warmup=1000 of 1000"),
        (("--batch-size", "10", "--accumulate", "4"), "multiple of 4"),
        (("--betas", "0.9", "1.0"), "Invalid --betas"),
        (("--schedule", "wsd", "--decay", "0"), "Invalid decay=0"),
        (("--optimizer", "schedulefree", "--schedule", "cosine"), "Must be constant for schedulefree"),
        (("--width", "33", "--heads", "2"), "Invalid width=33"),
        (("--hf-config", "x", "--width", "32"), "--width is an option of our GPT-2"),
        (("--hf-config", "x", "--hf-checkpoint", "y"), "not allowed with"),
        (("--context", "0"), "Invalid --context=0"),
        (("--curvature", "guess"), "invalid choice"),
        (("--keep", "0"), "Invalid --keep=0"),
        (("--clip", "-1"), "Invalid --clip=-1"),
        (("--track", "guess"), "invalid choice"),
    ],
)
def test_bad_flags_are_refused_early(options, message, capsys, monkeypatch):
    monkeypatch.setattr(train, "load_from_arguments", None)  # nothing is loaded
    with pytest.raises(SystemExit) as caught:
        parse(list(options))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setattr("recipes.train_arguments.get_available_trackers", lambda: [])
    with pytest.raises(SystemExit):
        parse(["--track", "tensorboard"])
    assert "pip install tensorboard" in capsys.readouterr().err


def test_tensorboard(tmp_path, cache):
    run(flags(tmp_path, cache, "--steps", 3, "--track", "tensorboard"))
    events = list(tmp_path.rglob("events.out.tfevents*"))
    assert events
    assert sum(path.stat().st_size for path in events) > 200


def test_the_context_of_examples(tmp_path, cache):
    with pytest.raises(ValueError, match=r"--context=9.*need 5"):
        run(flags(tmp_path, cache, "--steps", 3, "--context", 9))


def test_the_script_on_text(tmp_path, cache):
    """The real script, on a file of text."""
    text = tmp_path / "text.txt"
    text.write_text("".join(path.read_text() for path in sorted((ROOT / "recipes").glob("*.py")))[:60_000])
    command = [
        sys.executable,
        str(ROOT / "recipes" / "train.py"),
        "--data",
        str(text),
        "--tokenizer",
        "bytes",
        "--cache",
        str(cache),
    ]
    command += ["--steps", "20", "--width", "16", "--depth", "1", "--heads", "2", "--context", "16", "--print-every", "10"]
    command += ["--cpu", "--output"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, str(tmp_path / "run")], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "step 10/20  loss" in done.stdout
    assert "tokens/s" in done.stdout
    assert "held out" in done.stdout.splitlines()[-1]
    losses = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert losses[1]["loss"] == pytest.approx(math.log(256), abs=0.2)
    assert losses[-1]["loss"] < losses[1]["loss"] - 0.3
