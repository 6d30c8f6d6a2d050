"""The recipe for the Trainer of transformers: it trains, fine-tunes what it saved, and resumes."""

import json
import re
from contextlib import contextmanager

import pytest
import torch
import transformers

from recipes import train_hf
from recipes.common.checkpoints import run_lock
from recipes.common.training import token_loss
from recipes.data.token_data import load_data

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:No block had"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    words = ["block", "head", "query", "key", "value", "loss", "step"]
    (folder / "text.txt").write_text(
        "\n".join(f"{a} of {b} and {c}." for a in words for b in words for c in words)
    )
    return folder


@pytest.fixture
def refused(capsys):
    """The script ends with code 2 and says why, without a traceback."""

    @contextmanager
    def check(message):
        with pytest.raises(SystemExit) as stop:
            yield
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert re.search(message, said)
        assert "Traceback" not in said

    return check


def flags(folder, output, *more):
    data = f"--data {folder / 'text.txt'} --vocab-size 300 --cache {folder / 'cache'} --context 16"
    sizes = "--batch-size 4 --eval-batches 2 --eval-every 4 --checkpoint-every 4 --cpu"
    options = f"{data} {sizes} --curvature-every 3 --output {folder / output}"
    return [*options.split(), *map(str, more)]


SIZES = ("--width", 16, "--depth", 1, "--heads", 2)


def state(folder, step):
    return json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())


def losses(state):
    return {line["step"]: line["loss"] for line in state["log_history"] if "loss" in line}


def test_overrides(folder, capsys, refused):
    """Of the GPT-2 of transformers, by its own names, in the scales that are written."""
    wte, query = "transformer.wte.weight=other", "transformer.h.*.attn.c_attn.weight=gate"
    both = ("--override", wte, "--override", query)
    train_hf.main(flags(folder, "overridden", *SIZES, "--steps", 4, *both))
    rows = (folder / "overridden" / "block_lr.csv").read_text().splitlines()
    roles = {row.split(",")[1] for row in rows[1:]}
    assert {"other", "gate"} <= roles
    assert not {"query", "key", "value", "embedding"} & roles
    with refused("'wte': it matches no trainable parameter"):
        train_hf.main(flags(folder, "typo", *SIZES, "--steps", 4, "--override", "wte=other"))
    with refused("Invalid override 'wte'"):
        train_hf.main(flags(folder, "typo", *SIZES, "--steps", 4, "--override", "wte"))


def test_train_resume_and_fine_tune(folder, capsys, refused):
    train_hf.main(flags(folder, "whole", *SIZES, "--steps", 12))
    whole = losses(state(folder / "whole", 12))
    assert whole[12] < whole[1] - 0.3
    out = capsys.readouterr().out
    assert "mlp_out" in out
    assert "held out" in out.splitlines()[-1]
    rows = (folder / "whole" / "block_lr.csv").read_text().splitlines()
    assert {row.split(",")[0] for row in rows[1:]} == {
        "2",
        "4",
        "7",
        "10",
    }  # the schedule of transformers starts from 0
    assert (folder / "whole" / "block_lr.png").stat().st_size > 10_000

    with refused(r"There is a run in .*whole. Go on with it \(--resume\)"):
        train_hf.main(flags(folder, "whole", *SIZES, "--steps", 12))
    train_hf.shutil.rmtree(folder / "whole" / "checkpoint-12")  # as if killed after step 8
    train_hf.main(flags(folder, "whole", *SIZES, "--steps", 12, "--resume"))
    assert losses(state(folder / "whole", 12)) == whole

    saved = folder / "whole" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert 257 < model.config.vocab_size <= 300
    options = f"--hf-checkpoint {saved} --steps 4 --lr 1e-5 --curvature none"
    train_hf.main(flags(folder, "tuned", *options.split()))
    tuned = losses(state(folder / "tuned", 4))
    assert tuned[1] == pytest.approx(
        whole[12], abs=0.4
    )  # it goes on from what was learned, with its tokenizer
    assert tuned[1] < whole[1] - 0.3
    assert not (folder / "tuned" / "block_lr.csv").exists()


def loss_and_gradient_norm(model, rows, ignored):
    rows = torch.from_numpy(rows.numpy().astype("int64"))
    targets = rows[:, 1:].clone()
    targets[:, :ignored] = -100
    loss = token_loss(model, rows[:, :-1], targets)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.stack([g.norm() for g in gradients]).norm().item()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("source", ["text", "addition:2"])
