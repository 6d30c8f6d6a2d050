"""What `capture_attention` sees is what attention is given, in every family; what it cannot see raises; it leaves no trace."""

from contextlib import nullcontext, suppress

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from blockopt.measure.attention_capture import AttentionCall, capture_attention
from tests.helpers.models import (
    BATCH,
    FAMILIES,
    LENGTH,
    LLAMA_SIZES,
    SDPA,
    VOCAB,
    WIDTH,
    loss_of,
    timm_vit,
    transformers,
)

HEADS = 4
# The two attention modules of each family, and the attribute of them that makes the queries.
TWO_LAYERS = {
    "gpt2": ("transformer.h.{}.attn", "c_attn"),
    "lora-gpt2": ("base_model.model.transformer.h.{}.attn", "c_attn"),
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "mixtral"), ("model.layers.{}.self_attn", "q_proj")
    ),
    "phi3": ("model.layers.{}.self_attn", "qkv_proj"),
    "lora-llama": ("base_model.model.model.layers.{}.self_attn", "q_proj"),
    "gpt_neox": ("gpt_neox.layers.{}.attention", "query_key_value"),
    **dict.fromkeys(
        ("falcon-multi-query", "falcon-groups", "falcon-plain"),
        ("transformer.h.{}.self_attention", "query_key_value"),
    ),
    "opt": ("model.decoder.layers.{}.self_attn", "q_proj"),
    "timm_vit": ("blocks.{}.attn", "qkv"),
    "vit": ("vit.layers.{}.attention", "q_proj"),
    "nanogpt": ("h.{}.attn", "c_attn"),
    "bert": ("bert.encoder.layer.{}.attention.self", "query"),
}
T5_CALLS = [
    *(f"encoder.block.{i}.layer.0.SelfAttention" for i in range(2)),
    *(
        f"decoder.block.{i}.layer.{j}.{name}"
        for i in range(2)
        for j, name in enumerate(("SelfAttention", "EncDecAttention"))
    ),
]
CALLS = {
    **{family: [name.format(i) for i in range(2)] for family, (name, _) in TWO_LAYERS.items()},
    "gpt2-cross": [
        f"transformer.h.{i}.{name}" for i in range(2) for name in ("attn", "crossattention")
    ],
    **{"t5": T5_CALLS, "t5-gated": T5_CALLS},
    **{
        "attention": ["attention"],
        "attention-kdim": ["attention"],
        "attention-bias-kv": ["attention"],
    },
    "encoder_layer": ["self_attn"],
    "decoder_layer": ["layer.self_attn", "layer.multihead_attn"],
    **{"mlp": [], "cnn": []},
}
# Those that pass is_causal; Falcon passes a mask.
CAUSAL = TWO_LAYERS.keys() - {
    "falcon-multi-query",
    "falcon-groups",
    "falcon-plain",
    "timm_vit",
    "vit",
    "bert",
}
HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)


