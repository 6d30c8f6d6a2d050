"""The comparison: equal budgets, controls, corrected verdicts, the report, and a kill."""

import argparse
import datetime
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from matplotlib.colors import to_hex
from rich.console import Console

import blockopt
from blockopt.blocks.split import block_numel
from recipes import compare
from recipes.common.checkpoints import run_lock
from recipes.common.gpt2 import GPT2, GPT2Config
from recipes.comparison import plots
from recipes.comparison.arms import ARMS, build
from recipes.comparison.controls import controlled, role_cycle, shuffle_roles
from recipes.comparison.report import print_comparison, write_plots, write_report
from recipes.comparison.rows import compared
from recipes.comparison.run_config import DataConfig
from recipes.comparison.runs import RunResult
from recipes.comparison.studies import TEST_SEED, TUNING_SEED, Study, presets
from recipes.comparison.summary import caveats, sentences
from recipes.comparison.workers import run_study, workers
from tests.helpers import ROOT

MODEL = GPT2Config(vocab_size=256, context=16, width=16, depth=1, heads=2)


def study_of(*arms, budget=6, seeds=4, **changes):
    data = DataConfig("none", "bytes", 256, key="k")
    study = Study("tiny", arms, MODEL, data, 100, (0.5, 1.0, 2.0), 4, budget, seeds, length_seeds=2)
    return replace(study, **changes)


def made_up(config):
    """A loss that is lowest at lr 0.05, falls with the steps, and depends on arm and seed."""
    values = dict(config.values)
    if config.arm == "sgd" and values["lr"] > 1:
        return RunResult(
            final=math.inf, diverged="step 3: the loss is nan", seconds=1.0, header={"git": "x"}
        )
    gain = {"block-muon": -0.3, "adamw": 0.0, "sgd": 0.4}.get(
        config.arm, 0.01 * math.sin(config.seed)
    )
    loss = 3 + gain - 0.2 * math.log2(config.steps / 100) + 0.1 * math.log(values["lr"] / 0.05) ** 2
    loss += 0.05 * math.sin(12.9 * config.seed) + 0.004 * math.sin(
        config.seed * 7.1 + len(config.arm)
    )
    scales = [(step, {"query": 2.0, "norm": 0.5}) for step in (1, 6)] if "+" in config.arm else []
    losses = [loss + 3 / step for step in range(1, config.steps + 1)]
    evaluations = round(1.5 * config.steps) if "+" in config.arm else config.steps
    return RunResult(loss, losses, None, evaluations, 2.0, 0.1, 8.0, 4000, scales, 0, {"git": "x"})


def submit_made_up(config):
    future = Future()
    future.set_result(made_up(config))
    return future


def outcomes_of(study, submit=submit_made_up, on_result=lambda *_: None):
    return run_study(study, submit, {}, on_result)


def test_tuning_and_test_seeds_differ_and_lengths_have_runs_of_their_own():
    done = []
    study = study_of("adamw", "sgd")
    outcomes_of(study, on_result=lambda config, _: done.append(config))
    tuning = [config for config in done if config.seed == TUNING_SEED]
    tests = [config for config in done if config.seed != TUNING_SEED]
    assert {config.steps for config in tuning} == {100}
    for arm in study.arms:
        assert sum(config.arm == arm for config in tuning) == study.budget
        assert sum(config.arm == arm for config in done) == study.runs_per_arm()
        seeds = {
            steps: {c.seed for c in tests if c.arm == arm and c.steps == steps}
            for steps in (50, 100, 200)
        }
        assert seeds[100] == set(range(TEST_SEED, TEST_SEED + 4))
        assert seeds[50] == seeds[200] == {1, 2}
        assert len({config.values for config in tests if config.arm == arm}) == 1


def test_the_order_in_which_workers_finish_does_not_matter():
    study = study_of("adamw", "sgd", "block-muon")
    held = []

    def later(config):  # the last submitted finishes first
        future = Future()
        held.append((future, config))
        return future

    def release(waiting, return_when):
        future, config = held.pop()
        future.set_result(made_up(config))
        return argparse.Namespace(done=[future])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipes.comparison.workers.wait", release)
        shuffled = outcomes_of(study, later)
    assert shuffled == outcomes_of(study)


