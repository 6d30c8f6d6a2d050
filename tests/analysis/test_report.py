"""The report on the curvature of a model, against matrices that autograd builds entry by entry."""

import json

import pandas
import pytest
import torch
from torch import nn

from blockopt import find_blocks
from blockopt.analysis import Probes, hessian_report
from blockopt.blocks import BlockGroup
from blockopt.cli.local_model import next_token_losses
from tests.helpers.small_language_models import exact_matrix, small_model


def entries_of(model, names, blocks, wanted):
    """Where the blocks of a role lie, by marking the entries of each parameter."""
    parameters, marks = dict(model.named_parameters()), []
    for name in names:
        mark = torch.zeros(parameters[name].shape, dtype=torch.bool)
        split = blocks[name].split
        if split is None:
            mark[...] = blocks[name].roles[0] == wanted
        else:
            start = 0
            for role, size in zip(blocks[name].roles, split.sizes):
                mark.movedim(split.dim, 0)[start : start + size] = role == wanted
                start += size
        marks.append(mark.flatten())
    return torch.cat(marks)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_roles_of_small_blocks_are_exact(kind):
    model, ids = small_model(kind)
    names = [name for name, _ in model.named_parameters()]
    H = exact_matrix(model, ids, names)
    probes = Probes(num_steps=13, num_starts=8, top=3)
    report = hessian_report(model, next_token_losses(model, ids, 8), probes=probes)
    blocks = find_blocks(model, per_head=False, per_row=())
    tolerance = 1e-9 if kind == "gpt2" else 1e-5  # RMSNorm runs in float32
    assert sum(block.dimension for block in report.blocks.values()) == len(H)
    for group, block in report.blocks.items():
        where = entries_of(model, names, blocks, group.role)
        own = H[where][:, where]
        values = torch.linalg.eigvalsh(own)
        scale = float(own.norm())
        assert block.exact
        assert block.dimension == len(own)
        assert block.trace.value == pytest.approx(float(own.trace()), abs=tolerance * scale)
        assert block.frobenius.value == pytest.approx(scale, rel=tolerance)
        assert block.trace.standard_error == block.frobenius.standard_error == 0
        torch.testing.assert_close(block.spectrum.nodes, values, rtol=0, atol=tolerance * scale)
        by_size = values.abs().sort(descending=True).values
        torch.testing.assert_close(block.top.abs(), by_size[:3], rtol=0, atol=tolerance * scale)
    assert report.loss == pytest.approx(
        float(model(input_ids=ids, labels=ids).loss.detach()), rel=1e-6
    )


def test_estimates_agree_with_the_exact_matrix_within_their_errors():
    model, ids = small_model(n_inner=16)
    names = [name for name, _ in model.named_parameters()]
    H = exact_matrix(model, ids, names)
    blocks = find_blocks(model, per_head=False, per_row=())
    probes = Probes(num_probes=40, num_steps=12, num_starts=2, top=2)
    report = hessian_report(model, next_token_losses(model, ids, 8), probes=probes)
    estimated = [str(group) for group, block in report.blocks.items() if not block.exact]
    assert {"embedding", "mlp_in", "mlp_out"} <= set(estimated)
    for group, block in report.blocks.items():
        where = entries_of(model, names, blocks, group.role)
        own = H[where][:, where]
        trace, norm = float(own.trace()), float(own.norm())
        assert abs(block.trace.value - trace) <= 4 * block.trace.standard_error + 1e-9 * norm
        assert abs(block.frobenius.value - norm) <= 4 * block.frobenius.standard_error + 1e-9 * norm
        assert block.frobenius.standard_error < 0.3 * norm
        values = torch.linalg.eigvalsh(own)
        top = values[values.abs().argsort(descending=True)][:2]
        torch.testing.assert_close(block.top, top, rtol=0, atol=2e-4 * float(top[0].abs()))
    whole = report.whole
    assert abs(whole.trace.value - float(H.trace())) <= 4 * whole.trace.standard_error
    assert abs(whole.frobenius.value - float(H.norm())) <= 4 * whole.frobenius.standard_error
    assert float(whole.top[0]) == pytest.approx(_farthest(torch.linalg.eigvalsh(H)), rel=2e-4)
    groups = [entries_of(model, names, blocks, group.role) for group in report.blocks]
    diagonal = sum(float(H[where][:, where].square().sum()) for where in groups)
    share = report.mass.off_diagonal
    assert abs(share.value - (1 - diagonal / float(H.square().sum()))) <= 4 * share.standard_error


def _farthest(values):
    return float(values[values.abs().argmax()])


