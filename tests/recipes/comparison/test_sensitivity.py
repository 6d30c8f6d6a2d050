"""Sensitivity to each role's learning rate: the runs, the scales they set, table and picture."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from recipes import sensitivity
from recipes.common.gpt2 import GPT2, GPT2Config
from recipes.comparison import role_scales, role_signals
from recipes.comparison.arms import ARMS, build
from recipes.comparison.fixed_scales import fixed_scales
from recipes.comparison.role_scales import Case, cases, differences
from recipes.comparison.run_config import DataConfig, RunConfig

TINY = GPT2Config(vocab_size=256, context=16, width=16, depth=1, heads=2)


def test_every_role_of_a_gpt_is_in_one_group():
    import blockopt

    roles = {role for blocks in blockopt.find_blocks(GPT2(TINY)).values() for role in blocks.roles}
    grouped = [role for group in role_scales.ROLE_GROUPS.values() for role in group]
    assert roles == set(grouped)
    assert len(grouped) == len(set(grouped))


@pytest.mark.parametrize("optimizer", role_scales.OPTIMIZERS)
def test_a_run_multiplies_its_roles_and_no_other(optimizer):
    values = {"lr": 0.1, "weight_decay": 0.1, "query_scale": 4.0, "key_scale": 4.0}
    training = build(ARMS[optimizer], GPT2(TINY), values, steps=2, seed=0)
    scales = training.optimizer.block_scales()
    fused = next(s for name, s in scales.items() if name.endswith("c_attn.weight"))
    assert fused.tolist() == [4.0] * 4 + [1.0] * 2
    assert all(bool((s == 1).all()) for name, s in scales.items() if "c_attn" not in name)


@pytest.mark.parametrize("optimizer", role_scales.OPTIMIZERS)
def test_a_run_multiplies_one_layer_or_the_rows_of_some_tokens(optimizer):
    two_layers = GPT2(replace(TINY, depth=2))
    values = {"lr": 0.1, "weight_decay": 0.1, "value.1_scale": 4.0, "embedding.rare_scale": 0.5}
    tokens = torch.tensor([7] * 50 + [9] * 30 + list(range(20)))  # 7 makes half, 9 a third
    options = {"steps": 2, "seed": 0, "tokens": tokens}
    scales = build(ARMS[optimizer], two_layers, values, **options).optimizer.block_scales()
    layers = [s.tolist() for name, s in scales.items() if name.endswith("c_attn.weight")]
    assert layers == [[1.0] * 6, [1.0] * 4 + [4.0] * 2]
    rows = next(s for name, s in scales.items() if name.endswith("wte.weight"))
    assert [token for token in range(256) if rows[token] == 1] == [7, 9]
    assert set(rows.tolist()) == {1.0, 0.5}


def test_scales_of_blocks_that_a_model_lacks_are_refused():
    values = {"lr": 0.1, "weight_decay": 0.1, "value.9_scale": 4.0}
    with pytest.raises(ValueError, match=r"value\.9"):
        build(ARMS["block-sgd"], GPT2(TINY), values, steps=2, seed=0)


@pytest.mark.parametrize("kind", role_scales.KINDS)
def test_groups_do_not_overlap(kind):
    named = [name for names in role_scales.groups_by(kind, 3).values() for name in names]
    assert len(named) == len(set(named))
    fixed_scales(GPT2(replace(TINY, depth=3)), dict.fromkeys(named, 2.0), torch.arange(256))


def test_differences_are_paired_by_seed():
    finals = {(case, seed): 3.0 + seed for case in cases("block-muon") for seed in range(3)}
    finals |= {(Case("block-muon", "value", 4.0), seed): 2.9 + seed for seed in range(3)}
    finals[Case("block-muon", "output", 2.0), 1] = float("inf")  # a run that diverged
    rows = {(r["group"], r["multiplier"]): r for r in differences(finals, "block-muon", 3)}
    assert rows["value", 4.0]["mean"] == pytest.approx(-0.1)
    assert rows["value", 4.0]["high"] == pytest.approx(-0.1)
    assert rows["value", 0.5]["mean"] == 0
    assert rows["output", 2.0]["mean"] == float("inf")


def test_the_script_writes_data_and_a_picture_and_reads_finished_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(sensitivity.PRESETS, "0.5M", replace(TINY, vocab_size=300))
    monkeypatch.setattr(role_scales, "MULTIPLIERS", (2.0,))
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    options = ["--steps", "2", "--optimizers", "block-sgd", "--workers", "1", "--data", str(corpus)]
    options += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["sensitivity.py", *options])
    torch.manual_seed(0)
    sensitivity.main()
    first = json.loads((tmp_path / "out" / "sensitivity.json").read_text())["rows"]
    assert [row["group"] for row in first] == list(role_scales.ROLE_GROUPS)
    assert any(row["mean"] != 0 for row in first)
    assert (tmp_path / "out" / "sensitivity.png").stat().st_size > 10_000
    monkeypatch.setattr("recipes.comparison.runs.train", None)  # would fail if a run was repeated
    sensitivity.main()
    assert json.loads((tmp_path / "out" / "sensitivity.json").read_text())["rows"] == first


def test_a_rank_correlation_has_its_interval_inside_of_one():
    found = role_signals.correlation([1.0, 2.0, 2.0, 5.0, 4.0], [1.0, 4.0, 9.0, 16.0, 25.0])
    assert found.value == pytest.approx(8.5 / 95**0.5)  # equal values share a rank
    assert -1 < found.low < found.value < found.high < 1


@pytest.mark.parametrize("signal", ["1 / newton", "1 / gradient", *role_signals.PATHS])
def test_a_signal_has_a_number_for_each_group_of_roles(signal, tmp_path):
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    data = DataConfig(str(tmp_path / "corpus.txt"), "bytes", 256, cache=str(tmp_path / "cache"))
    values = (("lr", 1e-3), ("weight_decay", 0.1))
    config = RunConfig("block-adamw", values, 1, 6, TINY, data, batch_size=4)
    found = role_signals.measured(config, signal)
    assert set(found) <= set(role_scales.ROLE_GROUPS)
    assert len(found) >= 6
    if signal == "straightness":  # no path is shorter than the way from its start to its end
        assert all(value <= 1e-6 for value in found.values())


def test_the_truth_is_the_loss_at_half_minus_that_at_twice():
    finals = {(case, 0): 3.0 for case in cases("block-sgd")}
    finals[Case("block-sgd", "value", 2.0), 0] = 2.5
    paid = role_signals.truth(differences(finals, "block-sgd", 1), "block-sgd")
    assert paid == dict.fromkeys(role_scales.ROLE_GROUPS, 0.0) | {"value": 0.5}
