"""Attention without a softmax over scores: retention, and products of keys with values first."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt import Blocks, Split
from tests.helpers.expected_blocks import cut, rows
from tests.helpers.research_models.attention_kinds import in_heads
from tests.helpers.research_models.layers import FUSED
from tests.helpers.research_models.parts import DH, HIDDEN, D, H, T, by_head, with_bias


class Retention(nn.Module):
    """Scores that fade with distance, values of twice the size, a norm for each head, a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.c, self.e = nn.Linear(D, 4 * D, bias=False), nn.Linear(2 * D, D, bias=False)
        self.i, self.j = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        values, gate = self.c(x).chunk(2, dim=-1)
        q, k, v = in_heads(self.a(x)), in_heads(self.b(x)), in_heads(values)
        distance = torch.arange(T).unsqueeze(1) - torch.arange(T)
        fading = 0.9 ** distance.clamp(min=0) * (distance >= 0)
        y = F.rms_norm((q @ k.mT * fading) @ v, (2 * DH,)).transpose(1, 2).flatten(2)
        x = x + self.e(F.silu(gate) * y)
        return x + self.j(F.gelu(self.i(x)))


RETENTION = {
    "a.weight": by_head("query"),
    "b.weight": by_head("key"),
    "c.weight": cut(0, value=(2 * D, H), gate=(2 * D, H)),
    "e.weight": by_head("output", dim=1, size=2 * D),
    **with_bias("i", rows("mlp_in", HIDDEN)),
    **with_bias("j", rows("mlp_out", D)),
}


class LinearAttention(nn.Module):
    """Positive features of queries and keys; keys meet values first, and a sum divides."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (in_heads(y) for y in self.m(x).chunk(3, dim=-1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        both = torch.einsum("bhtd,bhte->bhde", k, v)
        total = torch.einsum("bhtd,bhd->bht", q, k.sum(dim=2))
        y = torch.einsum("bhtd,bhde->bhte", q, both) / total.unsqueeze(-1)
        return x + self.o(y.transpose(1, 2).flatten(2))


LINEAR = {
    "m.weight": FUSED,
    **with_bias("o", by_head("output", dim=1), whole_bias=True),
}


class Efficient(nn.Module):
    """A softmax of queries over features and of keys over tokens, stored value, key, query."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.k, self.q = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.t = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = in_heads(self.v(x)), in_heads(self.k(x)), in_heads(self.q(x))
        y = (a.mT @ b.softmax(dim=2)) @ c.softmax(dim=3).mT  # (B, H, DH, T)
        return x + self.t(y.permute(0, 3, 1, 2).flatten(2))


EFFICIENT = {
    "v.weight": by_head("value"),
    "k.weight": by_head("key"),
    "q.weight": by_head("query"),
    "t.weight": by_head("output", dim=1),
}


class Forgetting(nn.Module):
    """Scores that fade as fast as gates of each token say, as in the memory of an xLSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.o, self.z = (nn.Linear(D, n, bias=False) for n in (3 * D, D, D))
        self.f = nn.Linear(D, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (in_heads(y) for y in self.m(x).chunk(3, dim=-1))
        kept = F.logsigmoid(self.f(x)).mT.cumsum(dim=-1)  # (B, H, T)
        fading = (kept.unsqueeze(-1) - kept.unsqueeze(-2)).exp().tril()
        y = (q @ k.mT * fading) @ v
        return x + self.o(self.z(x).sigmoid() * y.transpose(1, 2).flatten(2))


FORGETTING = {
    "m.weight": FUSED,
    "o.weight": by_head("output", dim=1),
    "z.weight": by_head("gate"),
    "f.weight": by_head("gate", size=H),
    "f.bias": Blocks(("bias",), None, Split(0, (H,), (H,))),
}
