"""The block finder: which role every parameter plays and where it is cut, checked against tables and against the models."""

import io
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
import transformers
from models import CAUSAL, FAMILIES, block_index, loss_of
from torch import nn

from blockopt import Blocks, Split, find_blocks, param_groups
from blockopt.blocks import ROLES, ROW_ROLES, from_plain, to_plain
from blockopt.split import block_numel

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
    """A weight, and a bias that is cut as the weight is ("cut"), that is one block ("whole"), or is not there."""
    found = {f"{name}.weight": weight}
    if bias == "cut":
        found[f"{name}.bias"] = Blocks(("bias",) * len(weight.roles), None, weight.split._replace(dim=0))
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
    }  # fmt: skip


def llama_layer(size=16, key_size=8, bias="none"):
    return {
        **linear("self_attn.q_proj", cut(0, query=(size, 4)), bias),
        **linear("self_attn.k_proj", cut(0, key=(key_size, 2)), bias),
        **linear("self_attn.v_proj", cut(0, value=(key_size, 2)), bias),
        **linear("self_attn.o_proj", cut(1, output=(size, 4))),
        **norms("input_layernorm", "post_attention_layernorm", bias=False),
    }


GATED_MLP = {
    **linear("mlp.gate_proj", rows("mlp_gate", 24)),
    **linear("mlp.up_proj", rows("mlp_in", 24)),
    **linear("mlp.down_proj", rows("mlp_out", 16)),
}
LLAMA_OUTSIDE = {
    "model.embed_tokens.weight": rows("embedding", 20),
    "model.norm.weight": whole("norm"),
    "lm_head.weight": rows("head", 20),
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
    return {
        "transformer.word_embeddings.weight": rows("embedding", 20),
        **norms("transformer.ln_f"),
        **in_layers(
            "transformer.h.{}.",
            {
                **linear("self_attention.query_key_value", query_key_value, "cut" if bias else "none"),
                **linear("self_attention.dense", cut(1, output=(16, 4)), "whole" if bias else "none"),
                **linear("mlp.dense_h_to_4h", rows("mlp_in", 24), "cut" if bias else "none"),
                **linear("mlp.dense_4h_to_h", rows("mlp_out", 16), "cut" if bias else "none"),
                **norms(*norm_names),
            },
        ),
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
        return {f"layer.{layer}.DenseReluDense.{name}.weight": blocks for name, blocks in mlp.items()}

    def norm_of(count):
        return norms(*(f"layer.{i}.layer_norm" for i in range(count)), bias=False)

    buckets = rows("position", 8)._replace(layer=0)
    return {
        "shared.weight": rows("embedding", 20),
        **norms("encoder.final_layer_norm", "decoder.final_layer_norm", bias=False),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": buckets,
        "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": buckets,
        **in_layers("encoder.block.{}.", {**attention("layer.0.SelfAttention"), **dense(1), **norm_of(2)}),
        **in_layers(
            "decoder.block.{}.",
            {**attention("layer.0.SelfAttention"), **attention("layer.1.EncDecAttention"), **dense(2), **norm_of(3)},
        ),
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
    "gpt2-cross": {**GPT2_OUTSIDE, **in_layers("transformer.h.{}.", {**GPT2_LAYER, **GPT2_CROSS_LAYER})},
    "llama": {**LLAMA_OUTSIDE, **in_layers("model.layers.{}.", {**llama_layer(), **GATED_MLP})},
    "mistral": {**LLAMA_OUTSIDE, **in_layers("model.layers.{}.", {**llama_layer(), **GATED_MLP})},
    "qwen2": {**LLAMA_OUTSIDE, **in_layers("model.layers.{}.", {**llama_layer(bias="cut"), **GATED_MLP})},
    "qwen3": {
        **LLAMA_OUTSIDE,
        **in_layers(
            "model.layers.{}.",
            {**llama_layer(24, 12), **GATED_MLP, **norms("self_attn.q_norm", "self_attn.k_norm", bias=False)},
        ),
    },
    "phi3": {
        **LLAMA_OUTSIDE,
        **in_layers(
            "model.layers.{}.",
            {
                **linear("self_attn.qkv_proj", cut(0, query=(16, 4), key=(8, 2), value=(8, 2))),
                **linear("self_attn.o_proj", cut(1, output=(16, 4))),
                **linear("mlp.gate_up_proj", cut(0, mlp_gate=(24, 24), mlp_in=(24, 24))),
                **linear("mlp.down_proj", rows("mlp_out", 16)),
                **norms("input_layernorm", "post_attention_layernorm", bias=False),
            },
        ),
    },
    "mixtral": {
        **LLAMA_OUTSIDE,
        **in_layers(
            "model.layers.{}.",
            {
                **llama_layer(),
                "mlp.gate.weight": whole("other"),
                "mlp.experts.gate_up_proj": cut(0, mlp_in=(3, 3)),
                "mlp.experts.down_proj": cut(0, mlp_out=(3, 3)),
            },
        ),
    },
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
    "falcon-multi-query": falcon(cut(0, query=(16, 4), key=(4, 1), value=(4, 1)), ["input_layernorm"]),
    "falcon-groups": falcon(cut(0, query=(8, 2), key=(4, 1), value=(4, 1), repeat=2), ["ln_attn", "ln_mlp"]),
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
        "attention", {"in_proj_weight": fused(), "bias_k": cut(2, bias=(16, 4)), "bias_v": cut(2, bias=(16, 4))}
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
    "t5-gated": t5({"wi_0": rows("mlp_gate", 24), "wi_1": rows("mlp_in", 24), "wo": rows("mlp_out", 16)}),
    "lora-gpt2": in_layers(
        "base_model.model.transformer.h.{}.attn.c_attn.",
        {"lora_A.default.weight": whole("other"), "lora_B.default.weight": whole("other")},
    ),
    "lora-llama": in_layers(
        "base_model.model.model.layers.{}.self_attn.",
        {f"{name}.lora_{factor}.default.weight": whole("other") for name in ("q_proj", "v_proj") for factor in "AB"},
    ),
    "mlp": {
        f"layers.{i}.{name}": Blocks((role,), i) for i in (0, 2, 4) for name, role in (("weight", "other"), ("bias", "bias"))
    },
    "cnn": {
        **linear("conv1", whole("other"), "whole"),
        **linear("conv2", whole("other"), "whole"),
        **norms("bn1"),
        **linear("classifier", rows("head", 5), "cut"),
    },
}  # fmt: skip


def test_every_family_has_a_table():
    assert EXPECTED.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_finds_the_blocks_of_the_table(name):
    found = find_blocks(FAMILIES[name]())
    assert found.keys() == EXPECTED[name].keys()
    for parameter, blocks in EXPECTED[name].items():
        assert found[parameter] == blocks, parameter


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_covers_every_trainable_parameter_once_and_every_entry_once(name, per_head):
    model = FAMILIES[name]()
    blocks = find_blocks(model, per_head=per_head)
    trainable = {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    assert list(blocks) == list(trainable)
    for parameter, shape in trainable.items():
        entry = blocks[parameter]
        entry.check(shape)
        index = block_index(shape, entry.split)
        assert set(index.flatten().tolist()) == set(range(entry.num_blocks))
        assert len(entry.block_roles) == entry.num_blocks
        assert set(entry.block_roles) <= set(ROLES)


class AttentionCalls:
    """Runs a model, records what enters its attention, and disturbs the output of one head if asked to.

    A call is `{"query": q, "key": k, "value": v}`, each (B, H, T, dh), as the model itself hands them to attention.
    """

    def __init__(self, name, model, monkeypatch):
        self.name, self.model = name, model
        self.calls, self.disturbed = [], None
        if name == "bloom":  # the one family here that does not call scaled_dot_product_attention
            monkeypatch.setattr(torch.Tensor, "baddbmm", self._scores_of(torch.Tensor.baddbmm))
            monkeypatch.setattr(torch, "bmm", self._mix_of(torch.bmm))
        else:
            monkeypatch.setattr(F, "scaled_dot_product_attention", self._attention_of(F.scaled_dot_product_attention))

    def run(self, disturbed=None):
        self.calls, self.disturbed = [], disturbed
        with torch.no_grad():
            return loss_of(self.name, self.model).item()

    def _disturb(self, output):
        call = len(self.calls) - 1
        if self.disturbed is not None and self.disturbed[0] == call:
            output = output.clone()
            output[:, self.disturbed[1]] += torch.randn(output[:, 0].shape, generator=torch.Generator().manual_seed(1))
        return output

    def _attention_of(self, original):
        def attention(query, key, value, *args, **kwargs):
            self.calls.append({"query": query, "key": key, "value": value})
            return self._disturb(original(query, key, value, *args, **kwargs))

        return attention

    def _scores_of(self, original):
        def baddbmm(alibi, batch1, batch2, **kwargs):
            query, key = (x.unflatten(0, (-1, self.model.config.n_head)) for x in (batch1, batch2.transpose(1, 2)))
            self.calls.append({"query": query, "key": key})
            return original(alibi, batch1=batch1, batch2=batch2, **kwargs)

        return baddbmm

    def _mix_of(self, original):
        def bmm(probabilities, value):
            self.calls[-1]["value"] = value.unflatten(0, (-1, self.model.config.n_head))
            return self._disturb(original(probabilities, value).unflatten(0, (-1, self.model.config.n_head))).flatten(0, 1)

        return bmm


def changed_heads(before, after):
    """The first call that differs, and the (role, head) pairs that differ in it."""
    for call, (old, new) in enumerate(zip(before, after, strict=True)):
        changed = {
            (role, head)
            for role in ("query", "key", "value")
            for head in range(old[role].shape[1])
            if (old[role][:, head] - new[role][:, head]).abs().max() > 1e-4
        }
        if changed:
            return call, changed
    return None, set()


@pytest.fixture(params=ATTENTION)
def attention(request, monkeypatch):
    """A model whose attention is watched, its blocks, and its parameters; adapted models with their base unfrozen."""
    model = FAMILIES[request.param]().requires_grad_(True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # far from the near-zero initialisation, so that a change shows
        for p in model.parameters():
            if p.ndim == 2:
                p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return AttentionCalls(request.param, model, monkeypatch), find_blocks(model), dict(model.named_parameters())


BIASES_OF_TORCH = {"in_proj_bias": ("query", "key", "value"), "bias_k": ("key",), "bias_v": ("value",)}


def section_roles(name, blocks):
    """The roles of the sections of a query, key or value weight, or of the bias beside it; None for another parameter."""
    if set(blocks[name].roles) <= {"query", "key", "value"}:
        return blocks[name].roles
    module, _, attribute = name.rpartition(".")
    if attribute in BIASES_OF_TORCH:
        return BIASES_OF_TORCH[attribute]
    weight = blocks.get(f"{module}.weight")
    if attribute == "bias" and weight is not None and set(weight.roles) <= {"query", "key", "value"}:
        return weight.roles
    return None


def test_each_query_key_and_value_block_feeds_one_head_alone(attention):
    watched, blocks, parameters = attention
    watched.run()
    before = watched.calls
    reached = set()
    for name, parameter in parameters.items():
        roles = section_roles(name, blocks)
        if roles is None:
            continue
        index = block_index(tuple(parameter.shape), blocks[name].split)
        number = Counter()
        block_roles = blocks[name]._replace(roles=roles).block_roles
        heads_of_role = Counter(block_roles)
        for block, role in enumerate(block_roles):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(block))
            original = parameter.detach().clone()
            parameter.data += noise * (index == block)
            watched.run()
            parameter.data.copy_(original)
            call, changed = changed_heads(before, watched.calls)
            assert call is not None, f"{name}: block {block} changes no attention"
            copies = before[call][role].shape[1] // heads_of_role[role]  # key-value heads may come repeated
            head = number[role]
            assert changed == {(role, head * copies + copy) for copy in range(copies)}, f"{name}: block {block}"
            number[role] += 1
            if parameter.ndim == 2:
                reached |= {(call, *pair) for pair in changed}
    everything = {(i, role, head) for i, call in enumerate(before) for role in call for head in range(call[role].shape[1])}
    assert reached == everything


def test_each_output_block_is_all_that_meets_its_head(attention):
    watched, blocks, parameters = attention
    watched.run()
    outputs = [name for name in parameters if blocks[name].roles == ("output",)]
    assert len(outputs) == len(watched.calls)
    for call, name in enumerate(outputs):
        parameter, heads = parameters[name], watched.calls[0]["query"].shape[1]
        assert blocks[name].num_blocks == heads
        index = block_index(tuple(parameter.shape), blocks[name].split)
        for head in range(heads):
            original = parameter.detach().clone()
            parameter.data[index == head] = 0.0
            undisturbed = watched.run()
            seen = {h for h in range(heads) if abs(watched.run(disturbed=(call, h)) - undisturbed) > 1e-5}
            parameter.data.copy_(original)
            assert seen == set(range(heads)) - {head}, f"{name}: without block {head} the loss sees heads {seen}"


UNIT_ROLES = {"mlp_in", "mlp_gate", "mlp_out", "head"}


def with_units(name):
    return any(UNIT_ROLES & set(blocks.roles) and parameter.endswith("weight") for parameter, blocks in EXPECTED[name].items())


@pytest.mark.parametrize("name", [name for name in FAMILIES if with_units(name)])
def test_each_row_of_an_mlp_or_head_is_one_output_unit(name):
    model = FAMILIES[name]()
    blocks = find_blocks(model)
    checked = 0
    for module_name, module in model.named_modules():
        entry = blocks.get(f"{module_name}.weight")
        if entry is None or not UNIT_ROLES & set(entry.roles):
            continue
        checked += 1
        stored_input_first = isinstance(module, transformers.pytorch_utils.Conv1D)
        inputs = torch.rand(3, module.weight.shape[0 if stored_input_first else 1]) + 1.0
        weight, bias = module.weight, module.bias
        before = module(inputs).detach()
        assert entry.num_blocks == before.shape[1]
        for tensor, split in ((weight, entry.split), (bias, None if bias is None else entry.split._replace(dim=0))):
            if tensor is None:
                continue
            index = block_index(tuple(tensor.shape), split)
            for unit in range(0, entry.num_blocks, 5):
                original = tensor.detach().clone()
                tensor.data += 1.0 * (index == unit)
                difference = (module(inputs).detach() - before).abs().amax(dim=0)
                tensor.data.copy_(original)
                assert difference.nonzero().flatten().tolist() == [unit]
        if bias is not None and f"{module_name}.bias" in blocks:
            assert blocks[f"{module_name}.bias"].split == entry.split._replace(dim=0)
    assert checked


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "phi3", "t5-gated"])
def test_the_gate_is_what_enters_the_activation(name):
    model = FAMILIES[name]()
    blocks = find_blocks(model)
    inputs = []
    for module in model.modules():
        if type(module).__name__ in ("SiLU", "SiLUActivation", "NewGELUActivation", "GELUActivation"):
            module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))

    def activations():
        inputs.clear()
        with torch.no_grad():
            loss_of(name, model)
        return list(inputs)

    before = activations()
    holders = {role: [n for n, entry in blocks.items() if role in entry.roles] for role in ("mlp_gate", "mlp_in")}
    assert len(before) == len(holders["mlp_gate"]) == len(holders["mlp_in"]) > 0
    for parameter_name, parameter in model.named_parameters():
        entry = blocks[parameter_name]
        index = block_index(tuple(parameter.shape), entry.split)
        number = Counter()
        for block, role in enumerate(entry.block_roles):
            unit = number[role]
            number[role] += 1
            if role not in holders or unit % 7:
                continue
            original = parameter.detach().clone()
            parameter.data += 1.0 * (index == block)
            own = holders[role].index(parameter_name)
            difference = (activations()[own] - before[own]).flatten(0, -2).abs().amax(dim=0)
            parameter.data.copy_(original)
            assert difference.nonzero().flatten().tolist() == ([unit] if role == "mlp_gate" else [])