def test_standard_errors_are_those_of_repeated_runs():
    model, ids = small_model(n_inner=16)
    losses = next_token_losses(model, ids, 8)
    found = [
        hessian_report(
            model,
            losses,
            only=["mlp.*.weight"],
            probes=Probes(num_probes=6, num_starts=0, seed=seed),
        )
        for seed in range(15)
    ]
    for what in ("trace", "frobenius"):
        estimates = [getattr(report.whole, what) for report in found]
        spread = torch.tensor([e.value for e in estimates]).std()
        claimed = torch.tensor([e.standard_error for e in estimates]).square().mean().sqrt()
        assert 0.6 < float(claimed / spread) < 1.6


def test_the_whole_is_more_than_its_blocks_and_batches_make_no_difference():
    model, ids = small_model()
    one = hessian_report(model, next_token_losses(model, ids, 3), only=["mlp.*"])
    # A batch of 2 and a smaller one of 1
    many = hessian_report(model, next_token_losses(model, ids, 2), only=["mlp.*"])
    assert one.whole.trace.value == pytest.approx(
        sum(b.trace.value for b in one.blocks.values()), rel=1e-12
    )
    for label, block in one.blocks.items():
        assert many.blocks[label].trace.value == pytest.approx(
            block.trace.value, rel=1e-9, abs=1e-12
        )
        torch.testing.assert_close(many.blocks[label].top, block.top, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(many.mass.matrix, one.mass.matrix, rtol=1e-9, atol=1e-15)


def test_gauss_newton_and_the_functional_part_sum_to_the_hessian():
    model, ids = small_model()
    losses = next_token_losses(model, ids, 8)
    traces = {
        matrix: hessian_report(model, losses, matrix=matrix, by="tensor", only=["attn.*"]).blocks
        for matrix in ("hessian", "gauss-newton", "functional")
    }
    for label, block in traces["hessian"].items():
        outer, functional = traces["gauss-newton"][label], traces["functional"][label]
        assert block.trace.value == pytest.approx(
            outer.trace.value + functional.trace.value, rel=1e-9, abs=1e-10
        )
        assert outer.negative.of_mass == 0
        assert float(outer.top[0]) >= 0


@pytest.mark.parametrize("by", ["layer", "tensor", "head"])
def test_every_cut_covers_all_parameters(by):
    model, ids = small_model()
    probes = Probes(num_probes=2, num_starts=0)
    report = hessian_report(model, next_token_losses(model, ids, 8), by=by, probes=probes)
    assert sum(block.dimension for block in report.blocks.values()) == sum(
        p.numel() for p in model.parameters()
    )
    name = "transformer.h.0.attn.c_attn.weight"
    group, label = {
        "layer": (BlockGroup("query", 0), "layer 0 query"),
        "tensor": (BlockGroup("query", 0, name), f"{name} query"),
        "head": (BlockGroup("query", 0, name, 1), f"{name} query head 1"),
    }[by]
    assert report.blocks[group].dimension == (8 if by == "head" else 16)
    assert str(group) == label
    assert label in {row["block"] for row in report.rows()}
    assert label in report.to_dict()["blocks"]
    assert label in report.to_dict()["mass"]["labels"]


def test_a_head_is_its_own_columns():
    model, ids = small_model()
    name = "transformer.h.0.attn.c_attn.weight"
    report = hessian_report(
        model, next_token_losses(model, ids, 8), by="head", only=["c_attn.weight"]
    )
    H = exact_matrix(model, ids, [name])
    # Keys of the second head: columns 6 and 7 of 12
    where = torch.arange(48).reshape(4, 12)[:, 6:8].flatten()
    own = H[where][:, where]
    block = report.blocks[BlockGroup("key", 0, name, 1)]
    torch.testing.assert_close(block.spectrum.nodes, torch.linalg.eigvalsh(own), rtol=0, atol=1e-12)
    assert report.whole.dimension == 48
    assert report.whole.trace.value == pytest.approx(float(H.trace()), rel=1e-9)


def test_only_takes_the_names_with_and_without_what_is_around():
    model, ids = small_model()
    losses = next_token_losses(model, ids, 8)
    probes = Probes(num_starts=0)
    short = hessian_report(model, losses, only=["h.0.mlp.*"], probes=probes)
    full = hessian_report(model, losses, only=["transformer.h.0.mlp.*"], probes=probes)
    assert list(short.blocks) == [BlockGroup(role) for role in ("mlp_in", "mlp_out", "bias")]
    assert short.rows() == full.rows()
    with pytest.raises(ValueError, match="Invalid only='nothing'"):
        hessian_report(model, losses, only=["h.0.mlp.*", "nothing"])


def test_without_starts_there_are_no_spectra():
    model, ids = small_model()
    probes = Probes(num_starts=0)
    report = hessian_report(model, next_token_losses(model, ids, 8), probes=probes)
    assert report.distance == {}
    assert {block.spectrum for block in report.blocks.values()} == {None}
    assert all(line.split()[-1] == "-" for line in report.table().splitlines()[1:])
    assert report.rows()[0]["negative_of_mass"] is None
    json.dumps(report.to_dict(), allow_nan=False)


def test_exact_builds_every_block_however_few_steps_there_are():
    model, ids = small_model()
    losses = next_token_losses(model, ids, 8)
    probes = Probes(exact=True, num_steps=2, num_starts=1)
    report = hessian_report(model, losses, probes=probes)
    assert all(block.exact for block in report.blocks.values())
    assert not report.whole.exact
    embedding = report.blocks[BlockGroup("embedding")]
    assert len(embedding.spectrum.nodes) == embedding.dimension == 44


def test_tables_fit_and_long_labels_keep_both_ends():
    model, ids = small_model("llama")
    losses = next_token_losses(model, ids, 8)
    probes = Probes(num_probes=2, num_starts=0, top=9)
    report = hessian_report(model, losses, by="head", only=["self_attn.*"], probes=probes)
    for table in (report.table(), report.eigenvalue_table(), report.table(80)):
        widths = {len(line) for line in table.splitlines()}
        assert len(widths) == 1
        assert widths.pop() <= 100
    # Without what all labels share
    assert report.table().splitlines()[1].startswith("q_proj.weight query head 0  ")
    assert report.table(80).splitlines()[1].startswith("q_pro…head 0  ")
    assert report.rows()[0]["block"] == "model.layers.0.self_attn.q_proj.weight query head 0"


def test_a_block_without_curvature_does_no_harm(tmp_path):
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(2, 1, bias=False), nn.Linear(2, 2, bias=False)

        def forward(self, x):
            return self.used(x).square().sum() + 0 * self.unused(x).sum()

    model = Unused().double()
    x = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    report = hessian_report(model, lambda: model(x), by="tensor")
    assert report.blocks[BlockGroup("other", None, "unused.weight")].frobenius.value == 0
    assert report.spread.num_blocks == 1  # what has no curvature is left out
    assert report.spread.ratio == 1
    assert report.mass.off_diagonal.value == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"matrix": "fisher"},
            "Invalid matrix='fisher'. Must be one of 'hessian', 'gauss-newton', 'functional'.",
        ),
        (
            {"by": "column"},
            "Invalid by='column'. Must be one of 'role', 'layer', 'tensor', 'head'.",
        ),
    ],
)
def test_wrong_options_of_the_report(options, message):
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="Invalid") as caught:
        hessian_report(model, lambda: model(torch.ones(1, 2)).square().sum(), **options)
    assert str(caught.value) == message


