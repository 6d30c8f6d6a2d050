"""Our GPT-2: the same logits as that of transformers, and the options that the papers study."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers

import blockopt
from recipes.common.gpt2 import GPT2, PRESETS, GPT2Config, to_huggingface
from tests.helpers.optimizers import TINY, tiny_gpt

TOKENS = torch.randint(19, (2, 8), generator=torch.Generator().manual_seed(3))


def test_transformers_has_the_same_logits(tmp_path):
    ours = tiny_gpt()
    with torch.no_grad():
        for parameter in ours.parameters():  # biases and norms too, which start as 0 and 1
            parameter.add_(torch.randn_like(parameter) * 0.3)
    expected = ours(TOKENS)
    assert expected.std() > 0.5  # not the logits of a model that says nothing
    theirs = to_huggingface(ours)
    torch.testing.assert_close(theirs(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)
    theirs.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(TOKENS).logits, expected, rtol=1e-5, atol=1e-5)


def test_what_huggingface_lacks_is_refused():
    with pytest.raises(ValueError, match="'post'"):
        to_huggingface(GPT2(GPT2Config(19, 8, 16, 2, 2, norm="post")))


def by_hand(model, tokens):
    """The forward pass written out, one head and one position at a time."""
    config = model.config
    norm = {
        "layer": lambda module, x: F.layer_norm(x, x.shape[-1:], module.weight, module.bias),
        "none": lambda module, x: x,
    }["none" if config.norm == "none" else "layer"]
    x = model.wte.weight[tokens] + model.wpe.weight[: tokens.shape[1]]
    dh = config.width // config.heads

    def attend(layer, x):
        qkv = x @ layer.attn.c_attn.weight.T + layer.attn.c_attn.bias
        mixed = torch.zeros_like(x)
        for h in range(config.heads):
            q, k, v = (
                qkv[..., n * config.width + h * dh : n * config.width + (h + 1) * dh]
                for n in range(3)
            )
            for i in range(x.shape[1]):
                scores = (q[:, i, None] * k[:, : i + 1]).sum(-1) / math.sqrt(dh)
                weights = scores.softmax(-1) if config.attention == "softmax" else scores
                mixed[:, i, h * dh : (h + 1) * dh] = (weights[..., None] * v[:, : i + 1]).sum(1)
        return mixed @ layer.attn.c_proj.weight.T + layer.attn.c_proj.bias

    def mlp(layer, x):
        hidden = x @ layer.mlp.c_fc.weight.T + layer.mlp.c_fc.bias
        gelu = (
            0.5
            * hidden
            * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        )
        return gelu @ layer.mlp.c_proj.weight.T + layer.mlp.c_proj.bias

    for layer in model.h:
        if config.norm == "post":
            x = norm(layer.ln_1, x + attend(layer, x))
            x = norm(layer.ln_2, x + mlp(layer, x))
        else:
            x = x + attend(layer, norm(layer.ln_1, x))
            x = x + mlp(layer, norm(layer.ln_2, x))
    x = norm(model.ln_f, x) if config.norm == "pre" else x
    return x @ model.wte.weight.T


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_options_by_hand(norm, attention):
    torch.manual_seed(0)
    model = GPT2(GPT2Config(19, 8, 16, 2, 2, norm=norm, attention=attention)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        torch.testing.assert_close(model(TOKENS), by_hand(model, TOKENS), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("norm", "count"), [("pre", 5), ("post", 4), ("none", 0)])
def test_blocks_are_found_with_every_norm(norm, count):
    model = GPT2(GPT2Config(19, 8, 16, 2, 2, norm=norm, attention="linear"))
    blocks = blockopt.find_blocks(model)
    assert (
        sum(entry.roles == ("norm",) for name, entry in blocks.items() if name.endswith("weight"))
        == count
    )
    assert blocks["h.0.attn.c_attn.weight"].roles == ("query", "key", "value")
    blockopt.BlockMuon(blockopt.param_groups(model), lr=1e-3)


def test_presets_have_the_sizes_in_their_names():
    sizes = {}
    for name, config in PRESETS.items():
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in GPT2(config).parameters()) / 1e6
    assert sizes["small"] == pytest.approx(124.44, abs=0.01)  # 124,439,808
    assert sizes["medium"] == pytest.approx(354.82, abs=0.01)
    for name in ("0.5M", "1M", "3M", "10M"):
        assert sizes[name] == pytest.approx(float(name[:-1]), rel=0.25)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"norm": "rms"}, "norm='rms'"),
        ({"attention": "none"}, "attention"),
        ({"width": 17}, "width=17"),
        ({"depth": 0}, "depth=0"),
    ],
)
def test_bad_options_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        GPT2Config(**{"width": 16, "heads": 2, **option})


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="9 tokens"):
        GPT2(TINY)(torch.zeros(1, 9, dtype=torch.long))
