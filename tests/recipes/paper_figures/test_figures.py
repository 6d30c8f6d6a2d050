"""The papers' figures: data, models against autograd, every figure at the smallest sizes."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.func import jacrev

from blockopt.analysis.closed_forms.attention_growth import BlockPart
from blockopt.analysis.operators.dense import dense
from blockopt.analysis.operators.model_operators import (
    FunctionalOperator,
    GaussNewtonOperator,
    HessianOperator,
)
from recipes import figures
from recipes.data.addition import EQUALS, IGNORED, PLUS, addition, decode
from recipes.paper_figures.models import (
    LinearAttentionChain,
    Transformer,
    estimated_norms,
    last_layer_norms,
    linear_mlp_norms,
    synthetic_images,
)
from recipes.paper_figures.outcome import (
    TINY,
    Check,
    Outcome,
    Run,
    exponent_check,
    mean_check,
    sign_check,
)
from recipes.paper_figures.vision import moving_average
from tests.helpers import ROOT

FIGURES = figures.FIGURES
ROLES = ("query", "key", "value", "output")


# ---- digit addition


@pytest.mark.parametrize("digits", [1, 5])
def test_sums_are_right(digits):
    inputs, targets = addition(20, digits, answers_only=False)
    assert inputs.shape == targets.shape == (20, 3 * digits + 2)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for row, following in zip(inputs, targets):
        text = decode(torch.cat([row, following[-1:]]))
        left, right = text.split("=")
        first, second = left.split("+")
        assert len(first) == len(second) == digits
        assert len(right) == digits + 1
        assert int(first) + int(second) == int(right)


def test_only_the_sum_counts():
    inputs, targets = addition(7)
    assert inputs.shape == (7, 17)  # the paper's L
    counts = targets != IGNORED
    assert counts.sum(1).tolist() == [6] * 7
    assert (inputs[:, 11] == EQUALS).all()  # from which the first digit of the sum is predicted
    assert (inputs[:, 5] == PLUS).all()
    assert counts[:, 11:].all()
    assert torch.equal(targets[counts], addition(7, answers_only=False)[1][counts])


def test_sums_come_from_the_generator():
    assert torch.equal(addition(5)[0], addition(5)[0])
    assert not torch.equal(
        addition(5)[0], addition(5, generator=torch.Generator().manual_seed(1))[0]
    )
    with pytest.raises(ValueError, match="Both must be integers >= 1"):
        addition(0)


# ---- models


@pytest.mark.parametrize(
    ("norm", "softmax"), [("none", True), ("none", False), ("pre", True), ("post", True)]
)
def test_exact_norms_of_the_last_layer(norm, softmax):
    inputs, targets = addition(2)
    model = Transformer(4, 2, norm=norm, softmax=softmax, scale=0.7)
    found = last_layer_norms(model, inputs, targets, ROLES)
    loss = lambda: model(inputs, targets)  # noqa: E731
    operators = {
        "outer": GaussNewtonOperator,
        "functional": FunctionalOperator,
        "full": HessianOperator,
    }
    for part, operator in operators.items():
        for role in ROLES:
            expected = float(dense(operator(model, loss, names=[f"layers.1.{role}"])).norm())
            scale = found[BlockPart("full", role)]
            assert found[BlockPart(part, role)] == pytest.approx(
                expected, rel=1e-8, abs=1e-10 * scale
            ), (part, role)


def test_estimated_norms_agree_with_exact_ones():
    inputs, targets = addition(2)
    model = Transformer(4, norm="pre", scale=0.7)
    exact = last_layer_norms(model, inputs, targets, ROLES[:1])
    estimated = estimated_norms(model, inputs, targets, 0, ROLES[:1], 3000, 0)
    assert estimated.keys() == exact.keys()
    for label, norm in exact.items():
        assert estimated[label] == pytest.approx(norm, rel=0.1), label


def test_scale_is_that_of_the_embeddings():
    model, reference = Transformer(64, scale=0.3), Transformer(64)
    assert float(model.tokens.detach().std()) == pytest.approx(0.3, rel=0.1)
    assert float(reference.tokens.detach().std()) == pytest.approx(0.1, rel=0.1)  # 0.8 / sqrt(64)
    assert torch.equal(model.layers[0].query, reference.layers[0].query)
    ratio = model.tokens / reference.tokens
    torch.testing.assert_close(ratio, torch.full_like(ratio, 3.0))


def test_linear_attention_is_homogeneous():
    inputs, targets = addition(2)
    models = (LinearAttentionChain(4, 2, scale=scale) for scale in (1.0, 2.0))
    first, second = (
        estimated_norms(model, inputs, targets, 0, ["query"], 3, 0)[BlockPart("outer", "query")]
        for model in models
    )
    # The output is of degree 9 in the data
    assert second / first == pytest.approx(2.0**18, rel=1e-9)


def test_norms_of_a_linear_mlp():
    generator = torch.Generator().manual_seed(0)
    x, Y = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    shapes = [(3, 4), (4, 3), (3, 2)]
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def loss(*parts):
        output = x
        for W in parts:
            output = output @ W
        return F.mse_loss(output, Y)

    for index, found in enumerate(linear_mlp_norms(x, weights)):
        second = jacrev(jacrev(loss, index), index)(*weights)
        assert found == pytest.approx(float(second.norm()), rel=1e-10)


def test_synthetic_images():
    images, labels = synthetic_images(200, seed=3)
    assert images.shape == (200, 9, 16)
    assert float(images.std()) == pytest.approx(0.31, rel=1e-3)
    assert set(labels.tolist()) <= set(range(10))
    assert torch.equal(images, synthetic_images(200, seed=3)[0])
    assert not torch.equal(images, synthetic_images(200, seed=4)[0])


# ---- figures


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_runs(name):
    outcome = FIGURES[name](Run(TINY))
    assert outcome.checks
    for check in outcome.checks:
        assert math.isfinite(check.measured), check
        assert len(check.row()) == 5
    assert outcome.figure.get_axes()
    for ax in outcome.figure.get_axes():
        assert ax.get_title() or ax.get_ylabel(), "an axis without a name"
    json.dumps(outcome.as_dict(), allow_nan=False)
    if name in ("7", "3a"):  # 2·3^D is exact at any size, the others nearly so
        assert outcome.verdict == "reproduced", outcome.markdown()


def test_exponents_of_linear_mlps_are_exact_at_any_size():
    outcome = FIGURES["8"](Run(TINY))
    assert [
        check.measured for check in outcome.checks if "exponent" in check.what
    ] == pytest.approx([2.0] * 5, abs=1e-9)


def test_verdicts_follow_from_the_checks():
    yes, no = Check("a", "1", 1.0, 0.5, 1.5), Check("b", "1", 2.0, 0.5, 1.5)
    outcome = Outcome("t", "s", [yes], None)
    assert outcome.verdict == "reproduced"
    assert replace(outcome, checks=[yes, no]).verdict == "partly reproduced"
    assert replace(outcome, checks=[no]).verdict == "not reproduced"
    assert "| b | 1 | 2 | 0.5 to 1.5 | NO |" in replace(outcome, checks=[no]).markdown()
    assert not Check("c", "", math.nan, 0.0, 1.0).holds
    assert (
        "size of \\|x\\|" in replace(outcome, checks=[replace(no, what="size of |x|")]).markdown()
    )
    ours = replace(no, ours=True)
    # The run itself went wrong
    assert replace(outcome, checks=[yes, ours]).verdict == "not reproduced"
    assert replace(outcome, checks=[yes, replace(yes, ours=True)]).verdict == "reproduced"
    assert replace(outcome, checks=[no, replace(yes, ours=True)]).verdict == "not reproduced"


def test_mean_and_exponent_checks():
    check = mean_check("a", "2", [1.0, 3.0], low=1.5)
    assert check.measured == 2.0
    assert check.error == pytest.approx(1.0)  # std √2 over √2
    assert check.row()[3] == ">= 1.5"
    assert not sign_check("a", "> 0", [0.0, 2.0], 1).holds  # 1 ± 1
    assert sign_check("a", "> 0", [1.0, 1.2], 1).holds
    assert not sign_check("a", "< 0", [1.0, 1.2], -1).holds
    assert sign_check("a", "< 0", [-1.0], -1).holds
    data = Run(TINY).growth(
        lambda sigma, seed: {"x": (1 + seed) * sigma**3}, torch.tensor([0.1, 0.2, 0.4]), ""
    )
    assert exponent_check(data, "x", 3.0, tolerance=1e-9).holds
    assert not exponent_check(data, "x", 2.0, tolerance=0.5).holds


def test_moving_average_of_a_constant_is_that_constant():
    torch.testing.assert_close(moving_average(torch.full((50,), 3.0), 0.9), torch.full((50,), 3.0))
    found = moving_average(torch.tensor([0.0, 1.0]), 0.5)
    torch.testing.assert_close(found, torch.tensor([0.0, 2 / 3]))


def test_the_script_writes_plot_table_and_json(tmp_path):
    command = [
        "recipes/figures.py",
        "--figure",
        "8",
        "--tiny",
        "--repeats",
        "1",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "depth 5" in done.stdout
    assert (tmp_path / "figure_8.png").stat().st_size > 10_000
    record = json.loads((tmp_path / "figure_8.json").read_text())
    assert record["mode"] == "tiny"
    assert record["checks"][0]["measured"] == pytest.approx(2.0)
    assert (
        "| what | paper | measured | criterion | holds |" in (tmp_path / "figure_8.md").read_text()
    )


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["figures.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        figures.main()
    return stop.value.code


def test_help_names_all_figures(monkeypatch, capsys):
    assert call(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    assert all(name in text for name in FIGURES)


@pytest.mark.parametrize("arguments", [("--figure", "2"), ("--repeats", "0")])
def test_bad_arguments_are_refused(arguments, monkeypatch, capsys, tmp_path):
    assert call(monkeypatch, *arguments, "--out", str(tmp_path / "new")) == 2
    assert "error" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
