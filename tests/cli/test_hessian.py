"""`blockopt hessian`: models and texts from local files, what is printed, the files, and errors."""

import csv
import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import blockopt
from blockopt.analysis import Probes, hessian_report
from blockopt.analysis.plots.model_curvature import MOST_IN_A_PLOT, pooled_mass, pooled_spectra
from blockopt.blocks import BlockGroup, block_groups
from blockopt.cli import main
from blockopt.cli.local_model import load_model, load_text, next_token_losses
from tests.helpers.block_lr import GPT_ROLES
from tests.helpers.hessian_command import (
    QUICK,
    checkpoint,
    config_folder,
    message_of,
    run_files,
    save_tokenizer,
)
from tests.helpers.small_language_models import GPT2, LLAMA

# What it computes


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_files_hold_the_exact_spectra_of_small_blocks(kind, tmp_path, text, capsys):
    folder = config_folder(tmp_path / "model", kind)
    attention = "attn.c_attn.weight" if kind == "gpt2" else "self_attn.v_proj.weight"
    options = (
        "--by",
        "tensor",
        "--only",
        attention,
        "--length",
        "8",
        "--sequences",
        "5",
        "--batch",
        "2",
        "--seed",
        "3",
    )
    found, out = run_files(tmp_path, folder, "--text", text, *options, "--top", "2")

    model = load_model(folder, {}, seed=3).model.double()
    ids = load_text(text, model, None, sequences=5, length=8).ids
    name = next(name for name, _ in model.named_parameters() if name.endswith(attention))
    weight = model.get_parameter(name).detach()

    def loss(flat):
        logits = torch.func.functional_call(
            model.eval(), {name: flat.view_as(weight)}, kwargs={"input_ids": ids}
        ).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        matrix = torch.autograd.functional.hessian(loss, weight.flatten())
    if kind == "gpt2":  # values are the last third of the columns
        where = torch.arange(48).reshape(4, 12)[:, 8:].flatten()
        matrix = matrix[where][:, where]
    label = f"{name} value"
    values = torch.linalg.eigvalsh(matrix)
    block = found["report"]["blocks"][label]
    atol = (1e-10 if kind == "gpt2" else 1e-6) * float(values.abs().max())
    torch.testing.assert_close(
        torch.tensor(block["spectrum"]["nodes"], dtype=torch.float64), values, rtol=0, atol=atol
    )
    by_size = values[values.abs().argsort(descending=True)]
    torch.testing.assert_close(
        torch.tensor(block["top"], dtype=torch.float64), by_size[:2], rtol=0, atol=atol
    )
    assert block["trace"]["value"] == pytest.approx(float(matrix.trace()), abs=10 * atol)
    assert block["frobenius"]["value"] == pytest.approx(float(matrix.norm()), rel=1e-6)

    with (out / "blocks.csv").open(newline="") as file:
        rows = {row["block"]: row for row in csv.DictReader(file)}
    assert list(rows) == [*found["report"]["blocks"], "whole"]
    assert float(rows[label]["top_1"]) == block["top"][0]
    assert float(rows[label]["trace"]) == block["trace"]["value"]
    assert rows[label]["exact"] == "True"
    for name in ("spectrum.png", "blocks.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert (out / name).stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "random weights, seed 3" in printed
    assert f"{block['trace']['value']:.2e}" in printed
    assert ("float32 in any dtype" in printed) == (kind == "llama")
    assert max(map(len, printed.split("\n\n", 1)[1].splitlines()[:4])) <= 100


def test_the_record_tells_how_the_numbers_came_about(tmp_path, text):
    folder = config_folder(tmp_path / "model")
    found, _ = run_files(
        tmp_path,
        f"{folder}/config.json",
        "--text",
        text,
        *QUICK,
        "--set",
        "n_inner=5",
        "--dtype",
        "float32",
    )
    assert found["model"] == "GPT2LMHeadModel"
    assert found["weights"] == "random weights, seed 0"
    assert found["config"]["n_inner"] == 5
    assert found["dtype"] == "float32"
    assert (
        found["tokens"]
        == "bytes, as there is no tokenizer; 11 to 255 count as 10, the last of the vocabulary"
    )
    assert found["options"]["sequences"] == 3
    assert found["versions"]["torch"] == torch.__version__
    assert found["parameters"] == sum(b["dimension"] for b in found["report"]["blocks"].values())
    assert found["report"]["seconds"] > 0
    assert not (tmp_path / "out" / "spectrum.png").exists()  # no spectra were asked for
    assert (tmp_path / "out" / "blocks.png").exists()


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(tmp_path, text, capsys):
    folder = config_folder(tmp_path / "model")
    tables = []
    for seed in ("1", "1", "2"):
        main(["hessian", folder, "--text", text, *QUICK, "--only", "mlp.*", "--seed", seed])
        tables.append(capsys.readouterr().out.split("\n\n")[1])
    assert tables[0] == tables[1] != tables[2]


def test_more_blocks_than_a_plot_holds_are_pooled_by_role():
    model = load_model("gpt2", GPT2).model.double()
    ids = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(0))
    probes = Probes(num_steps=3, num_starts=1)
    report = hessian_report(model, next_token_losses(model, ids, 2), by="tensor", probes=probes)
    assert len(report.blocks) > MOST_IN_A_PLOT
    short = report.short_labels()
    labels, mass = pooled_mass(report.mass, short)
    spectra = pooled_spectra(report.blocks, short, report.whole)
    assert set(labels) == {BlockGroup(role) for role in GPT_ROLES}
    assert set(spectra) == {*labels, "whole"}
    assert float(mass.sum()) == pytest.approx(float(report.mass.matrix.sum()), rel=1e-12)
    assert report.mass.labels == tuple(report.blocks)
    norms = [group for group in report.blocks if group.role == "norm"]
    numbers = [report.mass.labels.index(group) for group in norms]
    place = labels.index(BlockGroup("norm"))
    assert float(mass[place, place]) == pytest.approx(
        float(report.mass.matrix[numbers][:, numbers].sum()), rel=1e-12
    )
    mean = sum(report.blocks[n].dimension * report.blocks[n].spectrum.moment(1) for n in norms)
    dimension = sum(report.blocks[n].dimension for n in norms)
    pooled = spectra[BlockGroup("norm")]
    assert pooled.moment(1) == pytest.approx(mean / dimension, rel=1e-9)
    assert float(pooled.weights.sum()) == pytest.approx(1, rel=1e-12)
    few = hessian_report(model, next_token_losses(model, ids, 2), by="tensor", only=["attn.*"])
    assert [str(s) for s in pooled_spectra(few.blocks, few.short_labels(), None)][:2] == [
        "c_attn.weight query",
        "c_attn.weight key",
    ]


