"""What `capture_attention` sees is what attention is given, in every family."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from blockopt.measure.attention_capture import AttentionCall, capture_attention
from tests.helpers.attention_calls import (
    CALLS,
    HEADS,
    TWO_LAYERS,
    Attention,
    assert_consistent,
    family_model,
    make_eager,
    mixed_values,
    seeded,
)
from tests.helpers.matrices import normal
from tests.helpers.models import (
    BATCH,
    FAMILIES,
    LENGTH,
    LLAMA_SIZES,
    SDPA,
    VOCAB,
    WIDTH,
    loss_of,
    transformers,
)

# Those that pass is_causal; Falcon passes a mask.
FALCONS = ("falcon-multi-query", "falcon-groups", "falcon-plain")
CAUSAL = TWO_LAYERS.keys() - {*FALCONS, "timm_vit", "vit", "bert"}


def inputs_of(module):
    """Return a list that fills with the first argument of every later call of `module`."""
    seen = []

    def record(_, args, kwargs):
        seen.append((*args, *kwargs.values())[0])

    module.register_forward_pre_hook(record, with_kwargs=True)
    return seen


def test_families_are_all_here():
    assert CALLS.keys() | {"bloom"} == FAMILIES.keys()


@pytest.mark.parametrize("family", CALLS)
def test_calls_of_every_family(family):
    model = family_model(family)
    with capture_attention(model) as calls:
        loss_of(family, model)
    assert [call.module for call in calls] == CALLS[family]
    for call in calls:
        length = LENGTH if family not in ("timm_vit", "vit") else 5
        assert call.x.shape == (BATCH, length, WIDTH)
        assert call.query.shape[:3] == (BATCH, HEADS, length)
        own = family == "gpt2-cross" and call.module.endswith(".attn")
        assert call.is_causal == (family in CAUSAL or own)
        assert call.dropout == 0.0
        unscaled = family in ("opt", "t5", "t5-gated")
        assert call.scale == (1.0 if unscaled else call.query.shape[-1] ** -0.5)
        assert_consistent(call)


@pytest.mark.parametrize("family", TWO_LAYERS)
def test_x_is_the_very_input_of_the_query_projection(family):
    model = family_model(family)
    _, projection = TWO_LAYERS[family]
    inputs = [inputs_of(model.get_submodule(f"{name}.{projection}")) for name in CALLS[family]]
    with capture_attention(model) as calls:
        loss_of(family, model)
    for call, (x,) in zip(calls, inputs, strict=True):
        assert call.x is x
        assert call.context is None
    assert calls[0].x is not calls[1].x


@pytest.mark.parametrize(
    ("family", "cross", "query", "key"),
    [
        ("t5", "decoder.block.1.layer.1.EncDecAttention", "q", "k"),
        ("gpt2-cross", "transformer.h.1.crossattention", "q_attn", "c_attn"),
    ],
)
def test_cross_attention_has_x_and_context(family, cross, query, key):
    model = family_model(family)
    inputs = {name: inputs_of(model.get_submodule(f"{cross}.{name}")) for name in (query, key)}
    with capture_attention(model) as calls:
        loss_of(family, model)
    call = next(call for call in calls if call.module == cross)
    assert call.x is inputs[query][0]
    assert call.context is inputs[key][0]
    assert call.context is not call.x
    for call in calls:
        assert (call.context is not None) == ("cross" in call.module or "EncDec" in call.module)


@pytest.mark.parametrize("batch_first", [True, False])
def test_cross_attention_of_torch_has_batch_first_x_and_context(batch_first):
    model = seeded(nn.MultiheadAttention, WIDTH, HEADS, batch_first=batch_first)
    x, memory = normal(BATCH, LENGTH, WIDTH), normal(BATCH, LENGTH + 2, WIDTH, seed=1)
    given = (x, memory) if batch_first else (x.transpose(0, 1), memory.transpose(0, 1))
    with capture_attention(model) as calls:
        model(query=given[0], key=given[1], value=given[1], need_weights=False)
    (call,) = calls
    assert call.module == ""
    assert call.x.data_ptr() == x.data_ptr()
    assert torch.equal(call.x, x)
    assert torch.equal(call.context, memory)
    query, key, _ = model.in_proj_weight.chunk(3)
    for seen, given, weight in ((call.query, x, query), (call.key, memory, key)):
        heads = F.linear(given, weight).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        torch.testing.assert_close(seen, heads)


def test_unbatched_attention_of_torch_has_a_batch_of_one():
    model = seeded(nn.MultiheadAttention, WIDTH, HEADS)
    x, memory = normal(LENGTH, WIDTH), normal(3, WIDTH, seed=1)
    with capture_attention(model) as calls:
        model(x, memory, memory, need_weights=False)
        model(x, x, x, need_weights=False)
    assert torch.equal(calls[0].x, x[None])
    assert torch.equal(calls[0].context, memory[None])
    assert calls[1].context is None
    assert_consistent(calls[0])


def rotated(x, theta=10000.0):  # (B, H, T, dh)
    half = x.shape[-1] // 2
    speeds = theta ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * speeds
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_queries_and_keys_are_those_after_norm_and_rope(family):
    model = family_model(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.copy_(1 + 0.3 * normal(*parameter.shape, seed=3))
    with capture_attention(model) as calls:
        loss_of(family, model)
    for call in calls:
        attention = model.get_submodule(call.module)
        for letter, seen in (("q", call.query), ("k", call.key)):
            plain = attention.get_submodule(f"{letter}_proj")(call.x)
            plain = plain.unflatten(-1, (-1, seen.shape[-1])).transpose(1, 2)
            expected = plain
            if family == "qwen3":
                scale = (plain.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()
                expected = plain * scale * attention.get_parameter(f"{letter}_norm.weight")
            # transformers rotates in float32.
            torch.testing.assert_close(seen, rotated(expected), rtol=1e-5, atol=1e-6)
            assert not torch.allclose(seen, plain, rtol=1e-2)


WITH_EAGER = ("gpt2", "llama", "qwen2", "qwen3", "phi3", "gpt_neox", "opt", "bert", "t5")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", [*WITH_EAGER, "falcon-multi-query", "falcon-groups"])
def test_weights_are_those_of_eager_attention(family, padded):
    model = family_model(family).eval()
    tokens = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if padded:
        inputs["attention_mask"][0, -2:] = 0
    if family == "t5":
        inputs["decoder_input_ids"] = tokens.flip(1)
    with capture_attention(model) as calls:
        model(**inputs)
    make_eager(model)
    outputs = model(**inputs, output_attentions=True)
    if family == "t5":
        decoder = [
            w for pair in zip(outputs.decoder_attentions, outputs.cross_attentions) for w in pair
        ]
        expected = [*outputs.encoder_attentions, *decoder]
    else:
        expected = outputs.attentions
    for call, weights in zip(calls, expected, strict=True):
        torch.testing.assert_close(call.weights().float(), weights.float(), rtol=1e-5, atol=1e-7)


def test_left_padding_is_seen():
    model = family_model("llama")
    tokens = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    with capture_attention(model) as calls:
        model(tokens, attention_mask=mask)
    for call in calls:
        torch.testing.assert_close(mixed_values(call), call.output)
        allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() & mask[:, None, None].bool()
        seen = call.weights()[:, :, 2:] > 0
        assert torch.equal(seen, allowed[:, :, 2:].expand(-1, HEADS, -1, -1))


@pytest.mark.parametrize("mask", ["none", "bool", "additive", "padding", "causal"])
def test_weights_are_those_that_torch_returns(mask):
    model = seeded(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True)
    x = normal(BATCH, LENGTH, WIDTH)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[0, -2:] = True
    options = {
        "none": {},
        "bool": {"attn_mask": future},
        "additive": {"attn_mask": normal(BATCH * HEADS, LENGTH, LENGTH, seed=1)},
        "padding": {"key_padding_mask": padding, "attn_mask": future},
        "causal": {"attn_mask": future, "is_causal": True},
    }[mask]
    with capture_attention(model) as calls:
        model(x, x, x, need_weights=False, **options)
    _, weights = model(x, x, x, average_attn_weights=False, **options)
    torch.testing.assert_close(calls[0].weights(), weights)
    assert calls[0].is_causal == (mask == "causal")


def test_sliding_window_is_seen():
    config = transformers.MistralConfig(**LLAMA_SIZES, **SDPA, sliding_window=3)
    model = seeded(transformers.MistralForCausalLM, config)
    with capture_attention(model) as calls:
        loss_of("mistral", model)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    inside = ((distance >= 0) & (distance < 3)).expand(BATCH, HEADS, -1, -1)
    for call in calls:
        assert_consistent(call)
        assert torch.equal(call.weights() > 0, inside)


@pytest.mark.parametrize("key_heads", [1, 2])
def test_grouped_heads_given_to_torch(key_heads):
    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    model = seeded(Attention, attend, key_heads=key_heads)
    with capture_attention(model) as calls:
        model(normal(BATCH, LENGTH, WIDTH))
    assert calls[0].key.shape[1] == key_heads
    assert_consistent(calls[0])


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: scaled_dot_product_attention(q, k, v),
        lambda q, k, v: F.scaled_dot_product_attention(value=v, key=k, query=q, scale=0.3),
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, None, 0.0, True),
    ],
    ids=["imported by name", "keywords", "positions"],
)
def test_call_is_seen_however_it_is_written(attend):
    model = seeded(Attention, attend)
    with capture_attention(model) as calls:
        model(normal(BATCH, LENGTH, WIDTH))
    assert_consistent(calls[0])


def test_query_that_may_attend_to_nothing_has_zeros():
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(-1)
    model = seeded(Attention, partial(F.scaled_dot_product_attention, attn_mask=mask))
    with capture_attention(model) as calls:
        model(normal(BATCH, LENGTH, WIDTH))
    weights = calls[0].weights()
    assert torch.equal(weights[:, :, 0], torch.zeros_like(weights[:, :, 0]))
    torch.testing.assert_close(mixed_values(calls[0]), calls[0].output)
    (gradient,) = torch.autograd.grad(weights.square().sum(), calls[0].query)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("autocast", [False, True])
def test_weights_are_at_least_float32(autocast):
    q = normal(1, 1, 3, 8).bfloat16()
    call = AttentionCall("attn", None, None, q, q, q, None, False, 0.5, 0.0, q)
    with torch.autocast("cpu", enabled=autocast):
        weights = call.weights()
    expected = (0.5 * q.double() @ q.double().mT).softmax(dim=-1)
    torch.testing.assert_close(weights, expected.float(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("index", [(slice(None), 0), (0, 0)], ids=["batch", "no batch"])
def test_queries_without_heads(index):
    def attend(*qkv):
        return qkv[0] + scaled_dot_product_attention(*(t[index] for t in qkv)).mean()

    model = seeded(Attention, attend)
    with capture_attention(model) as calls:
        model(normal(BATCH, LENGTH, WIDTH))
    assert calls[0].query.shape == normal(BATCH, HEADS, LENGTH, WIDTH // HEADS)[index].shape
    torch.testing.assert_close(calls[0].weights() @ calls[0].value, calls[0].output)
