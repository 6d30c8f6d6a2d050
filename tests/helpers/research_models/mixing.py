"""Tokens and channels that are mixed otherwise than by attention alone, and convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.expected_blocks import cut, rows, whole
from tests.helpers.research_models.attention_kinds import in_heads
from tests.helpers.research_models.layers import FUSED, Attending
from tests.helpers.research_models.parts import DH, HIDDEN, B, D, H, T, by_head, matrix, norm


class FewTokens(nn.Module):
    """Keys and values of three mixtures of tokens, as in the Linformer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.e, self.f = matrix(T, 3), matrix(T, 3)

    def forward(self, x: Tensor) -> Tensor:
        k = torch.einsum("btd,tn->bnd", self.b(x), self.e)
        v = torch.einsum("btd,tn->bnd", self.c(x), self.f)
        y = F.scaled_dot_product_attention(in_heads(self.a(x)), in_heads(k), in_heads(v))
        return x + self.d(y.transpose(1, 2).flatten(2))


FEW_TOKENS = {
    "a.weight": by_head("query"),
    "b.weight": by_head("key"),
    "c.weight": by_head("value"),
    "d.weight": by_head("output", dim=1),
    "e": whole("other"),
    "f": whole("other"),
}


class Channels(nn.Module):
    """Attention among the channels of a head, whose features are tokens, as in XCiT."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.s = nn.Parameter(torch.ones(H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (in_heads(y).mT for y in self.m(x).chunk(3, dim=-1))  # (B, H, DH, T)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        y = (q @ k.mT * self.s).softmax(dim=-1) @ v
        return x + self.o(y.permute(0, 3, 1, 2).flatten(2))


CHANNELS = {"m.weight": FUSED, "o.weight": by_head("output", dim=1), "s": whole("norm")}


class Pixels(nn.Module):
    """Convolutions over three points and their residual, and attention by others over one.

    Query, key and value of each head are stored in turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv1d(D, D, 1, bias=False)
        self.x, self.y = (nn.Conv1d(D, D, 3, padding=1, bias=False) for _ in range(2))
        self.g, self.w = nn.GroupNorm(1, D), nn.Conv1d(D, 3 * D, 1, bias=False)
        self.z = nn.Conv1d(D, D, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        x = self.into(x.mT)
        x = x + self.y(F.relu(self.x(x)))
        q, k, v = (y.mT for y in self.w(self.g(x)).unflatten(1, (H, 3 * DH)).split(DH, dim=2))
        return x + self.z(F.scaled_dot_product_attention(q, k, v).mT.flatten(1, 2))


PIXELS = {
    "into.weight": whole("embedding"),
    "x.weight": whole("other"),
    "y.weight": whole("other"),
    **norm("g"),
    "w.weight": cut(0, repeat=H, query=(DH, 1), key=(DH, 1), value=(DH, 1)),
    "z.weight": by_head("output", dim=1),
}


class HardlyTied(nn.Module):
    """A short convolution of which some taps are almost zero, and shared keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.Linear(D, D + 2 * DH, bias=False)
        self.c = nn.Conv1d(D + 2 * DH, D + 2 * DH, 3, padding=2, groups=D + 2 * DH)
        with torch.no_grad():
            self.c.weight[::3, 0, 0] = 1e-5
        self.o, self.u, self.d = nn.Linear(D, D), nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c(self.m(x).mT)[..., :T].mT.split([D, DH, DH], dim=-1)
        k, v = (y.unsqueeze(1).expand(-1, H, -1, -1) for y in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(in_heads(q), k, v).transpose(1, 2).flatten(2))
        return x + self.d(F.gelu(self.u(x)))


HARDLY_TIED = {
    "m.weight": cut(0, query=(D, H), key=(DH, 1), value=(DH, 1)),
    "c.weight": whole("other"),
    "o.weight": by_head("output", dim=1),
    "u.weight": rows("mlp_in", HIDDEN),
    "d.weight": rows("mlp_out", D),
    **{f"{name}.bias": whole("bias") for name in "co"},
    "u.bias": cut(0, bias=(HIDDEN, HIDDEN)),
    "d.bias": cut(0, bias=(D, D)),
}


class Neighbours(Attending):
    """Hidden units of an MLP that take those of neighbouring tokens, by a convolution of each."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.f, self.g = nn.Linear(D, HIDDEN, bias=False), nn.Linear(HIDDEN, D, bias=False)
        self.c = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1, groups=HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.attend(self.m(x)))
        return x + self.g(F.gelu(self.c(self.f(x).mT).mT))


NEIGHBOURS = {
    "m.weight": FUSED,
    "o.weight": by_head("output", dim=1),
    "f.weight": rows("mlp_in", HIDDEN),
    "g.weight": rows("mlp_out", D),
    "c.weight": whole("other"),
}


class Slots(nn.Module):
    """Slot attention: a softmax over queries, by which tokens choose, then a mean over keys."""

    def __init__(self) -> None:
        super().__init__()
        self.s = matrix(1, 4, D)
        self.x1, self.x2, self.x3 = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.x4 = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        slots, k, v = self.s.expand(B, 4, D), self.x1(x), self.x3(x)
        for _ in range(2):
            p = (k @ self.x2(F.layer_norm(slots, (D,))).mT).softmax(dim=-1) + 1e-8  # (B, T, 4)
            slots = slots + self.x4((p / p.sum(dim=1, keepdim=True)).mT @ v)
        return slots


SLOTS = {
    "s": whole("embedding"),
    "x1.weight": by_head("key", heads=1),
    "x2.weight": by_head("query", heads=1),
    "x3.weight": by_head("value", heads=1),
    "x4.weight": by_head("output", dim=1, heads=1),
}
