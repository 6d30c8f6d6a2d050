"""The report on the curvature of a model, against matrices that autograd builds entry by entry."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from blockopt import find_blocks
from blockopt.analysis import HessianOperator, Probes, hessian_report, measure_block
from blockopt.blocks import BlockGroup
from blockopt.cli.local_model import load_model, next_token_losses
from tests.helpers.matrices import Products, normal, random_symmetric, with_spectrum

GPT2 = {"n_layer": 1, "n_embd": 4, "n_head": 2, "n_inner": 6, "n_positions": 16, "vocab_size": 11}
LLAMA = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 13,
}


def exact_matrix(model, ids, names):
    """The Hessian of the mean cross-entropy of the next token in some parameters."""
    parameters = dict(model.named_parameters())
    sizes = [parameters[name].numel() for name in names]

    def loss(vector):
        pieces = {
            name: piece.view_as(parameters[name]) for name, piece in zip(names, vector.split(sizes))
        }
        logits = torch.func.functional_call(model, pieces, kwargs={"input_ids": ids}).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    model.eval()
    start = torch.cat([parameters[name].detach().flatten() for name in names])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.autograd.functional.hessian(loss, start)


def small_model(kind="gpt2", sequences=3, length=8, **entries):
    model = load_model(
        kind, {**(GPT2 if kind == "gpt2" else LLAMA), **entries}, seed=1
    ).model.double()
    generator = torch.Generator().manual_seed(0)
    # Farther from zero than at the start: queries and keys have curvature then
    for p in model.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    ids = torch.randint(0, model.config.vocab_size, (sequences, length), generator=generator)
    return model, ids


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


def test_the_cost_is_told_before_and_is_close_to_what_is_done(monkeypatch):
    model, ids = small_model()
    columns, told = [], []
    original = HessianOperator.__matmul__

    def counting(self, v):
        columns.append(1 if v.ndim == 1 else v.shape[1])
        return original(self, v)

    monkeypatch.setattr(HessianOperator, "__matmul__", counting)

    def announce(cost):
        told.append((cost, sum(columns)))

    report = hessian_report(
        model,
        next_token_losses(model, ids, 8),
        probes=Probes(exact=True, num_starts=0),
        only=["mlp.*"],
        announce=announce,
    )
    ((cost, before),) = told
    assert before == 3  # two for the symmetry, one for the clock
    assert report.cost == cost
    assert cost.seconds_per_product > 0
    done = sum(columns) - before
    blocks = sum(min(20, b.dimension) + b.dimension for b in report.blocks.values())
    # The rest is for the top eigenvalue of the whole, for which 25 were foreseen
    assert blocks < done < blocks + 60
    assert cost.num_products == blocks + 25


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


@pytest.mark.parametrize(
    ("name", "value", "smallest"),
    [("top", -1, 0), ("num_probes", 1, 2), ("num_steps", 1, 2), ("num_starts", -1, 0)],
)
def test_wrong_numbers_of_probes(name, value, smallest):
    with pytest.raises(ValueError, match="Invalid") as caught:
        Probes(**{name: value})
    assert str(caught.value) == f"Invalid {name}={value}. Must be an integer >= {smallest}."


def test_what_is_no_closure_is_told():
    with pytest.raises(TypeError, match="one is of type Tensor"):
        hessian_report(nn.Linear(2, 1), [torch.ones(())])
    with pytest.raises(ValueError, match="no closure"):
        hessian_report(nn.Linear(2, 1), [])


def test_blocks_that_do_not_fit_are_refused_with_the_number(monkeypatch):
    monkeypatch.setattr("blockopt.analysis.report.free_memory", lambda device: 2**20)
    model = nn.Linear(1000, 1, bias=False)
    closure = lambda: model(torch.ones(1, 1000)).square().sum()  # noqa: E731
    with pytest.raises(
        ValueError, match=r"The largest block has 1,000 parameters: .* needs 0\.0 GiB"
    ):
        hessian_report(model, closure, probes=Probes(exact=True))
    big = nn.Linear(20_000, 1, bias=False)
    with pytest.raises(
        ValueError, match=r"Products with the block 'other' of 20,000 parameters need 0\.0 GiB"
    ):
        hessian_report(big, lambda: big(torch.ones(1, 20_000)).square().sum())


def test_what_does_not_fit_into_memory_is_left_out_and_told(monkeypatch):
    model, ids = small_model(n_inner=40)
    losses = next_token_losses(model, ids, 8)
    probes = Probes(num_probes=3, num_steps=100, num_starts=1)
    whole = hessian_report(model, losses, probes=probes)
    n, largest = whole.whole.dimension, max(b.dimension for b in whole.blocks.values())
    assert whole.notes == ()

    monkeypatch.setattr("blockopt.analysis.report.free_memory", lambda device: 101 * n)
    some = hessian_report(model, losses, probes=probes)
    assert some.whole is not None
    assert some.whole.spectrum is None
    assert len(some.whole.top) == 0
    assert "Memory did not suffice for top eigenvalues of whole." in some.notes
    traces = [[row["trace"] for row in report.rows()] for report in (some, whole)]
    assert traces[0] == pytest.approx(traces[1], rel=1e-9, abs=1e-12)

    monkeypatch.setattr("blockopt.analysis.report.free_memory", lambda device: 101 * largest)
    few = hessian_report(model, losses, probes=probes)
    assert few.whole is few.mass is None
    assert "nothing on the whole" in few.notes[0]
    assert any("spectra of" in note for note in few.notes)
    for group, block in few.blocks.items():
        known = whole.blocks[group]
        if block.exact:
            assert block.trace.value == pytest.approx(known.trace.value, abs=1e-12)
        else:
            error = 4 * (block.trace.standard_error + known.trace.standard_error)
            assert abs(block.trace.value - known.trace.value) <= error
    assert "whole" not in few.table()
    assert "off the blocks" not in few.summary()
    json.dumps(few.to_dict(), allow_nan=False)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("memory", [None, 2000])
def test_a_report_that_was_stopped_continues_with_the_same_numbers(tmp_path, monkeypatch, memory):
    if memory is not None:  # block by block, without the whole
        monkeypatch.setattr(
            "blockopt.analysis.report.free_memory", lambda device: memory * 8 + 100 * 48
        )
    model, ids = small_model()
    losses = next_token_losses(model, ids, 2)
    options = {"by": "head", "probes": Probes(num_probes=2, num_steps=3, num_starts=2)}
    options["only"] = ["attn.*"]
    untouched = hessian_report(model, losses, **options)
    path = tmp_path / "partial.pt"
    original, seen, stops = HessianOperator.__matmul__, [], [40]

    def stopping(self, v):
        seen.append(1)
        if len(seen) in stops:
            raise Stopped
        return original(self, v)

    monkeypatch.setattr(HessianOperator, "__matmul__", stopping)
    with pytest.raises(Stopped):
        hessian_report(model, losses, **options, partial=path)
    assert path.exists()
    seen.clear()
    stops.clear()
    report = hessian_report(model, losses, **options, partial=path)
    continued = len(seen)
    assert report.rows() == untouched.rows()
    seen.clear()
    hessian_report(model, losses, **options, partial=tmp_path / "other.pt")
    assert continued < len(seen)  # what was finished was not done again
    model.lm_head.weight.data[0, 0] += 1e-3
    with pytest.raises(ValueError, match="of other weights, data or options"):
        hessian_report(model, losses, **options, partial=path)
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="no partial results that can be read"):
        hessian_report(model, losses, **options, partial=path)


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
    pandas = pytest.importorskip("pandas")
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


# One operator alone


def test_small_operators_are_measured_exactly():
    A = Products(random_symmetric(20))
    found = measure_block(A)
    values = torch.linalg.eigvalsh(A.matrix)
    assert A.count == found.dimension == 20
    assert found.exact
    assert found.trace == (pytest.approx(float(values.sum())), 0, 20)
    assert found.frobenius == (pytest.approx(float(A.matrix.norm())), 0, 20)
    assert float(found.top[0]) == pytest.approx(_farthest(values))
    assert found.negative == (
        pytest.approx(float((values < 0).double().mean())),
        pytest.approx(float(-values.clamp(max=0).sum() / values.abs().sum())),
    )
    torch.testing.assert_close(found.spectrum.nodes, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_operators_are_estimated(dtype):
    values = torch.cat([normal(290), torch.linspace(5, 9, 9), torch.tensor([-20.0])]).double()
    A = Products(with_spectrum(values).to(dtype))
    found = measure_block(A, Probes(num_probes=100, num_starts=9))
    assert not found.exact
    assert abs(found.trace.value - float(values.sum())) < 3 * found.trace.standard_error
    assert abs(found.frobenius.value - float(values.norm())) < 3 * found.frobenius.standard_error
    assert found.frobenius.standard_error < 0.1 * found.frobenius.value
    assert found.trace.num_products == found.frobenius.num_products == 100
    assert float(found.top[0]) == pytest.approx(-20, rel=1e-4)
    assert found.negative.of_count == pytest.approx(float((values < 0).double().mean()), abs=0.1)
    mass = float(-values.clamp(max=0).sum() / values.abs().sum())
    assert found.negative.of_mass == pytest.approx(mass, abs=0.03)


@pytest.mark.parametrize("size", [5, 150])
def test_zero_operators(size):
    found = measure_block(Products(torch.zeros(size, size)))
    assert found.trace.value == found.frobenius.value == float(found.top[0]) == 0
    assert found.negative == (0, 0)
    assert found.frobenius.standard_error == 0


def test_probes_decide_how_much_is_measured_of_an_operator():
    A = Products(random_symmetric(150))
    other = measure_block(A, Probes(num_probes=20, num_steps=10, num_starts=2, seed=3))
    assert len(other.spectrum.nodes) == 20
    assert other.trace.num_products == 20
    first, second = measure_block(A), measure_block(A)
    assert first.trace == second.trace != other.trace
    assert torch.equal(first.top, second.top)
    assert len(measure_block(A, Probes(top=4, num_starts=0)).top) == 4
    with pytest.raises(FloatingPointError, match="not finite"):
        measure_block(Products(random_symmetric(150) * torch.nan))
