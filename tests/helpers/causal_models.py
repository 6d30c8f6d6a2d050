"""Small causal language models of transformers, by type, and what they hand to attention."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = {
    **{"vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 40, "max_position_embeddings": 32, "num_key_value_heads": 2},
    **{"head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    # Experts
    **{"num_experts": 3, "num_local_experts": 3, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 12, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "n_shared_experts": 1,
    # Low-rank attention
    **{"q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4},
    "v_head_dim": 5,
}
# Types that have other names for their sizes, or that need some of them to be otherwise.
LOW_RANK = {"head_dim": 4, "num_key_value_heads": 4, "qk_head_dim": 10}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_ctx": 32, "rotary_dim": 4}
OTHERWISE = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash"), LOW_RANK),
    **dict.fromkeys(("codegen", "gptj", "gpt_bigcode", "gpt_neo", "mpt", "xglm"), GPT),
}


def build_causal(kind: str) -> nn.Module:
    """A model of a type, with weights far from zero so that changes show."""
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **OTHERWISE.get(kind, {})})
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.3)
    return model


def attention_inputs(model: nn.Module, monkeypatch) -> list[dict[str, Tensor]]:
    """Query, key and value (batch, heads, tokens, size) of each attention call of one pass."""
    calls: list[dict[str, Tensor]] = []
    original = F.scaled_dot_product_attention

    def attention(query, key, value, *args, **kwargs):
        calls.append({"query": query, "key": key, "value": value})
        return original(query, key, value, *args, **kwargs)

    tokens = torch.randint(3, 24, (2, 6), generator=torch.Generator().manual_seed(0))
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(F, "scaled_dot_product_attention", attention)
        model(tokens, use_cache=False)
    return calls
