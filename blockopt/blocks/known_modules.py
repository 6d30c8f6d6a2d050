"""The names under which known modules hold their projections, head counts, embeddings and heads."""

from __future__ import annotations

SEPARATE_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),  # Llama, Mistral, Qwen, OPT, GPT-J, ViT
    ("query", "key", "value"),  # BERT
    ("q", "k", "v"),  # T5
    ("q_lin", "k_lin", "v_lin"),  # DistilBERT
    ("to_q", "to_k", "to_v"),  # diffusers
    ("wq", "wk", "wv"),  # Llama reference code, torchtitan
)
# Fused projections stored as all queries, then all keys, then all values.
CONTIGUOUS_PROJECTIONS = ("c_attn", "qkv_proj", "qkv", "Wqkv")
# Fused projections stored group by group: the query heads that share a key, the key, its value.
GROUPED_PROJECTIONS = {"query_key_value": ("GPTNeoXAttention", "BloomAttention", "FalconAttention")}
# Types that store a fused matrix head by head, or in an order of their own.
INTERLEAVED_TYPES = ("MiniMaxLightningAttention",)
UNKNOWN_ORDER_TYPES = ("CodeGenAttention",)
OUTPUT_PROJECTIONS = (
    *("o_proj", "out_proj", "c_proj", "dense", "proj"),
    *("o", "out_lin", "to_out", "wo", "Wo"),
)

NUM_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead", "heads")
NUM_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_head", "n_kv_heads")
HEAD_DIM = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")

MLP_PROJECTIONS: tuple[dict[str, tuple[str, ...]], ...] = (
    # Llama, Mistral, Qwen
    {"gate_proj": ("mlp_gate",), "up_proj": ("mlp_in",), "down_proj": ("mlp_out",)},
    {"gate_up_proj": ("mlp_gate", "mlp_in"), "down_proj": ("mlp_out",)},  # Phi-3
    {"wi_0": ("mlp_gate",), "wi_1": ("mlp_in",), "wo": ("mlp_out",)},  # T5 v1.1
    {"w1": ("mlp_gate",), "w3": ("mlp_in",), "w2": ("mlp_out",)},  # Llama reference code
    {"wi": ("mlp_in",), "wo": ("mlp_out",)},  # T5
    {"c_fc": ("mlp_in",), "c_proj": ("mlp_out",)},  # GPT-2, nanoGPT
    {"up_proj": ("mlp_in",), "down_proj": ("mlp_out",)},
    {"fc1": ("mlp_in",), "fc2": ("mlp_out",)},  # OPT, ViT, timm
    {"fc_in": ("mlp_in",), "fc_out": ("mlp_out",)},  # GPT-J
    {"lin1": ("mlp_in",), "lin2": ("mlp_out",)},  # DistilBERT
    {"linear1": ("mlp_in",), "linear2": ("mlp_out",)},  # the layers of nn.Transformer
    {"dense_h_to_4h": ("mlp_in",), "dense_4h_to_h": ("mlp_out",)},  # GPT-NeoX, Bloom, Falcon
    {"intermediate.dense": ("mlp_in",), "output.dense": ("mlp_out",)},  # BERT
    {"intermediate_dense": ("mlp_in",), "output_dense": ("mlp_out",)},  # HuBERT, wav2vec2
    {"ffn": ("mlp_in",), "ffn_output": ("mlp_out",)},  # ALBERT
    {"linear_fc1": ("mlp_in",), "linear_fc2": ("mlp_out",)},  # Qwen-VL
    {"Wi": ("mlp_gate", "mlp_in"), "Wo": ("mlp_out",)},  # ModernBERT
)

# Experts stacked in one tensor, (experts, out, in): one block per expert.
EXPERT_PROJECTIONS = {
    "gate_up_proj": "mlp_in",
    "up_proj": "mlp_in",
    "gate_proj": "mlp_gate",
    "down_proj": "mlp_out",
}

POSITION_NAMES = {
    *("wpe", "position_embeddings", "position_embedding", "positional_embedding"),
    *("embed_positions", "pos_embed", "pos_embedding", "pos_emb", "relative_attention_bias"),
}
TOKEN_NAMES = {"cls_token", "class_token", "mask_token", "reg_token", "dist_token"}
HEAD_NAMES = {
    *("lm_head", "head", "head_dist", "classifier", "score"),
    *("embed_out", "qa_outputs", "decoder", "unembed"),
}