def test_what_is_no_closure_is_told():
    with pytest.raises(TypeError, match="one is of type Tensor"):
        hessian_report(nn.Linear(2, 1), [torch.ones(())])
    with pytest.raises(ValueError, match="no closure"):
        hessian_report(nn.Linear(2, 1), [])


def test_rounding_is_measured_against_float64_and_leaves_the_weights_alone():
    model, ids = small_model()
    losses = next_token_losses(model, ids, 8)
    assert hessian_report(model, losses, only=["mlp.*"]).rounding is None
    model.float()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    pointers = [p.data_ptr() for p in model.parameters()]
    report = hessian_report(model, losses, only=["mlp.*"], probes=Probes(num_starts=0))
    assert 1e-9 < report.rounding < 1e-4
    assert [p.data_ptr() for p in model.parameters()] == pointers
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32
        assert torch.equal(p, before[name])


def test_results_are_shown_as_tables_frames_json_and_plots():
    model, ids = small_model()
    losses = next_token_losses(model, ids, 8)
    probes = Probes(num_probes=2, num_steps=3, num_starts=1)
    report = hessian_report(model, losses, by="head", only=["attn.*.weight"], probes=probes)
    frame = report.to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["block"]) == [row["block"] for row in report.rows()]
    assert json.loads(report.to_json())["loss"] == report.loss
    shown = report._repr_html_()
    assert shown.count("<tr>") == len(report.rows()) + 1
    assert "query head 1" in shown
    titles = [ax.get_title() for ax in report.plot().axes]
    assert "query: mean curvature |trace| / size" in titles
    assert len(report.plot("spectra").axes) == 1 + len(report.blocks)
    assert any("Frobenius" in ax.get_title() for ax in report.plot("blocks").axes)
    assert "layer 0 head" in report.role_table()
    roles = hessian_report(model, losses, probes=Probes(num_probes=2, num_starts=0))
    with pytest.raises(ValueError, match="Invalid kind='heads'"):
        roles.plot("heads")


def test_a_frame_without_pandas_says_what_to_do(monkeypatch):
    model = nn.Linear(2, 1, bias=False)
    report = hessian_report(model, lambda: model(torch.ones(1, 2)).square().sum())
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        report.to_frame()