def test_a_failed_run_is_named():
    def fail(config):
        future = Future()
        future.set_exception(TypeError("no such thing"))
        return future

    with pytest.raises(RuntimeError, match=r"adamw with lr=0\.003.*no such thing"):
        outcomes_of(study_of("adamw"), fail)


def weighted_mean_of_logs(scales, model):
    blocks, parameters = blockopt.find_blocks(model), dict(model.named_parameters())
    logs = torch.cat([scales[name].double().log() for name in blocks])
    sizes = torch.cat(
        [
            block_numel(tuple(parameters[name].shape), entry.split).double()
            for name, entry in blocks.items()
        ]
    )
    return float(logs @ sizes / sizes.sum())


@pytest.mark.parametrize("control", ["shuffled", "inverted"])
@pytest.mark.parametrize("seed", range(3))
def test_controls_keep_the_geometric_mean(control, seed):
    model = GPT2(replace(MODEL, depth=2))
    scales = blockopt.sharpness_disparity(model)
    changed = controlled(scales, model, control, seed)
    assert weighted_mean_of_logs(changed, model) == pytest.approx(0, abs=1e-6)
    if control == "inverted":
        products = torch.cat([scales[name] * changed[name] for name in scales])
        assert torch.allclose(products, products[0].expand_as(products), rtol=1e-5)
        assert float(products.max()) != pytest.approx(
            float(torch.cat(list(scales.values())).max()) ** 2
        )


@pytest.mark.parametrize("seed", range(5))
def test_shuffling_gives_every_role_the_value_of_another(seed):
    roles = ["query", "key", "value", "norm", "bias"]
    cycle = role_cycle(roles, seed)
    assert sorted(cycle.values()) == sorted(roles)
    assert all(cycle[role] != role for role in roles)
    model = GPT2(MODEL)
    blocks = blockopt.find_blocks(model)
    labels = sorted({role for entry in blocks.values() for role in entry.roles})
    values = {
        n: torch.tensor([1.0 + labels.index(r) for r in entry.block_roles])
        for n, entry in blocks.items()
    }
    shuffled = shuffle_roles(values, model, seed)
    expected = role_cycle_of_model(blocks, seed)
    for name, entry in blocks.items():
        assert shuffled[name].tolist() == pytest.approx(
            [1.0 + labels.index(expected[r]) for r in entry.block_roles]
        )


def role_cycle_of_model(blocks, seed):
    found = dict.fromkeys(role for entry in blocks.values() for role in entry.roles)
    return role_cycle(list(found), seed)


@pytest.mark.filterwarnings("ignore:No block had")
@pytest.mark.parametrize(
    "arm", ["block-adamw+newton", "block-adamw+newton-shuffled", "block-adamw+newton-inverted"]
)
def test_scales_of_a_run_keep_the_geometric_mean_and_controls_differ(arm):
    torch.manual_seed(0)
    model = GPT2(MODEL)
    training = build(
        ARMS[arm], model, {"lr": 3e-3, "power": -0.5, "weight_decay": 0.1}, steps=4, seed=0
    )
    tokens = torch.randint(256, (4, 17))
    for _ in range(4):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        training.optimizer.step()
        training.block_lr.step(lambda: model(tokens[:, :-1], tokens[:, 1:]))
        training.optimizer.zero_grad()
    scales = training.optimizer.block_scales()
    assert weighted_mean_of_logs(scales, model) == pytest.approx(0, abs=1e-5)
    refresh = training.block_lr.history[0]
    low, high = (pick(refresh.curvature, key=refresh.curvature.get) for pick in (min, max))
    if arm.endswith("inverted"):
        assert refresh.scale[low] < refresh.scale[high]
    else:  # the history of the shuffled arm shows the curvature that each role was given
        assert refresh.scale[low] > refresh.scale[high]


