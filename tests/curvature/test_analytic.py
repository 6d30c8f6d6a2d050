"""The closed forms give the exact Gauss-Newton blocks, or leave them to an unbiased estimate."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from blockopt import Blocks, Split, find_blocks
from blockopt.blocks.split import block_numel
from blockopt.curvature import analytic
from blockopt.curvature.analytic.independence import find_independence
from blockopt.curvature.analytic.layer_calls import (
    capture_layers,
    drop_parameters_used_elsewhere,
)
from blockopt.measure.attention_capture import capture_attention
from blockopt.measure.loss_curvature import CaptureLosses, LossCurvature
from tests.helpers.dense_hessians import (
    Attention,
    Net,
    assert_means,
    build,
    gauss_newton_means,
    language_loss,
    tokens_of,
)
from tests.helpers.models import FAMILIES, SEQUENCES, loss_of, timm_vit

OWN = {
    "nanogpt",
    "timm_vit",
    "cnn",
    "mlp",
    *SEQUENCES,
}  # in float64 throughout; transformers computes its loss in float32


class FewLabels(TorchFunctionMode):
    """Leaves the labels of three positions, so that the exact sums take seconds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.cross_entropy and len(args[1]) > 6:
            args = (
                args[0],
                args[1].index_fill(0, torch.tensor([0, 2, 3, 5, 6, 7, 8, 9, 11]), -100),
                *args[2:],
            )
        return func(*args, **(kwargs or {}))


def few_labels(name, model):
    def loss():
        with FewLabels():
            return loss_of(name, model)

    return loss


def exact_outer(model, loss, **options):
    return analytic(model, loss, num_probes=None, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_outer_is_exact(family):
    model = FAMILIES[family]().eval()
    if family != "mixtral":  # whose experts are float32 only
        model.double()
    loss = few_labels(family, model)
    assert_means(
        exact_outer(model, loss), gauss_newton_means(model, loss), 1e-10 if family in OWN else 1e-5
    )


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
    kept = drop_parameters_used_elsewhere(layers, curvature.predictions, names)
    assert [(call.weight, call.bias) for call in kept] == [
        (call.weight, call.bias) for call in layers
    ]
    separate, local = find_independence(curvature, kept, attention[-1].output)
    assert local
    assert all(
        after.x.shape[0] == 2
        for after in separate
        if "wpe" not in after.module and "bias" not in after.module
    )
    above = [call for call in separate if call.attention_calls == len(attention)]
    assert len(above) >= 3
    assert all(call.local for call in above)


KINDS = [
    {},
    {"fused": True},
    {"groups": 1},
    {"groups": 2, "repeat": True},
    {"groups": 2, "fused": True, "scale": 0.9},
]
KINDS += [
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
    assert_means(exact_outer(model, loss), gauss_newton_means(model, loss))


def test_padding_is_masked():
    model = build(layers=2, causal=False)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)[:, None, None, :]
    loss = language_loss(model, mask=mask)
    assert_means(exact_outer(model, loss), gauss_newton_means(model, loss))


def test_packed_documents():
    """The last position, on which independence is tried, is a document of its own."""
    model = build(layers=2)
    mask = torch.block_diag(torch.ones(3, 3), torch.ones(1, 1)).bool().tril()
    loss = language_loss(model, mask=mask)
    assert_means(exact_outer(model, loss), gauss_newton_means(model, loss))


@pytest.mark.parametrize("trained", ["q_proj", "v_proj", "k_proj"])
def test_groups_do_not_depend_on_the_other_projections(trained):
    model = build(heads=4, groups=2, repeat=True).requires_grad_(False)
    model.layers[0].get_submodule(trained).requires_grad_(True)
    loss = language_loss(model)
    found = exact_outer(model, loss)
    assert set(found) == {f"layers.0.{trained}.weight", f"layers.0.{trained}.bias"}
    assert_means(found, gauss_newton_means(model, loss))


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

    assert_means(exact_outer(model, loss), gauss_newton_means(model, loss))


def test_two_losses():
    model = build(layers=2, top=nn.LayerNorm(6))
    tokens, targets = tokens_of(2, 4)

    def loss():
        features = model.features(tokens)
        pooled = model.head(features.mean(1))
        return F.cross_entropy(model.head(features).mT, targets) + 0.3 * F.mse_loss(
            pooled, torch.zeros_like(pooled)
        )

    assert_means(exact_outer(model, loss), gauss_newton_means(model, loss))


def test_contrastive_loss_couples_sequences():
    model = build(layers=1)
    tokens, others = tokens_of(3, 4)

    def loss():
        return F.cross_entropy(
            model.features(tokens)[:, -1] @ model.features(others)[:, -1].mT, torch.arange(3)
        )

    assert_means(exact_outer(model, loss), gauss_newton_means(model, loss))


def test_span_prediction_couples_positions():
    """The classes of the cross-entropy are the positions."""
    model = build(layers=1, causal=False)
    tokens, _ = tokens_of(3, 4)

    def loss():
        return F.cross_entropy(model(tokens)[..., 0], torch.tensor([3, 0, 1]))

    assert_means(exact_outer(model, loss), gauss_newton_means(model, loss))


class MixesBefore(nn.Module):
    """Averages over earlier positions without attention."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        weights = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        return x + weights / weights.sum(-1, keepdim=True) @ self.linear(x)


class NormByHead(nn.Module):
    """Several rows a position."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(3)

    def forward(self, x):
        return x + self.norm(x.unflatten(-1, (2, 3))).flatten(-2)


class ScaleNorm(nn.Module):
    """One number for all channels."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.weight * x / x.norm(dim=-1, keepdim=True)


class ChannelsFirst(nn.Module):
    """A norm whose channels are not the last dimension; the last is as long."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(6, affine=True)

    def forward(self, x):
        return self.norm(x.mT).mT


class OnePlusNorm(nn.RMSNorm):
    """Gemma's."""

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape) * (1 + self.weight)


