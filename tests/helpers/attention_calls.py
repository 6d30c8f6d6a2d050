"""Which attention calls each family of models makes, and a layer to build others from."""

import torch
from torch import nn

from tests.helpers.models import FAMILIES, WIDTH

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
