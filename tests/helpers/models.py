"""One tiny model per family and attention layout, built from its config without a download.

`FAMILIES[name]()` is a seeded model of a few thousand parameters, and `loss_of(name, model)` is its
loss on a seeded batch.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from recipes.common.gpt2 import GPT2, GPT2Config

# On models this small more threads only wait for one another, above all under pytest-xdist.
torch.set_num_threads(1)

BATCH, LENGTH, VOCAB, WIDTH, CLASSES = 2, 6, 20, 16, 5
SDPA = {"attn_implementation": "sdpa"}
ENCODER_SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {"vocab_size": VOCAB, **ENCODER_SIZES}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
NEOX_SIZES = {**SIZES, **TOKENS, "intermediate_size": 24, "max_position_embeddings": 16}
LLAMA_SIZES = {**NEOX_SIZES, "num_key_value_heads": 2}
NO_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class MLP(nn.Module):
    """A plain multi-layer perceptron, without names that a transformer would use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, 8)
        return self.layers(x)


class CNN(nn.Module):
    """Two convolutions, batch norm and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.classifier = nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:  # (B, 3, 8, 8)
        return self.classifier(self.conv2(F.relu(self.bn1(self.conv1(images)))).mean(dim=(2, 3)))


class TorchAttention(nn.Module):
    """`nn.MultiheadAttention` alone; `kdim` and `vdim` feed it keys and values of other widths."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        key, value = x[..., : self.attention.kdim], x[..., : self.attention.vdim]
        return self.attention(x, key, value, need_weights=False)[0]


class TorchDecoder(nn.Module):
    """`nn.TransformerDecoderLayer` that attends to itself and to a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(
            WIDTH, 4, dim_feedforward=24, dropout=0.0, batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.flip(1))


def nanogpt() -> nn.Module:
    return GPT2(GPT2Config(vocab_size=VOCAB, context=LENGTH, width=WIDTH, depth=2, heads=4))


def gpt2(**options: Any) -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    config = transformers.GPT2Config(**sizes, **tokens, **dropout, **SDPA, **options)
    return transformers.GPT2LMHeadModel(config)


def llama(**options: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_SIZES, **SDPA, **options))


def mistral() -> nn.Module:
    config = transformers.MistralConfig(**LLAMA_SIZES, **SDPA, sliding_window=None)
    return transformers.MistralForCausalLM(config)


def qwen2() -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA_SIZES, **SDPA))


def qwen3() -> nn.Module:
    config = transformers.Qwen3Config(**LLAMA_SIZES, **SDPA, head_dim=6)
    return transformers.Qwen3ForCausalLM(config)


def phi3() -> nn.Module:
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**LLAMA_SIZES, **SDPA))


def mixtral() -> nn.Module:
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "router_jitter_noise": 0.0}
    config = transformers.MixtralConfig(**LLAMA_SIZES, **SDPA, **experts, sliding_window=None)
    return transformers.MixtralForCausalLM(config)


def gpt_neox() -> nn.Module:
    config = transformers.GPTNeoXConfig(**NEOX_SIZES, **NO_DROPOUT, **SDPA)
    return transformers.GPTNeoXForCausalLM(config)


def bloom() -> nn.Module:
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4}
    config = transformers.BloomConfig(**sizes, **TOKENS, **NO_DROPOUT)
    return transformers.BloomForCausalLM(config)


def falcon(**options: Any) -> nn.Module:
    others = {"ffn_hidden_size": 24, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.FalconConfig(**SIZES, **others, **NO_DROPOUT, **SDPA, **options)
    return transformers.FalconForCausalLM(config)


def bert() -> nn.Module:
    sizes = {**SIZES, "intermediate_size": 24, "max_position_embeddings": 16}
    config = transformers.BertConfig(**sizes, **NO_BERT_DROPOUT, **SDPA)
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    images = {"image_size": 8, "patch_size": 4, "num_labels": CLASSES, "intermediate_size": 24}
    config = transformers.ViTConfig(**ENCODER_SIZES, **images, **NO_BERT_DROPOUT, **SDPA)
    return transformers.ViTForImageClassification(config)


def timm_vit(**options: Any) -> nn.Module:
    images = {"img_size": 8, "patch_size": 4, "num_classes": CLASSES}
    sizes = {"embed_dim": WIDTH, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
    return timm_vision_transformer().VisionTransformer(**images, **sizes, **options)


def t5(**options: Any) -> nn.Module:
    sizes = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 6, "d_ff": 24, "num_layers": 2}
    positions = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
    others = {"num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    config = transformers.T5Config(**sizes, **positions, **others, **SDPA, **options)
    return transformers.T5ForConditionalGeneration(config)


def opt() -> nn.Module:
    sizes = {"ffn_dim": 24, "max_position_embeddings": 16, "word_embed_proj_dim": WIDTH}
    others = {"dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0}
    config = transformers.OPTConfig(**SIZES, **sizes, **others, **SDPA)
    return transformers.OPTForCausalLM(config)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, dim_feedforward=24, dropout=0.0, batch_first=True)


def lora(model: nn.Module, targets: list[str]) -> nn.Module:
    import peft

    config = peft.LoraConfig(
        r=2, target_modules=targets, init_lora_weights=False, fan_in_fan_out="c_attn" in targets
    )
    return peft.get_peft_model(model, config)


class _TorchvisionStub(ModuleType):
    """Stands for a module of torchvision: every name in it is an empty class."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        modes = ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
        members = {mode: mode for mode in modes} if name == "InterpolationMode" else {}
        value = type(name, (nn.Module,), members)
        setattr(self, name, value)
        return value


