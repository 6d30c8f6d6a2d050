"""The blocks that each family should have, written out by hand."""

from blockopt import Blocks, Split
from tests.helpers.models import FAMILIES

NO_ATTENTION = ("mlp", "cnn")
ATTENTION = [name for name in FAMILIES if name not in NO_ATTENTION]


def cut(dim, repeat=1, **sections):
    """Sections given as role=(size, parts)."""
    sizes, parts = zip(*sections.values())
    return Blocks(tuple(sections), None, Split(dim, sizes, parts, repeat))


def rows(role, count, dim=0):
    return cut(dim, **{role: (count, count)})


def whole(role):
    return Blocks((role,))


def linear(name, weight, bias="none"):
    """A weight, and a bias that is cut like it ("cut"), is one block ("whole") or missing."""
    found = {f"{name}.weight": weight}
    if bias == "cut":
        roles = ("bias",) * len(weight.roles)
        found[f"{name}.bias"] = Blocks(roles, None, weight.split._replace(dim=0))
    elif bias == "whole":
        found[f"{name}.bias"] = whole("bias")
    return found


def norms(*names, bias=True):
    suffixes = ("weight", "bias") if bias else ("weight",)
    return {f"{name}.{suffix}": whole("norm") for name in names for suffix in suffixes}


def fused(dim=0, size=16, parts=4):
    return cut(dim, query=(size, parts), key=(size, parts), value=(size, parts))


def in_layers(template, layer):
    return {
        template.format(i) + name: blocks._replace(layer=i)
        for i in (0, 1)
        for name, blocks in layer.items()
    }


def llama_layer(size=16, key_size=8, bias="none"):
    return {
        **linear("self_attn.q_proj", cut(0, query=(size, 4)), bias),
        **linear("self_attn.k_proj", cut(0, key=(key_size, 2)), bias),
        **linear("self_attn.v_proj", cut(0, value=(key_size, 2)), bias),
        **linear("self_attn.o_proj", cut(1, output=(size, 4))),
        **norms("input_layernorm", "post_attention_layernorm", bias=False),
    }


def llama(layer):
    return {
        "model.embed_tokens.weight": rows("embedding", 20),
        "model.norm.weight": whole("norm"),
        "lm_head.weight": rows("head", 20),
        **in_layers("model.layers.{}.", layer),
    }


GATED_MLP = {
    **linear("mlp.gate_proj", rows("mlp_gate", 24)),
    **linear("mlp.up_proj", rows("mlp_in", 24)),
    **linear("mlp.down_proj", rows("mlp_out", 16)),
}
GPT2_OUTSIDE = {
    "transformer.wte.weight": rows("embedding", 20),
    "transformer.wpe.weight": rows("position", 16),
    **norms("transformer.ln_f"),
}
GPT2_LAYER = {
    **norms("ln_1", "ln_2"),
    **linear("attn.c_attn", fused(dim=1), "cut"),
    **linear("attn.c_proj", cut(0, output=(16, 4)), "whole"),
    **linear("mlp.c_fc", rows("mlp_in", 64, dim=1), "cut"),
    **linear("mlp.c_proj", rows("mlp_out", 16, dim=1), "cut"),
}
GPT2_CROSS_LAYER = {
    **norms("ln_cross_attn"),
    **linear("crossattention.q_attn", cut(1, query=(16, 4)), "cut"),
    **linear("crossattention.c_attn", cut(1, key=(16, 4), value=(16, 4)), "cut"),
    **linear("crossattention.c_proj", cut(0, output=(16, 4)), "whole"),
}
INTERLEAVED = cut(0, query=(4, 1), key=(4, 1), value=(4, 1), repeat=4)


def falcon(query_key_value, norm_names, bias=False):
    cut_bias, whole_bias = ("cut", "whole") if bias else ("none", "none")
    layer = {
        **linear("self_attention.query_key_value", query_key_value, cut_bias),
        **linear("self_attention.dense", cut(1, output=(16, 4)), whole_bias),
        **linear("mlp.dense_h_to_4h", rows("mlp_in", 24), cut_bias),
        **linear("mlp.dense_4h_to_h", rows("mlp_out", 16), cut_bias),
        **norms(*norm_names),
    }
    return {
        "transformer.word_embeddings.weight": rows("embedding", 20),
        **norms("transformer.ln_f"),
        **in_layers("transformer.h.{}.", layer),
    }