# Models and texts


def test_a_checkpoint_is_loaded_and_random_weights_only_on_demand(tmp_path, text):
    folder, saved = checkpoint(tmp_path / "model")
    model, weights, _ = load_model(folder, {})
    assert weights == "weights of the checkpoint"
    for (name, p), q in zip(saved.named_parameters(), model.parameters()):
        assert torch.equal(p, q), name
    other, weights, _ = load_model(folder, {"n_layer": 2}, random=True, seed=4)
    assert weights == "random weights, seed 4"
    assert len(other.transformer.h) == 2
    assert not torch.equal(other.transformer.wte.weight, model.transformer.wte.weight)


def test_random_weights_leave_the_random_state_alone_and_are_float32_whatever_the_config_says(
    tmp_path,
):
    folder = config_folder(tmp_path / "model", dtype="bfloat16")
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    model = load_model(folder, {}).model
    assert torch.equal(torch.random.get_rng_state(), before)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_entries_that_follow_from_others_follow_what_is_set():
    model = load_model("llama", {**LLAMA, "hidden_size": 16}).model
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (16, 16)
    assert model.config.head_dim == 4
    assert model.config.eos_token_id == 2  # within the vocabulary of 13
    assert load_model("gpt2", GPT2).model.config.eos_token_id is None  # 50256 is not


def test_the_loss_is_that_of_the_model():
    model = load_model("gpt2", GPT2).model.eval()
    ids = torch.randint(0, 11, (3, 8), generator=torch.Generator().manual_seed(0))
    values = [closure() for closure in next_token_losses(model, ids, 2)]
    assert [tokens for _, tokens in values] == [14, 7]
    mean = sum(float(loss.detach()) * tokens for loss, tokens in values) / 21
    assert mean == pytest.approx(float(model(input_ids=ids, labels=ids).loss.detach()), rel=1e-6)