def timm_vision_transformer() -> ModuleType:
    """Import timm's `vision_transformer` with stubs for torchvision, which only its data needs."""
    if "timm.models.vision_transformer" in sys.modules:
        return sys.modules["timm.models.vision_transformer"]
    names = ("transforms", "transforms.functional", "datasets", "ops", "ops.misc")
    names = ("torchvision", *(f"torchvision.{name}" for name in names))
    stubs = {name: _TorchvisionStub(name) for name in names}
    for name, stub in stubs.items():
        parent, _, attribute = name.rpartition(".")
        if parent:
            setattr(stubs[parent], attribute, stub)
    sys.modules.update(stubs)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            return importlib.import_module("timm.models.vision_transformer")
    finally:
        for name in stubs:
            del sys.modules[name]


def _seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build_seeded() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return build().train()

    return build_seeded


Builders = dict[str, Callable[[], nn.Module]]

CAUSAL: Builders = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "phi3": phi3,
    "mixtral": mixtral,
    "gpt_neox": gpt_neox,
    "bloom": bloom,
    "falcon-multi-query": lambda: falcon(multi_query=True, new_decoder_architecture=False),
    "falcon-groups": lambda: falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-plain": lambda: falcon(multi_query=False, new_decoder_architecture=False, bias=True),
    "opt": opt,
    "lora-gpt2": lambda: lora(gpt2(), ["c_attn"]),
    "lora-llama": lambda: lora(llama(), ["q_proj", "v_proj"]),
}
IMAGES: Builders = {"timm_vit": timm_vit, "vit": vit, "cnn": CNN}
SEQUENCES: Builders = {
    "attention": TorchAttention,
    "attention-kdim": lambda: TorchAttention(kdim=10, vdim=12),
    "attention-bias-kv": lambda: TorchAttention(add_bias_kv=True),
    "encoder_layer": encoder_layer,
    "decoder_layer": TorchDecoder,
}
OTHERS: Builders = {
    "nanogpt": nanogpt,
    "gpt2-cross": lambda: gpt2(add_cross_attention=True),
    "bert": bert,
    "t5": lambda: t5(feed_forward_proj="relu"),
    "t5-gated": lambda: t5(feed_forward_proj="gated-gelu"),
    "mlp": MLP,
}
FAMILIES = {name: _seeded(build) for name, build in (CAUSAL | IMAGES | SEQUENCES | OTHERS).items()}


def loss_of(name: str, model: nn.Module, seed: int = 0) -> Tensor:
    """Return the loss of a model of family `name` on a small batch that depends on `seed` alone."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    targets = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=generator)
    classes = torch.randint(CLASSES, (BATCH,), generator=generator)
    dtype = next(model.parameters()).dtype
    features = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    images = torch.randn(BATCH, 3, 8, 8, generator=generator, dtype=torch.float64).to(dtype)
    if name == "nanogpt":
        return model(tokens, targets)
    if name == "gpt2-cross":
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        context = {"encoder_hidden_states": features, "encoder_attention_mask": mask}
        return model(tokens, labels=tokens, use_cache=False, **context).loss
    if name in ("t5", "t5-gated"):
        return model(input_ids=tokens, labels=targets, use_cache=False).loss
    if name == "bert":
        return model(tokens, labels=targets).loss
    if name in CAUSAL:
        return model(tokens, labels=tokens, use_cache=False).loss
    if name == "vit":
        return model(images, labels=classes).loss
    if name in IMAGES:
        return F.cross_entropy(model(images), classes)
    if name == "mlp":
        return F.cross_entropy(model(features[:, 0, :8]), classes)
    return F.mse_loss(model(features), features.roll(1, dims=1))


def block_index(shape: tuple[int, ...], split: Any) -> Tensor:
    """Return the number of the block of each entry of a parameter, slowly and plain to read."""
    index = torch.zeros(shape, dtype=torch.long)
    if split is None:
        return index
    along = []
    for repeat in range(split.repeat):
        block = 0 if split.pooled else repeat * sum(split.parts)
        for size, parts in zip(split.sizes, split.parts):
            for part in range(parts):
                along += [block + part] * (size // parts)
            block += parts
    for position, block in enumerate(along):
        index.select(split.dim, position).fill_(block)
    if split.stack > 1:
        count = split.num_blocks // split.stack
        index += count * torch.arange(split.stack).reshape(-1, *[1] * (len(shape) - 1))
    return index
