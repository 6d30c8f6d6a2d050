"""The closed forms know which layers they fit, whatever is above attention and around it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blockopt.curvature import analytic
from blockopt.curvature.analytic.layer_calls import capture_layers
from blockopt.measure.attention_capture import capture_attention
from tests.helpers.dense_hessians import (
    Attention,
    Net,
    assert_gauss_newton_is_exact,
    assert_means,
    build,
    gauss_newton_means,
    language_loss,
    tokens_of,
)
from tests.helpers.models import FAMILIES


class MixesBefore(nn.Module):
    """Averages over earlier positions without attention."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        weights = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        return x + weights / weights.sum(-1, keepdim=True) @ self.linear(x)


class NormByHead(nn.Module):
    """A norm with several rows per position."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(3)

    def forward(self, x):
        return x + self.norm(x.unflatten(-1, (2, 3))).flatten(-2)


class ScaleNorm(nn.Module):
    """A norm whose weight is one number for all channels."""

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
    """The norm of Gemma."""

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape) * (1 + self.weight)


class ConditionalNorm(nn.LayerNorm):
    """A norm that needs more than its input."""

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
    lambda: Squared(6, 6),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    lambda: nn.Sequential(NormByHead(), Attention(6)),
]


@pytest.mark.parametrize("index", range(len(TOPS)))
def test_what_is_above_attention(index):
    model = build(layers=1, top=TOPS[index]())
    loss = language_loss(model, 2, 6)  # six positions of six channels
    assert_gauss_newton_is_exact(model, loss)


@pytest.mark.parametrize("shape", [(5, 2), (4, 4)])
def test_sequence_first(shape):
    model = build(layers=2, sequence_first=True)
    loss = language_loss(model, *shape)
    assert_gauss_newton_is_exact(model, loss)


@pytest.mark.parametrize("shape", [(5, 2, 16), (4, 4, 16), (16, 16)])
def test_torch_sequence_first(shape):
    """Also where there are as many sequences as positions, or positions as channels."""
    model = build(nn.TransformerEncoderLayer, 16, 2, dim_feedforward=8).eval()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    used = (0, -1)

    def loss():
        return F.mse_loss(model(x)[used], x[used].flip(-1))

    assert_gauss_newton_is_exact(model, loss)


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

    assert_gauss_newton_is_exact(model, loss, 1e-5)


class TiedByHand(Net):
    def forward(self, tokens):
        return F.linear(self.features(tokens), self.embedding.weight)


class TiedInput(Net):
    """The table goes through a layer before it is used as a head."""

    def forward(self, tokens):
        layer = self.layers[0]
        return self.features(tokens) @ layer.o_proj(layer.v_proj(self.embedding.weight)).mT


@pytest.mark.parametrize("cls", [TiedByHand, TiedInput])
def test_weights_used_outside_of_their_module(cls):
    model = build(cls, layers=2)
    del model.head
    loss = language_loss(model)
    assert_gauss_newton_is_exact(model, loss)


def test_padding_token_is_not_trained():
    model = build(layers=1)
    model.embedding.padding_idx = 3
    loss = language_loss(model)
    exact = gauss_newton_means(model, loss)
    assert exact["embedding.weight"][3] == 0
    assert exact["embedding.weight"][2] > 0
    assert_means(analytic(model, loss, num_probes=None), exact)
