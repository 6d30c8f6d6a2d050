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
]
KINDS += [{"causal": False}, {"scale": 0.9}, {"factor": 1.7}]


def rest_of_hessian(model, loss):
    """H - G."""
    whole, outer = hessian_means(model, loss), gauss_newton_means(model, loss)
    return {name: whole[name] - outer[name] for name in whole}


def inside_attention(means, model):
    """Those of attention: above it these models are affine, so nothing else adds to them."""
    return {
        name: m
        for name, m in means.items()
        if not name.startswith("embedding") and name in find_blocks(model)
    }


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
    roles = {name: set(b.block_roles) for name, b in find_blocks(model).items()}
    for name, mean in exact.items():  # it is not zero for any head of queries and keys
        for role, value in zip(find_blocks(model)[name].block_roles, mean, strict=True):
            assert role not in ("query", "key") or abs(value) > 1e-6, roles


def test_full_is_the_sum():
    model = build(heads=4, groups=2)
    loss = language_loss(model)
    outer, functional, full = (
        analytic(model, loss, part=part, num_probes=2) for part in ("outer", "functional", "full")
    )
    assert_means(full, {name: outer[name] + functional[name] for name in outer}, 1e-14)
    exact = analytic(model, loss, part="full", num_probes=None)
    assert_means(
        inside_attention(exact, model), inside_attention(hessian_means(model, loss), model)
    )


def test_padding():
    model = build(causal=False)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)[:, None, None, :]
    loss = language_loss(model, mask=mask)
    exact = rest_of_hessian(model, loss)
    assert_means(
        inside_attention(analytic(model, loss, part="functional"), model),
        inside_attention(exact, model),
    )


@pytest.mark.parametrize("family", ["attention", "attention-kdim", "attention-bias-kv"])
def test_torch_attention(family):
    model = FAMILIES[family]().double().eval()

    def loss():
        return 10 * loss_of(family, model)

    assert_means(analytic(model, loss, part="functional"), rest_of_hessian(model, loss))


@pytest.mark.parametrize("per_head", [True, False])
def test_torch_attention_by_block(per_head):
    model = FAMILIES["attention-bias-kv"]().double().eval()
    blocks = find_blocks(model, per_head=per_head)
    found = analytic(
        model, lambda: loss_of("attention-bias-kv", model), part="functional", blocks=blocks
    )
    diagonal = functional_diagonal(
        model, ["attention"], lambda: loss_of("attention-bias-kv", model)
    )
    assert_means(found, means_by_block(model, diagonal, per_head=per_head))


ATTENTION = {
    **{
        "nanogpt": "h.{}.attn",
        "gpt2": "transformer.h.{}.attn",
        "opt": "model.decoder.layers.{}.self_attn",
    },
    **{"llama": "model.layers.{}.self_attn", "falcon-groups": "transformer.h.{}.self_attention"},
    **{"bert": "bert.encoder.layer.{}.attention.self", "qwen2": "model.layers.{}.self_attn"},
    **{
        "t5": "decoder.block.{}.layer.1.EncDecAttention",
        "encoder_layer": "self_attn",
        "timm_vit": "blocks.{}.attn",
    },
}
FLOAT64 = {
    "nanogpt",
    "encoder_layer",
    "timm_vit",
}  # the others compute their loss or rotation in float32


def exact_functional(family, layer):
    """Found and exact values of the attention of one layer, under all that is above it."""
    model = FAMILIES[family]().double().eval()
    with torch.no_grad():
        for p in trainable(model).values():  # at initialisation attention is nearly uniform
            p.mul_(4.0) if p.ndim > 1 else p.add_(
                0.1 * torch.arange(p.numel(), dtype=p.dtype).sin()
            )
    name = ATTENTION[family].format(layer)
    diagonal = functional_diagonal(model, [name], lambda: loss_of(family, model))
    others = {n: torch.zeros_like(p) for n, p in trainable(model).items() if n not in diagonal}
    exact = means_by_block(model, others | diagonal)
    found = analytic(model, lambda: loss_of(family, model), part="functional", num_probes=None)
    return {n: found[n] for n in diagonal}, {n: exact[n] for n in diagonal}


@pytest.mark.parametrize("family", ATTENTION)
def test_attention_inside_a_network(family):
    """A layer needs only the gradient that reaches it. Llama, Qwen and Falcon rotate."""
    found, exact = exact_functional(family, layer=0)
    assert_means(found, exact, 1e-10 if family in FLOAT64 else 1e-5)
    blocks = find_blocks(FAMILIES[family]())
    for role in ("query", "key"):
        values = [
            v
            for n, e in exact.items()
            for r, v in zip(blocks[n].block_roles, e, strict=True)
            if r == role
        ]
        assert values
        assert min(abs(float(v)) for v in values) > 1e-8


@pytest.mark.parametrize(
    "options", [{}, {"groups": 2, "rope": 1.3}, {"groups": 2, "repeat": True, "fused": True}]
)
def test_rotated_keys(options):
    model = build(**{"rope": 1.0, "heads": 4, "layers": 2, **options})
    loss = language_loss(model, 2, 6)
    diagonal = functional_diagonal(model, ["layers.0", "layers.1"], loss)
    others = {n: torch.zeros_like(p) for n, p in trainable(model).items() if n not in diagonal}
    exact = means_by_block(model, others | diagonal)
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
    blocks = find_blocks(
        model, overrides={"h.0.attn.c_attn.weight": "other", "h.1.attn.c_attn.bias": "bias"}
    )
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

    exact = {
        n: m for n, m in functional_diagonal(model, ["layers.0"], loss).items() if "q_proj" in n
    }
    found = analytic(model, loss, part="functional")
    for name, diagonal in exact.items():
        torch.testing.assert_close(found[name], diagonal.view(2, -1).mean(1), rtol=1e-10, atol=0.0)
