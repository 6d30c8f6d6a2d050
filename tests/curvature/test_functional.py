"""The functional part: the softmax's own second derivative, against autograd."""

import pytest
import torch
import torch.nn.functional as F

from blockopt import find_blocks
from blockopt.curvature import analytic
from tests.helpers.dense_hessians import (
    assert_means,
    build,
    functional_diagonal,
    gauss_newton_means,
    hessian_means,
    language_loss,
    means_by_block,
    tokens_of,
    trainable,
)
from tests.helpers.models import FAMILIES, loss_of

KINDS = [
    {},
    {"fused": True},
    {"heads": 4, "groups": 2},
    {"heads": 4, "groups": 1, "fused": True, "repeat": True},
    {"causal": False},
    {"scale": 0.9},
    {"factor": 1.7},
]


def rest_of_hessian(model, loss):
    """Return the Hessian minus the Gauss-Newton matrix, by block."""
    whole, outer = hessian_means(model, loss), gauss_newton_means(model, loss)
    return {name: whole[name] - outer[name] for name in whole}


def inside_attention(means, model):
    """Select the blocks that only the softmax adds to: above it these models are affine."""
    blocks = find_blocks(model)
    return {n: m for n, m in means.items() if not n.startswith("embedding") and n in blocks}


def squared_error(model, *shape):
    tokens, _ = tokens_of(*shape)
    target = torch.randn(*shape, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return lambda: F.mse_loss(model(tokens), target)


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("loss_function", [language_loss, squared_error])
def test_one_layer_is_exact(options, loss_function):
    model = build(**options)
    loss = loss_function(model, 2, 4)
    exact = inside_attention(rest_of_hessian(model, loss), model)
    found = inside_attention(analytic(model, loss, part="functional"), model)
    assert_means(found, exact)
    blocks = find_blocks(model)
    for name, mean in exact.items():  # it is not zero for any head of queries and keys
        for role, value in zip(blocks[name].block_roles, mean, strict=True):
            assert role not in ("query", "key") or abs(value) > 1e-6, name


def test_full_is_the_sum():
    model = build(heads=4, groups=2)
    loss = language_loss(model)
    outer, functional, full = (
        analytic(model, loss, part=part, num_probes=2) for part in ("outer", "functional", "full")
    )
    assert_means(full, {name: outer[name] + functional[name] for name in outer}, 1e-14)
    both = analytic(model, loss, part="full", num_probes=None), hessian_means(model, loss)
    assert_means(*(inside_attention(means, model) for means in both))


def test_padding():
    model = build(causal=False)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)[:, None, None, :]
    loss = language_loss(model, mask=mask)
    both = analytic(model, loss, part="functional"), rest_of_hessian(model, loss)
    assert_means(*(inside_attention(means, model) for means in both))


@pytest.mark.parametrize("family", ["attention", "attention-kdim", "attention-bias-kv"])
def test_torch_attention(family):
    model = FAMILIES[family]().double().eval()

    def loss():
        return 10 * loss_of(family, model)

    assert_means(analytic(model, loss, part="functional"), rest_of_hessian(model, loss))


@pytest.mark.parametrize("per_head", [True, False])
def test_torch_attention_by_block(per_head):
    model = FAMILIES["attention-bias-kv"]().double().eval()

    def loss():
        return loss_of("attention-bias-kv", model)

    blocks = find_blocks(model, per_head=per_head)
    found = analytic(model, loss, part="functional", blocks=blocks)
    diagonal = functional_diagonal(model, ["attention"], loss)
    assert_means(found, means_by_block(model, diagonal, per_head=per_head))


FIRST_ATTENTION = {
    "nanogpt": "h.0.attn",
    "gpt2": "transformer.h.0.attn",
    "opt": "model.decoder.layers.0.self_attn",
    "llama": "model.layers.0.self_attn",
    "falcon-groups": "transformer.h.0.self_attention",
    "bert": "bert.encoder.layer.0.attention.self",
    "qwen2": "model.layers.0.self_attn",
    "t5": "decoder.block.0.layer.1.EncDecAttention",
    "encoder_layer": "self_attn",
    "timm_vit": "blocks.0.attn",
}
FLOAT64 = {"nanogpt", "encoder_layer", "timm_vit"}  # others have a loss or rotation in float32


