"""Modules that look like known ones, but are not."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from blockopt import Split, find_blocks


def module(type_name, attributes, **children):
    made = type(type_name, (nn.Module,), {})()
    for name, value in {**attributes, **children}.items():
        setattr(made, name, value)
    return made


def linear(inputs=16, outputs=16):
    return nn.Linear(inputs, outputs)


HEADS = {"num_heads": 2, "head_dim": 8}
BY_HEAD = [
    module("AttentionCl", {**HEADS, "head_first": True}, qkv=linear(16, 48), proj=linear()),
    module(
        "GPTBigCodeAttention",
        {**HEADS, "multi_query": False},
        c_attn=linear(16, 48),
        c_proj=linear(),
    ),
    module("MiniMaxLightningAttention", HEADS, qkv_proj=linear(16, 48), out_proj=linear()),
]


def test_unknown_storage_order_raises():
    fused = {"query_key_value": linear(16, 48), "dense": linear()}
    attention = module("StrangeAttention", HEADS, **fused)
    with pytest.raises(ValueError, match=r"query_key_value\.weight.*interleaved by head"):
        find_blocks(attention)


@pytest.mark.parametrize("attention", BY_HEAD, ids=lambda m: type(m).__name__)
def test_fused_by_head_is_not_read_as_contiguous(attention):
    fused = next(b for b in find_blocks(attention).values() if b.roles == ("query", "key", "value"))
    assert fused.split == Split(0, (8, 8, 8), (1, 1, 1), repeat=2)


def test_classifier_of_a_plain_net_is_no_mlp():
    net = module("Net", {}, conv1=nn.Conv2d(1, 4, 3), fc1=nn.Linear(64, 32), fc2=nn.Linear(32, 10))
    roles = {name: b.roles for name, b in find_blocks(net).items() if name.endswith("weight")}
    assert set(roles.values()) == {("other",)}


def test_output_of_an_mlp_beside_attention_is_no_output_projection():
    attention = module("SelfAttention", HEADS, query=linear(), key=linear(), value=linear())
    wide, narrow = (module("Dense", {}, dense=linear(*size)) for size in ((16, 64), (64, 16)))
    layer = module("Layer", {}, attention=attention, intermediate=wide, output=narrow)
    blocks = find_blocks(layer)
    assert blocks["output.dense.weight"].roles == ("mlp_out",)
    assert blocks["attention.value.weight"].roles == ("value",)


def test_sizes_that_fit_no_heads_raise_until_overridden():
    attention = module("Attention", {"num_heads": 4}, qkv=nn.Linear(16, 42), proj=nn.Linear(14, 16))
    with pytest.raises(ValueError, match="overrides="):
        find_blocks(attention)
    assert len(find_blocks(attention, overrides={"*": "other"})) == 4


def test_layer_is_the_index_into_the_list_of_layers():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32), num_layers=3, enable_nested_tensor=False
    )
    blocks = find_blocks(nn.Sequential(encoder, nn.Linear(16, 2)))
    assert blocks["0.layers.2.self_attn.out_proj.weight"].layer == 2
    assert blocks["1.weight"].layer is None


def test_the_gate_of_streaming_moonshine_is_the_second_half():
    from transformers.models.moonshine_streaming import modeling_moonshine_streaming as moonshine

    config = SimpleNamespace(hidden_size=4, intermediate_size=6)
    mlp = moonshine.MoonshineStreamingDecoderMLP(config, "silu")
    assert find_blocks(mlp)["fc1.weight"].roles == ("mlp_in", "mlp_gate")
    x, shift = torch.randn(3, 4), mlp.fc2.bias
    with torch.no_grad():
        before = mlp(x) - shift
        mlp.fc1.weight[:6] *= 2
        mlp.fc1.bias[:6] *= 2
        torch.testing.assert_close(mlp(x) - shift, 2 * before)  # linear, as no gate is
