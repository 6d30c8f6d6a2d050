"""Which module an attention call belongs to."""

import torch.nn.functional as F
from torch import nn

from blockopt.measure.attention_capture import capture_attention
from tests.helpers.attention_calls import CALLS, HEADS, Attention, seeded
from tests.helpers.matrices import normal
from tests.helpers.models import BATCH, FAMILIES, LENGTH, WIDTH, loss_of


class Core(nn.Module):
    """Attention proper as a module of its own, as in torchtitan."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Projections(nn.Module):
    """A module that only makes queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        return tuple(
            p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.projections = Projections()

    def forward(self, scale, x):
        return scale * F.scaled_dot_product_attention(*self.projections(x))


def test_call_belongs_to_the_module_that_holds_the_queries():
    model, x = nn.Sequential(seeded(Attention, Core())), normal(BATCH, LENGTH, WIDTH)
    with capture_attention(model) as calls:
        model(x)
    assert calls[0].module == "0"
    assert calls[0].x is x


def test_projections_below_the_caller_are_no_unseen_attention():
    model = seeded(Mixer)
    with capture_attention(model) as calls:
        model(2.0, normal(BATCH, LENGTH, WIDTH))
    assert calls[0].module == ""
    assert calls[0].x is None  # the first argument is no tensor


def test_calls_outside_the_model_are_not_its_own():
    model, other = (seeded(Attention, F.scaled_dot_product_attention) for _ in range(2))
    x = normal(BATCH, LENGTH, WIDTH)
    with capture_attention(model) as calls:
        other(x)
        model(x)
        F.scaled_dot_product_attention(x, x, x)
    assert len(calls) == 1


def test_contexts_nest():
    model = FAMILIES["decoder_layer"]().double()
    with capture_attention(model) as outer:
        loss_of("decoder_layer", model)
        with capture_attention(model.layer.self_attn) as inner:
            loss_of("decoder_layer", model)
    assert [call.module for call in outer] == 2 * CALLS["decoder_layer"]
    assert [call.module for call in inner] == [""]
    assert inner[0].query is outer[2].query