def test_free_ratios_reach_the_groups_they_are_for():
    model = GPT2(MODEL)
    values = {"lr": 1e-3, "embedding_ratio": 4.0, "vector_ratio": 0.5, "weight_decay": 0.1}
    optimizer = build(ARMS["adamw-groups"], model, values, steps=10, seed=0).optimizer
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert found["wte.weight"] == found["wpe.weight"] == pytest.approx(4e-3)
    assert found["h.0.ln_1.weight"] == found["h.0.mlp.c_fc.bias"] == pytest.approx(5e-4)
    assert found["h.0.attn.c_attn.weight"] == found["h.0.mlp.c_proj.weight"] == pytest.approx(1e-3)


def test_values_of_another_arm_are_refused():
    with pytest.raises(ValueError, match="power"):
        build(
            ARMS["block-adamw+newton"],
            GPT2(MODEL),
            {"lr": 1e-3, "weight_decay": 0.1},
            steps=10,
            seed=0,
        )


def test_shipped_arms_tune_their_learning_rate_only():
    study, longer = presets()["small"]
    assert study.baseline == longer.baseline == "shipped-muon"
    shipped = [arm for arm in map(ARMS.get, study.arms) if arm.shipped]
    assert {arm for arm in map(ARMS.get, longer.arms) if arm.shipped} < set(shipped)
    for arm in shipped:
        assert [axis.name for axis in arm.space] == ["lr"]
        training = build(arm, GPT2(MODEL), {"lr": 1e-3}, steps=1200, seed=5)
        decays = {group["weight_decay"] for group in training.optimizer.param_groups}
        assert decays == {0.0, 0.1}
        assert (training.block_lr is None) == (arm.scales is None)
    training = build(ARMS["shipped-block-muon+newton"], GPT2(MODEL), {"lr": 1e-3}, steps=9, seed=5)
    plain = GPT2(MODEL)
    default = blockopt.BlockLR(blockopt.BlockMuon(blockopt.param_groups(plain), lr=1e-3), plain)
    for name, value in vars(default).items():
        if isinstance(value, (int, float, str, dict)):
            assert getattr(training.block_lr, name) == value


@pytest.fixture(scope="module")
def comparison():
    study = study_of(
        "adamw", "sgd", "block-muon", "block-adamw+newton", "block-adamw+newton-shuffled", budget=8
    )
    outcomes = outcomes_of(study)
    return compared(
        study, outcomes, {"soap": "Optimizer 'soap' needs the package pytorch-optimizer."}
    )


def test_rows_hold_what_was_put_in(comparison):
    assert comparison.rows[0].name == "block-muon"
    muon, adamw, sgd = (comparison.row(name) for name in ("block-muon", "adamw", "sgd"))
    assert muon.verdict == "better"
    assert muon.difference.mean == pytest.approx(-0.3, abs=0.05)
    # 0.3 lower, where a factor of 2 in steps gives 0.2: a part 2^-1.5 of the steps, below the
    # shortest runs
    assert (muon.steps.part, muon.steps.kind) == (pytest.approx(0.5), "before")
    newton = comparison.row("block-adamw+newton")
    assert newton.evaluations.part == pytest.approx(1.5 * newton.steps.part)
    assert adamw.evaluations == adamw.steps
    assert adamw.verdict == "baseline"
    assert (adamw.steps.part, adamw.steps.kind) == (pytest.approx(1.0), "at")
    assert sgd.verdict == "worse"
    assert (sgd.steps.part, sgd.steps.kind) == (pytest.approx(2.0), "after")
    pair = comparison.pairs[0]
    assert (pair.name, pair.against) == ("block-adamw+newton-shuffled", "block-adamw+newton")


def test_the_words_name_winners_and_losers(comparison):
    said = " ".join(sentences(comparison))
    assert "block-muon has the lowest loss: " in said
    assert "Worse than AdamW: sgd" in said
    assert "Not reached" in said
    limits = " ".join(caveats(comparison))
    assert "soap" in limits
    assert "4,000 parameters" in limits
    assert "They left power" not in limits
    few = study_of("adamw", "adamw-groups", budget=4)
    said = " ".join(caveats(compared(few, outcomes_of(few), {})))
    assert "They left vector_ratio at its start for adamw-groups." in said
    assert "They left weight_decay at its start for all arms." in said