class Attention(nn.Module):
    """Attention with every projection and core that a test may want to put in its place."""

    def __init__(self, attend, key_heads=HEADS):
        super().__init__()
        self.num_heads = HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, key_heads * WIDTH // HEADS) for _ in range(2))
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.attend = attend

    def forward(self, x):  # (B, T, D)
        q, k, v = (
            p(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


def eager(q, k, v):
    return (q @ k.mT).softmax(dim=-1) @ v


def seeded(build, *args, **options):
    torch.manual_seed(0)
    return build(*args, **options).double()


def family_model(family):
    dtype = (
        torch.float32 if family == "mixtral" else torch.float64
    )  # torch's grouped_mm for experts knows no float64
    return FAMILIES[family]().to(dtype)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixed_values(call):
    return call.weights() @ call.value.repeat_interleave(
        call.query.shape[1] // call.value.shape[1], dim=1
    )


def assert_consistent(call):
    weights = call.weights()
    assert weights.shape == (*call.query.shape[:3], call.key.shape[2])
    tolerance = 1e-6 if call.query.dtype == torch.float32 else 1e-12
    torch.testing.assert_close(
        weights.sum(dim=-1), torch.ones_like(weights[..., 0]), rtol=0, atol=tolerance
    )
    torch.testing.assert_close(mixed_values(call), call.output, rtol=tolerance, atol=tolerance)


def make_eager(model):
    model.set_attn_implementation("eager")
    model.config._attn_implementation = "eager"  # Falcon does not take it otherwise


def inputs_of(module):
    """The first argument of every later call of `module`."""
    seen = []
    module.register_forward_pre_hook(
        lambda _, args, kw: seen.append((*args, *kw.values())[0]), with_kwargs=True
    )
    return seen


# What is seen


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
        assert call.is_causal == (
            family in CAUSAL or (family == "gpt2-cross" and call.module.endswith(".attn"))
        )
        assert call.dropout == 0.0
        assert call.scale == (
            1.0 if family in ("opt", "t5", "t5-gated") else call.query.shape[-1] ** -0.5
        )
        assert_consistent(call)


@pytest.mark.parametrize("family", TWO_LAYERS)
def test_x_is_the_very_input_of_the_query_projection(family):
    model = family_model(family)
    _, projection = TWO_LAYERS[family]
    inputs = [inputs_of(model.get_submodule(f"{name}.{projection}")) for name in CALLS[family]]
    with capture_attention(model) as calls:
        loss_of(family, model)
    assert all(
        call.x is x and call.context is None for call, (x,) in zip(calls, inputs, strict=True)
    )
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
    assert [c.context is not None for c in calls] == [
        ("cross" in c.module or "EncDec" in c.module) for c in calls
    ]


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
    query = F.linear(x, model.in_proj_weight[:WIDTH]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    key = (
        F.linear(memory, model.in_proj_weight[WIDTH : 2 * WIDTH])
        .unflatten(-1, (HEADS, -1))
        .transpose(1, 2)
    )
    torch.testing.assert_close(call.query, query)
    torch.testing.assert_close(call.key, key)


def test_unbatched_attention_of_torch_has_a_batch_of_one():
    model, x, memory = (
        seeded(nn.MultiheadAttention, WIDTH, HEADS),
        normal(LENGTH, WIDTH),
        normal(3, WIDTH, seed=1),
    )
    with capture_attention(model) as calls:
        model(x, memory, memory, need_weights=False)
        model(x, x, x, need_weights=False)
    assert torch.equal(calls[0].x, x[None])
    assert torch.equal(calls[0].context, memory[None])
    assert calls[1].context is None
    assert_consistent(calls[0])


def rotated(x, theta=10000.0):  # (B, H, T, dh)
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * theta ** (
        -torch.arange(half, dtype=x.dtype) / half
    )
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            second * angles.cos() + first * angles.sin(),
        ],
        dim=-1,
    )


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
        for projection, norm, seen in (
            ("q_proj", "q_norm", call.query),
            ("k_proj", "k_norm", call.key),
        ):
            plain = (
                getattr(attention, projection)(call.x)
                .unflatten(-1, (-1, seen.shape[-1]))
                .transpose(1, 2)
            )
            expected = plain
            if family == "qwen3":
                expected = (
                    plain
                    * (plain.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()
                    * getattr(attention, norm).weight
                )
            torch.testing.assert_close(
                seen, rotated(expected), rtol=1e-5, atol=1e-6
            )  # transformers turns in float32
            assert not torch.allclose(seen, plain, rtol=1e-2)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "family",
    [
        "gpt2",
        "llama",
        "qwen2",
        "qwen3",
        "phi3",
        "gpt_neox",
        "opt",
        "bert",
        "t5",
        "falcon-multi-query",
        "falcon-groups",
    ],
)
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
        torch.testing.assert_close(
            call.weights(), weights, rtol=1e-5, atol=1e-7, check_dtype=False
        )  # theirs are in float32


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
        assert torch.equal(
            call.weights()[:, :, 2:] > 0, allowed[:, :, 2:].expand(-1, HEADS, -1, -1)
        )


@pytest.mark.parametrize("mask", ["none", "bool", "additive", "padding", "causal"])
def test_weights_are_those_that_torch_returns(mask):
    model, x = (
        seeded(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True),
        normal(BATCH, LENGTH, WIDTH),
    )
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
    attend = lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
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
    model = seeded(
        Attention, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    )
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
    model = seeded(
        Attention,
        lambda *qkv: qkv[0] + scaled_dot_product_attention(*(t[index] for t in qkv)).mean(),
    )
    with capture_attention(model) as calls:
        model(normal(BATCH, LENGTH, WIDTH))
    assert calls[0].query.shape == normal(BATCH, HEADS, LENGTH, WIDTH // HEADS)[index].shape
    torch.testing.assert_close(calls[0].weights() @ calls[0].value, calls[0].output)


# Which module a call belongs to


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


def test_calls_outside_of_the_model_are_not_its_own():
    model, other = (
        seeded(Attention, F.scaled_dot_product_attention),
        seeded(Attention, F.scaled_dot_product_attention),
    )
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


# What cannot be seen raises


def test_model_without_forward_raises():
    model = family_model("nanogpt")
    with (
        pytest.raises(
            ValueError,
            match=r"'h\.0\.attn' \(SelfAttention\).*did not run inside.*Run a forward pass",
        ),
        capture_attention(model),
    ):
        pass


@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "bert", "t5", "opt", "falcon-plain", "lora-llama"]
)
def test_eager_attention_of_transformers_raises(family):
    model = family_model(family)
    make_eager(model.base_model.model if family == "lora-llama" else model)
    first = CALLS[family][0].replace(".", r"\.")
    with (
        pytest.raises(ValueError, match=rf"attention of '{first}'.*attn_implementation=\"sdpa\""),
        capture_attention(model),
    ):
        loss_of(family, model)


