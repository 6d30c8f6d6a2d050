"""Every snippet of the READMEs runs, and every command is understood."""

import re
import types

import pytest
import torch
import transformers

import blockopt
from blockopt.cli import main
from tests.helpers import ROOT
from tests.helpers.models import timm_vision_transformer
from tests.helpers.readmes import READMES, commands, snippets

timm_vision_transformer()  # imports timm without torchvision
import timm.optim  # noqa: E402

README, GUIDE, ANALYSIS = READMES[:3]


def run_snippets(readme, names):
    with torch.random.fork_rng():
        for snippet in snippets(readme, "python"):
            exec(compile(snippet, str(readme), "exec"), names)


@pytest.mark.parametrize("readme", [README, GUIDE])
def test_snippets_run_with_what_a_user_has(readme, tmp_path):
    """A model of transformers, its batches, a schedule, and the libraries that are named."""
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 50}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model, ids = transformers.GPT2LMHeadModel(config), torch.randint(50, (2, 8))
    batch = {"input_ids": ids, "labels": ids}
    names = {
        **{"model": model, "batch": batch, "loader": [batch] * 2, "v": torch.randn(16 * 48)},
        "scheduler": types.SimpleNamespace(step=lambda: None),
        **{name: torch.randn(16, 16) for name in ("X", "W_Q", "W_K", "W_V", "Y")},
        "args": transformers.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True),
        **{"Trainer": transformers.Trainer, "data": [batch], "timm": timm},
        "lightning": types.SimpleNamespace(Callback=object),  # tests/loops runs it
        "checkpoint": torch.optim.AdamW(model.parameters()).state_dict(),
    }
    run_snippets(readme, names)
    if readme == README:
        assert names["block_lr"].history[0].step == 1
    else:
        assert isinstance(names["curvature"]["transformer.wte.weight"], torch.Tensor)
        assert issubclass(
            names["trainer_optimizer"](model, names["args"]).__class__, blockopt.BlockAdamW
        )


@pytest.mark.distributed
def test_the_snippets_of_the_analysis(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    run_snippets(ANALYSIS, names)
    printed = capsys.readouterr().out
    table = ANALYSIS.read_text(encoding="utf-8").split("```\nblock ")[1].splitlines()
    for shown, line in zip(table[1:], names["report"].table().splitlines()[1:]):
        assert shown.split()[:2] == line.split()[:2]
    assert "transformer.h.0.attn.c_attn.weight query head 1" in printed
    assert {path.name for path in tmp_path.iterdir()} == {"spectra.png", "mass.png"}


@pytest.mark.parametrize(
    "words", [words for words in commands() if words[0] == "blockopt"], ids=" ".join
)
def test_commands_of_blockopt_are_understood(words, tmp_path, monkeypatch, capsys):
    """They end with a table, or for want of the file that they name."""
    monkeypatch.chdir(tmp_path)
    if words[1] == "describe":
        assert main(words[1:]) == 0
        assert "embedding" in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit, match=r"No text file at|No model at"):
            main(words[1:])


def test_files_that_the_readmes_name_exist():
    for readme in READMES:
        text = readme.read_text(encoding="utf-8")
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (readme.parent / link).exists(), f"{readme}: {link}"


@pytest.mark.parametrize("readme", READMES[1:], ids=lambda path: path.parent.name)
def test_links_to_sections_lead_somewhere(readme):
    def anchors(path):
        titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}

    text = readme.read_text(encoding="utf-8")
    for file, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
        assert anchor in anchors(readme.parent / file if file else readme), anchor
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert re.findall(r"^- \[(.*)\]\(#", text, re.MULTILINE) == titles


def test_the_first_page_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 170
    assert (ROOT / "recipes/images/headline.png").stat().st_size < 200_000