class ConditionalNorm(nn.LayerNorm):
    """Needs more than its input."""

    def forward(self, x, shift=None):
        return super().forward(x) + shift


class Conditional(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = ConditionalNorm(6)

    def forward(self, x):
        return self.norm(x, shift=x)


class InPlace(nn.Module):
    """Changes the output of a layer after it has left the layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return F.relu(self.linear(x).mul_(2.0).add_(x), inplace=True)


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.linear(x.flatten(0, 1).contiguous()).tanh().unflatten(0, x.shape[:2])


class Squared(nn.Linear):
    """A linear map by its type only."""

    def forward(self, x):
        return F.linear(x, self.weight.square(), self.bias)


class Hooked(nn.Linear):
    """A layer whose output a hook replaces."""

    def __init__(self):
        super().__init__(6, 6)
        self.register_forward_hook(lambda module, args, output: 3 * output)


TOPS = [
    MixesBefore,
    NormByHead,
    ScaleNorm,
    ChannelsFirst,
    lambda: OnePlusNorm(6),
    Conditional,
    InPlace,
    Flat,
    Hooked,
]
TOPS += [
    lambda: Squared(6, 6),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    lambda: nn.Sequential(NormByHead(), Attention(6)),
]


@pytest.mark.parametrize("index", range(len(TOPS)))
def test_what_is_above_attention(index):
    model = build(layers=1, top=TOPS[index]())
    loss = language_loss(model, 2, 6)  # six positions of six channels
    assert_means(exact_outer(model, loss), gauss_newton_means(model, loss))


@pytest.mark.parametrize("shape", [(5, 2), (4, 4)])
def test_sequence_first(shape):
    model = build(layers=2, sequence_first=True)
    loss = language_loss(model, *shape)
    assert_means(exact_outer(model, loss), gauss_newton_means(model, loss))


@pytest.mark.parametrize("shape", [(5, 2, 16), (4, 4, 16), (16, 16)])
def test_torch_sequence_first(shape):
    """Also where there are as many sequences as positions, or positions as channels."""
    model = build(nn.TransformerEncoderLayer, 16, 2, dim_feedforward=8).eval()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    used = (0, -1)

    def loss():
        return F.mse_loss(model(x)[used], x[used].flip(-1))

    assert_means(exact_outer(model, loss), gauss_newton_means(model, loss))


@pytest.mark.parametrize("batch_first", [True, False])
def test_sequences_are_found_on_either_side(batch_first):
    model = nn.TransformerEncoderLayer(16, 2, dim_feedforward=8, batch_first=batch_first)
    with capture_attention(model) as attention, capture_layers(model, attention) as layers:
        model(torch.randn((2, 5, 16) if batch_first else (5, 2, 16)))
    assert {call.module for call in layers} == {"linear1", "linear2", "norm1", "norm2"}
    assert all(call.x.shape[:2] == call.y.shape[:2] == (2, 5) for call in layers)


def test_relative_positions_of_as_many_positions_as_sequences():
    model = FAMILIES["t5"]().double().eval()
    tokens, targets = tokens_of(3, 3, vocabulary=20)
    targets[:, 1:] = -100

    def loss():
        return model(input_ids=tokens, labels=targets, use_cache=False).loss

    assert_means(exact_outer(model, loss), gauss_newton_means(model, loss), 1e-5)


class TiedByHand(Net):
    def forward(self, tokens):
        return F.linear(self.features(tokens), self.embedding.weight)


class TiedInput(Net):
    """The table goes through a layer before it is used as a head."""

    def forward(self, tokens):
        return (
            self.features(tokens)
            @ self.layers[0].o_proj(self.layers[0].v_proj(self.embedding.weight)).mT
        )


@pytest.mark.parametrize("cls", [TiedByHand, TiedInput])
def test_weights_used_outside_of_their_module(cls):
    model = build(cls, layers=2)
    del model.head
    loss = language_loss(model)
    assert_means(exact_outer(model, loss), gauss_newton_means(model, loss))


def test_padding_token_is_not_trained():
    model = build(layers=1)
    model.embedding.padding_idx = 3
    loss = language_loss(model)
    exact = gauss_newton_means(model, loss)
    assert exact["embedding.weight"][3] == 0
    assert exact["embedding.weight"][2] > 0
    assert_means(exact_outer(model, loss), exact)


@pytest.mark.parametrize("name", ["nanogpt", "attention-bias-kv", "falcon-groups"])
def test_blocks_of_ones_own(name):
    """Whole matrices, and cuts that are no heads, have the same traces in total."""
    model = FAMILIES[name]().double().eval()
    loss = few_labels(name, model)
    heads, merged = find_blocks(model), find_blocks(model, per_head=False, per_row=())
    rows = {}
    for (n, b), p in zip(heads.items(), model.parameters()):
        cut = Blocks(b.roles[:1], split=Split(0, (len(p),), (len(p),)))
        rows[n] = cut if p.ndim == 2 else Blocks(("bias",))
    totals = []
    for blocks in (heads, merged, rows):
        found = analytic(model, loss, blocks=blocks, num_probes=None, part="outer")
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        totals.append(
            {
                n: (m * block_numel(shapes[n], blocks[n].split)).sum().reshape(1)
                for n, m in found.items()
            }
        )
    assert_means(totals[1], totals[0], 1e-5)
    assert_means(totals[2], totals[0], 1e-5)


def test_vision_transformer_with_other_pools():
    for pool in ("avg", "token"):
        model = timm_vit(global_pool=pool).double().eval()
        loss = few_labels("timm_vit", model)
        assert_means(exact_outer(model, loss), gauss_newton_means(model, loss))
