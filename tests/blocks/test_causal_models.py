"""Blocks of many families against the models: a block of queries, keys or values feeds one head."""

from collections import Counter

import pytest
import torch

from blockopt import find_blocks
from tests.helpers.causal_models import attention_inputs, build_causal
from tests.helpers.models import block_index

ROLES = ("query", "key", "value")
FAMILIES = (
    *("apertus", "arcee", "aria_text", "beam", "bert"),
    *("bert-generation", "biogpt", "bitnet", "camembert", "cohere"),
    *("cohere2", "cohere2_moe", "ctrl", "cwm", "data2vec-text"),
    *("deepseek_v2", "doge", "electra", "ernie", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "fuyu", "gemma", "gemma3_text"),
    *("gemma4_text", "gemma4_unified_text", "glm", "glm4", "gpt-sw3"),
    *("gpt2", "gpt_bigcode", "gpt_neox", "granite", "granitemoe"),
    *("granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3"),
    *("hyperclovax", "inkling_text", "jais2", "kolibri1", "laguna"),
    *("lfm2", "llama", "llama4_text", "mellum", "minimax"),
    *("minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral"),
    *("modernbert-decoder", "moshi", "nanochat", "nemotron", "olmo"),
    *("opt", "persimmon", "phi", "phi3", "phimoe"),
    *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "roberta"),
    *("roberta-prelayernorm", "roc_bert", "seed_oss", "smollm3", "stablelm"),
    *("starcoder2", "xlm-roberta", "xlm-roberta-xl"),
)


def changed_heads(before, after):
    return {
        (role, head)
        for role in ROLES
        for head in range(before[role].shape[1])
        if (before[role][:, head] - after[role][:, head]).abs().max() > 1e-5
    }


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)  # GPT-BigCode
def test_each_block_of_the_first_layer_feeds_its_head_alone(kind, monkeypatch):
    model = build_causal(kind)
    first = attention_inputs(model, monkeypatch)[0]
    reached = set()
    for name, entry in find_blocks(model).items():
        parameter = model.get_parameter(name)
        if entry.layer != 0 or parameter.ndim < 2 or not set(entry.roles) <= {*ROLES, "gate"}:
            continue
        several = Counter(entry.block_roles)
        if max(several[role] for role in ROLES) < 2 < first["query"].shape[1] and "_a_" in name:
            continue  # the first factor of a low-rank map, which all heads share
        index, seen = block_index(tuple(parameter.shape), entry.split), Counter()
        for block, role in enumerate(entry.block_roles):
            head = seen[role]
            seen[role] += 1
            original = parameter.detach().clone()
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(block))
            parameter.data += noise * (index == block)
            changed = changed_heads(first, attention_inputs(model, monkeypatch)[0])
            parameter.data.copy_(original)
            if role == "gate":
                assert not changed, f"{name}: block {block}"
                continue
            copies = first[role].shape[1] // several[role]  # of a head that queries share
            heads = range(head * copies, (head + 1) * copies)
            assert changed == {(role, h) for h in heads}, f"{name}: block {block}"
            reached |= changed
    assert reached == {(role, h) for role in ROLES for h in range(first[role].shape[1])}