def torch_attention(name, weights):
    return {
        **{f"{name}.{key}": blocks for key, blocks in weights.items()},
        f"{name}.in_proj_bias": Blocks(("bias",) * 3, None, Split(0, (16, 16, 16), (4, 4, 4))),
        **linear(f"{name}.out_proj", cut(1, output=(16, 4)), "whole"),
    }


def torch_mlp(name=""):
    return {
        **linear(f"{name}linear1", rows("mlp_in", 24), "cut"),
        **linear(f"{name}linear2", rows("mlp_out", 16), "cut"),
    }


def t5(mlp):
    def attention(name):
        return {
            **linear(f"{name}.q", cut(0, query=(24, 4))),
            **linear(f"{name}.k", cut(0, key=(24, 4))),
            **linear(f"{name}.v", cut(0, value=(24, 4))),
            **linear(f"{name}.o", cut(1, output=(24, 4))),
        }

    def dense(layer):
        return {
            f"layer.{layer}.DenseReluDense.{name}.weight": blocks for name, blocks in mlp.items()
        }

    def norm_of(count):
        return norms(*(f"layer.{i}.layer_norm" for i in range(count)), bias=False)

    own, cross = attention("layer.0.SelfAttention"), attention("layer.1.EncDecAttention")
    buckets = rows("position", 8)._replace(layer=0)
    return {
        "shared.weight": rows("embedding", 20),
        **norms("encoder.final_layer_norm", "decoder.final_layer_norm", bias=False),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": buckets,
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": buckets,
        **in_layers("encoder.block.{}.", own | dense(1) | norm_of(2)),
        **in_layers("decoder.block.{}.", own | cross | dense(2) | norm_of(3)),
    }


