"""GPT-2 in one readable file: pre-norm blocks, GELU, learned positions, tied head, GPT-2's initialisation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2."""

    vocab_size: int = 50257
    context: int = 1024
    width: int = 768
    depth: int = 12
    heads: int = 12


PRESETS = {
    "0.5M": GPT2Config(vocab_size=1024, context=128, width=96, depth=3, heads=3),
    "1M": GPT2Config(vocab_size=2048, context=128, width=128, depth=4, heads=4),
    "3M": GPT2Config(vocab_size=4096, context=256, width=192, depth=5, heads=6),
    "10M": GPT2Config(vocab_size=8192, context=256, width=320, depth=6, heads=5),
    "small": GPT2Config(),
    "medium": GPT2Config(width=1024, depth=24, heads=16),
}


class SelfAttention(nn.Module):
    """Causal attention with query, key and value fused in `c_attn`."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.num_heads = config.heads
        self.c_attn = nn.Linear(config.width, 3 * config.width)
        self.c_proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        """Mix each position with those before it."""
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D/H)
        return self.c_proj(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Two linear maps with a GELU between."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width)
        self.c_proj = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to each position alone."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and MLP, each on a normalised copy of the residual stream."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attn = SelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and MLP find."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """A causal language model."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.h = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.ln_f = nn.LayerNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._initialize)
        for block in self.h:  # residual branches add up: keep the stream's variance independent of depth
            for projection in (block.attn.c_proj, block.mlp.c_proj):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * config.depth))

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:  # (B, T)
        """The logits (B, T, V), or the mean cross-entropy if targets are given."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
