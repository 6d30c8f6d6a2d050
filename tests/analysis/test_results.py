"""Every result shows itself: as an HTML table, a frame, JSON and a plot."""

import functools
import json

import pandas
import pytest
import torch

from blockopt.analysis import (
    Probes,
    block_mass,
    growth,
    hessian_report,
    jensen_shannon,
    kronecker_report,
    loss_difference,
    measure_block,
    plots,
    sampled_report,
    spectral_density,
    top_eigenpairs,
)
from blockopt.analysis.recorder import HessianRecorder
from blockopt.blocks import BlockGroup
from blockopt.cli.local_model import next_token_losses
from tests.helpers.matrices import random_symmetric
from tests.helpers.small_language_models import small_model

QUICK = Probes(num_probes=2, num_steps=4, num_starts=2)


def recorded(model, losses):
    measure = functools.partial(hessian_report, by="head", probes=QUICK)
    recorder = HessianRecorder(model, losses, steps=[0, 1], measure=measure)
    recorder.step(0)
    recorder.step(1)
    return recorder


def difference(model, losses):
    update = {name: 0.01 * torch.ones_like(p) for name, p in model.named_parameters()}
    return loss_difference(model, losses, update)


OF_MODELS = {
    "report": lambda model, losses: hessian_report(model, losses, by="head", probes=QUICK),
    "sampled report": lambda model, losses: sampled_report(model, losses, num_samples=2),
    "Kronecker report": kronecker_report,
    "recorder": recorded,
    "loss difference": difference,
}
MATRIX = random_symmetric(20)
PARTS = {"first": torch.arange(8), "second": torch.arange(8, 20)}
OF_MATRICES = {
    "block report": lambda: measure_block(MATRIX),
    "mass": lambda: block_mass(MATRIX, PARTS),
    "distance": lambda: jensen_shannon({"a": torch.ones(3), "b": torch.zeros(2)}),
    "spectral density": lambda: spectral_density(MATRIX),
    "eigenpairs": lambda: top_eigenpairs(MATRIX, 3),
    "growth": lambda: growth(
        lambda sigma, seed: {"a": sigma**2, "b": seed + sigma}, [1, 2], repeats=2
    ),
}


def check(result):
    rows = result.rows()
    shown = result._repr_html_()
    assert shown.count("<tr>") == min(len(rows), 60) + 1
    frame = result.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == len(rows) > 0
    found = json.loads(result.to_json())
    assert found == json.loads(json.dumps(result.to_dict()))
    drawn = [ax for ax in result.plot().axes if ax.get_title()]
    assert len(drawn) > 0
    assert all(ax.has_data() for ax in drawn)


@pytest.mark.parametrize("name", OF_MODELS)
def test_results_about_models(name):
    model, ids = small_model(n_embd=4, n_inner=4)
    check(OF_MODELS[name](model, next_token_losses(model, ids, 8)))


@pytest.mark.parametrize("name", OF_MATRICES)
def test_results_about_matrices(name):
    check(OF_MATRICES[name]())


def test_rows_of_pairs():
    mass = block_mass(MATRIX, PARTS)
    rows = mass.to_frame()
    assert list(rows["other"]) == ["first", "second", "second"]
    counts = (1, 2, 1)  # the pair off the diagonal counts twice
    assert sum(n * share for n, share in zip(counts, rows["share"])) == pytest.approx(1)
    corner = MATRIX[:8, 8:].square().sum()
    assert rows["squared_norm"][1] == pytest.approx(float(corner))
    distance = jensen_shannon({"a": torch.ones(3), "b": torch.zeros(2), "c": torch.ones(1)})
    found = {(row["block"], row["other"]): row["distance"] for row in distance.rows()}
    assert found == pytest.approx({("a", "b"): 1, ("a", "c"): 0, ("b", "c"): 1}, abs=1e-6)


def test_rows_of_spectra_and_growth():
    eigenvalues = torch.linalg.eigvalsh(MATRIX)
    density = spectral_density(MATRIX, num_probes=3).to_frame()
    assert density["weight"].sum() == pytest.approx(1)
    moment = (density["weight"] * density["eigenvalue"] ** 2).sum()
    assert moment == pytest.approx(float(eigenvalues.square().mean()), rel=0.5)
    pairs = top_eigenpairs(MATRIX, 2, which="largest")
    assert pairs.to_frame()["eigenvalue"].tolist() == pytest.approx(
        eigenvalues.flip(0)[:2].tolist()
    )
    assert "vectors" not in pairs.to_dict()  # as many numbers as the operator has rows
    found = growth(lambda sigma, seed: {"a": (1 + seed) * sigma}, [1.0, 2.0], repeats=2)
    assert found.to_frame().values.tolist() == [["a", 1.0, 1.5, 0.5], ["a", 2.0, 3.0, 1.0]]


def test_heat_maps_have_a_colour_bar():
    heads = {BlockGroup("query", 0, "w", head): 10.0**head for head in range(4)}
    drawn = (
        jensen_shannon({"a": torch.ones(3), "b": torch.zeros(2)}).plot(),
        block_mass(MATRIX, PARTS).plot(),
        plots.hessian_heatmap(MATRIX, {"first": 8, "second": 12}).figure,
        plots.head_heatmap(heads).figure,
    )
    assert all(len(figure.axes) == 2 for figure in drawn)


def test_a_block_without_a_spectrum():
    with pytest.raises(ValueError, match="no spectrum to plot"):
        measure_block(random_symmetric(200), Probes(num_starts=0)).plot()
    with pytest.raises(ValueError, match="Invalid 1 labels and a matrix of shape"):
        plots.distance_heatmap(["a"], torch.zeros(2, 2))


def test_blocks_that_are_only_rounding():
    """Biases of keys, which softmax does not see, are neither the smallest norm nor drawn."""
    model, ids = small_model(n_embd=4, n_inner=4)
    report = hessian_report(model, next_token_losses(model, ids, 8), by="head", probes=QUICK)
    norms = {str(group): block.frobenius.value for group, block in report.blocks.items()}
    smallest = report.summary().splitlines()[2].removeprefix("                smallest: ")
    assert norms[smallest] == report.spread.smallest > 1e3 * min(norms.values())
    left_out = sum(norm <= 1e-14 * max(norms.values()) for norm in norms.values())
    title = report.plot("blocks").axes[0].get_title()
    assert title.endswith(f"({left_out} more are zero up to rounding)")