@pytest.mark.parametrize("name", ATTENTION)
def test_without_heads_each_role_is_one_block_of_the_same_entries(name):
    model = FAMILIES[name]().requires_grad_(True)
    by_head, merged = find_blocks(model), find_blocks(model, per_head=False)
    for parameter, p in model.named_parameters():
        fine, coarse = by_head[parameter], merged[parameter]
        assert coarse.roles == fine.roles
        if set(fine.roles) & {"query", "key", "value", "output"}:
            assert sorted(coarse.block_roles) == sorted(set(fine.roles))
            fine_index, coarse_index = (block_index(tuple(p.shape), b.split) for b in (fine, coarse))
            for role in set(fine.roles):
                of_role = [i for i, r in enumerate(fine.block_roles) if r == role]
                assert torch.equal(
                    torch.isin(fine_index, torch.tensor(of_role)), coarse_index == coarse.block_roles.index(role)
                )
        elif section_roles(parameter, by_head) is not None:
            assert coarse.num_blocks == len(fine.roles)
        else:
            assert coarse == fine


def test_merged_interleaved_heads_are_pooled():
    blocks = find_blocks(FAMILIES["gpt_neox"](), per_head=False)["gpt_neox.layers.0.attention.query_key_value.weight"]
    assert blocks.block_roles == ("query", "key", "value")
    assert blocks.split == Split(0, (4, 4, 4), (1, 1, 1), repeat=4, pooled=True)
    assert block_numel((48, 16), blocks.split).tolist() == [256, 256, 256]