def test_losses_and_gradients_are_those_of_our_loss_on_the_same_tokens(source, accumulate, folder):
    """One step that is too small to be seen: the Trainer logs what we compute from its model."""
    name = folder / "text.txt" if source == "text" else source
    data = [
        "--data",
        name,
        "--max-tokens",
        18 * 16,
        "--tokenizer",
        "bytes",
        "--cache",
        folder / "cache",
    ]
    data += ["--context", 16] if source == "text" else []
    tokens = load_data(str(name), tokenizer="bytes", max_tokens=18 * 16, cache=folder / "cache")
    length = 16 if source == "text" else 9
    train, held_out = (
        part[: len(part) // length * length].view(-1, length) if part.ndim == 1 else part
        for part in (tokens.train, tokens.validation)
    )
    assert len(train) % accumulate == 0
    output = folder / f"step-{source[:4]}-{accumulate}"
    size = [
        "--batch-size",
        len(train) // accumulate,
        "--accumulate",
        accumulate,
        "--steps",
        1,
        "--lr",
        1e-12,
    ]
    train_hf.main(
        [
            str(flag)
            for flag in [*data, *SIZES, *size, "--cpu", "--curvature", "none", "--output", output]
        ]
    )
    logged = {key: value for line in state(output, 1)["log_history"] for key, value in line.items()}
    model = transformers.AutoModelForCausalLM.from_pretrained(output / "model")
    assert model.config.n_positions == length
    loss, norm = loss_and_gradient_norm(model, train, tokens.ignored)
    assert logged["loss"] == pytest.approx(loss, rel=1e-5)
    assert logged["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert logged["eval_loss"] == pytest.approx(
        loss_and_gradient_norm(model, held_out, tokens.ignored)[0], rel=1e-5
    )


# --- resuming


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def test_a_damaged_checkpoint_is_passed_over(folder, refused):
    run = flags(folder, "damaged", *SIZES, "--steps", 8, "--curvature", "none")
    train_hf.main(run)
    output = folder / "damaged"
    before = losses(state(output, 8))
    sums = (output / "checkpoint-8" / "SHA256SUMS").read_text().splitlines()
    assert {line.split()[1] for line in sums} >= {
        "model.safetensors",
        "optimizer.pt",
        "trainer_state.json",
    }
    cut(output / "checkpoint-8" / "model.safetensors")
    with pytest.warns(
        UserWarning, match=r"checkpoint-8 is passed over: model.safetensors is cut off or damaged"
    ):
        train_hf.main([*run, "--resume"])
    assert losses(state(output, 8)) == before
    (output / "checkpoint-8" / "SHA256SUMS").unlink()  # as if killed while it was written
    (output / "checkpoint-4" / "optimizer.pt").unlink()
    passed_over = pytest.warns(UserWarning, match="8 is passed over: it was not written to its end")
    and_this = pytest.warns(UserWarning, match=r"4 is passed over: optimizer.pt is missing")
    with (
        passed_over,
        and_this,
        refused(r"error: None of the 2 checkpoints in .* is whole"),
    ):
        train_hf.main([*run, "--resume"])


def test_a_run_goes_on_with_its_own_settings_only_and_alone(folder, monkeypatch, refused):
    run = flags(folder, "settings", *SIZES, "--steps", 4, "--curvature", "none")
    train_hf.main(run)
    (folder / "other.txt").write_text((folder / "text.txt").read_text()[:3000])
    for other in (
        ["--optimizer", "adamw"],
        ["--lr", "0.5"],
        ["--steps", "8"],
        ["--data", str(folder / "other.txt")],
    ):
        name, value = other[0][2:], other[1]
        with refused(rf"error: The run in .*settings had .*{name} .*, now '?{value}"):
            train_hf.main([*run, "--resume", *other])
    with (
        run_lock(folder / "settings"),
        refused(r"error: Another run trains in .*settings \(process"),
    ):
        train_hf.main([*run, "--resume"])
    monkeypatch.chdir(folder)
    train_hf.main(
        [*run, "--resume", "--data", "./text.txt", "--eval-every", "2"]
    )  # the same data, spelled in another way
    (folder / "settings" / "settings.json").unlink()
    with refused("error: Cannot read the settings of the run"):
        train_hf.main([*run, "--resume"])


# --- tokenizers of checkpoints


def test_a_checkpoint_comes_with_its_tokenizer(tmp_path, monkeypatch, capsys):
    def tokenizer(*options):
        return train_hf.parse(["--hf-checkpoint", *map(str, options)]).tokenizer

    monkeypatch.chdir(tmp_path)
    assert tokenizer("gpt2") == "gpt2"
    assert tokenizer("someone/model") == "someone/model"
    assert tokenizer("someone/model", "--tokenizer", "bytes") == "bytes"
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "vocab.json").write_text("{}")
    for wrong, message in (
        (saved, "There is no tokenizer.json in"),
        (tmp_path / "nowhere", "No checkpoint '/"),
    ):
        with pytest.raises(SystemExit):
            tokenizer(wrong)
        assert message in capsys.readouterr().err
    assert tokenizer(saved, "--data", "addition:2") is None
    (saved / "tokenizer.json").write_text("{}")
    assert tokenizer(saved) == str(saved / "tokenizer.json")
    assert tokenizer("saved") == "saved/tokenizer.json"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--optimizer", "sophia"), "Use recipes/train.py"),
        (("--optimizer", "adam"), "Invalid optimizer 'adam'"),
        (
            ("--optimizer", "adam-mini"),
            "the GPT-2 of transformers has columns. Use recipes/train.py",
        ),
        (("--steps", "0"), "Invalid --steps=0"),
        (("--lr", "0"), "Invalid --lr=0"),
        (("--hf-config", "x", "--norm", "post"), "--norm is an option of our GPT-2"),
    ],
)
def test_bad_flags_are_refused_early(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        train_hf.parse(list(options))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_what_transformers_lacks_is_refused(folder, refused):
    with refused(r"error: Invalid norm='post'"):
        train_hf.main(flags(folder, "post", *SIZES, "--norm", "post"))
    with refused(r"(?s)error: .*nowhere"):
        train_hf.main(flags(folder, "none", "--hf-config", folder / "nowhere"))
    with refused(r"error: The validation part of .* Lower --context or raise --validation-frac"):
        train_hf.main([*flags(folder, "long", *SIZES), "--context", "1000"])
