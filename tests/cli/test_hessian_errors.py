"""`blockopt hessian`: what goes wrong is told in one line, with what to do."""

import sys
from pathlib import Path

import pytest
import torch

from blockopt.blocks import UnknownBlocksError
from blockopt.blocks.layouts import Ambiguity, Layout
from blockopt.cli import main
from blockopt.cli.local_model import load_text
from tests.helpers.hessian_command import QUICK, checkpoint, config_folder, message_of, run_files


def test_a_tokenizer_that_cannot_be_read_is_told(tmp_path, text):
    folder, model = checkpoint(tmp_path / "model")
    (Path(folder) / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"The tokenizer of .* cannot be read"):
        load_text(text, model, Path(folder), sequences=2, length=6)


def test_errors_of_models(tmp_path, text):
    rest = ("--text", text, *QUICK)
    assert "Nothing is downloaded" in message_of("no/such/model", *rest)
    assert "bert is a masked language model" in message_of("bert", *rest)
    assert "t5 is not a causal language model" in message_of("t5", *rest)
    assert "vit is not a causal language model" in message_of("vit", *rest)
    folder = config_folder(tmp_path / "model")
    assert (
        message_of(folder, *rest, "--set", "n_layer")
        == "Invalid --set n_layer. Must be KEY=VALUE, such as n_layer=2."
    )
    assert "Must be an entry of the config of gpt2. Did you mean n_layer" in message_of(
        folder, *rest, "--set", "n_layers=2"
    )
    for wrong in ("n_layer=-1", "n_head=0", "vocab_size=0"):
        assert f"Invalid --set {wrong}. Must be at least 1." in message_of(
            folder, *rest, "--set", wrong
        )
    refusal = message_of(folder, *rest, "--set", "n_layer=abc")
    assert "transformers refuses this config of gpt2" in refusal
    assert "n_layer" in refusal
    assert not refusal.endswith(":")  # the reason may stand in the second line of the error
    (tmp_path / "model" / "config.json").write_text("{")
    assert "is not JSON" in message_of(folder, *rest)
    (tmp_path / "model" / "config.json").write_text('{"n_layer": 2}')
    assert "has no 'model_type'" in message_of(folder, *rest)
    config_folder(tmp_path / "model", "unheard_of")
    assert "No model type 'unheard_of'" in message_of(folder, *rest)
    (tmp_path / "empty").mkdir()
    assert "No model at" in message_of(str(tmp_path / "empty"), *rest)


def test_overrides_are_taken_and_asked_for(tmp_path, text, monkeypatch, capsys):
    folder, rest = config_folder(tmp_path / "model"), ("--text", text, *QUICK, "--only", "*c_fc*")
    assert "Invalid override 'q=table'" in message_of(folder, *rest, "--override", "q=table")
    override = ("--override", "transformer.h.*.mlp.c_fc.weight=other")
    assert main(["hessian", folder, *rest, *override]) == 0
    assert "other" in capsys.readouterr().out

    def refuse(model, **options):
        raise UnknownBlocksError({"h.0.w": Ambiguity("why", Layout(("other",)))}, {"h.0.w": (4, 4)})

    monkeypatch.setattr("blockopt.cli.override_option.find_blocks", refuse)
    assert "    --override 'h.*.w=other'" in message_of(folder, *rest)


def test_errors_of_checkpoints(tmp_path, text):
    folder, _ = checkpoint(tmp_path / "model")
    rest = ("--text", text, *QUICK)
    assert "holds weights, which would not fit another config. Add --random" in message_of(
        folder, *rest, "--set", "n_layer=2"
    )
    from safetensors.torch import load_file, save_file

    weights = load_file(f"{folder}/model.safetensors")
    del weights["transformer.h.0.mlp.c_fc.weight"]
    save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
    assert "lacks weights of GPT2LMHeadModel: transformer.h.0.mlp.c_fc.weight" in message_of(
        folder, *rest
    )