def test_the_words_hold_controls_rounding_and_the_correction_for_many_comparisons():
    study = study_of(
        "adamw",
        "sgd",
        "block-muon",
        "block-adamw",
        "block-adamw+newton",
        "block-adamw+newton-inverted",
    )
    comparison = compared(study, outcomes_of(study), {})
    said = " ".join(sentences(comparison))
    assert (
        "Scales in the wrong places, against the measured ones: block-adamw+newton-inverted" in said
    )
    assert "Scales from curvature, against all scales 1: block-adamw+newton" in said
    assert "the difference is rounding: block-adamw against adamw" in said
    sure = {row.name for row in comparison.rows if row.verdict in ("better", "worse")}
    assert sure == {"block-muon", "sgd"}
    assert "Holm's correction for 5 comparisons with AdamW." in said


def test_only_a_difference_that_survives_the_correction_is_called_better():
    """One arm that a single comparison would call better, among several without a difference."""

    def submit(config):
        future, seed = Future(), config.seed % 4
        differences = {"adamw": (0.0,) * 4, "block-muon": (-0.05, -0.12, -0.15, -0.09)}
        difference = differences.get(config.arm, (0.1, -0.1, 0.1, -0.1))[seed]
        future.set_result(replace(made_up(config), final=3 + difference))
        return future

    arms = ["adamw", "block-muon", "muon", "adam-mini", "sgd", "soap", "block-sgd", "block-adamw"]
    study = study_of(*arms, lengths=(1.0,))
    alone = compared(replace(study, arms=tuple(arms[:2])), outcomes_of(study, submit)[:2], {})
    assert alone.row("block-muon").verdict == "better"
    among = compared(study, outcomes_of(study, submit), {})
    assert among.row("block-muon").difference == alone.row("block-muon").difference
    assert among.row("block-muon").verdict == "unclear"
    said = " ".join(sentences(among))
    assert "Better than AdamW" not in said
    assert "Without the correction it would also exclude zero for block-muon." in said


def test_a_control_takes_the_tuned_power_of_its_base_and_tunes_its_learning_rate_alone():
    asked = []

    def submit(config):
        asked.append(config)
        future = Future()
        loss = (
            made_up(config).final
            + 0.1 * math.log(dict(config.values).get("power", -1) / -0.125) ** 2
        )
        future.set_result(replace(made_up(config), final=loss))
        return future

    study = study_of("adamw", "block-adamw+newton", "block-adamw+newton-inverted", budget=8)
    _, base, control = outcomes_of(study, submit)
    assert base.tuned.best["power"] == -0.125
    assert control.fixed == {name: base.tuned.best[name] for name in ("power", "weight_decay")}
    tried = [dict(config.values) for config in asked if config.arm.endswith("inverted")]
    assert {values["power"] for values in tried} == {-0.125}
    assert len({values["lr"] for values in tried if values}) == 8


def test_runs_that_diverge_now_and_then_are_counted():
    def submit(config):
        future, result = Future(), made_up(config)
        if (
            config.arm == "block-muon"
            and config.purpose == "test"
            and (config.seed, config.steps) in {(1, 100), (2, 200)}
        ):
            result = RunResult(diverged="step 7", gradient_evaluations=7, seconds=1.0, header={})
        future.set_result(result)
        return future

    study = study_of("adamw", "sgd", "block-muon")
    comparison = compared(study, outcomes_of(study, submit), {})
    row = comparison.row("block-muon")
    assert (row.diverged, row.tests, row.verdict) == (2, 8, "diverged")
    assert "Diverged: block-muon (2 of 8 test runs)." in sentences(comparison)
    assert (
        row.evaluations == row.steps
    )  # a run that died at its 7th gradient still counts as one of its length


def test_without_a_baseline_nothing_is_claimed():
    def submit(config):
        future = Future()
        lost = config.arm == "adamw" and config.purpose == "test" and config.seed == 1
        future.set_result(
            RunResult(diverged="step 1", seconds=1.0, header={}) if lost else made_up(config)
        )
        return future

    study = study_of("adamw", "block-muon")
    (said,) = sentences(compared(study, outcomes_of(study, submit), {}))
    assert "nothing to compare with" in said


