"""Attention of many other kinds against the models: a block of a role feeds one head of it.

Families that hand their queries, keys and values to torch's attention in a causal language model
are in `test_causal_models.py`; here are state-space layers, linear attention, convolutions, windows
and whatever else computes attention in its own way.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from blockopt import find_blocks
from tests.helpers.attention_events import (
    Events,
    Replay,
    changed,
    disturbed,
    from_attention,
    from_products,
)
from tests.helpers.models import block_index, timm_vision_transformer
from tests.helpers.tiny_models import batch_of, scatter, tiny_transformer

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries, and of roles


def from_rwkv(events: Events):
    _, _, key, value = events.kernel[0][:4]
    return {"key": key.unsqueeze(1), "value": value.unsqueeze(1)}


def from_mamba(events: Events):
    (x, steps, _, B, C), kwargs = events.kernel
    parts = {"query": C, "key": B, "value": x, "steps": steps, "gate": kwargs["z"]}
    return {role: part.unsqueeze(1) for role, part in parts.items()}


def from_mamba2(events: Events):
    x, steps, _, B, C = events.kernel[0][:5]  # each (batch, tokens, heads, …)
    parts = {"query": C, "key": B, "value": x, "steps": steps}
    parts["gate"] = events.gate.unflatten(-1, (x.shape[2], -1))
    return {role: part.movedim(2, 1) for role, part in parts.items()}


def from_delta_rule(events: Events):
    (query, key, value), kwargs = events.kernel  # each (batch, tokens, heads, …)
    gate = events.gate.reshape(value.shape)
    parts = {"query": query, "key": key, "value": value, "gate": gate}
    parts |= {"steps": kwargs["g"], "beta": kwargs["beta"]}
    return {role: part.movedim(2, 1) for role, part in parts.items()}


def from_xlnet(events: Events):  # (tokens, batch, heads, size)
    output = events.result.movedim(2, 0).flatten(1)
    return {**from_products(dim=2)(events), "output": output}


def from_one_query(events: Events):  # MobileViTv2: a score, keys and values in one map
    return {r: x.unsqueeze(1) for r, x in zip(("query", "key", "value"), events.split)}


class Case(NamedTuple):
    """A module to watch: where it is, how it is read, and what takes its result."""

    build: Callable[[], nn.Module]
    path: str
    read: Callable[[Events], Any]
    output: str | None = None
    kernel: str = ""
    run: Callable[[nn.Module], object] = lambda model: model(**batch_of(model))
    follows: tuple[str, ...] = ()  # what is made from the values, as in the first Mamba
    learned: tuple[str, ...] = ()  # what no map makes


def timm_model(name, size=64, **options):
    timm_vision_transformer()  # imports timm without torchvision
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=4, **options).eval()
    scatter(model)
    return model


def noise(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def on_an_image(size):
    return lambda model: model(noise(1, 3, size, size))


def timm_case(name, path, output="proj", read=from_attention, size=64, **options):
    return Case(lambda: timm_model(name, **options), path, read, output, run=on_an_image(size))


MADE = ("query", "key", "value")
GATES = {"gate", "steps", "beta"}
SMALL_VIT = {"embed_dim": 32, "depth": 1, "num_heads": 4, "img_size": 32, "patch_size": 8}


def case(kind, path, output, read=None, kernel="", changes=None, **more):
    def build():
        return tiny_transformer(kind, **(changes or {}))

    return Case(build, path, read or from_products(), output, kernel, **more)


def with_global_attention(model):
    first = (torch.arange(8) == 0).long().expand(2, 8)
    return model(**batch_of(model), global_attention_mask=first)


def blip_on_both(model):
    tokens = torch.arange(1, 9)[None]
    return model(pixel_values=noise(1, 3, 384, 384), input_ids=tokens, use_cache=False)


def query_transformer(model):
    return model.qformer(query_embeds=noise(1, 4, 96), encoder_hidden_states=noise(1, 6, 176))


def mask_decoder(model):
    tokens = noise(1, 1, 5, 32)
    return model.mask_decoder.transformer.layers[0].self_attn(tokens, tokens, tokens)


CASES = {
    "xlnet": case("xlnet", "transformer.layer.0.rel_attn", None, from_xlnet, changes={"n_head": 4}),
    "squeezebert": case("squeezebert", "transformer.encoder.layers.0", "post_attention.conv1d"),
    "codegen": case("codegen", "transformer.h.0.attn", "out_proj", changes={"n_head": 8}),
    "deberta": case("deberta", "deberta.encoder.layer.0.attention", "output.dense"),
    "deberta-v2": case(
        "deberta-v2", "deberta.encoder.layer.0.attention", "output.dense", from_products(heads=24)
    ),
    "longformer": case(
        "longformer",
        "longformer.encoder.layer.0.attention",
        "output.dense",
        from_products(heads=12, last=-3),  # after it, that of the global attention
        changes={"attention_window": 4},
        run=with_global_attention,
    ),
    "rwkv": case("rwkv", "rwkv.blocks.0.attention", "output", from_rwkv, "rwkv_linear_attention"),
    "mamba": case(
        "mamba",
        "backbone.layers.0.mixer",
        "out_proj",
        from_mamba,
        "mamba_selective_scan",
        follows=("query", "key", "steps"),
    ),
    "mamba2": case(
        "mamba2",
        "backbone.layers.0.mixer",
        None,
        from_mamba2,
        "mamba2_chunk_scan",
        {"num_heads": 16, "head_dim": 512, "chunk_size": 8},
    ),
    "qwen3_next-linear": case(
        "qwen3_next",
        "model.layers.0.linear_attn",
        "out_proj",
        from_delta_rule,
        "torch_chunk_gated_delta_rule",
    ),
    "qwen3_next": case("qwen3_next", "model.layers.1.self_attn", "o_proj", from_attention),
    "aimv2-pool": case(
        "aimv2_vision_model", "head", "output_proj", from_attention, learned=("query",)
    ),
    "led": case(
        "led",
        "led.encoder.layers.0.self_attn",
        "output",
        from_products(heads=16, last=-3),
        changes={"attention_window": 4},
        run=with_global_attention,
    ),
    "conformer": case(
        "wav2vec2-conformer",
        "wav2vec2_conformer.encoder.layers.0.self_attn",
        "linear_out",
        from_attention,
        changes={"vocab_size": 32, "position_embeddings_type": "relative"},
    ),
    "blip": case("blip", "vision_model.encoder.layers.0.self_attn", "projection", run=blip_on_both),
    "blip-text": case(
        "blip",
        "text_decoder.bert.encoder.layer.0.crossattention",
        "output.dense",
        run=blip_on_both,
    ),
    "blip-2": case(
        "blip-2",
        "vision_model.encoder.layers.0.self_attn",
        "projection",
        from_attention,
        run=lambda model: model.vision_model(pixel_values=noise(1, 3, 224, 224)),
    ),
    "blip-2-queries": case(
        "blip-2",
        "qformer.encoder.layer.0.crossattention",
        "output.dense",
        from_attention,
        run=query_transformer,
    ),
    "perceiver": case(
        "perceiver",
        "perceiver.encoder.self_attends.0.attention",
        "output.dense",
        changes={"num_latents": 8, "d_latents": 256},
        run=lambda model: model(inputs=torch.arange(3, 11)[None]),
    ),
    "perceiver-cross": case(
        "perceiver",
        "perceiver.encoder.cross_attention.attention",
        "output.dense",
        changes={"num_latents": 8, "d_latents": 256},
        run=lambda model: model(inputs=torch.arange(3, 11)[None]),
    ),
    "patchtst": case(
        "patchtst",
        "encoder.layers.0.self_attn",
        "out_proj",
        from_attention,
        changes={"num_attention_heads": 4},
        run=lambda model: model(past_values=noise(1, 32, 1)),
    ),
    "sam2": case(
        "sam2",
        "mask_decoder.transformer.layers.0.self_attn",
        "o_proj",
        from_attention,
        run=mask_decoder,
    ),
    "deepseek_v3": case(
        "deepseek_v3",
        "model.layers.0.self_attn",
        "o_proj",
        from_attention,
        changes={"num_attention_heads": 16, "num_key_value_heads": 16},
        follows=("key",),  # both come from one latent
    ),
    "qwen3_5-linear": case(
        "qwen3_5_text",
        "model.layers.0.linear_attn",
        "out_proj",
        from_delta_rule,
        "torch_chunk_gated_delta_rule",
    ),
    "jamba-mamba": case(
        "jamba",
        "model.layers.0.mamba",
        "out_proj",
        from_mamba,
        "mamba_selective_scan",
        {"attn_layer_offset": 1, "attn_layer_period": 2, "num_hidden_layers": 2},
        follows=("query", "key", "steps"),
    ),
    "coatnet": timm_case("coatnet_nano_rw_224", "stages.2.blocks.0.attn", img_size=64),
    "twins-local": timm_case("twins_svt_small", "blocks.0.0.attn", img_size=64),
    "twins-global": timm_case("twins_svt_small", "blocks.0.1.attn", img_size=64),
    "visformer": timm_case("visformer_tiny", "stage2.0.attn", img_size=64, read=from_products()),
    "mobilevitv2": timm_case(
        "mobilevitv2_050", "stages.2.1.transformer.0.attn", "out_proj", from_one_query
    ),
    "pvt_v2": timm_case("pvt_v2_b0", "stages.1.blocks.0.attn"),
    "eva02": timm_case("eva02_tiny_patch14_224", "blocks.0.attn", size=28, img_size=28, depth=1),
    "siglip": timm_case("vit_base_patch16_siglip_224", "blocks.0.attn", size=32, **SMALL_VIT),
    "siglip-pool": timm_case("vit_base_patch16_siglip_224", "attn_pool", size=32, **SMALL_VIT),
    "swinv2": timm_case(
        "swinv2_tiny_window8_256", "layers.0.blocks.0.attn", read=from_products(), img_size=64
    ),
    "levit": timm_case(
        "levit_128", "stages.0.blocks.0.attn", "proj.ln", from_products(), img_size=64
    ),
    "aimv2": timm_case("aimv2_large_patch14_224", "blocks.0.attn", size=32, **SMALL_VIT),
}


@pytest.mark.parametrize("name", CASES)
def test_each_block_feeds_its_head_alone(name):
    case = CASES[name]
    model = case.build()
    blocks = find_blocks(model)
    output = model.get_submodule(f"{case.path}.{case.output}") if case.output else None
    replay = Replay(
        model.get_submodule(case.path), lambda: case.run(model), case.read, case.kernel, output
    )
    before = replay()
    assert not changed(before, replay()), "it must compute the same twice"
    inside = {n: e for n, e in blocks.items() if n.startswith(f"{case.path}.")}
    columns = output_blocks(model, inside)
    heads_made = max(before[role].shape[1] for role in MADE if role in before)
    assert columns is None or max(columns) + 1 == heads_made
    reached = set()
    for parameter_name, entry in inside.items():
        parameter = model.get_parameter(parameter_name)
        if parameter.ndim < 2 or not set(entry.roles) <= {*MADE, "gate"}:
            continue
        several, seen, own = Counter(entry.block_roles), Counter(), set()
        for block, role in enumerate(entry.block_roles):
            head, where = seen[role], f"{parameter_name}: block {block}, {role} {seen[role]}"
            seen[role] += 1
            with disturbed(parameter, entry.split, block):
                found = changed(before, replay())
            heads = {(r, h) for r, h in found if r != "output"}
            if role == "value":
                heads = {(r, h) for r, h in heads if r not in case.follows}
            assert {r for r, _ in heads} <= (GATES if role == "gate" else {role}), where
            apart = role == "gate" or role not in before or is_position(parameter_name)
            if not apart:
                copies = before[role].shape[1] // several[role]  # of a head that several share
                assert heads == {(role, head * copies + copy) for copy in range(copies)}, where
            if "output" in before and columns is not None:
                fed = {h for _, h in heads} if heads else {head}
                number = before[next(iter(heads))[0]].shape[1] if heads else several[role]
                allowed = set().union(*(columns_of_head(columns, h, number) for h in fed))
                assert set() < {c for r, c in found if r == "output"} <= allowed, where
            assert own.isdisjoint(heads), f"{where}: fed by another block too"
            own |= heads
        reached |= own
    roles = [role for role in before if role not in ("output", *case.learned)]
    assert reached == {(r, h) for r in roles for h in range(before[r].shape[1])}


def is_position(name):
    """Whether a map makes keys or queries that meet the others in a product of their own."""
    return name.endswith((".r", "linear_pos.weight")) or "pos_" in name or "_global" in name


def output_blocks(model, inside):
    """The number of the block of each column of the output projection."""
    names = [n for n, entry in inside.items() if entry.roles == ("output",)]
    if len(names) != 1:
        return None
    parameter, split = model.get_parameter(names[0]), inside[names[0]].split
    if split is None:
        return [0] * parameter.shape[1]
    return (
        block_index(tuple(parameter.shape), split).movedim(split.dim, 0).flatten(1)[:, 0].tolist()
    )


def columns_of_head(columns, head, several):
    """The columns of the blocks that a head of `several` feeds."""
    number = max(columns) + 1
    first, last = head * number // several, -(-(head + 1) * number // several)
    return {column for column, block in enumerate(columns) if first <= block < last}
