"""KFAC and EKFAC against explicit sums over tokens and classes, and against curvlinops."""

import json
import math
import warnings
from functools import partial

import pandas
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockopt.analysis.kronecker.factors import kronecker_factors, linear_maps, recorded_calls
from blockopt.analysis.kronecker.fit import built_fit, nearest_error
from blockopt.analysis.kronecker.report import kronecker_report
from blockopt.measure.loss_curvature import LossCurvature
from recipes.common.gpt2 import GPT2, GPT2Config, to_huggingface

with warnings.catch_warnings():
    # torch.jit warns, in a library that curvlinops imports
    warnings.simplefilter("ignore", DeprecationWarning)
    import curvlinops

VOCABULARY = 5


@pytest.fixture(autouse=True)
def attention_that_vmap_knows():
    with sdpa_kernel(SDPBackend.MATH):
        yield


class LastToken(nn.Module):
    """A causal model that predicts once per sequence: (B, T) to logits (B, V)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens)[:, -1]


def gpt2(width=6, heads=2, depth=2, spread=0.6):
    torch.manual_seed(3)
    model = GPT2(GPT2Config(VOCABULARY, context=7, width=width, depth=depth, heads=heads)).double()
    for p in model.parameters():
        nn.init.normal_(p, std=spread / math.sqrt(p.shape[-1]) if p.ndim > 1 else 0.3)
    return model


def tokens(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (2, *shape), generator=generator)


def every_position(model, x, y):
    logits = model(x)
    logits = logits if isinstance(logits, torch.Tensor) else logits.logits
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def exact(model, loss):
    """The factors of all linear maps, with all classes of all predictions."""
    maps = linear_maps(model, [name for name, _ in model.named_parameters()])
    return kronecker_factors(model, [loss], maps, LossCurvature.factors)


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


def gauss_newton(model, name, x, num_classes):
    """`Jᵀ Λ J` of one parameter, from `torch.func` and the probabilities."""
    p = model.get_parameter(name).detach()

    def logits(value):
        return functional_call(model, {name: value}, (x,)).reshape(-1, num_classes)

    J = jacrev(logits)(p).reshape(-1, num_classes, p.numel())
    probabilities = logits(p).detach().softmax(-1)
    curvature = probabilities.diag_embed() - probabilities[:, :, None] * probabilities[:, None]
    return (torch.einsum("rci,rcd,rdj->ij", J, curvature, J) / len(J)).detach()


def test_factors_are_sums_over_tokens_and_positions():
    # For each prediction alone, by a Jacobian with respect to what is added to the outputs of a map
    model, (x, y) = gpt2(), tokens(3, 4)
    name = "h.0.attn.c_attn"
    module = model.get_submodule(name)
    inputs = []
    handle = module.register_forward_hook(lambda m, args, out: inputs.append(args[0].detach()))
    model(x)
    handle.remove()
    a = inputs[0].flatten(0, 1)

    def logits(shift):
        handle = module.register_forward_hook(lambda m, args, out: out + shift)
        found = model(x).flatten(0, 1)
        handle.remove()
        return found

    zero = torch.zeros(3, 4, 18, dtype=torch.float64)
    J = jacrev(logits)(zero).detach()  # (predictions, classes, 3, 4, 18)
    p = logits(zero).softmax(-1).detach()
    curvature = p.diag_embed() - p[:, :, None] * p[:, None]
    B = torch.einsum("rcbti,rcd,rdbtj->ij", J, curvature, J) / len(p)
    found = exact(model, partial(every_position, model, x, y))[f"{name}.weight"]
    assert relative(found.rows, B) < 1e-12
    assert relative(found.columns, a.T @ a / len(a)) < 1e-12


def curvlinops_matrix(kind, model, x, y, name, **options):
    options = {"fisher_type": "type-2", "check_deterministic": False, **options}
    p = model.get_parameter(name)
    operator = getattr(curvlinops, kind)(model, nn.CrossEntropyLoss(), [p], [(x, y)], **options)
    return operator @ torch.eye(p.numel(), dtype=p.dtype)


NAMES = [
    "model.h.0.attn.c_attn.weight",
    "model.h.1.attn.c_proj.weight",
    "model.h.1.mlp.c_fc.weight",
]


@pytest.mark.parametrize("name", NAMES)
def test_one_prediction_per_sequence_agrees_with_curvlinops(name):
    model, (x, y) = LastToken(gpt2()), tokens(6, 5)
    y = y[:, 0]
    loss = partial(every_position, model, x, y)
    factors = exact(model, loss)[name]
    ours = torch.kron(factors.rows, factors.columns)
    theirs = curvlinops_matrix("KFACLinearOperator", model, x, y, name)
    assert relative(ours, theirs) < 1e-10
    G = gauss_newton(model, name, x, VOCABULARY)
    fit = built_fit(G, factors, top=3)
    for kind, match in (("KFACLinearOperator", fit.kfac), ("EKFACLinearOperator", fit.ekfac)):
        K = curvlinops_matrix(kind, model, x, y, name)
        assert match.error == pytest.approx(relative(K, G), rel=1e-8)
        values, true = torch.linalg.eigvalsh(K), torch.linalg.eigvalsh(G)
        assert match.top == pytest.approx(float(values[-1] / true[-1]), rel=1e-8)
        assert match.spectrum == pytest.approx(relative(values, true), rel=1e-8)
        assert match.trace == pytest.approx(float(K.trace() / G.trace()), rel=1e-8)
        U, V = (torch.linalg.eigh(matrix)[1][:, -3:] for matrix in (K, G))
        assert match.overlap == pytest.approx(float((U.T @ V).square().sum()) / 3, rel=1e-6)


def test_predictions_of_all_positions_agree_with_sampled_labels_and_not_with_type_2():
    # curvlinops goes back from all positions of a class at once, which adds products of two
    # positions; sampled labels are independent, so that these vanish on average.
    model, (x, y) = gpt2(width=4, depth=1), tokens(2, 3)
    name = "h.0.attn.c_attn.weight"
    classes_second = nn.Module()
    classes_second.model = model
    classes_second.forward = lambda x: model(x).movedim(-1, 1)
    factors = exact(model, partial(every_position, model, x, y))[name]
    ours = torch.kron(factors.rows, factors.columns)
    matrix = partial(curvlinops_matrix, "KFACLinearOperator", classes_second, x, y, f"model.{name}")
    assert relative(matrix(fisher_type="mc", mc_samples=2000), ours) < 0.08
    assert relative(matrix(), ours) > 0.2


@pytest.mark.parametrize("by", ["head", "tensor"])
def test_report_is_that_of_explicit_matrices(by):
    model, (x, y) = gpt2(width=4, heads=2, depth=1), tokens(3, 4)
    report = kronecker_report(model, partial(every_position, model, x, y), by=by, top=2)
    factors = exact(model, partial(every_position, model, x, y))
    wholes = {
        name: (gauss_newton(model, name, x, VOCABULARY), torch.kron(*factors[name]))
        for name in factors
    }
    assert len(report.blocks) == (10 if by == "head" else 6)
    for group, fit in report.blocks.items():
        G, K = wholes[group.parameter]
        rows, columns = torch.meshgrid(
            *(torch.arange(n) for n in model.get_parameter(group.parameter).shape), indexing="ij"
        )
        roles = ("query", "key", "value")
        chosen = torch.ones_like(rows, dtype=torch.bool)
        if group.role in roles:
            start = 4 * roles.index(group.role) + 2 * (group.head or 0)
            chosen = (rows >= start) & (rows < start + (2 if by == "head" else 4))
        elif group.role == "output" and by == "head":
            chosen = columns // 2 == group.head
        where = chosen.flatten().nonzero().flatten()
        G, K = (matrix[where][:, where] for matrix in (G, K))
        assert fit.kfac.error == pytest.approx(relative(K, G), rel=1e-8)
        assert fit.norm == pytest.approx(float(G.norm()), rel=1e-8)
        assert fit.nearest < fit.kfac.error + 1e-9
        assert fit.ekfac.error < fit.kfac.error + 1e-9
        assert fit.ekfac.trace == pytest.approx(1, rel=1e-9)
        assert fit.kfac.spectrum < fit.kfac.error + 1e-9
        n = math.prod(fit.shape)
        assert n == len(where)


def test_products_give_what_built_blocks_give():
    model, (x, y) = gpt2(width=6), tokens(3, 4)
    loss = partial(every_position, model, x, y)
    built = kronecker_report(model, loss, top=2)
    estimated = kronecker_report(model, loss, top=2, largest_built=0, num_probes=200)
    assert built.blocks.keys() == estimated.blocks.keys()
    for group, fit in built.blocks.items():
        other = estimated.blocks[group]
        assert other.nearest is None
        for kind in ("kfac", "ekfac"):
            a, b = getattr(fit, kind), getattr(other, kind)
            assert 0 < b.error_error < 0.1 * b.error
            assert abs(a.error - b.error) < 5 * b.error_error
            assert b.top == pytest.approx(a.top, rel=2e-3)
            assert b.overlap == pytest.approx(a.overlap, abs=0.02)


def test_samples_converge_to_the_exact_factors():
    model, (x, y) = gpt2(width=4, depth=1), tokens(3, 4)
    loss = partial(every_position, model, x, y)
    few, many, exactly = (
        kronecker_report(model, loss, num_samples=number) for number in (2, 1000, None)
    )
    distance = [
        max(abs(report.blocks[g].kfac.trace - fit.kfac.trace) for g, fit in exactly.blocks.items())
        for report in (few, many)
    ]
    assert distance[1] < 0.1 < 4 * distance[1] < distance[0]


def test_batches_are_averaged_by_tokens():
    model, (x, y) = gpt2(width=4, depth=1), tokens(4, 4)
    whole = exact(model, partial(every_position, model, x, y))
    maps = linear_maps(model, list(whole))
    losses = [
        lambda part=part: (every_position(model, x[part], y[part]), y[part].numel())
        for part in (slice(0, 1), slice(1, 4))
    ]
    parts = kronecker_factors(model, losses, maps, LossCurvature.factors)
    for name, factors in whole.items():
        for one, other in zip(factors, parts[name]):
            assert relative(other, one) < 1e-12


def test_conv1d_stores_the_same_matrix_transposed():
    ours, (x, y) = gpt2(), tokens(3, 4)
    theirs = to_huggingface(ours).double().eval()
    reports = [
        kronecker_report(model, partial(every_position, model, x, y), top=2)
        for model in (ours, theirs)
    ]
    first, second = (
        {(g.role, g.layer, g.head): fit for g, fit in report.blocks.items()} for report in reports
    )
    assert first.keys() == second.keys()
    assert len(first) == 20
    for place, fit in first.items():
        assert second[place].shape == fit.shape[::-1]
        assert second[place].kfac.error == pytest.approx(fit.kfac.error, rel=1e-5)
        assert second[place].ekfac.error == pytest.approx(fit.ekfac.error, rel=1e-5)
        assert second[place].nearest == pytest.approx(fit.nearest, rel=1e-5)


def test_a_map_that_is_applied_twice_has_both_calls_as_rows():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh()).double()
    x, target = torch.randn(2, 5, 3, dtype=torch.float64)
    factors = exact(model, lambda: F.mse_loss(model(model(x)), target))["0.weight"]
    once = model(x).detach()
    rows = torch.cat([x, once])
    assert relative(factors.columns, rows.T @ rows / 10) < 1e-12


def test_nearest_error_is_below_that_of_many_products():
    torch.manual_seed(0)
    G = torch.randn(12, 12, dtype=torch.float64)
    G = G @ G.T
    best = nearest_error(G, (3, 4))
    arranged = G.reshape(3, 4, 3, 4).transpose(1, 2).reshape(9, 16)
    U, S, V = torch.linalg.svd(arranged)
    nearest = torch.kron(S[0] * U[:, 0].reshape(3, 3), V[0].reshape(4, 4))
    assert best == pytest.approx(relative(nearest, G), rel=1e-9)
    assert nearest_error(G, (4, 3)) != pytest.approx(best, rel=1e-3)


def test_the_result_is_a_table_json_html_and_a_plot():
    model, (x, y) = gpt2(width=4, depth=1), tokens(3, 4)
    report = kronecker_report(model, partial(every_position, model, x, y), top=2)
    rows = report.rows()
    assert [row["head"] for row in rows if row["role"] == "query"] == [0, 1]
    assert isinstance(report.to_frame(), pandas.DataFrame)
    assert len(json.loads(report.to_json())["blocks"]) == len(rows) == 10
    assert report._repr_html_().count("<tr>") == 11
    roles = report.by_role()
    squares = [(r["frobenius"], r["kfac_error"]) for r in rows if r["role"] == "key"]
    missed = sum((norm * error) ** 2 for norm, error in squares)
    expected = math.sqrt(missed / sum(norm**2 for norm, _ in squares))
    assert roles["key"]["kfac_error"] == pytest.approx(expected)
    figure = report.plot()
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == list(roles)
    assert "wte.weight, wpe.weight" in report.notes[0]


def test_what_has_no_factors_is_refused():
    model, (x, y) = gpt2(), tokens(2, 3)
    loss = partial(every_position, model, x, y)
    with pytest.raises(ValueError, match="only those have Kronecker factors"):
        kronecker_report(model, loss, only=["wte.weight"])
    with pytest.raises(ValueError, match="by='role'"):
        kronecker_report(model, loss, by="role")

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Doubled(3, 2)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="does not only multiply"):
        kronecker_report(model, lambda: F.mse_loss(model(x), torch.zeros(4, 2).double()))


def test_nothing_is_left_on_the_model():
    model, (x, y) = gpt2(), tokens(2, 3)
    kronecker_report(model, partial(every_position, model, x, y), num_samples=1, only=["h.0.mlp.*"])
    assert not any(module._forward_hooks for module in model.modules())
    with recorded_calls(linear_maps(model, ["h.0.mlp.c_fc.weight"])) as calls:
        model(x)
    assert len(calls["h.0.mlp.c_fc.weight"]) == 1
    assert not any(module._forward_hooks for module in model.modules())
