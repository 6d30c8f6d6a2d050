"""The closed forms give the exact Gauss-Newton blocks, or leave them to an unbiased estimate."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from blockopt import Blocks, Split, find_blocks
from blockopt.blocks import block_numel
from blockopt.curvature import analytic
from blockopt.curvature.analytic import sequence_gradients
from blockopt.curvature.analytic.layer_calls import (
    capture_layers,
    drop_parameters,
    parameters_used_elsewhere,
)
from blockopt.curvature.analytic.sequence_gradients import find_independence
from blockopt.measure.attention_capture import capture_attention
from blockopt.measure.loss_curvature import CaptureLosses, LossCurvature
from tests.helpers.dense_hessians import (
    Net,
    assert_gauss_newton_is_exact,
    assert_means,
    build,
    language_loss,
    tokens_of,
)
from tests.helpers.models import FAMILIES, SEQUENCES, loss_of, timm_vit

# These compute in float64 throughout; transformers computes its loss in float32.
FLOAT64 = {"nanogpt", "timm_vit", "cnn", "mlp", *SEQUENCES}


class FewLabels(TorchFunctionMode):
    """Keeps the labels of three positions only, so that the exact sums take seconds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.cross_entropy and len(args[1]) > 6:
            ignored = torch.tensor([0, 2, 3, 5, 6, 7, 8, 9, 11])
            args = (args[0], args[1].index_fill(0, ignored, -100), *args[2:])
        return func(*args, **(kwargs or {}))


def few_labels(name, model):
    def loss():
        with FewLabels():
            return loss_of(name, model)

    return loss


@pytest.mark.parametrize("family", FAMILIES)
def test_outer_is_exact(family):
    model = FAMILIES[family]().eval()
    if family != "mixtral":  # whose experts are float32 only
        model.double()
    tolerance = 1e-10 if family in FLOAT64 else 1e-5
    assert_gauss_newton_is_exact(model, few_labels(family, model), tolerance)


@pytest.mark.parametrize("family", ["nanogpt", "llama", "t5", "vit", "gpt2-cross"])
def test_closed_forms_are_in_use(family):
    """Only what no module explains is left to the noisier estimate; sequences are taken apart."""
    model = FAMILIES[family]().eval()
    with (
        capture_attention(model) as attention,
        capture_layers(model, attention) as layers,
        CaptureLosses() as seen,
    ):
        loss = loss_of(family, model)
    curvature = LossCurvature(loss, seen.calls)
    names = {p: name for name, p in model.named_parameters()}
    elsewhere = parameters_used_elsewhere(layers, curvature.predictions, names)
    kept = drop_parameters(layers, elsewhere)
    assert [call[2:4] for call in kept] == [call[2:4] for call in layers]  # weight and bias
    separate, local = find_independence(curvature, kept, attention[-1].output)
    assert local
    assert all(
        len(call.x) == 2
        for call in separate
        if "wpe" not in call.module and "bias" not in call.module
    )
    above = [call for call in separate if call.attention_calls == len(attention)]
    assert len(above) >= 3
    assert all(call.local for call in above)


def test_independence_is_tried_once_for_each_shape(monkeypatch):
    tried = []
    once = sequence_gradients._try_last_rows
    monkeypatch.setattr(
        sequence_gradients, "_try_last_rows", lambda *a: tried.append(1) or once(*a)
    )
    model, known = build(layers=2), {}
    for batch, expected in ((2, 1), (2, 1), (3, 2)):
        loss = language_loss(model, batch, 3)
        kept = analytic(model, loss, known=known)
        assert len(tried) == expected
        afresh = analytic(model, loss)
        tried.pop()
        assert all(torch.equal(kept[name], afresh[name]) for name in afresh)


KINDS = [
    {},
    {"fused": True},
    {"groups": 1},
    {"groups": 2, "repeat": True},
    {"groups": 2, "fused": True, "scale": 0.9},
    {"rope": 1.0, "groups": 2},
    {"norm": True},
    {"norm": True, "rope": 1.0},
    {"causal": False},
    {"factor": 1.7},
]


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("layers", [1, 2])
def test_every_kind_of_attention(options, layers):
    model = build(layers=layers, heads=4, **options)
    loss = language_loss(model, 2, 3)
    assert_gauss_newton_is_exact(model, loss)


