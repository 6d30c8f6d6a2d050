"""What hand-written models share: sizes, inputs, and words for the blocks they should have."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from blockopt import Blocks, Split
from tests.helpers.expected_blocks import cut, whole

B, T, D, V, H = 2, 5, 12, 17, 3
DH, HIDDEN = D // H, 20


def tokens() -> Tensor:
    return torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))


def features() -> Tensor:
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(0))


def causal(scores: Tensor) -> Tensor:
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -torch.inf)


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / math.sqrt(shape[0]))


def memory() -> tuple[Tensor, Tensor]:
    return features(), features().flip(1)[:, :3]


def image() -> Tensor:
    return torch.randn(B, 3, 4, 4, generator=torch.Generator().manual_seed(0))


def by_head(role: str, dim: int = 0, size: int = D, heads: int = H) -> Blocks:
    return cut(dim, **{role: (size, heads)})


def stack_of_heads(role: str, size: int = D) -> Blocks:
    return Blocks((role,), None, Split(1, (size,), (1,), stack=H))


def with_bias(name: str, weight: Blocks, *, whole_bias: bool = False) -> dict[str, Blocks]:
    roles = ("bias",) * len(weight.roles)
    bias = whole("bias") if whole_bias else Blocks(roles, None, weight.split._replace(dim=0))
    return {f"{name}.weight": weight, f"{name}.bias": bias}


def norm(name: str) -> dict[str, Blocks]:
    return {f"{name}.weight": whole("norm"), f"{name}.bias": whole("norm")}
