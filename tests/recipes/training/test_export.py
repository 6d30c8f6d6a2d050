"""The model that a run leaves loads in transformers, and is the one that was evaluated."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from recipes import train
from recipes.common.checkpoints import CheckpointError
from recipes.common.training import token_loss
from recipes.training.arguments import parse
from tests.helpers.training import flags, forget, read_log, run


def exported_loss(arguments):
    """Of the exported model, on the batches of the evaluation."""
    forget()
    parsed = parse(arguments)
    _, _, held_out = train.load_batches(parsed, print)
    model = AutoModelForCausalLM.from_pretrained(parsed.output / "model").eval()
    with torch.no_grad():
        return (
            sum(float(token_loss(model, *held_out[index])) for index in range(parsed.eval_batches))
            / parsed.eval_batches
        )


@pytest.mark.parametrize(
    "options", [(), ("--optimizer", "schedulefree"), ("--compile", "aot_eager")]
)
def test_the_exported_model_is_the_evaluated_one(options, tmp_path, cache):
    arguments = flags(tmp_path, cache, "--steps", 6, *options)
    log = run(arguments)
    assert exported_loss(arguments) == pytest.approx(read_log(log)[-1]["loss"], rel=1e-5)


def test_a_model_of_transformers_and_its_tokenizer(tmp_path, cache):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{a}+{b}={a + b}\n" for a in range(40) for b in range(40)))
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaConfig(**sizes, vocab_size=99, max_position_embeddings=8).save_pretrained(
        tmp_path / "config"
    )
    arguments = flags(
        tmp_path / "run", cache, "--steps", 4, "--data", text, "--vocab-size", 280, "--context", 8
    )
    first = arguments.index("--width")
    arguments = [
        *arguments[:first],
        *arguments[first + 6 :],
        "--hf-config",
        str(tmp_path / "config"),
    ]
    log = run(arguments)
    assert exported_loss(arguments) == pytest.approx(read_log(log)[-1]["loss"], rel=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert tokenizer.decode(tokenizer("12+30=42")["input_ids"]) == "12+30=42"
    tuned = [flag for flag in arguments if flag != "--hf-config"]
    tuned[tuned.index(str(tmp_path / "config"))] = "--hf-checkpoint"
    tuned += [str(tmp_path / "run" / "model"), "--output", str(tmp_path / "tuned"), "--lr", "1e-9"]
    tuned = [flag for flag in tuned if flag not in ("--vocab-size", "280")]
    assert read_log(run(tuned))[-1]["loss"] == pytest.approx(read_log(log)[-1]["loss"], rel=1e-4)


def test_what_transformers_lacks_stays_in_the_checkpoints(tmp_path, cache, capsys):
    run(flags(tmp_path, cache, "--steps", 2, "--norm", "post"))
    assert "transformers has no such GPT-2" in capsys.readouterr().out
    assert not (tmp_path / "model").exists()


def test_a_full_disk_is_said_and_the_model_written_later(tmp_path, cache, monkeypatch):
    arguments = flags(tmp_path, cache, "--steps", 2)
    with monkeypatch.context() as patch:

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        patch.setattr("transformers.PreTrainedModel.save_pretrained", full)
        with pytest.raises(
            CheckpointError, match=r"could not be written to .*model: .*No space left.*--resume"
        ):
            run(arguments)
    log = run([*arguments, "--resume"])
    assert exported_loss(arguments) == pytest.approx(read_log(log)[-1]["loss"], rel=1e-5)
    assert not list(tmp_path.glob(".model*"))
