"""Attention of many kinds: grouped, latent, gated, convolved, talking heads and others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.expected_blocks import cut, rows, whole
from tests.helpers.research_models.parts import (
    DH,
    HIDDEN,
    B,
    D,
    H,
    T,
    by_head,
    causal,
    matrix,
    norm,
    with_bias,
)


class RotaryGrouped(nn.Module):
    """Grouped queries, rotary positions, a norm of queries and keys over all heads at once."""

    def __init__(self) -> None:
        super().__init__()
        self.p1, self.p2, self.p3 = nn.Linear(D, 24), nn.Linear(D, 12), nn.Linear(D, 12)
        self.n1, self.n2, self.p4 = nn.RMSNorm(24), nn.RMSNorm(12), nn.Linear(24, D)

    def turn(self, x: Tensor) -> Tensor:  # (B, H, T, 4)
        angle = torch.arange(T).unsqueeze(1) / 10.0 ** torch.arange(2)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        return x * cos + torch.cat([-x[..., 2:], x[..., :2]], dim=-1) * sin

    def forward(self, x: Tensor) -> Tensor:
        q = self.turn(self.n1(self.p1(x)).view(B, T, 6, 4).transpose(1, 2))
        k = self.turn(self.n2(self.p2(x)).view(B, T, 3, 4).transpose(1, 2))
        v = self.p3(x).view(B, T, 3, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.p4(y.transpose(1, 2).flatten(2))


ROTARY_GROUPED = {
    **with_bias("p1", by_head("query", size=24, heads=6)),
    **with_bias("p2", by_head("key")),
    **with_bias("p3", by_head("value")),
    "n1.weight": whole("norm"),
    "n2.weight": whole("norm"),
    **with_bias("p4", by_head("output", dim=1, size=24, heads=6), whole_bias=True),
}


class CrossAttending(nn.Module):
    """Attends to a memory by keys and values of one linear map, with norms after the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.know, self.tell = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.z, self.fc = (
            nn.LayerNorm(D),
            nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, D)),
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q = self.ask(x).view(B, T, H, DH).transpose(1, 2)
        k, v = self.know(memory).view(B, -1, 2, H, DH).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.z(x + self.tell(y))
        return x + self.fc(x)


CROSS_ATTENDING = {
    **with_bias("ask", by_head("query")),
    **with_bias("know", cut(0, key=(D, H), value=(D, H))),
    **with_bias("tell", by_head("output", dim=1), whole_bias=True),
    **norm("z"),
    **{f"fc.0.{n}": b._replace(layer=0) for n, b in with_bias("", rows("mlp_in", 8)).items()},
    **{f"fc.2.{n}": b._replace(layer=2) for n, b in with_bias("", rows("mlp_out", D)).items()},
}
CROSS_ATTENDING = {name.replace("..", "."): blocks for name, blocks in CROSS_ATTENDING.items()}


class Parametrized(nn.Module):
    """Sigmoid attention whose query has weight norm, and whose key is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.s, self.t, self.u, self.w = (nn.Linear(D, D, bias=False) for _ in range(4))
        nn.utils.parametrizations.weight_norm(self.s)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.s(x), F.linear(x, self.t.weight * 0.5)
        q, k, v = (y.view(B, T, H, DH).transpose(1, 2) for y in (q, k, self.u(x)))
        p = torch.sigmoid(q @ k.transpose(-2, -1))
        return x + self.w((p @ v).transpose(1, 2).flatten(2))


PARAMETRIZED = {
    "s.parametrizations.weight.original0": by_head("query"),
    "s.parametrizations.weight.original1": by_head("query"),
    "t.weight": by_head("key"),
    "u.weight": by_head("value"),
    "w.weight": by_head("output", dim=1),
}


class MultiQuery(nn.Module):
    """All query heads meet one key head in one product, without copies of the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.x1, self.x2 = nn.Linear(D, D + 2 * DH), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.x1(x).split([D, DH, DH], dim=-1)
        scores = q.reshape(B, T * H, DH) @ k.mT  # (B, T * H, T)
        y = scores.softmax(dim=-1) @ v
        return x + self.x2(y.view(B, T, D))


MULTI_QUERY = {
    **with_bias("x1", cut(0, query=(D, H), key=(DH, 1), value=(DH, 1))),
    **with_bias("x2", by_head("output", dim=1), whole_bias=True),
}