UNTIED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "gpt_neox")
TIED = {
    "nanogpt": ("wte.weight", "lm_head.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "bloom": ("transformer.word_embeddings.weight", "lm_head.weight"),
    "opt": ("model.decoder.embed_tokens.weight", "lm_head.weight"),
    "bert": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    "t5": ("shared.weight", "lm_head.weight"),
}


@pytest.mark.parametrize("name", TIED)
def test_a_tied_head_counts_once_as_embedding(name):
    model, (embedding, head) = FAMILIES[name](), TIED[name]
    assert model.get_parameter(embedding) is model.get_parameter(head)
    blocks = find_blocks(model)
    assert blocks[embedding].roles == ("embedding",)
    assert head not in blocks
    assert not any("head" in entry.roles for entry in blocks.values())


@pytest.mark.parametrize("name", UNTIED)
def test_tying_by_hand_turns_the_head_into_the_embedding(name):
    model = FAMILIES[name]()
    assert "head" in {role for entry in find_blocks(model).values() for role in entry.roles}
    model.set_output_embeddings(nn.Linear(16, 20, bias=False))
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    assert "head" not in {role for entry in find_blocks(model).values() for role in entry.roles}


def test_a_head_registered_before_the_embedding_it_shares_is_still_embedding():
    model = nn.Module()
    model.lm_head = nn.Linear(4, 6, bias=False)
    model.wte = nn.Embedding(6, 4)
    model.wte.weight = model.lm_head.weight
    assert find_blocks(model) == {"lm_head.weight": rows("embedding", 6)}


@pytest.mark.parametrize("name", ["gpt2", "llama", "encoder_layer"])
def test_frozen_parameters_are_left_out(name):
    model = FAMILIES[name]()
    everything = find_blocks(model)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp" in parameter_name or "linear" in parameter_name)
    kept = {n: b for n, b in everything.items() if "mlp" in n or "linear" in n}
    assert 0 < len(kept) < len(everything)
    assert find_blocks(model) == kept
    assert find_blocks(model.requires_grad_(False)) == {}


class Wrapper(nn.Module):
    """Holds a model as `DistributedDataParallel` does."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


# torch.compile imports code that torch itself has deprecated
compiles = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
WRAPPERS = {
    "module.": Wrapper,
    "_orig_mod.": torch.compile,
    "module._orig_mod.": lambda model: Wrapper(torch.compile(model)),
    "_orig_mod.module.": lambda model: torch.compile(Wrapper(model)),
}


@compiles
@pytest.mark.parametrize("prefix", WRAPPERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrapper_changes_the_names_alone(name, prefix):
    model = FAMILIES[name]()
    expected = {prefix + parameter: blocks for parameter, blocks in find_blocks(model).items()}
    assert find_blocks(WRAPPERS[prefix](model)) == expected


@compiles
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "falcon-groups", "bert", "phi3", "t5", "encoder_layer", "timm_vit"])
def test_compiling_the_attention_modules_alone_changes_the_names_alone(name):
    model = FAMILIES[name]()
    expected = find_blocks(model)
    for module in list(model.modules()):
        for attribute, child in list(module.named_children()):
            if "Attention" in type(child).__name__ and "T5Layer" not in type(child).__name__:
                setattr(module, attribute, torch.compile(child))
    found = find_blocks(model)
    assert any("_orig_mod" in parameter for parameter in found)
    assert {parameter.replace("_orig_mod.", ""): blocks for parameter, blocks in found.items()} == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_modules_whose_class_is_subclassed_as_fsdp2_does_are_recognised(name):
    model = FAMILIES[name]()
    expected = find_blocks(model)
    for module in model.modules():
        module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {})
    assert find_blocks(model) == expected


@pytest.mark.parametrize("name", ["lora-gpt2", "lora-llama"])
def test_lora_factors_are_other_and_the_base_beside_them_keeps_its_roles(name):
    model = FAMILIES[name]()
    assert {entry.roles for entry in find_blocks(model).values()} == {("other",)}
    unfrozen = find_blocks(model.requires_grad_(True))
    base = {n.removeprefix("base_model.model.").replace(".base_layer", ""): b for n, b in unfrozen.items() if "lora_" not in n}
    assert base == EXPECTED[name.removeprefix("lora-")]


def test_a_position_embedding_that_peft_saves_whole_keeps_its_role():
    import peft

    config = peft.LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["wpe"], fan_in_fan_out=True)
    blocks = find_blocks(peft.get_peft_model(CAUSAL["gpt2"](), config))
    saved = {n: b for n, b in blocks.items() if "modules_to_save" in n}
    assert [b.roles for b in saved.values()] == [("position",)]


class FusedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.query_key_value = nn.Linear(8, 24)
        self.dense = nn.Linear(8, 8)


class HeadlessAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class MisfitAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 3, 4
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class MisfitFusedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(8, 23)
        self.proj = nn.Linear(8, 8)


class StrangeAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = nn.Linear(8, 8)


class FusedGateMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 32), nn.Linear(16, 8)


QKV = Blocks(("query", "key", "value"), split=Split(0, (8, 8, 8), (2, 2, 2)))
HEADS = {role: Blocks((role,), split=Split(0, (8,), (2,))) for role in ("query", "key", "value")}
AMBIGUOUS = {
    FusedAttention: ("query_key_value", (24, 8), {"*.query_key_value.weight": QKV, "*.dense.weight": "output"}),
    HeadlessAttention: ("q_proj", (8, 8), {f"*.{r[0]}_proj.weight": blocks for r, blocks in HEADS.items()}),
    MisfitAttention: ("q_proj", (8, 8), {f"*.{r[0]}_proj.weight": blocks for r, blocks in HEADS.items()}),
    MisfitFusedAttention: ("qkv", (23, 8), {"*.qkv.weight": "other", "*.proj.weight": "output"}),
    StrangeAttention: ("mixer", (8, 8), {"*.mixer.weight": "query"}),
    FusedGateMLP: ("fc1", (32, 8), {"*.fc1.weight": Blocks(("mlp_gate", "mlp_in"), split=Split(0, (16, 16), (16, 16)))}),
}


def model_with(module_class):
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"part": module_class()}) for _ in range(2))
    return model


@pytest.mark.parametrize("module_class", AMBIGUOUS)
def test_what_cannot_be_read_in_one_way_raises_and_names_the_override(module_class):
    attribute, shape, _ = AMBIGUOUS[module_class]
    with pytest.raises(ValueError, match="Cannot tell the blocks of") as error:
        find_blocks(model_with(module_class))
    message = str(error.value)
    assert f"'layers.0.part.{attribute}.weight'" in message
    assert f"of shape {shape}" in message
    assert f"Pass overrides={{'layers.*.part.{attribute}.weight': Blocks(roles=" in message
    assert module_class.__name__ in message


@pytest.mark.parametrize("module_class", AMBIGUOUS)
def test_overrides_settle_it_in_every_layer(module_class):
    overrides = AMBIGUOUS[module_class][2]
    blocks = find_blocks(model_with(module_class), overrides=overrides)
    for pattern, value in overrides.items():
        for layer in (0, 1):
            expected = Blocks((value,)) if isinstance(value, str) else value
            assert blocks[pattern.replace("*", f"layers.{layer}.part")] == expected._replace(layer=layer)


def test_an_override_of_the_fused_weight_alone_is_enough():
    blocks = find_blocks(model_with(FusedAttention), overrides={"layers.*.part.query_key_value.weight": QKV})
    for layer in (0, 1):
        assert blocks[f"layers.{layer}.part.query_key_value.weight"] == QKV._replace(layer=layer)
        assert blocks[f"layers.{layer}.part.dense.weight"] == cut(1, output=(8, 2))._replace(layer=layer)


def test_an_override_replaces_what_would_be_found_and_nothing_else():
    model = FAMILIES["gpt2"]()
    name = "transformer.h.1.mlp.c_fc.weight"
    mine = Blocks(("mlp_in",), layer=7, split=Split(1, (64,), (2,)))
    assert find_blocks(model, overrides={name: mine}) == {**find_blocks(model), name: mine}


def test_a_later_override_wins():
    overrides = {"*.c_fc.weight": "other", "transformer.h.1.mlp.c_fc.weight": "mlp_in"}
    blocks = find_blocks(FAMILIES["gpt2"](), overrides=overrides)
    assert blocks["transformer.h.0.mlp.c_fc.weight"] == Blocks(("other",), 0)
    assert blocks["transformer.h.1.mlp.c_fc.weight"] == Blocks(("mlp_in",), 1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"nothing.*": "other"}, r"Invalid overrides key 'nothing\.\*': it matches no trainable parameter"),
        ({"self_attn.in_proj_weight": "attention"}, r"Invalid overrides.*'self_attn.in_proj_weight'.*Invalid roles"),
        ({"norm1.weight": Blocks(())}, r"Invalid roles=\(\)"),
        ({"linear1.weight": Blocks(("mlp_in",), split=Split(0, (23,), (1,)))}, r"of shape \(24, 16\).*cover 23 of the 24"),
        ({"linear1.weight": Blocks(("mlp_in",), split=Split(2, (24,), (1,)))}, r"Invalid dim=2"),
        ({"linear1.weight": Blocks(("mlp_in",), split=Split(0, (12, 12), (1, 1)))}, r"one for each of the 2 sections"),
        ({"linear1.weight": Blocks(("mlp_in", "mlp_gate"))}, r"one for each of the 1 sections"),
    ],
)  # fmt: skip
def test_overrides_that_do_not_fit_raise(overrides, message):
    with pytest.raises(ValueError, match=message):
        find_blocks(FAMILIES["encoder_layer"](), overrides=overrides)


def test_an_override_of_a_frozen_parameter_raises():
    model = FAMILIES["encoder_layer"]()
    model.linear1.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="matches no trainable parameter"):
        find_blocks(model, overrides={"linear1.weight": "other"})


@pytest.mark.parametrize("per_row", ["head", ("query",), ("head", "norm"), ("rows",)])
def test_per_row_with_a_role_that_has_no_rows_raises(per_row):
    with pytest.raises(ValueError, match="Invalid per_row="):
        find_blocks(FAMILIES["mlp"](), per_row=per_row)


@pytest.mark.parametrize("per_row", [(), ("embedding",), ("head", "position"), ["mlp_in"], {"mlp_gate", "mlp_out"}, ROW_ROLES])
@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_per_row_cuts_the_roles_it_names_and_no_others(name, per_row):
    model = FAMILIES[name]()
    for parameter, entry in find_blocks(model, per_row=per_row).items():
        default = EXPECTED[name][parameter]
        if len(entry.roles) == 1 and entry.roles[0] in ROW_ROLES:
            assert entry == (default if entry.roles[0] in per_row else default._replace(split=None))
        elif not set(entry.roles) <= {"bias"}:
            assert entry == default


def test_per_row_can_cut_one_half_of_a_fused_matrix():
    blocks = find_blocks(FAMILIES["phi3"](), per_row=("mlp_gate",))["model.layers.0.mlp.gate_up_proj.weight"]
    assert blocks == Blocks(("mlp_gate", "mlp_in"), 0, Split(0, (24, 24), (24, 1)))
    whole_halves = find_blocks(FAMILIES["phi3"](), per_row=())["model.layers.0.mlp.gate_up_proj.weight"]
    assert whole_halves == Blocks(("mlp_gate", "mlp_in"), 0, Split(0, (24, 24), (1, 1)))


def test_a_bias_follows_its_weight_when_rows_are_not_cut():
    blocks = find_blocks(FAMILIES["gpt2"](), per_row=())
    assert blocks["transformer.h.0.mlp.c_fc.bias"] == Blocks(("bias",), 0)
    assert blocks["transformer.h.0.attn.c_attn.bias"].num_blocks == 12


def test_the_meta_device_gives_the_same_blocks():
    with torch.device("meta"):
        model = CAUSAL["llama"]()
    assert next(model.parameters()).is_meta
    assert find_blocks(model) == EXPECTED["llama"]


def test_block_roles_names_every_block_in_storage_order():
    blocks = Blocks(("query", "key", "value"), split=Split(0, (4, 2, 2), (2, 1, 1), repeat=2))
    assert blocks.block_roles == ("query", "query", "key", "value") * 2
    assert blocks._replace(split=blocks.split._replace(pooled=True)).block_roles == ("query", "query", "key", "value")
    assert Blocks(("norm",)).block_roles == ("norm",)


@pytest.mark.parametrize("by", ["role", "parameter"])
@pytest.mark.parametrize("name", FAMILIES)
def test_param_groups_hold_every_parameter_once_with_its_blocks(name, by):
    model = FAMILIES[name]()
    blocks = find_blocks(model)
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = param_groups(model, by=by)
    seen = [(n, p, from_plain(b)) for g in groups for (n, p), b in zip(g["params"], g["blocks"], strict=True)]
    assert Counter(n for n, _, _ in seen) == Counter(list(trainable))
    for n, p, b in seen:
        assert p is trainable[n]
        assert b == blocks[n]
    if by == "parameter":
        assert [[n for n, _ in g["params"]] for g in groups] == [[n] for n in trainable]
    else:
        assert max(Counter((g["role"], g["weight_decay"] > 0) for g in groups).values()) == 1


@pytest.mark.parametrize("by", ["role", "parameter"])
@pytest.mark.parametrize("name", FAMILIES)
def test_weight_decay_is_for_matrices_that_are_neither_norm_nor_bias(name, by):
    for group in param_groups(FAMILIES[name](), weight_decay=0.3, by=by):
        for (_, parameter), (roles, _, _) in zip(group["params"], group["blocks"]):
            decays = parameter.ndim >= 2 and roles[0] not in ("norm", "bias")
            assert group["weight_decay"] == (0.3 if decays else 0.0)


def test_no_weight_decay_for_biases_of_three_dimensions():
    groups = {n: g for g in param_groups(FAMILIES["attention-bias-kv"](), by="parameter") for n, _ in g["params"]}
    assert groups["attention.bias_k"]["weight_decay"] == 0.0
    assert groups["attention.in_proj_weight"]["weight_decay"] == 0.1


def test_the_role_of_a_group_joins_the_roles_of_a_fused_matrix():
    assert [g["role"] for g in param_groups(FAMILIES["phi3"]())] == [
        *("embedding", "output", "query+key+value", "mlp_gate+mlp_in", "mlp_out", "norm", "head"),
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_groups_are_plain_data_that_torch_loads_as_weights_only(name):
    groups = [{k: v for k, v in group.items() if k != "params"} for group in param_groups(FAMILIES[name]())]
    file = io.BytesIO()
    torch.save(groups, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == groups

    def types(value):
        inner = value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ()
        return {type(value)}.union(*(types(v) for v in inner))

    assert types(groups) <= {list, dict, tuple, str, int, float, bool, type(None)}


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_blocks_come_back_also_from_lists(name):
    def listed(value):
        return [listed(v) for v in value] if isinstance(value, tuple) else value

    for blocks in find_blocks(FAMILIES[name]()).values():
        assert from_plain(to_plain(blocks)) == blocks
        assert from_plain(listed(to_plain(blocks))) == blocks


def test_param_groups_carry_the_blocks_they_are_given():
    model = FAMILIES["gpt_neox"]()
    merged = find_blocks(model, per_head=False, per_row=())
    carried = {n: from_plain(b) for g in param_groups(model, merged) for (n, _), b in zip(g["params"], g["blocks"])}
    assert carried == merged


def test_blocks_that_do_not_cover_the_model_exactly_raise():
    model = FAMILIES["encoder_layer"]()
    blocks = find_blocks(model)
    with pytest.raises(ValueError, match=r"without \['norm1.weight'\], and with \[\]"):
        param_groups(model, {n: b for n, b in blocks.items() if n != "norm1.weight"})
    with pytest.raises(ValueError, match=r"without \[\], and with \['extra'\]"):
        param_groups(model, {**blocks, "extra": Blocks(("other",))})
    model.norm1.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"with \['norm1.weight'\] that the model does not train"):
        param_groups(model, blocks)


def test_blocks_that_do_not_fit_a_shape_raise():
    model = FAMILIES["encoder_layer"]()
    with pytest.raises(ValueError, match="cover 8 of the 24"):
        param_groups(model, {**find_blocks(model), "linear1.weight": cut(0, mlp_in=(8, 8))})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "layer"}, "Invalid by='layer'"),
        ({"weight_decay": -0.1}, r"Invalid weight_decay=-0\.1"),
        ({"weight_decay": float("nan")}, "Invalid weight_decay=nan"),
        ({"weight_decay": float("inf")}, "Invalid weight_decay=inf"),
    ],
)
def test_param_groups_refuse_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        param_groups(FAMILIES["mlp"](), **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_torch_adamw_trains_with_the_groups(name):
    model = FAMILIES[name]()
    optimizer = torch.optim.AdamW(param_groups(model), lr=3e-3)
    losses = []
    for _ in range(3):
        loss = loss_of(name, model)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    optimizer.load_state_dict(torch.load(buffer, weights_only=True))
