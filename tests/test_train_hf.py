"""The recipe for the Trainer of transformers: it trains, fine-tunes what it saved, and resumes."""

import json

import pytest
import torch
import transformers

from recipes import train_hf
from recipes.data import load_data
from recipes.gpt2 import GPT2, GPT2Config, to_huggingface
from recipes.models import token_loss

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:Curvature not positive")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    words = ["block", "head", "query", "key", "value", "loss", "step"]
    (folder / "text.txt").write_text("\n".join(f"{a} of {b} and {c}." for a in words for b in words for c in words))
    return folder


def flags(folder, output, *more):
    sizes = ["--batch-size", "4", "--eval-batches", "2", "--eval-every", "4", "--checkpoint-every", "4", "--cpu"]
    data = ["--data", str(folder / "text.txt"), "--vocab-size", "300", "--cache", str(folder / "cache"), "--context", "16"]
    return [*data, *sizes, "--output", str(folder / output), "--curvature-every", "3", *map(str, more)]


SIZES = ("--width", 16, "--depth", 1, "--heads", 2)


def state(folder, step):
    return json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())


def losses(state):
    return {line["step"]: line["loss"] for line in state["log_history"] if "loss" in line}


def test_train_resume_and_fine_tune(folder, capsys):
    train_hf.main(flags(folder, "whole", *SIZES, "--steps", 12))
    whole = losses(state(folder / "whole", 12))
    assert whole[12] < whole[1] - 0.3
    out = capsys.readouterr().out
    assert "mlp_out" in out
    assert "held out" in out.splitlines()[-1]
    rows = (folder / "whole" / "block_lr.csv").read_text().splitlines()
    assert {row.split(",")[0] for row in rows[1:]} == {"2", "4", "7", "10"}  # the schedule of transformers starts from 0
    assert (folder / "whole" / "block_lr.png").stat().st_size > 10_000

    with pytest.raises(SystemExit):  # without --resume
        train_hf.main(flags(folder, "whole", *SIZES, "--steps", 12))
    assert "There is a run in" in capsys.readouterr().err
    train_hf.shutil.rmtree(folder / "whole" / "checkpoint-12")  # as if killed after step 8
    train_hf.main(flags(folder, "whole", *SIZES, "--steps", 12, "--resume"))
    assert losses(state(folder / "whole", 12)) == whole

    saved = folder / "whole" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert 257 < model.config.vocab_size <= 300
    train_hf.main(flags(folder, "tuned", "--hf-checkpoint", saved, "--steps", 4, "--lr", 1e-5, "--curvature", "none"))
    tuned = losses(state(folder / "tuned", 4))
    assert tuned[1] == pytest.approx(whole[12], abs=0.4)  # it goes on from what was learned, with its tokenizer
    assert tuned[1] < whole[1] - 0.3
    assert not (folder / "tuned" / "block_lr.csv").exists()


def test_the_labels_are_our_targets(folder):
    """The loss of transformers on its windows is our loss on the same tokens."""
    data = load_data("addition:2", cache=folder / "cache", max_tokens=900)
    torch.manual_seed(0)
    ours = GPT2(GPT2Config(data.vocab_size, 9, 16, 1, 2))
    training, _ = train_hf.windows(data, data.context + 1)
    rows = [training[n] for n in range(6)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    theirs = to_huggingface(ours)(**batch).loss
    inputs, targets = batch["input_ids"][:, :-1], batch["input_ids"][:, 1:].clone()
    targets[:, : data.ignored] = -100
    torch.testing.assert_close(theirs, token_loss(ours, inputs, targets))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--optimizer", "sophia"), "Use recipes/train.py"),
        (("--optimizer", "adam"), "Invalid optimizer 'adam'"),
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


def test_what_transformers_lacks_is_refused(folder):
    with pytest.raises(SystemExit, match=r"error: Invalid norm='post'"):
        train_hf.main(flags(folder, "post", *SIZES, "--norm", "post"))
    with pytest.raises(SystemExit, match=r"(?s)error: .*nowhere"):
        train_hf.main(flags(folder, "none", "--hf-checkpoint", folder / "nowhere"))
