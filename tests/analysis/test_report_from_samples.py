"""Reports from sampled gradients, against the Gauss-Newton matrix that autograd builds."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from blockopt import find_blocks
from blockopt.analysis import hessian_report, sampled_report
from blockopt.analysis.report_from_samples import Plan
from blockopt.blocks import BlockGroup
from blockopt.cli.local_model import load_model, next_token_losses
from tests.helpers.small_language_models import small_model


def gauss_newton(model, ids):
    """The matrix `Jᵀ Λ J / N` of all parameters, from Jacobians of the logits, and their names."""
    names = [name for name, _ in model.named_parameters()]
    parameters = dict(model.named_parameters())
    sizes = [parameters[name].numel() for name in names]

    def logits_of(vector):
        pieces = {n: v.view_as(parameters[n]) for n, v in zip(names, vector.split(sizes))}
        logits = torch.func.functional_call(model, pieces, kwargs={"input_ids": ids}).logits
        return logits[:, :-1].flatten(0, 1)

    model.eval()
    start = torch.cat([parameters[name].detach().flatten() for name in names])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        J = torch.autograd.functional.jacobian(logits_of, start, vectorize=True)  # (N, V, n)
    p = logits_of(start).detach().softmax(-1)
    JL = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    return torch.einsum("tvn,tvw,twm->nm", J, JL, J) / len(p), names


def heads_of(model, names, blocks):
    """Where each block by head lies in the vector of all parameters, by parameter and number."""
    places, start = {}, 0
    for name in names:
        shape = model.get_parameter(name).shape
        split = blocks[name].split
        numbers = torch.zeros(shape, dtype=torch.int64)
        if split is not None:
            along = torch.arange(split.num_blocks).repeat_interleave(
                split.length // split.num_blocks
            )
            numbers = numbers.movedim(split.dim, -1).add(along).movedim(-1, split.dim)
        for number in range(blocks[name].num_blocks):
            places[name, number] = start + (numbers.flatten() == number).nonzero().flatten()
        start += shape.numel()
    return places


@pytest.fixture(scope="module")
def measured():
    model, ids = small_model(sequences=4)
    G, names = gauss_newton(model, ids)
    losses = next_token_losses(model, ids, 1)
    report = sampled_report(model, losses, num_samples=256, seed=2)
    places = list(heads_of(model, names, find_blocks(model, per_row=())).values())
    return model, ids, G, report, places


def test_traces_norms_and_pairs_agree_with_the_matrix_within_their_errors(measured):
    _, _, G, report, places = measured
    assert len(places) == len(report.blocks)
    scale = float(G.norm())
    for (group, block), where in zip(report.blocks.items(), places):
        own = G[where][:, where]
        assert block.dimension == len(own), group
        trace, norm = float(own.trace()), float(own.norm())
        assert abs(block.trace.value - trace) <= 4 * block.trace.standard_error + 1e-12 * scale
        assert abs(block.frobenius.value - norm) <= 4 * block.frobenius.standard_error + 1e-9
        assert block.trace.standard_error <= 0.2 * trace + 1e-12 * scale
    exact = torch.tensor([[float(G[a][:, b].square().sum()) for b in places] for a in places])
    scores = (report.mass.matrix - exact) / report.mass.standard_error.clamp(min=1e-12 * scale**2)
    assert float(scores.abs().max()) < 6  # pairs share their noise, and eight windows tell it
    whole = report.whole
    assert abs(whole.trace.value - float(G.trace())) <= 4 * whole.trace.standard_error
    assert abs(whole.frobenius.value - scale) <= 4 * whole.frobenius.standard_error
    share = 1 - float(exact.diagonal().sum() / exact.sum())
    found = report.mass.off_diagonal
    assert found.standard_error < 0.05
    # A ratio of estimates has a small bias.
    assert abs(found.value - share) <= 4 * found.standard_error + 0.01


def test_the_top_eigenvalue_lies_in_its_range(measured):
    _, _, G, report, places = measured
    inside = 0
    for block, where in zip(report.blocks.values(), places):
        top = float(torch.linalg.eigvalsh(G[where][:, where])[-1])
        middle, half = float(block.top[0]), float(block.residuals[0])
        if top > 1e-9:
            assert middle == pytest.approx(top, rel=0.25)
            inside += abs(middle - top) <= half + 0.15 * top
        else:
            inside += middle < 1e-9
    assert inside >= 0.95 * len(places)
    top = float(torch.linalg.eigvalsh(G)[-1])
    assert float(report.whole.top[0]) == pytest.approx(top, rel=0.15)


def test_standard_errors_are_those_of_repeated_runs():
    model, ids = small_model(sequences=2)
    losses = next_token_losses(model, ids, 1)
    found = [
        sampled_report(model, losses, by="role", num_samples=12, seed=seed) for seed in range(30)
    ]
    for role in ("query", "value", "mlp_out"):
        for what in ("trace", "frobenius"):
            estimates = [getattr(report.blocks[BlockGroup(role)], what) for report in found]
            spread = torch.tensor([e.value for e in estimates]).std()
            claimed = torch.tensor([e.standard_error for e in estimates]).square().mean().sqrt()
            assert 0.55 < float(claimed / spread) < 1.8, (role, what)


def test_little_memory_gives_the_same_traces_in_groups(monkeypatch):
    model, ids = small_model(sequences=4)
    losses = next_token_losses(model, ids, 1)
    size = 8 * sum(p.numel() for p in model.parameters())
    G, _ = gauss_newton(model, ids)
    name = "blockopt.analysis.report_from_samples.free_memory"
    monkeypatch.setattr(name, lambda device: 11 * size / 0.8)
    report = sampled_report(model, losses, by="role", num_samples=60)
    assert "Memory holds 8 of 240 sampled gradients" in report.notes[0]
    whole = report.whole
    assert abs(whole.trace.value - float(G.trace())) <= 4 * whole.trace.standard_error
    assert abs(whole.frobenius.value - float(G.norm())) <= 4 * whole.frobenius.standard_error
    assert whole.frobenius.standard_error < 0.2 * float(G.norm())
    # Two vectors: all batches of a round are summed into one
    monkeypatch.setattr(name, lambda device: 2.5 * size / 0.8)
    report = sampled_report(model, losses, by="role", num_samples=60)
    whole = report.whole
    assert abs(whole.frobenius.value - float(G.norm())) <= 4 * whole.frobenius.standard_error
    monkeypatch.setattr(name, lambda device: size)
    with pytest.raises(ValueError, match="Two sampled gradients need"):
        sampled_report(model, losses, by="role")


@pytest.mark.parametrize("samples", range(2, 14))
@pytest.mark.parametrize("room", [2, 3, 5, 8, 100])
def test_plans_draw_all_samples_and_no_group_is_alone(samples, room):
    plan = Plan.fitting(samples, 4, room)
    assert sum(plan.rounds) == samples
    assert min(plan.rounds) >= 2
    assert plan.chunks <= 4
    if room >= 4:
        assert max(plan.rounds) * plan.chunks <= max(room, 3 * plan.chunks)


class Stopped(Exception):
    pass


def test_a_report_that_was_stopped_continues_with_the_same_numbers(tmp_path, monkeypatch):
    from blockopt.analysis.sampled_gradients import SampledGradients

    model, ids = small_model(sequences=3)
    losses = next_token_losses(model, ids, 1)
    size = 8 * sum(p.numel() for p in model.parameters())
    name = "blockopt.analysis.report_from_samples.free_memory"
    monkeypatch.setattr(name, lambda device: 7 * size / 0.8)
    untouched = sampled_report(model, losses, num_samples=8)
    path, original, drawn = tmp_path / "partial.pt", SampledGradients.draw, []

    def stopping(self, *arguments):
        if len(drawn) == 2:
            raise Stopped
        drawn.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(SampledGradients, "draw", stopping)
    with pytest.raises(Stopped):
        sampled_report(model, losses, num_samples=8, partial=path)
    drawn.clear()
    monkeypatch.setattr(name, lambda device: 1000 * size)  # the plan is that of the first run
    report = sampled_report(model, losses, num_samples=8, partial=path)
    assert len(drawn) == 2
    assert report.rows() == untouched.rows()
    assert report.loss == untouched.loss
    with pytest.raises(ValueError, match="of other weights, data or options"):
        sampled_report(model, losses, num_samples=9, partial=path)


def test_it_agrees_with_products_on_llama_and_in_float32(tmp_path):
    model, ids = small_model("llama", sequences=2)
    losses = next_token_losses(model, ids, 1)
    exact = hessian_report(model, losses, matrix="gauss-newton", by="tensor")
    model.float()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = sampled_report(model, losses, by="tensor", num_samples=100)
    assert 1e-9 < report.rounding < 1e-4
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    for group, block in exact.blocks.items():
        found = report.blocks[group]
        error = 4 * (found.trace.standard_error + block.trace.standard_error)
        assert abs(found.trace.value - block.trace.value) <= error + 1e-9, group
    assert report.loss == pytest.approx(exact.loss, rel=1e-5)
    json.dumps(report.to_dict(), allow_nan=False)


def test_batches_count_by_tokens():
    model, ids = small_model(sequences=3)
    together = sampled_report(model, next_token_losses(model, ids, 3), num_samples=200, by="role")
    apart = sampled_report(model, next_token_losses(model, ids, 2), num_samples=200, by="role")
    for group, block in together.blocks.items():
        other = apart.blocks[group].trace
        error = 4 * (block.trace.standard_error + other.standard_error) + 1e-12
        assert abs(block.trace.value - other.value) <= error


def test_squared_error_and_unused_parameters():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 1, bias=False), nn.Linear(2, 2, bias=False)

        def forward(self, x):
            return self.used(x)

    model = Unused().double()
    x, zero = torch.tensor([[3.0, 4.0]]).double(), torch.zeros(1, 1).double()
    report = sampled_report(model, lambda: F.mse_loss(model(x), zero), by="tensor", num_samples=3)
    assert report.blocks[BlockGroup("other", None, "unused.weight")].frobenius.value == 0
    assert report.whole.trace.value == pytest.approx(50)
    assert report.whole.top.tolist() == pytest.approx([50])
    assert report.whole.residuals.tolist() == pytest.approx([0], abs=1e-9)


def test_errors():
    model = load_model("gpt2", {"n_layer": 1, "n_embd": 4, "n_head": 2, "vocab_size": 11}).model
    ids = torch.zeros(1, 4, dtype=torch.int64)
    losses = next_token_losses(model, ids, 1)
    with pytest.raises(ValueError, match=r"Invalid num_samples=1. Must be an integer >= 2"):
        sampled_report(model, losses, num_samples=1)
    with pytest.raises(ValueError, match="Invalid only='nothing'"):
        sampled_report(model, losses, only=["nothing"])
    with pytest.raises(ValueError, match="Gauss-Newton needs one"):
        sampled_report(model, lambda: model(input_ids=ids).logits.square().sum())
