"""Every snippet of the guide runs, one after another."""

import re
from pathlib import Path

import pytest
import torch

from blockopt.cli import main

README = Path(__file__).parents[2] / "blockopt/analysis/README.md"


def snippets(language):
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_python_snippets(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    with torch.random.fork_rng():
        for snippet in snippets("python"):
            exec(compile(snippet, str(README), "exec"), names)
    printed = capsys.readouterr().out
    table = README.read_text(encoding="utf-8").split("```\nblock ")[1].splitlines()
    for shown, line in zip(table[1:], names["report"].table().splitlines()[1:]):
        assert shown.split()[:2] == line.split()[:2]
    assert "transformer.h.0.attn.c_attn.weight query head 1" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"spectra.png", "mass.png"}


def test_commands_are_understood(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (text,) = snippets("sh")
    gpt2, checkpoint, small = text.replace("\\\n", "").replace("'", "").splitlines()
    with pytest.raises(SystemExit, match=r"No text file at 'corpus\.txt'"):
        main(gpt2.split()[1:])
    with pytest.raises(SystemExit, match="No model at 'path/to/checkpoint'"):
        main(checkpoint.split()[1:])
    with pytest.raises(SystemExit, match="No model at 'path/to/gpt2-small'"):
        main(small.partition("#")[0].split()[1:])


def test_the_table_of_contents_names_every_section():
    text = README.read_text(encoding="utf-8")
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert re.findall(r"^- \[(.*)\]\(#", text, re.MULTILINE) == titles
