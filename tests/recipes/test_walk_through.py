"""The walk-through: from a checkpoint to one page that needs nothing else."""

import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from recipes import walk_through


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["walk_through.py", *map(str, arguments)])
    walk_through.main()


@pytest.mark.distributed
def test_a_checkpoint_leads_to_one_page(monkeypatch, tmp_path, capfd):
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 64, "vocab_size": 256}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    model.save_pretrained(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    given = ("--model", tmp_path / "model", "--text", text, "--samples", 4)
    call(monkeypatch, *given, "--out", tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") >= 3
    assert "http" not in page.replace("http-equiv", "")
    start = page.index("In short")
    said = page[start : page.index("<h2>", start)]
    assert "These heads are sharp" in said
    assert "layer 0 head" in said
    assert "bias, layer" not in said
    assert "These roles are flat" in said
    assert "BlockLR would slowly bring the learning rate of" in said


def test_a_model_needs_a_text(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, "--model", tmp_path, "--out", tmp_path)
    assert stop.value.code == 2
    assert "--model needs --text" in capsys.readouterr().err