def test_bloom_raises_kindly():
    model = family_model("bloom")
    names = r"'transformer\.h\.0\.self_attention' \(BloomAttention\), 'transformer\.h\.1\.self_attention' \(BloomAttention\)"
    with (
        pytest.raises(ValueError, match=rf"{names}.*only eager.*Bloom, cannot be captured"),
        capture_attention(model),
    ):
        loss_of("bloom", model)


def test_timm_without_fused_attention_raises():
    model = seeded(timm_vit)
    model.blocks[1].attn.fused_attn = False
    with (
        pytest.raises(
            ValueError, match=r"attention of 'blocks\.1\.attn' \(Attention\): .*fused_attn=True"
        ),
        capture_attention(model),
    ):
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


# No trace is left


def snapshot(model):
    hooks = [{name: dict(getattr(module, name)) for name in HOOKS} for module in model.modules()]
    stance = torch._dynamo.eval_frame._stance.stance
    return hooks, F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled(), stance


@pytest.mark.parametrize("fastpath", [True, False])
@pytest.mark.parametrize("family", ["llama", "decoder_layer"])
def test_nothing_is_left_behind(family, fastpath):
    model = family_model(family)
    next(model.children()).register_forward_pre_hook(lambda *_: None)
    usual = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fastpath)
    try:
        before = snapshot(model)
        with capture_attention(model) as calls:
            loss_of(family, model)
            assert not torch.backends.mha.get_fastpath_enabled()
            assert snapshot(model) != before
        assert snapshot(model) == before
        loss_of(family, model)
        assert len(calls) == 2
    finally:
        torch.backends.mha.set_fastpath_enabled(usual)


def test_nothing_is_left_behind_after_an_exception():
    model, x = (
        seeded(nn.TransformerDecoderLayer, WIDTH, HEADS, batch_first=True),
        normal(BATCH, LENGTH, WIDTH),
    )
    before = snapshot(model)
    with (
        pytest.raises(RuntimeError, match="attn_mask"),
        capture_attention(model),
    ):  # and not that nothing was seen
        model(x, x, memory_mask=torch.zeros(2, 3, dtype=torch.float64))
    assert snapshot(model) == before


class Careful(nn.Module):
    """Attends without projections where attention with them fails."""

    def __init__(self):
        super().__init__()
        self.attention = Attention(self.fail)

    def fail(self, *_):
        raise ZeroDivisionError

    def forward(self, x):
        with suppress(ZeroDivisionError):
            self.attention(x)
        return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("in_hook", [False, True])
def test_exception_inside_does_not_confuse_the_names(in_hook):
    model, x = (
        nn.Sequential(seeded(Careful), seeded(Attention, F.scaled_dot_product_attention)),
        normal(BATCH, LENGTH, WIDTH),
    )
    if in_hook:
        model[0].attention.register_forward_pre_hook(model[0].fail)
    with capture_attention(model) as calls:
        model(x)
    assert [call.module for call in calls] == ["0", "1"]


def test_attention_that_raised_is_not_unseen():
    model, x = seeded(Careful), normal(BATCH, LENGTH, WIDTH)
    model = nn.ModuleList([model, seeded(Attention, F.scaled_dot_product_attention)])
    with capture_attention(model) as calls:
        with pytest.raises(ZeroDivisionError):
            model[0].attention(x)
        model[1](x)
    assert [call.module for call in calls] == ["1"]


def loss_and_gradients(family, model, context):
    model.zero_grad()
    with context:
        loss = loss_of(family, model)
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", CALLS)
def test_loss_and_gradients_are_the_same_bit_by_bit(family):
    model = family_model(family).eval()
    plain_loss, plain = loss_and_gradients(family, model, nullcontext())
    loss, gradients = loss_and_gradients(family, model, capture_attention(model))
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True))