def test_errors_of_texts(tmp_path, text):
    folder = config_folder(tmp_path / "model")
    assert message_of(folder, "--text", "no.txt") == "No text file at 'no.txt'."
    assert "Must be at least 2 tokens" in message_of(folder, "--text", text, "--length", "1")
    assert (
        message_of(folder, "--text", text, "--length", "17")
        == "Invalid --length 17. The model has 16 positions."
    )
    assert "736 tokens, and --sequences 100 of --length 8 need 800." in message_of(
        *(folder, "--text", text, "--length", "8", "--sequences", "100")
    )
    (tmp_path / "text.txt").write_text("")
    assert "Must be a longer text" in message_of(folder, "--text", text, *QUICK)


def test_errors_of_options(tmp_path, text, monkeypatch):
    folder = config_folder(tmp_path / "model")
    rest = (folder, "--text", text, *QUICK)
    assert message_of(*rest, "--batch", "0") == "Invalid --batch 0. Must be an integer >= 1."
    assert message_of(*rest, "--top", "-1") == "Invalid top=-1. Must be an integer >= 0."
    assert message_of(*rest, "--samples", "1") == "Invalid --samples 1. Must be an integer >= 2."
    for matrix in ("hessian", "functional"):
        assert "Leave out one" in message_of(*rest, "--samples", "4", "--matrix", matrix)
    for option in (("--exact",), ("--top", "2"), ("--probes", "5"), ("--starts", "0")):
        found = message_of(*rest[:3], "--samples", "4", *option)
        assert "no use for --top, --probes, --steps, --starts and --exact" in found
    assert message_of(*rest, "--memory", "0") == "Invalid --memory 0. Must be > 0, in GiB."
    assert "Must fit a trainable parameter" in message_of(*rest, "--only", "nothing")
    assert "Invalid --device nonsense" in message_of(*rest, "--device", "nonsense")
    assert "exists" in message_of(*rest, "--out", text)
    monkeypatch.setattr("blockopt.analysis.report.free_memory", lambda device: 2**10)
    assert "GiB are free" in message_of(*rest, "--exact")


def test_out_of_memory_and_other_failures_of_torch(tmp_path, text, monkeypatch):
    folder = config_folder(tmp_path / "model")

    def fail(*arguments, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("blockopt.cli.hessian.hessian_report", fail)
    assert "Try a smaller --batch or --length" in message_of(folder, "--text", text, *QUICK)


@pytest.mark.parametrize(
    "kind", [RuntimeError, ValueError, TypeError, KeyError, OSError, ImportError]
)
@pytest.mark.parametrize("where", ["hessian_report", "load_text", "next_token_losses"])
def test_bugs_keep_their_traceback(tmp_path, text, monkeypatch, kind, where):
    def break_down(*arguments, **options):
        raise kind("a bug")

    monkeypatch.setattr(f"blockopt.cli.hessian.{where}", break_down)
    with pytest.raises(kind, match="a bug"):
        main(["hessian", config_folder(tmp_path / "model"), "--text", text, *QUICK])


def test_numbers_that_are_not_finite_are_told_in_one_line(tmp_path, text):
    folder, model = checkpoint(tmp_path / "model")
    model.transformer.wte.weight.data[0, 0] = torch.nan
    model.save_pretrained(folder)
    assert "Curvature needs a finite loss" in message_of(folder, "--text", text, *QUICK)


def test_without_transformers_or_matplotlib(tmp_path, text, monkeypatch, capsys):
    import importlib.util

    folder = config_folder(tmp_path / "model")
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else original(name)
    )
    _, out = run_files(tmp_path, folder, "--text", text, *QUICK, "--only", "mlp.*")
    assert sorted(path.name for path in out.iterdir()) == ["blocks.csv", "report.json"]
    assert "no plots without matplotlib" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert (
        message_of(folder, "--text", text)
        == "This command needs transformers: pip install 'blockopt[hf]'."
    )


def test_warnings_become_notes(tmp_path, text, monkeypatch, capsys):
    from blockopt.analysis import block_report

    original = block_report.top_eigenpairs

    def few_steps(operator, k, *, tolerance, generator):
        return original(operator, k, tolerance=1e-14, max_steps=k, generator=generator)

    monkeypatch.setattr(block_report, "top_eigenpairs", few_steps)
    found, _ = run_files(
        tmp_path, config_folder(tmp_path / "model"), "--text", text, *QUICK, "--only", "mlp.*"
    )
    assert any("Eigenpairs not finished after max_steps=1" in note for note in found["notes"])
    assert "Note: Eigenpairs not finished" in capsys.readouterr().out