def test_the_tokenizer_of_a_checkpoint_is_used(tmp_path, text):
    folder, model = checkpoint(tmp_path / "model")
    save_tokenizer(folder)
    ids, what = load_text(text, model, Path(folder), sequences=2, length=6)
    assert what == f"tokenizer of {folder}"
    assert ids[0].tolist() == [1, 2, 3, 4, 5, 6]
    save_tokenizer(folder, words=[f"w{i}" for i in range(11)] + ["the"])
    with pytest.raises(ValueError, match=r"gives token 12, and the model has 11 of them"):
        load_text(text, model, Path(folder), sequences=2, length=6)


def test_sequences_are_spread_over_the_text_without_overlap(tmp_path):
    model = load_model("gpt2", {**GPT2, "vocab_size": 256}).model
    path = tmp_path / "bytes.txt"
    for number in (12, 13, 17, 250):
        path.write_bytes(bytes(range(number)))
        ids = load_text(str(path), model, None, sequences=3, length=4).ids
        assert ids[0, 0] == 0
        assert ids[-1, -1] == number - 1
        assert len(ids.unique()) == 12
        assert (ids.diff(dim=1) == 1).all()
    assert load_text(str(path), model, None, sequences=1, length=4).ids.tolist() == [[0, 1, 2, 3]]


# What is printed


