"""The training script: what it logs, and what its options do."""

import json
import math
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import transformers

import blockopt
from recipes import train
from recipes.common.checkpoints import CheckpointError, Checkpoints
from recipes.common.gpt2 import GPT2, GPT2Config, to_huggingface
from recipes.common.optimizers import build_optimizer
from recipes.common.schedules import schedule
from recipes.common.training import token_loss
from recipes.training.arguments import parse
from tests.helpers import ROOT
from tests.helpers.training import die, flags, forget, in_child, losses_of, read_log, run, sized

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_hessian_is_recorded_at_chosen_steps_and_changes_nothing(tmp_path, cache, capsys):
    plain = run(flags(tmp_path / "plain", cache, "--steps 3"))
    log = run(flags(tmp_path / "recorded", cache, "--steps 3 --record-hessian 0 3"))
    printed = capsys.readouterr().out
    assert [f"Hessian after step {step}" in printed for step in range(4)] == [
        True,
        False,
        False,
        True,
    ]
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