def test_the_table_fits_into_100_columns(comparison):
    buffer = io.StringIO()
    print_comparison(comparison, Console(file=buffer, width=100))
    lines = buffer.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in buffer.getvalue()
    assert any(line.strip().startswith("block-adamw+newton-shuffled 3.0") for line in lines)


def test_the_report_needs_no_network(comparison, tmp_path):
    path = tmp_path / "out" / "report.html"
    write_report([comparison], path, "python recipes/compare.py --arms 'a<b>'", {"git": "x"})
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"(https?:)?//[a-z]", re.sub(r'"data:[^"]*"', '""', text))
    assert "<script" not in text
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', text)
    images = [source for source in sources if source.startswith("data:image/png;base64,")]
    assert len(images) == 2 * 7  # seven plots, light and dark
    assert set(sources) - set(images) == {"data:,"}
    assert "a&lt;b&gt;" in text
    day = datetime.datetime.now(datetime.timezone.utc).date()
    assert f"blockopt: optimizers compared, {day}</p><h1>block-muon ends " in text
    assert 'class="words"' in text
    assert text.index("lowest loss") < text.index("<img") < text.index("Run it again")
    assert "by other code than that which wrote this report" not in text
    write_report([comparison], path, "x", {"git": "x", "code": "another"})
    assert "by other code than that which wrote this report" in path.read_text(encoding="utf-8")
    assert "<td class=text>lr; power, weight_decay from block-adamw+newton</td>" in text
    assert "<td class=text>lr, power, weight_decay</td>" in text
    assert len(write_plots(comparison, tmp_path / "out")) == 7
    assert all(plot.stat().st_size > 5000 for plot in (tmp_path / "out").glob("*.png"))


def test_the_headline_is_for_people(comparison):
    """Plain names, ours in one colour, a title with task, size and steps; no controls."""
    figure = plots.headline(comparison, plots.LIGHT)
    (axes,) = figure.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    rows = [row for row in comparison.rows if row.outcome.arm.control is None]
    assert names == [row.outcome.arm.title for row in rows][::-1]
    assert set(names) == {"SGD", "AdamW", "BlockAdamW + BlockLR", "BlockMuon"}
    bars = dict(zip(names, axes.patches, strict=True))
    colors = {name: to_hex(bar.get_facecolor()) for name, bar in bars.items()}
    assert colors["BlockMuon"] == colors["BlockAdamW + BlockLR"] == plots.LIGHT.ours
    assert colors["SGD"] == colors["AdamW"] == plots.LIGHT.neutral
    for name in names:
        row = next(row for row in comparison.rows if row.outcome.arm.title == name)
        bar = bars[name]
        assert bar.get_x() + bar.get_width() == pytest.approx(row.loss.mean)
    title = figure.get_suptitle()
    assert "Loss after 100 steps" in title
    assert "GPT-2 of tiny parameters, none, 4 seeds, 95 % intervals" in title
    start = axes.get_xlim()[0]
    assert f"the axis starts at {start:g}" in figure.get_supxlabel()


def test_a_comparison_where_all_diverged_is_still_reported(tmp_path):
    study = study_of("adamw", "sgd", seeds=2)

    def lost(config):
        future = Future()
        future.set_result(RunResult(diverged="step 1", seconds=1.0, parameters=10, header={}))
        return future

    got = compared(study, outcomes_of(study, lost), {})
    write_report([got], tmp_path / "report.html", "x", {})
    assert "diverged" in (tmp_path / "report.html").read_text()
    print_comparison(got, Console(file=io.StringIO(), width=100))


def test_one_seed_and_one_length_are_reported(tmp_path):
    study = study_of("adamw", "block-muon", seeds=1, lengths=(1.0,), budget=1)
    got = compared(study, outcomes_of(study), {})
    assert got.row("block-muon").verdict == "unclear"
    assert got.row("block-muon").steps is None
    write_report([got], tmp_path / "report.html", "x", {})


