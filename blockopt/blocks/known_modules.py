"""What names say about a linear map, and the few layouts that neither names nor sizes tell."""

from __future__ import annotations

# What a word in the name of a map of attention says that it makes. Several words add up, so that
# `query_key_value` and `qkv` are the same.
ATTENTION_WORDS = {
    **dict.fromkeys(("q", "query", "queries", "wq", "receptance"), "q"),
    **dict.fromkeys(("k", "key", "keys", "wk"), "k"),
    **dict.fromkeys(("v", "value", "values", "wv"), "v"),
    **dict.fromkeys(("kv", "wkv"), "kv"),
    "qk": "qk",
    **dict.fromkeys(("qkv", "wqkv"), "qkv"),
}
ATTENTION_ROLES = {"q": "query", "k": "key", "v": "value"}
ATTENTION_TYPE_WORDS = {"attention", "attn", "sdpa", "mha"}
# Names of a fused query, key and value that have no such word.
FUSED_NAMES = ("c_attn", "att_proj", "attn_proj", "in_proj")
OUTPUT_WORDS = {
    "o",
    "out",
    "output",
    "wo",
    "proj",
    "projection",
    "dense",
    "post",
    "final",
    "linear",
}
GATE_WORDS = {
    "gate",
    "g",
    "z",
    "beta",
    "alpha",
    "a",
    "b",
    "ba",
    "f",
    "dt",
    "ogate",
    "igate",
    "fgate",
}
# Words that say of a map only that it is one.
PLAIN_WORDS = {"proj", "in", "linear", "to", "w", "layer", "projection", "fc", "lin"}
POSITION_WORDS = {
    *("pos", "position", "positions", "positional", "relative", "rel", "rpe", "wpe", "r"),
    *("temporal", "time"),
}

# Attention that stores a fused query, key and value group by group: the query heads that share a
# key, that key, its value. All others are taken to store all queries, all keys, all values.
GROUPED_TYPES = (
    *("GPTNeoXAttention", "GPTNeoXJapaneseAttention", "BloomAttention", "PersimmonAttention"),
    *("MiniMaxLightningAttention", "DisentangledSelfAttention"),
)
# Attention whose query projection holds a gate too: in each head the query, then the gate.
GATED_QUERY_TYPES = ("Qwen3NextAttention",)
# A convolution between two gates, all three made by one map: gate, gate, value.
GATED_CONVOLUTION_TYPES = ("Lfm2ShortConv", "Lfm2MoeShortConv")
# These names are in use for both orders.
UNKNOWN_ORDER_NAMES = ("query_key_value", "key_value")

HEADS_WORDS = {"head", "heads", "nhead", "nheads"}
NOT_HEADS_WORDS = {
    *("dim", "size", "channels", "width", "kv", "key", "value", "k", "v", "groups", "mask"),
    *("states", "hidden", "bias", "query", "index", "ratio", "scale", "split", "layers"),
}
HEADS_LETTERS = ("h", "nh", "n_h", "H")
NUM_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead", "heads", "groups")
NUM_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_head", "n_kv_heads")
HEAD_DIM = (
    *("head_dim", "head_size", "attention_head_size", "key_value_proj_dim", "qk_head_dim"),
    *("dim_head", "head_dims", "d_head", "d_kv"),
)

# Gate and input of a gated MLP, where no name says "gate": act(gate(x)) * input(x).
GATE_AND_INPUT = (
    ("w1", "w3"),  # Llama's reference code
    ("wi_0", "wi_1"),  # T5 v1.1
    ("w_0", "w_1"),  # CPM-Ant
    ("fc1_g", "fc1_x"),  # timm's SwiGLU
    ("linear_y", "linear_x"),  # RecurrentGemma
    ("w0", "w1"),  # timm's GeGLU
)
# One map for both: the order of its halves, by type first, then by name.
GATE_FIRST_NAMES = ("gate_up_proj", "Wi", "wi", "weights_in", "input_linear", "w12", "gate_up")
GATE_FIRST_TYPES = ("MoshiGatingMLP", "KyutaiSpeechToTextGatingMLP")
INPUT_FIRST_TYPES = (
    "Phi4MultimodalAudioMLP",
    "MoonshineDecoderMLP",
    "MoonshineStreamingDecoderMLP",
)
GATE_WORDS_OF_MLP = {"gate", "gating", "glu", "receptance", "g", "wg"}
OUT_WORDS_OF_MLP = {"down", "out", "output", "wo", "o"}
MLP_TYPE_WORDS = {
    *("mlp", "ffn", "feed", "ff", "feedforward", "intermediate", "glu", "swiglu", "expert"),
    *("projector", "merger", "connector", "adapter", "dense", "mixer"),
}

EMBEDDING_WORDS = {"embedding", "embeddings", "embed", "embedder", "emb", "patch", "stem", "wte"}
TOKEN_WORDS = {
    *("token", "tokens", "cls", "probe", "latent", "latents", "prompt", "prompts", "register"),
    *("registers", "query", "queries", "mask", "embedding", "embeddings", "embed", "emb"),
}
HEAD_WORDS = {
    *("head", "heads", "classifier", "classifiers", "score", "unembed", "logits", "predictor"),
    *("loss", "classification", "unembedding"),
}
HEAD_NAMES = {
    *("decoder", "embed_out", "qa_outputs", "vocab_projector", "seq_relationship", "output"),
    *("output_projection", "generator"),
}
# Heads whose `dense` holds what the embedding is too narrow for, one column for each token.
WIDENED_HEAD_TYPES = ("MobileBertLMPredictionHead",)
# The time constants of state-space and linear-attention layers.
TIME_CONSTANTS = {
    *("A_log", "D", "A", "dt_bias", "dt_proj", "dt_proj_weight"),
    *("time_decay", "time_first", "time_faaaa"),
}
