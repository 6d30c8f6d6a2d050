"""What the comparison says: corrected verdicts, tables, plots and the report."""

import datetime
import io
import math
import re
from concurrent.futures import Future
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex
from rich.console import Console

from recipes.comparison import plots
from recipes.comparison.report import print_comparison, write_plots, write_report
from recipes.comparison.rows import compared
from recipes.comparison.runs import RunResult
from recipes.comparison.summary import caveats, sentences
from tests.helpers.comparison import made_up, outcomes_of, study_of


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


def bar_colors(comparison):
    (axes,) = plots.steps_bars(comparison, plots.LIGHT).axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    return {name: to_hex(bar.get_edgecolor()) for name, bar in zip(names, axes.patches)}


def test_bars_of_steps_claim_nothing_that_the_corrected_loss_does_not(comparison):
    assert bar_colors(comparison)["block-muon"] == plots.LIGHT.better
    rows = [
        replace(row, verdict="unclear") if row.name == "block-muon" else row
        for row in comparison.rows
    ]
    unclear = bar_colors(replace(comparison, rows=rows))
    assert unclear["block-muon"] == plots.LIGHT.neutral
    assert unclear["sgd"] == plots.LIGHT.worse


def test_ticks_of_learning_rates_are_few_and_those_that_were_tried(comparison):
    panels = plots.tuning(comparison, plots.LIGHT).axes
    assert len(panels) == len(comparison.rows)
    for row, axes in zip(comparison.rows, panels):
        shown = [label.get_text() for label in axes.get_xticklabels(which="both")]
        tried = {f"{trial.values['lr']:.2g}" for trial in row.outcome.tuned.trials}
        assert 0 < len(shown) <= 4
        assert set(shown) <= tried