def test_padding_is_masked():
    model = build(layers=2, causal=False)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)[:, None, None, :]
    loss = language_loss(model, mask=mask)
    assert_gauss_newton_is_exact(model, loss)


def test_packed_documents():
    """The last position, on which independence is tried, is a document of its own."""
    model = build(layers=2)
    mask = torch.block_diag(torch.ones(3, 3), torch.ones(1, 1)).bool().tril()
    loss = language_loss(model, mask=mask)
    assert_gauss_newton_is_exact(model, loss)


@pytest.mark.parametrize("trained", ["q_proj", "v_proj", "k_proj"])
def test_groups_do_not_depend_on_the_other_projections(trained):
    model = build(heads=4, groups=2, repeat=True).requires_grad_(False)
    model.layers[0].get_submodule(trained).requires_grad_(True)
    loss = language_loss(model)
    assert set(find_blocks(model)) == {f"layers.0.{trained}.weight", f"layers.0.{trained}.bias"}
    assert_gauss_newton_is_exact(model, loss)


class Pooled(Net):
    """A classifier of whole sequences."""

    def __init__(self, pool, **options):
        super().__init__(causal=False, **options)
        self.pool = pool

    def forward(self, tokens):
        return self.head(self.pool(self.features(tokens)))


POOLS = {
    "mean": lambda x: x.mean(1),
    "first": lambda x: x[:, 0],
    "max": lambda x: x.max(1).values,
    "two": lambda x: x[:, :2].sum(1),
}


@pytest.mark.parametrize("length", [2, 4])
@pytest.mark.parametrize("pool", POOLS)
def test_pooled_positions_are_not_taken_apart(pool, length):
    model = build(Pooled, POOLS[pool], top=nn.LayerNorm(6))
    (tokens, _), targets = tokens_of(3, length), torch.tensor([0, 1, 4])

    def loss():
        return F.cross_entropy(model(tokens), targets)

    assert_gauss_newton_is_exact(model, loss)


def test_two_losses():
    model = build(layers=2, top=nn.LayerNorm(6))
    tokens, targets = tokens_of(2, 4)

    def loss():
        features = model.features(tokens)
        pooled = model.head(features.mean(1))
        first = F.cross_entropy(model.head(features).mT, targets)
        return first + 0.3 * F.mse_loss(pooled, torch.zeros_like(pooled))

    assert_gauss_newton_is_exact(model, loss)


def test_contrastive_loss_couples_sequences():
    model = build(layers=1)
    tokens, others = tokens_of(3, 4)

    def loss():
        first, second = (model.features(batch)[:, -1] for batch in (tokens, others))
        return F.cross_entropy(first @ second.mT, torch.arange(3))

    assert_gauss_newton_is_exact(model, loss)


def test_span_prediction_couples_positions():
    """The classes of the cross-entropy are the positions."""
    model = build(layers=1, causal=False)
    tokens, _ = tokens_of(3, 4)

    def loss():
        return F.cross_entropy(model(tokens)[..., 0], torch.tensor([3, 0, 1]))

    assert_gauss_newton_is_exact(model, loss)


@pytest.mark.parametrize("name", ["nanogpt", "attention-bias-kv", "falcon-groups"])
def test_blocks_given_by_the_user(name):
    """Whole matrices, and cuts that are not heads, have the same traces in total."""
    model = FAMILIES[name]().double().eval()
    loss = few_labels(name, model)
    heads, merged = find_blocks(model), find_blocks(model, per_head=False, per_row=())
    rows = {}
    named = dict(model.named_parameters())
    for n, p in named.items():
        cut = Blocks(heads[n].roles[:1], split=Split(0, (len(p),), (len(p),)))
        rows[n] = cut if p.ndim == 2 else Blocks(("bias",))
    totals = []
    for blocks in (heads, merged, rows):
        found = analytic(model, loss, blocks=blocks, num_probes=None, part="outer")
        numel = {n: block_numel(tuple(p.shape), blocks[n].split) for n, p in named.items()}
        totals.append({n: (m * numel[n]).sum().reshape(1) for n, m in found.items()})
    assert_means(totals[1], totals[0], 1e-5)
    assert_means(totals[2], totals[0], 1e-5)


def test_vision_transformer_with_other_pools():
    for pool in ("avg", "token"):
        model = timm_vit(global_pool=pool).double().eval()
        loss = few_labels("timm_vit", model)
        assert_gauss_newton_is_exact(model, loss)