class Latent(nn.Module):
    """Queries, keys and values through narrow maps; a part of each key is shared by all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qa, self.qb = nn.Linear(D, 5, bias=False), nn.Linear(5, H * 6, bias=False)
        self.kva, self.kvb = nn.Linear(D, 7 + 2, bias=False), nn.Linear(7, H * 9, bias=False)
        self.n, self.out = nn.RMSNorm(7), nn.Linear(H * 5, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.qb(self.qa(x)).unflatten(-1, (H, 6)).transpose(1, 2)
        narrow, shared = self.kva(x).split([7, 2], dim=-1)
        k, v = self.kvb(self.n(narrow)).unflatten(-1, (H, 9)).transpose(1, 2).split([4, 5], dim=-1)
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, H, -1, -1)], dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


LATENT = {
    "qa.weight": whole("query"),
    "qb.weight": by_head("query", size=H * 6),
    "kva.weight": cut(0, value=(7, 1), key=(2, 1)),
    "kvb.weight": cut(0, repeat=H, key=(4, 1), value=(5, 1)),
    "n.weight": whole("norm"),
    "out.weight": by_head("output", dim=1, size=H * 5),
}


class Gated(nn.Module):
    """A gate for each head beside its query, layer norms over all heads, and `F.glu`."""

    def __init__(self) -> None:
        super().__init__()
        self.qg, self.two, self.back = nn.Linear(D, 2 * D), nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.nq, self.nk = nn.LayerNorm(D), nn.LayerNorm(D)
        self.wide, self.thin = nn.Linear(D, 2 * HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.qg(x).view(B, T, H, 2, DH).unbind(3)
        k, v = self.two(x).chunk(2, dim=-1)
        q, k = self.nq(q.flatten(2)), self.nk(k)
        q, k, v = (y.view(B, T, H, DH).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.back((y * gate.sigmoid()).flatten(2))
        return x + self.thin(F.glu(self.wide(x)))


GATED = {
    **with_bias("qg", cut(0, repeat=H, query=(DH, 1), gate=(DH, 1))),
    **with_bias("two", cut(0, key=(D, H), value=(D, H))),
    **norm("nq"),
    **norm("nk"),
    **with_bias("back", by_head("output", dim=1), whole_bias=True),
    **with_bias("wide", cut(0, mlp_in=(HIDDEN, HIDDEN), mlp_gate=(HIDDEN, HIDDEN))),
    **with_bias("thin", rows("mlp_out", D)),
}


class Convolved(nn.Module):
    """A short convolution over time between each projection and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.z = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.mixing = nn.Conv1d(3 * D, 3 * D, 3, padding=2, groups=3 * D)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mixing(self.m(x).mT)[..., :T].mT
        q, k, v = mixed.unflatten(-1, (3, H, DH)).permute(2, 0, 3, 1, 4)
        return x + self.z(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


CONVOLVED = {
    "m.weight": cut(0, query=(D, H), key=(D, H), value=(D, H)),
    "z.weight": by_head("output", dim=1),
    "mixing.weight": whole("other"),
    "mixing.bias": whole("bias"),
}


def in_heads(x: Tensor, heads: int = H) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


FUSED = cut(0, query=(D, H), key=(D, H), value=(D, H))


class Differential(nn.Module):
    """The difference of two attentions, and a norm of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 2 * D, bias=False), nn.Linear(D, 2 * D, bias=False)
        self.c, self.d = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.much, self.g = nn.Parameter(torch.tensor(0.3)), nn.RMSNorm(DH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = in_heads(self.a(x), 2 * H), in_heads(self.b(x), 2 * H), in_heads(self.c(x))
        p = causal(q @ k.mT / DH**0.5).softmax(dim=-1).view(B, H, 2, T, T)
        y = self.g((p[:, :, 0] - self.much * p[:, :, 1]) @ v)
        return x + self.d(y.transpose(1, 2).flatten(2))


DIFFERENTIAL = {
    "a.weight": by_head("query", size=2 * D, heads=2 * H),
    "b.weight": by_head("key", size=2 * D, heads=2 * H),
    "c.weight": by_head("value"),
    "d.weight": by_head("output", dim=1),
    "much": whole("norm"),
    "g.weight": whole("norm"),
}


class TalkingHeads(nn.Module):
    """Heads that are mixed before and after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.z = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.before, self.after = matrix(H, H), matrix(H, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (in_heads(y) for y in self.m(x).chunk(3, dim=-1))
        scores = torch.einsum("bhts,hg->bgts", q @ k.mT, self.before)
        p = torch.einsum("bhts,hg->bgts", causal(scores).softmax(dim=-1), self.after)
        return x + self.z((p @ v).transpose(1, 2).flatten(2))


TALKING_HEADS = {
    "m.weight": FUSED,
    "z.weight": by_head("output", dim=1),
    "before": whole("other"),
    "after": whole("other"),
}


class ComplexRotary(nn.Module):
    """Positions as rotations by complex numbers, and two keys for three queries."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.j = nn.Linear(D, D + 4 * DH, bias=False), nn.Linear(D, D, bias=False)

    def turn(self, x: Tensor) -> Tensor:  # (B, heads, T, DH)
        angles = torch.outer(torch.arange(T).float(), torch.tensor([1.0, 0.1]))
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.i(x).split([D, 2 * DH, 2 * DH], dim=-1)
        q, k, v = self.turn(in_heads(q)), self.turn(in_heads(k, 2)), in_heads(v, 2)
        k, v = (y[:, [0, 0, 1]] for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.j(y.transpose(1, 2).flatten(2))


COMPLEX_ROTARY = {
    "i.weight": cut(0, query=(D, 3), key=(2 * DH, 2), value=(2 * DH, 2)),
    "j.weight": by_head("output", dim=1),
}


class SlidingWindow(nn.Module):
    """Each token sees three, by `unfold` and einsum, with a bias for every distance and head."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.near = nn.Embedding(3, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (in_heads(y) for y in self.w(x).chunk(3, dim=-1))
        k, v = (F.pad(y, (0, 0, 2, 0)).unfold(2, 3, 1) for y in (k, v))  # (B, H, T, DH, 3)
        bias = self.near(torch.arange(3)).T.unsqueeze(1)  # (H, 1, 3)
        p = (torch.einsum("bhtd,bhtdw->bhtw", q, k) + bias).softmax(dim=-1)
        y = torch.einsum("bhtw,bhtdw->bhtd", p, v)
        return x + self.o(y.transpose(1, 2).flatten(2))


SLIDING_WINDOW = {
    "w.weight": FUSED,
    "o.weight": by_head("output", dim=1),
    "near.weight": rows("position", 3),
}


class GatedUnit(nn.Module):
    """One head of squared rectified scores; queries and keys are one map, scaled and shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.p, self.o = nn.LayerNorm(D), nn.Linear(D, 46), nn.Linear(HIDDEN, D)
        self.stretch, self.move = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        gate, v, both = F.silu(self.p(self.n(x))).split([HIDDEN, HIDDEN, 6], dim=-1)
        q, k = (both.unsqueeze(2) * self.stretch + self.move).unbind(2)
        return x + self.o(gate * (F.relu(q @ k.mT).square() @ v))


GATED_UNIT = {
    **norm("n"),
    **with_bias("p", cut(0, gate=(HIDDEN, 1), value=(HIDDEN, 1), query=(6, 1))),
    **with_bias("o", by_head("output", dim=1, size=HIDDEN, heads=1), whole_bias=True),
    "stretch": whole("norm"),
    "move": whole("bias"),
}


class LearnedKeys(nn.Module):
    """A learned key and value before those of tokens, unit queries and keys, a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(D, D, bias=False), nn.Linear(D, 2 * DH, bias=False)
        self.none, self.h = matrix(2, DH), nn.Linear(D, D, bias=False)
        self.sharp = nn.Parameter(torch.tensor(8.0))

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = in_heads(self.f(x)), self.g(x).chunk(2, dim=-1)
        k, v = (torch.cat([n.expand(B, 1, DH), y], dim=1) for n, y in zip(self.none, (k, v)))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        p = (torch.einsum("bhid,bjd->bhij", q, k) * self.sharp).softmax(dim=-1)
        y = torch.einsum("bhij,bjd->bhid", p, v)
        return x + self.h(y.transpose(1, 2).flatten(2))


LEARNED_KEYS = {
    "f.weight": by_head("query"),
    "g.weight": cut(0, key=(DH, 1), value=(DH, 1)),
    "h.weight": by_head("output", dim=1),
    "none": whole("bias"),
    "sharp": whole("norm"),
}