def test_dropout_is_recorded_and_draws_the_same_numbers():
    model = seeded(
        Attention, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    )
    x = normal(BATCH, LENGTH, WIDTH)
    torch.manual_seed(1)
    plain = model(x)
    torch.manual_seed(1)
    with capture_attention(model) as calls:
        output = model(x)
    assert torch.equal(output, plain)
    assert calls[0].dropout == 0.25
    assert not torch.allclose(mixed_values(calls[0]), calls[0].output)


@pytest.mark.parametrize("family", [f for f, calls in CALLS.items() if calls])
def test_gradients_at_the_tensors_of_a_call(family):
    model = family_model(family)
    with capture_attention(model) as calls:
        loss = loss_of(family, model)
    for call in calls:
        inputs = [
            t for t in (call.query, call.key, call.value) if t.requires_grad
        ]  # LoRA leaves the first keys frozen
        *gradients, at_output = torch.autograd.grad(loss, [*inputs, call.output], retain_graph=True)
        chained = torch.autograd.grad(call.output, inputs, at_output, retain_graph=True)
        assert call.query.requires_grad
        assert all(g.count_nonzero() for g in gradients)
        assert all(torch.equal(a, b) for a, b in zip(gradients, chained, strict=True))


# Fast paths, compiled models and checkpointed ones


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padded", [False, True])
def test_inference_fast_path_is_seen(padded):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, dim_feedforward=24, batch_first=True)
    model = seeded(nn.TransformerEncoder, layer, num_layers=2).eval()
    x, padding = normal(BATCH, LENGTH, WIDTH), torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[0, -2:] = True
    options = {"src_key_padding_mask": padding} if padded else {}
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        fast = []
        native = torch._transformer_encoder_layer_fwd
        patch.setattr(
            torch,
            "_transformer_encoder_layer_fwd",
            lambda *a, **k: (fast.append(1), native(*a, **k))[1],
        )
        expected = model(x, **options)
        assert len(fast) == 2  # or else there is nothing to test
        with capture_attention(model) as calls:
            output = model(x, **options)
        assert len(fast) == 2
    assert [call.module for call in calls] == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(output[~padding], expected[~padding])
    for call in calls:
        assert_consistent(call)
        assert (call.weights()[0, :, :, -2:] == 0).all() == padded


def test_fast_path_of_attention_alone_is_seen():
    model, x = (
        seeded(nn.MultiheadAttention, WIDTH, HEADS, batch_first=True).eval(),
        normal(BATCH, LENGTH, WIDTH),
    )
    with torch.no_grad(), capture_attention(model) as calls:
        model(x, x, x, need_weights=False)
    assert_consistent(calls[0])


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_model_is_seen_and_not_compiled_again(in_place):
    torch._dynamo.reset()
    compilations = []

    def backend(graph, _):
        compilations.append(graph)
        return graph.forward

    model = family_model("nanogpt")
    if in_place:
        model.compile(backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    loss = loss_of("nanogpt", model)
    before = len(compilations)
    assert before > 0
    with capture_attention(model) as calls:
        captured = loss_of("nanogpt", model)
    assert [call.module for call in calls] == [
        f"{'' if in_place else '_orig_mod.'}h.{i}.attn" for i in range(2)
    ]
    torch.testing.assert_close(captured, loss)
    assert torch.autograd.grad(captured, calls[0].query)[0].count_nonzero()
    loss_of("nanogpt", model)
    assert len(compilations) == before


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.attention, self.reentrant = Attention(F.scaled_dot_product_attention), reentrant

    def forward(self, x):
        return checkpoint(self.attention, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("frozen", [(), ("q_proj", "o_proj")])
def test_recomputation_in_the_backward_pass_is_not_recorded(reentrant, frozen):
    model, x = seeded(Checkpointed, reentrant), normal(BATCH, LENGTH, WIDTH).requires_grad_()
    for name in frozen:
        getattr(model.attention, name).requires_grad_(False)
    with capture_attention(model) as calls:
        torch.autograd.backward(model(x).square().sum())
    assert [call.module for call in calls] == ["attention"]
    assert x.grad.count_nonzero()
    assert calls[0].query.requires_grad is not reentrant


def test_backward_pass_inside_of_a_forward_is_not_recorded():
    class Penalised(Checkpointed):
        def forward(self, x):
            y = super().forward(x)
            torch.autograd.backward(y.square().sum(), inputs=x)
            return y

    model, x = seeded(Penalised, reentrant=False), normal(BATCH, LENGTH, WIDTH).requires_grad_()
    with capture_attention(model) as calls:
        model(x)
    assert [call.module for call in calls] == ["attention"]
    assert x.grad.count_nonzero()
