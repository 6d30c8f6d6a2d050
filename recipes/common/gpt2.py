"""GPT-2 in one readable file: pre-norm blocks, GELU, learned positions, tied head.

It can also be what papers on its Hessian study: with norms after the residual connections or
without any, and with attention without softmax. `to_huggingface` makes the GPT-2 of transformers,
which has the same logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt.checks import check_choice, check_count
from recipes.common.errors import UsageError


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2, and how it may differ from it.

    Attributes:
        vocab_size: Number of tokens.
        context: Longest sequence.
        width: Width of the residual stream.
        depth: Number of blocks.
        heads: Number of attention heads.
        norm: "pre", `x + f(LN(x))` with a norm at the end (GPT-2); "post", `LN(x + f(x))`; "none",
            `x + f(x)`.
        attention: "softmax", or "linear", the masked scores themselves as in the ICLR 2025 paper.
    """

    vocab_size: int = 50257
    context: int = 1024
    width: int = 768
    depth: int = 12
    heads: int = 12
    norm: Literal["pre", "post", "none"] = "pre"
    attention: Literal["softmax", "linear"] = "softmax"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "width", "depth", "heads"):
            check_count(name, getattr(self, name))
        if self.width % self.heads:
            raise ValueError(
                f"Invalid width={self.width} for {self.heads} heads. Must be a multiple of heads."
            )
        check_choice("norm", self.norm, ("pre", "post", "none"))
        check_choice("attention", self.attention, ("softmax", "linear"))


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
        self.num_heads, self.attention = config.heads, config.attention
        self.c_attn = nn.Linear(config.width, 3 * config.width)
        self.c_proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        """Mix each position with those before it."""
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        if self.attention == "softmax":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D/H)
        else:
            mixed = (q @ k.mT / math.sqrt(q.shape[-1])).tril() @ v
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
    """Attention and MLP, each added to the residual stream, of which it sees a normalised copy."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.post_norm = config.norm == "post"
        self.ln_1 = nn.Identity() if config.norm == "none" else nn.LayerNorm(config.width)
        self.attn = SelfAttention(config)
        self.ln_2 = nn.Identity() if config.norm == "none" else nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and MLP find."""
        if self.post_norm:
            x = self.ln_1(x + self.attn(x))
            return self.ln_2(x + self.mlp(x))
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """A causal language model."""

    _no_split_modules = ("Block",)  # what accelerate makes FSDP2 shard one by one

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.h = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.ln_f = nn.LayerNorm(config.width) if config.norm == "pre" else nn.Identity()
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(self._initialize)
        # Residual branches add up: keep the stream's variance independent of depth.
        for block in self.h:
            for projection in (block.attn.c_proj, block.mlp.c_proj):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * config.depth))

    @staticmethod
    def _initialize(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:  # (B, T)
        """Return the logits (B, T, V), or the mean cross-entropy if targets are given."""
        length, context = tokens.shape[1], self.config.context
        if length > context:
            raise ValueError(f"Invalid sequence of {length} tokens. Must be at most {context=}.")
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def to_huggingface(model: GPT2) -> Any:
    """Return a `transformers.GPT2LMHeadModel` with the weights of our GPT-2.

    Raises:
        UsageError: If the model has a norm or an attention that the GPT-2 of transformers lacks.
    """
    import transformers

    config = model.config
    if (config.norm, config.attention) != ("pre", "softmax"):
        raise UsageError(
            f"Invalid norm={config.norm!r}, attention={config.attention!r}. "
            "Must be 'pre' and 'softmax' for transformers."
        )
    sizes = {
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.depth,
        "n_head": config.heads,
    }
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    tokens = {"vocab_size": config.vocab_size, "bos_token_id": None, "eos_token_id": None}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**tokens, **sizes, **dropout)).to(
        model.wte.weight.dtype
    )
    prefix = {
        name: name if name.startswith("lm_head") else f"transformer.{name}"
        for name in model.state_dict()
    }
    theirs.load_state_dict(
        {prefix[name]: _transposed(name, value) for name, value in model.state_dict().items()}
    )
    return theirs.eval()


def _transposed(name: str, value: Tensor) -> Tensor:
    """Transpose the matrices that are `Conv1D` in transformers and `Linear` here."""
    names = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return value.t() if name.startswith("h.") and name.endswith(names) else value