EXPECTED = {
    "nanogpt": {
        "wte.weight": rows("embedding", 20),
        "wpe.weight": rows("position", 6),
        **norms("ln_f"),
        **in_layers(
            "h.{}.",
            {
                **norms("ln_1", "ln_2"),
                **linear("attn.c_attn", fused(), "cut"),
                **linear("attn.c_proj", cut(1, output=(16, 4)), "whole"),
                **linear("mlp.c_fc", rows("mlp_in", 64), "cut"),
                **linear("mlp.c_proj", rows("mlp_out", 16), "cut"),
            },
        ),
    },
    "gpt2": {**GPT2_OUTSIDE, **in_layers("transformer.h.{}.", GPT2_LAYER)},
    "gpt2-cross": {**GPT2_OUTSIDE, **in_layers("transformer.h.{}.", GPT2_LAYER | GPT2_CROSS_LAYER)},
    "llama": llama(llama_layer() | GATED_MLP),
    "mistral": llama(llama_layer() | GATED_MLP),
    "qwen2": llama(llama_layer(bias="cut") | GATED_MLP),
    "qwen3": llama(
        llama_layer(24, 12) | GATED_MLP | norms("self_attn.q_norm", "self_attn.k_norm", bias=False)
    ),
    "phi3": llama(
        {
            **linear("self_attn.qkv_proj", cut(0, query=(16, 4), key=(8, 2), value=(8, 2))),
            **linear("self_attn.o_proj", cut(1, output=(16, 4))),
            **linear("mlp.gate_up_proj", cut(0, mlp_gate=(24, 24), mlp_in=(24, 24))),
            **linear("mlp.down_proj", rows("mlp_out", 16)),
            **norms("input_layernorm", "post_attention_layernorm", bias=False),
        }
    ),
    "mixtral": llama(
        {
            **llama_layer(),
            "mlp.gate.weight": rows("router", 3),
            "mlp.experts.gate_up_proj": Blocks(
                ("mlp_gate", "mlp_in"), None, Split(1, (24, 24), (24, 24), stack=3)
            ),
            "mlp.experts.down_proj": Blocks(("mlp_out",), None, Split(1, (16,), (16,), stack=3)),
        }
    ),
    "gpt_neox": {
        "gpt_neox.embed_in.weight": rows("embedding", 20),
        "lm_head.weight": rows("head", 20),
        **norms("gpt_neox.final_layer_norm"),
        **in_layers(
            "gpt_neox.layers.{}.",
            {
                **linear("attention.query_key_value", INTERLEAVED, "cut"),
                **linear("attention.dense", cut(1, output=(16, 4)), "whole"),
                **linear("mlp.dense_h_to_4h", rows("mlp_in", 24), "cut"),
                **linear("mlp.dense_4h_to_h", rows("mlp_out", 16), "cut"),
                **norms("input_layernorm", "post_attention_layernorm"),
            },
        ),
    },
    "bloom": {
        "transformer.word_embeddings.weight": rows("embedding", 20),
        **norms("transformer.word_embeddings_layernorm", "transformer.ln_f"),
        **in_layers(
            "transformer.h.{}.",
            {
                **linear("self_attention.query_key_value", INTERLEAVED, "cut"),
                **linear("self_attention.dense", cut(1, output=(16, 4)), "whole"),
                **linear("mlp.dense_h_to_4h", rows("mlp_in", 64), "cut"),
                **linear("mlp.dense_4h_to_h", rows("mlp_out", 16), "cut"),
                **norms("input_layernorm", "post_attention_layernorm"),
            },
        ),
    },
    "falcon-multi-query": falcon(
        cut(0, query=(16, 4), key=(4, 1), value=(4, 1)), ["input_layernorm"]
    ),
    "falcon-groups": falcon(
        cut(0, query=(8, 2), key=(4, 1), value=(4, 1), repeat=2), ["ln_attn", "ln_mlp"]
    ),
    "falcon-plain": falcon(INTERLEAVED, ["input_layernorm"], bias=True),
    "opt": {
        "model.decoder.embed_tokens.weight": rows("embedding", 20),
        "model.decoder.embed_positions.weight": rows("position", 18),
        **norms("model.decoder.final_layer_norm"),
        **in_layers(
            "model.decoder.layers.{}.",
            {
                **linear("self_attn.q_proj", cut(0, query=(16, 4)), "cut"),
                **linear("self_attn.k_proj", cut(0, key=(16, 4)), "cut"),
                **linear("self_attn.v_proj", cut(0, value=(16, 4)), "cut"),
                **linear("self_attn.out_proj", cut(1, output=(16, 4)), "whole"),
                **linear("fc1", rows("mlp_in", 24), "cut"),
                **linear("fc2", rows("mlp_out", 16), "cut"),
                **norms("self_attn_layer_norm", "final_layer_norm"),
            },
        ),
    },
    "bert": {
        "bert.embeddings.word_embeddings.weight": rows("embedding", 20),
        "bert.embeddings.position_embeddings.weight": rows("position", 16),
        "bert.embeddings.token_type_embeddings.weight": rows("embedding", 2),
        **norms("bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm"),
        **linear("cls.predictions.transform.dense", whole("other"), "whole"),
        "cls.predictions.bias": rows("bias", 20),
        **in_layers(
            "bert.encoder.layer.{}.",
            {
                **linear("attention.self.query", cut(0, query=(16, 4)), "cut"),
                **linear("attention.self.key", cut(0, key=(16, 4)), "cut"),
                **linear("attention.self.value", cut(0, value=(16, 4)), "cut"),
                **linear("attention.output.dense", cut(1, output=(16, 4)), "whole"),
                **linear("intermediate.dense", rows("mlp_in", 24), "cut"),
                **linear("output.dense", rows("mlp_out", 16), "cut"),
                **norms("attention.output.LayerNorm", "output.LayerNorm"),
            },
        ),
    },
    "vit": {
        "vit.embeddings.cls_token": whole("embedding"),
        "vit.embeddings.position_embeddings": whole("position"),
        **linear("vit.embeddings.patch_embeddings.projection", whole("embedding"), "whole"),
        **linear("classifier", rows("head", 5), "cut"),
        **norms("vit.layernorm"),
        **in_layers(
            "vit.layers.{}.",
            {
                **linear("attention.q_proj", cut(0, query=(16, 4)), "cut"),
                **linear("attention.k_proj", cut(0, key=(16, 4)), "cut"),
                **linear("attention.v_proj", cut(0, value=(16, 4)), "cut"),
                **linear("attention.o_proj", cut(1, output=(16, 4)), "whole"),
                **linear("mlp.fc1", rows("mlp_in", 24), "cut"),
                **linear("mlp.fc2", rows("mlp_out", 16), "cut"),
                **norms("layernorm_before", "layernorm_after"),
            },
        ),
    },
    "timm_vit": {
        "cls_token": whole("embedding"),
        "pos_embed": whole("position"),
        **linear("patch_embed.proj", whole("embedding"), "whole"),
        **linear("head", rows("head", 5), "cut"),
        **norms("norm"),
        **in_layers(
            "blocks.{}.",
            {
                **linear("attn.qkv", fused(), "cut"),
                **linear("attn.proj", cut(1, output=(16, 4)), "whole"),
                **linear("mlp.fc1", rows("mlp_in", 24), "cut"),
                **linear("mlp.fc2", rows("mlp_out", 16), "cut"),
                **norms("norm1", "norm2"),
            },
        ),
    },
    "attention": torch_attention("attention", {"in_proj_weight": fused()}),
    "attention-kdim": torch_attention(
        "attention",
        {
            "q_proj_weight": cut(0, query=(16, 4)),
            "k_proj_weight": cut(0, key=(16, 4)),
            "v_proj_weight": cut(0, value=(16, 4)),
        },
    ),
    "attention-bias-kv": torch_attention(
        "attention",
        {"in_proj_weight": fused(), "bias_k": cut(2, bias=(16, 4)), "bias_v": cut(2, bias=(16, 4))},
    ),
    "encoder_layer": {
        **torch_attention("self_attn", {"in_proj_weight": fused()}),
        **torch_mlp(),
        **norms("norm1", "norm2"),
    },
    "decoder_layer": {
        **torch_attention("layer.self_attn", {"in_proj_weight": fused()}),
        **torch_attention("layer.multihead_attn", {"in_proj_weight": fused()}),
        **torch_mlp("layer."),
        **norms("layer.norm1", "layer.norm2", "layer.norm3"),
    },
    "t5": t5({"wi": rows("mlp_in", 24), "wo": rows("mlp_out", 16)}),
    "t5-gated": t5(
        {"wi_0": rows("mlp_gate", 24), "wi_1": rows("mlp_in", 24), "wo": rows("mlp_out", 16)}
    ),
    "lora-gpt2": in_layers(
        "base_model.model.transformer.h.{}.attn.c_attn.",
        {"lora_A.default.weight": whole("value"), "lora_B.default.weight": fused()},
    ),
    "lora-llama": in_layers(
        "base_model.model.model.layers.{}.self_attn.",
        {
            "q_proj.lora_A.default.weight": whole("query"),
            "q_proj.lora_B.default.weight": cut(0, query=(16, 4)),
            "v_proj.lora_A.default.weight": whole("value"),
            "v_proj.lora_B.default.weight": cut(0, value=(8, 2)),
        },
    ),
    "mlp": {
        f"layers.{i}.{name}": Blocks((role,), i)
        for i in (0, 2, 4)
        for name, role in (("weight", "other"), ("bias", "bias"))
    },
    "cnn": {
        **linear("conv1", whole("other"), "whole"),
        **linear("conv2", whole("other"), "whole"),
        **norms("bn1"),
        **linear("classifier", rows("head", 5), "cut"),
    },
}


BIASES_OF_TORCH = {
    "in_proj_bias": ("query", "key", "value"),
    "bias_k": ("key",),
    "bias_v": ("value",),
}


def section_roles(name, blocks):
    """Return the roles of the sections of a query, key or value weight, or of its bias.

    The result is None for any other parameter.
    """
    module, _, attribute = name.rpartition(".")
    if attribute in BIASES_OF_TORCH:
        return BIASES_OF_TORCH[attribute]
    weight = blocks.get(f"{module}.weight") if attribute == "bias" else blocks[name]
    if "lora_A" in name:  # feeds all heads, and all of what is fused
        return None
    known = weight is not None and set(weight.roles) <= {"query", "key", "value"}
    return weight.roles if known else None