def test_presets_are_sound():
    for studies in presets().values():
        for study in studies:
            assert {study.baseline} < set(study.arms) <= set(ARMS)
            assert ARMS[study.baseline].optimizer in ("adamw", "muon")
            assert study.seeds >= 4
    assert {"adamw-groups", "muon-groups"} < set(presets()["small"][0].arms)
    start = presets()["start"][0]
    kinds = {(arm.optimizer, arm.scales, arm.control) for arm in map(ARMS.get, start.arms)}
    for base in ("block-sgd", "block-adamw", "block-adamw-block", "block-muon"):
        assert {(base, scales, None) for scales in (None, "analytic", "newton")} <= kinds
    assert {("block-adamw", "newton", "shuffled"), ("block-adamw", "newton", "inverted")} <= kinds


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"lengths": (0.5,)}, "hold 1"),
        ({"arms": ("adam",)}, "adam"),
        ({"budget": 0}, "budget=0"),
    ],
)
def test_bad_studies_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(study_of("adamw"), **changes)


@pytest.mark.parametrize(
    "flags",
    [
        *(["--arms", "adam"], ["--seeds", "0"], ["--workers", "0"], ["--preset", "huge"]),
        *(["--device", "guess"], ["--data", "missing.txt"]),
    ],
)
def test_bad_flags_are_refused_at_once(flags, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags])
    with pytest.raises(SystemExit) as stop:
        compare.main()
    assert stop.value.code == 2
    assert "error" in capsys.readouterr().err


def test_bugs_keep_their_traceback(monkeypatch, tmp_path, capsys):
    """What the user can mend is one line, anything else is not caught."""
    flags = ["--data", "addition:1", "--cache", str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags])
    for error in (RuntimeError("shapes do not match"), ValueError("bad"), OSError("bad")):
        monkeypatch.setattr(
            compare, "compare", lambda *_, error=error: (_ for _ in ()).throw(error)
        )
        with pytest.raises(type(error)) as caught:
            compare.main()
        assert caught.value is error
    with run_lock(tmp_path / "out"):
        monkeypatch.undo()
        monkeypatch.setattr(sys, "argv", ["compare.py", *flags])
        with pytest.raises(SystemExit, match="2"):
            compare.main()
    assert re.fullmatch(r"error: Another run trains in .*\n", capsys.readouterr().err)


def test_killed_in_the_middle_the_same_command_goes_on(tmp_path):
    text = "".join(f"{i * i % 97} plus {i % 31} is {i * i % 97 + i % 31}\n" for i in range(4000))
    (tmp_path / "text.txt").write_text(text)
    flags = ["--arms", "adamw", "block-adamw+newton", "--steps=4", "--seeds=2", "--budget=3"]
    flags += ["--data", str(tmp_path / "text.txt"), "--cache", str(tmp_path / "cache")]
    command = [sys.executable, str(ROOT / "recipes" / "compare.py"), *flags]
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        [*command, "--out", str(killed)], stdout=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 300
    while len(list((killed / "runs").glob("*.jsonl"))) < 3:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)  # the parent alone: workers end by themselves
    process.wait()
    before = {path.name: path.read_bytes() for path in (killed / "runs").glob("*.jsonl")}
    assert 3 <= len(before) < 14
    for out in (killed, tmp_path / "whole"):
        options = compare.arguments().parse_args(flags)
        studies, left_out = compare.chosen_studies(options)
        studies = [study.prepared(options.cache) for study in studies]
        compare.compare(studies, left_out, out, 1, Console(file=io.StringIO()))
    paths = sorted(path.name for path in (tmp_path / "whole" / "runs").glob("*"))
    assert paths == sorted(path.name for path in (killed / "runs").glob("*"))
    assert len(paths) == 2 * studies[0].runs_per_arm() == 18
    for name in paths:
        assert without_times(killed / "runs" / name) == without_times(
            tmp_path / "whole" / "runs" / name
        )
        assert (
            before.get(name, (killed / "runs" / name).read_bytes())
            == (killed / "runs" / name).read_bytes()
        )


def without_times(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0].pop("git")  # someone may commit while the tests run
    return [
        {name: value for name, value in line.items() if "seconds" not in name} for line in lines
    ]


def test_workers_must_be_at_least_one(tmp_path):
    with pytest.raises(ValueError, match="number=0"), workers(0, tmp_path, {}):
        pass
