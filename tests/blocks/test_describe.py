"""The table of blocks and the command line that prints it."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn

from blockopt import Blocks, Split, describe, find_blocks
from blockopt.blocks import ROLES
from blockopt.cli import main
from tests.helpers import ROOT
from tests.helpers.models import CAUSAL, ENCODER_SIZES, FAMILIES

GPT2_ROWS = [
    ("embedding", "-", 50_257, 38_597_376, "31.0%"),
    ("position", "-", 1_024, 786_432, "0.6%"),
    ("query", "0-11", 144, 7_077_888, "5.7%"),
    ("key", "0-11", 144, 7_077_888, "5.7%"),
    ("value", "0-11", 144, 7_077_888, "5.7%"),
    ("output", "0-11", 144, 7_077_888, "5.7%"),
    ("mlp_in", "0-11", 36_864, 28_311_552, "22.8%"),
    ("mlp_out", "0-11", 9_216, 28_311_552, "22.8%"),
    ("norm", "0-11, -", 50, 38_400, "0.0%"),
    ("bias", "0-11", 46_524, 82_944, "0.1%"),
]


def parse(table):
    """The rows of a table without header and total, and the total."""
    header, *lines, total = table.splitlines()
    assert header.split(maxsplit=5)[:5] == ["role", "layer", "blocks", "parameters", "share"]
    assert header.split()[-4:] == ["scale", "of", "a", "BlockMuon"]
    rows = []
    for line in lines:
        role, *layer, blocks, parameters, share, _, _ = line.split()
        rows.append(
            (
                role,
                " ".join(layer),
                int(blocks.replace(",", "")),
                int(parameters.replace(",", "")),
                share,
            )
        )
    name, blocks, parameters, share = total.split()
    assert (name, share) == ("total", "100.0%")
    return rows, (int(blocks.replace(",", "")), int(parameters.replace(",", "")))


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_totals_are_those_of_the_model(name, by_layer):
    model = FAMILIES[name]()
    rows, (blocks, parameters) = parse(describe(model, by_layer=by_layer))
    assert (
        parameters
        == sum(p.numel() for p in model.parameters() if p.requires_grad)
        == sum(row[3] for row in rows)
    )
    assert (
        blocks
        == sum(entry.num_blocks for entry in find_blocks(model).values())
        == sum(row[2] for row in rows)
    )
    for _, _, _, count, share in rows:
        assert share == f"{100 * count / parameters:.1f}%"


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_fits_80_columns_and_ends_no_line_in_blanks(name, by_layer):
    for line in describe(FAMILIES[name](), by_layer=by_layer).splitlines():
        assert 0 < len(line) <= 80
        assert line == line.rstrip()


def test_a_model_of_a_trillion_parameters_still_fits_80_columns():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(10, 10**11), nn.LayerNorm(10**11))
    table = describe(model)
    assert "1,200,000,000,000" in table
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize("name", FAMILIES)
def test_one_line_a_role_in_the_order_of_roles(name):
    model = FAMILIES[name]()
    rows, _ = parse(describe(model))
    present = {role for entry in find_blocks(model).values() for role in entry.roles}
    assert [row[0] for row in rows] == [role for role in ROLES if role in present]


def test_one_line_a_role_and_layer():
    rows, _ = parse(describe(FAMILIES["llama"](), by_layer=True))
    layer = [("query", 4, 256), ("key", 2, 128), ("value", 2, 128), ("output", 4, 256)]
    layer += [("mlp_in", 24, 384), ("mlp_gate", 24, 384), ("mlp_out", 16, 384), ("norm", 2, 32)]
    outside = [("embedding", 20, 320), ("norm", 1, 16), ("head", 20, 320)]
    expected = [(role, "-", blocks, count) for role, blocks, count in outside]
    expected += [(role, str(i), blocks, count) for i in (0, 1) for role, blocks, count in layer]
    assert [row[:4] for row in rows] == expected


def test_a_fused_matrix_counts_under_each_of_its_roles():
    fused, separate = (parse(describe(FAMILIES[name]())) for name in ("phi3", "llama"))
    assert fused == separate


def test_layers_are_given_as_a_range_with_a_dash_for_those_outside():
    layers = {row[0]: row[1] for row in parse(describe(FAMILIES["gpt2"]()))[0]}
    assert layers["embedding"] == "-"
    assert layers["query"] == "0-1"
    assert layers["norm"] == "0-1, -"


def test_describes_the_blocks_it_is_given():
    model = FAMILIES["gpt_neox"]()
    rows, _ = parse(describe(model, find_blocks(model, per_head=False, per_row=())))
    blocks = {row[0]: row[2] for row in rows}
    assert (blocks["query"], blocks["key"], blocks["value"], blocks["output"]) == (2, 2, 2, 2)
    assert (blocks["embedding"], blocks["mlp_in"], blocks["head"]) == (1, 2, 1)


def test_frozen_parameters_are_not_in_the_table():
    model = FAMILIES["llama"]()
    model.model.embed_tokens.requires_grad_(False)
    rows, (_, parameters) = parse(describe(model))
    assert "embedding" not in {row[0] for row in rows}
    assert parameters == sum(p.numel() for p in model.parameters()) - 320


def test_a_model_with_nothing_to_train_has_an_empty_table():
    assert parse(describe(FAMILIES["mlp"]().requires_grad_(False))) == ([], (0, 0))


def test_the_command_prints_the_table_of_a_model_type():
    result = subprocess.run(
        [sys.executable, "-m", "blockopt", "describe", "gpt2"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "default"},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    title, table = result.stdout.split("\n", 1)
    assert title == "GPT2LMHeadModel (gpt2)"
    assert parse(table) == (GPT2_ROWS, (144_511, 124_439_808))


def test_the_command_fails_clearly_on_an_unknown_name(monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match="No model at 'no-such/model'"):
        main(["describe", "no-such/model"])
    assert capsys.readouterr().out == ""


@pytest.fixture
def config_folder(tmp_path):
    CAUSAL["llama"]().config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("source", ["", "config.json"])
def test_a_config_file_and_its_folder_are_described(config_folder, source, capsys):
    path = str(config_folder / source)
    assert main(["describe", path]) == 0
    assert (
        capsys.readouterr().out == f"LlamaForCausalLM ({path})\n{describe(FAMILIES['llama']())}\n"
    )


def test_the_options_reach_the_finder(config_folder, capsys):
    model = FAMILIES["llama"]()
    main(
        [
            "describe",
            str(config_folder),
            "--by-layer",
            "--no-per-head",
            "--per-row",
            "head",
            "mlp_in",
        ]
    )
    blocks = find_blocks(model, per_head=False, per_row=("head", "mlp_in"))
    assert (
        capsys.readouterr().out.split("\n", 1)[1] == describe(model, blocks, by_layer=True) + "\n"
    )
    main(["describe", str(config_folder), "--per-row"])
    assert (
        capsys.readouterr().out.split("\n", 1)[1]
        == describe(model, find_blocks(model, per_row=())) + "\n"
    )


def test_entries_of_the_config_are_replaced(config_folder, capsys):
    def layers(*settings):
        assert main(["describe", str(config_folder), *settings]) == 0
        rows, _ = parse(capsys.readouterr().out.split("\n", 1)[1])
        return {row[0]: row[1] for row in rows}["query"]

    assert layers("--set", "num_hidden_layers=5", "--set", "vocab_size=40") == "0-4" != layers()
    with pytest.raises(SystemExit, match=r"Invalid --set num_layer\..*Did you mean"):
        main(["describe", str(config_folder), "--set", "num_layer=5"])


def test_overrides_on_the_command_line(config_folder, capsys):
    model = FAMILIES["llama"]()
    name = next(n for n, _ in model.named_parameters() if n.endswith("0.self_attn.q_proj.weight"))
    pattern = name.replace(".0.", ".*.")
    assert main(["describe", str(config_folder), "--override", f"{pattern}=other"]) == 0
    expected = describe(model, find_blocks(model, overrides={pattern: "other"}))
    assert capsys.readouterr().out.split("\n", 1)[1] == expected + "\n"
    rows = {row[0]: row for row in parse(expected)[0]}
    assert "query" not in rows
    assert "other" in rows
    with pytest.raises(SystemExit, match="Invalid override 'q=table' with the role 'table'"):
        main(["describe", str(config_folder), "--override", "q=table"])
    with pytest.raises(SystemExit, match="'nowhere': it matches no trainable parameter"):
        main(["describe", str(config_folder), "--override", "nowhere=other"])


@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [
        ("bert", "BertForMaskedLM"),
        ("gpt_neox", "GPTNeoXForCausalLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("vit", "ViTForImageClassification"),
    ],
)
def test_the_model_for_training_is_described(model_type, class_name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["describe", model_type])
    assert capsys.readouterr().out.startswith(f"{class_name} ({model_type})\n")


def test_the_command_watches_a_pass(config_folder, capsys, tmp_path):
    assert main(["describe", str(config_folder)]) == 0
    by_names = capsys.readouterr().out
    assert main(["describe", str(config_folder), "--watch"]) == 0
    assert capsys.readouterr().out == by_names
    transformers.Wav2Vec2Config(**ENCODER_SIZES, intermediate_size=24).save_pretrained(
        tmp_path / "audio"
    )
    with pytest.raises(SystemExit, match="Wav2Vec2Model takes input_values"):
        main(["describe", str(tmp_path / "audio"), "--watch"])


def test_heads_in_a_dimension_of_their_own_are_heads_and_both_updates_of_a_role_are_shown():
    model = nn.Module()
    model.heads = nn.Parameter(torch.zeros(8, 2, 4))
    model.table, model.few = nn.Embedding(9, 8), nn.Embedding(3, 8)
    blocks = find_blocks(model, overrides={"heads": Blocks(("query",), split=Split(1, (2,), (2,)))})
    lines = {line.split()[0]: line.split()[-2:] for line in describe(model, blocks).splitlines()}
    assert lines["query"] == ["head", "Muon"]
    assert lines["embedding"] == ["row", "AdamW/whitened"]


def test_a_folder_without_a_config_fails_clearly(tmp_path):
    with pytest.raises(SystemExit, match="No model at"):
        main(["describe", str(tmp_path)])


def test_a_config_of_an_unknown_type_fails_clearly(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    with pytest.raises(SystemExit, match="No model type 'no-such-type'"):
        main(["describe", str(tmp_path)])


def test_a_model_that_cannot_be_read_in_one_way_fails_with_the_finders_message(
    config_folder, monkeypatch
):
    class StrangeAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = nn.Linear(8, 8)

    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_config", lambda config: StrangeAttention()
    )
    with pytest.raises(
        SystemExit, match=r"Cannot tell the blocks of a parameter:\n  'mixer\.weight'"
    ):
        main(["describe", str(config_folder)])


@pytest.mark.parametrize(
    "arguments", [[], ["describe"], ["describe", "gpt2", "--per-row", "query"]]
)
def test_wrong_arguments_exit_with_usage(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: blockopt" in capsys.readouterr().err
