"""Attention that `capture_attention` cannot see raises, and says what to do."""

import pytest
import torch.nn.functional as F
from torch import nn

from blockopt.measure.attention_capture import capture_attention
from tests.helpers.attention_calls import (
    CALLS,
    HEADS,
    Attention,
    eager,
    family_model,
    make_eager,
    seeded,
)
from tests.helpers.matrices import normal
from tests.helpers.models import BATCH, LENGTH, WIDTH, loss_of, timm_vit


def test_model_without_forward_raises():
    model = family_model("nanogpt")
    message = r"'h\.0\.attn' \(SelfAttention\).*did not run inside.*Run a forward pass"
    with pytest.raises(ValueError, match=message), capture_attention(model):
        pass


@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "bert", "t5", "opt", "falcon-plain", "lora-llama"]
)
def test_eager_attention_of_transformers_raises(family):
    model = family_model(family)
    make_eager(model.base_model.model if family == "lora-llama" else model)
    first = CALLS[family][0].replace(".", r"\.")
    message = rf"attention of '{first}'.*attn_implementation=\"sdpa\""
    with pytest.raises(ValueError, match=message), capture_attention(model):
        loss_of(family, model)


def test_bloom_raises_kindly():
    model = family_model("bloom")
    names = [rf"'transformer\.h\.{i}\.self_attention' \(BloomAttention\)" for i in range(2)]
    message = rf"{', '.join(names)}.*only eager.*Bloom, cannot be captured"
    with pytest.raises(ValueError, match=message), capture_attention(model):
        loss_of("bloom", model)


def test_timm_without_fused_attention_raises():
    model = seeded(timm_vit)
    model.blocks[1].attn.fused_attn = False
    message = r"attention of 'blocks\.1\.attn' \(Attention\): .*fused_attn=True"
    with pytest.raises(ValueError, match=message), capture_attention(model):
        loss_of("timm_vit", model)


@pytest.mark.parametrize("eager_turn", [0, 1])
def test_torch_attention_that_returns_weights_raises_even_once(eager_turn):
    model, x = seeded(nn.MultiheadAttention, WIDTH, HEADS), normal(LENGTH, BATCH, WIDTH)

    def run():
        with capture_attention(model):
            for turn in range(2):
                model(x, x, x, need_weights=turn == eager_turn)

    with pytest.raises(ValueError, match=r"'' \(MultiheadAttention\).*need_weights=False"):
        run()


def test_eager_attention_of_own_code_raises():
    model = nn.Sequential(*(seeded(Attention, eager) for _ in range(5)))
    message = (
        r"'2' \(Attention\) and 2 more: .*\. To change that, [^;]* in the code of these modules\.$"
    )
    with pytest.raises(ValueError, match=message), capture_attention(model):
        model(normal(BATCH, LENGTH, WIDTH))


def test_unseen_attention_can_be_allowed():
    model = nn.Sequential(
        seeded(Attention, eager), seeded(Attention, F.scaled_dot_product_attention)
    )
    with capture_attention(model, allow_unseen=True) as calls:
        model(normal(BATCH, LENGTH, WIDTH))
    assert [call.module for call in calls] == ["1"]
    with capture_attention(model[0], allow_unseen=True) as calls:
        pass
    assert calls == []


def test_frozen_eager_attention_raises():
    model = seeded(Attention, eager).requires_grad_(False)
    with pytest.raises(ValueError, match="Cannot see"), capture_attention(model):
        model(normal(BATCH, LENGTH, WIDTH))


def test_eager_attention_with_unknown_projections_raises():
    model = type("LatentAttention", (nn.Sequential,), {})(nn.Linear(WIDTH, WIDTH)).double()
    with pytest.raises(ValueError, match=r"'' \(LatentAttention\)"), capture_attention(model):
        model(normal(BATCH, LENGTH, WIDTH))