def exact_functional(model, attention, loss):
    """Return the functional part of attention modules by block, and their parameters."""
    diagonal = functional_diagonal(model, attention, loss)
    zeros = {n: torch.zeros_like(p) for n, p in trainable(model).items()}
    return means_by_block(model, zeros | diagonal), diagonal.keys()


@pytest.mark.parametrize("family", FIRST_ATTENTION)
def test_attention_inside_a_network(family):
    """A layer needs only the gradient that reaches it. Llama, Qwen and Falcon rotate."""
    model = FAMILIES[family]().double().eval()
    with torch.no_grad():
        for p in trainable(model).values():  # at initialisation attention is nearly uniform
            waves = 0.1 * torch.arange(p.numel(), dtype=p.dtype).sin().view_as(p)
            p.copy_(4.0 * p if p.ndim > 1 else p + waves)

    def loss():
        return loss_of(family, model)

    exact, inside = exact_functional(model, [FIRST_ATTENTION[family]], loss)
    found = analytic(model, loss, part="functional", num_probes=None)
    tolerance = 1e-10 if family in FLOAT64 else 1e-5
    assert_means({n: found[n] for n in inside}, {n: exact[n] for n in inside}, tolerance)
    blocks = find_blocks(model)
    for role in ("query", "key"):
        masks = {n: torch.tensor([r == role for r in blocks[n].block_roles]) for n in inside}
        values = torch.cat([exact[n][masks[n]] for n in inside])
        assert values.abs().min() > 1e-8


@pytest.mark.parametrize(
    "options", [{}, {"groups": 2, "rope": 1.3}, {"groups": 2, "repeat": True, "fused": True}]
)
def test_rotated_keys(options):
    model = build(**{"rope": 1.0, "heads": 4, "layers": 2, **options})
    loss = language_loss(model, 2, 6)
    exact, _ = exact_functional(model, ["layers.0", "layers.1"], loss)
    assert_means(analytic(model, loss, part="functional", num_probes=None), exact)


def test_rotated_keys_by_one_probe_are_unbiased():
    model = build(rope=1.0, heads=4, groups=2, repeat=True)
    loss = language_loss(model, 2, 6)
    exact = analytic(model, loss, part="functional", num_probes=None)
    generator = torch.Generator().manual_seed(0)
    draws = [
        analytic(model, loss, part="functional", num_probes=1 + i % 2, generator=generator)
        for i in range(100)
    ]
    for name, e in exact.items():
        sample = torch.stack([draw[name] for draw in draws])
        deviation = sample.std(0) / 10
        assert ((sample.mean(0) - e).abs() <= 4 * deviation + 1e-14).all(), name
        assert ("k_proj" in name) == bool((deviation > 1e-3 * e.abs().max()).any()), name


@pytest.mark.parametrize("options", [{"norm": True}, {"norm": True, "rope": 1.0}])
def test_normalised_queries_are_left_out(options):
    model = build(**options)
    found = analytic(model, language_loss(model), part="functional")
    assert all(not mean.any() for mean in found.values())


def test_blocks_that_are_no_heads_are_left_out():
    model = FAMILIES["nanogpt"]().double()
    overrides = {"h.0.attn.c_attn.weight": "other", "h.1.attn.c_attn.bias": "bias"}
    blocks = find_blocks(model, overrides=overrides)
    found = analytic(model, lambda: loss_of("nanogpt", model), part="functional", blocks=blocks)
    usual = analytic(model, lambda: loss_of("nanogpt", model), part="functional")
    assert not found["h.0.attn.c_attn.weight"].any()
    assert not found["h.1.attn.c_attn.bias"].any()
    torch.testing.assert_close(found["h.1.attn.c_attn.weight"], usual["h.1.attn.c_attn.weight"])


def test_attention_that_is_not_seen_raises():
    model = FAMILIES["bloom"]().eval()
    analytic(model, lambda: loss_of("bloom", model), part="outer")
    with pytest.raises(ValueError, match="Cannot see the attention"):
        analytic(model, lambda: loss_of("bloom", model), part="full")


def test_functional_takes_any_loss():
    model = build()
    tokens, _ = tokens_of(2, 4)

    def loss():
        return model(tokens).logsumexp(-1).mean()

    found = analytic(model, loss, part="functional")
    for name, diagonal in functional_diagonal(model, ["layers.0"], loss).items():
        if "q_proj" in name:
            exact = diagonal.view(2, -1).mean(1)
            torch.testing.assert_close(found[name], exact, rtol=1e-10, atol=0.0)