def test_what_is_printed(tmp_path, text, capsys):
    folder = config_folder(tmp_path / "model")
    assert main(["hessian", folder, "--text", text, *QUICK, "--only", "attn.*", "--top", "2"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert (
        lines[0] == f"GPT2LMHeadModel ({folder}), 270 parameters in float64, random weights, seed 0"
    )
    assert lines[1] == f"3 sequences of 8 tokens from {text}"
    assert lines[2].startswith("tokens: bytes")
    assert lines[3].startswith("about ")  # the cost comes before the long part
    assert lines[5].split() == [
        "block",
        "dimension",
        "trace",
        "±",
        "Frobenius",
        "±",
        "top",
        "negative",
    ]
    assert [line.split()[0] for line in lines[6:12]] == [
        "query",
        "key",
        "value",
        "output",
        "bias",
        "whole",
    ]
    assert lines[13].split() == ["block", "top", "1", "top", "2"]
    assert lines[-1].startswith("loss")
    assert captured.err == ""
    # No files unless asked for
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["model"]


# Large models


def test_samples_measure_all_heads_and_the_page_leads_to_learning_rates(tmp_path, text, capsys):
    folder = config_folder(tmp_path / "model", n_layer=2)
    options = ("--length", "8", "--sequences", "4", "--batch", "1", "--by", "head")
    found, out = run_files(
        tmp_path, folder, "--text", text, *options, "--samples", "6", "--dtype", "float32"
    )
    assert found["report"]["matrix"] == "gauss-newton"
    assert 0 < found["report"]["rounding"] < 1e-4
    printed = capsys.readouterr().out
    assert "off by" in printed
    page = (out / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("data:image/png;base64,") == 3  # heads, multipliers, norms
    assert "http" not in page  # it loads nothing
    assert "What BlockLR does about it" in page
    assert "Measured is the Gauss-Newton matrix of the loss" in page
    assert "standard errors over sampled gradients. A top eigenvalue is the middle" in page
    sharpest = page.partition("The sharpest heads:")[2].partition("</table>")[0]
    over_median = re.findall(r"<td>([^<]*)</td><td>[^<]*</td></tr>", sharpest)
    assert over_median
    assert all(float(ratio) >= 1 for ratio in over_median)  # rounded
    assert not (out / "partial.pt").exists()
    assert {path.name for path in out.iterdir()} >= {"heads.png", "blocks.png", "report.html"}
    # The multipliers are those of block_scales
    model = load_model(folder, {}).model
    blocks = blockopt.find_blocks(model, per_row=())
    _, numbers = block_groups(blocks, "head")
    traces = [b["trace"]["value"] / b["dimension"] for b in found["report"]["blocks"].values()]
    curvature = {n: torch.tensor([traces[i] for i in of.tolist()]) for n, of in numbers.items()}
    scales = blockopt.block_scales(curvature, model, blocks)
    value = float(scales["transformer.wte.weight"][0])
    assert f"<td>embedding</td><td>{traces[0]:.3g}</td><td>{value:.3g}</td>" in page
    # They are where BlockLR goes, not where it is after one refresh
    assert "every 150 steps, takes them 10% of the way that is left" in page
    # What is called sharp has its standard error
    heads = [b for k, b in found["report"]["blocks"].items() if "weight" in k and " head " in k]
    first = max(heads, key=lambda b: b["trace"]["value"] / b["dimension"])
    mean, error = (first["trace"][k] / first["dimension"] for k in ("value", "standard_error"))
    assert f"({mean:.2g} ± {error:.1g})" in page.partition("These heads are sharp")[2][:200]
    assert f"<td>{mean:.3g}</td><td>{error:.3g}</td>" in sharpest


def test_only_small_curvature_is_called_flat(tmp_path, text, monkeypatch):
    from blockopt.cli import hessian_page

    means = {"query": 3e-3, "key": -0.5, "value": 2e-7}  # far below zero is not flat
    monkeypatch.setattr(hessian_page, "mean_by_role", lambda _: means)
    folder = config_folder(tmp_path / "model")
    options = ("--length", "8", "--sequences", "2", "--by", "head", "--starts", "0")
    only = ("--only", "h.0.attn.c_attn.weight")
    _, out = run_files(tmp_path, folder, "--text", text, *options, *only)
    page = (out / "report.html").read_text()
    assert "These roles are flat: value (2e-07). <" in page
    assert "in key (-0.5) and smallest in value (2e-07), a ratio of 2.5e+06." in page
    assert "over random vectors, 0 where a block was built" in page


def test_a_killed_command_continues(tmp_path, text, monkeypatch, capsys):
    from blockopt.analysis.partial_results import PartialResults

    folder, out = config_folder(tmp_path / "model"), tmp_path / "out"
    command = ["hessian", folder, "--text", text, *QUICK, "--out", str(out), "--only", "mlp.*"]
    original, saved = PartialResults.save, []

    def save(self, number, piece):
        original(self, number, piece)
        saved.append(number)
        if len(saved) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(PartialResults, "save", save)
    with pytest.raises(KeyboardInterrupt):
        main(command)
    assert (out / "partial.pt").exists()
    assert main(command) == 0
    assert saved == [0, 1, 2]
    assert "continues from" in capsys.readouterr().out
    rows = (out / "blocks.csv").read_text()
    assert main(command) == 0
    assert (out / "blocks.csv").read_text() == rows
    (out / "partial.pt").write_bytes(b"damaged")
    assert "Delete it to start anew" in message_of(*command[1:])


def test_many_blocks_are_summed_by_role_on_the_terminal(tmp_path, text, monkeypatch, capsys):
    monkeypatch.setattr("blockopt.cli.hessian.MOST_ROWS", 3)
    folder = config_folder(tmp_path / "model")
    main(["hessian", folder, "--text", text, *QUICK, "--by", "head", "--only", "attn.*"])
    printed = capsys.readouterr().out
    assert "blocks by role:" in printed
    assert "layer 0 head" in printed


def test_pairs_of_many_blocks_are_in_a_file_of_their_own(tmp_path, text, monkeypatch):
    folder = config_folder(tmp_path / "model")
    options = (folder, "--text", text, *QUICK[:-2], "--starts", "1", "--by", "tensor")
    whole, out = run_files(tmp_path, *options, "--only", "mlp.*")
    assert not (out / "pairs.pt").exists()
    monkeypatch.setattr("blockopt.cli.hessian_files.MOST_BLOCKS", 3)
    found, out = run_files(tmp_path, *options, "--only", "mlp.*")
    pairs = torch.load(out / "pairs.pt", weights_only=True)
    mass, distance = (whole["report"][name] for name in ("mass", "distance"))
    assert pairs["blocks"] == mass["labels"] == list(found["report"]["blocks"])
    torch.testing.assert_close(pairs["squared_norms"], torch.tensor(mass["matrix"]))
    torch.testing.assert_close(pairs["standard_errors"], torch.tensor(mass["standard_error"]))
    for axis in ("linear", "symmetric log"):
        assert pairs[f"labels of distances on a {axis} axis"] == distance[axis]["labels"]
        found_distances = pairs[f"distances on a {axis} axis"]
        torch.testing.assert_close(found_distances, torch.tensor(distance[axis]["matrix"]))
    assert found["pairs"] == "pairs.pt"
    assert found["report"]["mass"]["matrix"] == []
    assert found["report"]["mass"]["off_diagonal"] == mass["off_diagonal"]
