"""Hand-written models in the many styles of research code, and the blocks that each should have.

`RESEARCH[name]` is `(build, example, expected)`: no name in these models tells what a weight does,
and most would be refused without a forward pass.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt import Blocks, Split
from tests.helpers.expected_blocks import cut, rows, whole

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


class Letters(nn.Module):
    """Modules called q, k, v, o, heads called h, dropout everywhere."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = H
            self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
            self.a, self.b = nn.LayerNorm(D), nn.LayerNorm(D)
            self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)
            self.drop = nn.Dropout(0.2)

        def heads(self, x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, DH)).transpose(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            q, k, v = self.heads(self.q(y)), self.heads(self.k(y)), self.heads(self.v(y))
            p = self.drop(causal(q @ k.transpose(-2, -1) / DH**0.5).softmax(dim=-1))
            x = x + self.drop(self.o((p @ v).transpose(1, 2).flatten(2)))
            return x + self.drop(self.down(F.gelu(self.up(self.b(x)), approximate="tanh")))

    def __init__(self) -> None:
        super().__init__()
        self.e, self.where = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.last, self.scores = nn.LayerNorm(D), nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.e(ids) + self.where(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.scores(self.last(x))


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


LETTERS = {
    "e.weight": rows("embedding", V),
    "where.weight": rows("position", T),
    **norm("last"),
    **with_bias("scores", rows("head", V)),
    **{
        f"blocks.{layer}.{name}": blocks._replace(layer=layer)
        for layer in range(2)
        for name, blocks in {
            **with_bias("q", by_head("query")),
            **with_bias("k", by_head("key")),
            **with_bias("v", by_head("value")),
            **with_bias("o", by_head("output", dim=1), whole_bias=True),
            **norm("a"),
            **norm("b"),
            **with_bias("up", rows("mlp_in", HIDDEN)),
            **with_bias("down", rows("mlp_out", D)),
        }.items()
    },
}


class Einsum(nn.Module):
    """Parameters alone, einsum, its own RMS norm, tied logits and positions that are added."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.place = matrix(V, D), matrix(T + 2, D)
        self.g1, self.g2 = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))
        self.A, self.C, self.E = matrix(D, H, DH), matrix(D, H, DH), matrix(D, H, DH)
        self.a = nn.Parameter(torch.zeros(H, DH))
        self.M = matrix(H, DH, D)
        self.F, self.G, self.K = matrix(D, HIDDEN), matrix(D, HIDDEN), matrix(HIDDEN, D)

    def scaled(self, x: Tensor, gain: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-6) * gain

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table[ids] + self.place[: ids.shape[1]]
        y = self.scaled(x, self.g1)
        q = torch.einsum("btd,dhk->bthk", y, self.A) + self.a
        k, v = (torch.einsum("btd,dhk->bthk", y, w) for w in (self.C, self.E))
        p = causal(torch.einsum("bthk,bshk->bhts", q, k)).softmax(dim=-1)
        x = x + torch.einsum("bhts,bshk,hkd->btd", p, v, self.M)
        y = self.scaled(x, self.g2)
        x = x + (torch.sigmoid(y @ self.F) * (y @ self.F) * (y @ self.G)) @ self.K
        return x @ self.table.T


EINSUM = {
    "table": rows("embedding", V),
    "place": whole("position"),
    "g1": whole("norm"),
    "g2": whole("norm"),
    "A": by_head("query", 1, H),
    "C": by_head("key", 1, H),
    "E": by_head("value", 1, H),
    "a": Blocks(("bias",), None, Split(0, (H,), (H,))),
    "M": stack_of_heads("output", DH),
    "F": rows("mlp_gate", HIDDEN, dim=1),
    "G": rows("mlp_in", HIDDEN, dim=1),
    "K": rows("mlp_out", D, dim=1),
}


class Matrices(nn.Module):
    """One fused matrix on the right of `@`, and a gate fused after what it gates."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.b, self.U = matrix(D, 3 * D), nn.Parameter(torch.zeros(3 * D)), matrix(D, D)
        self.S, self.R = matrix(D, 2 * HIDDEN), matrix(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.W + self.b).unflatten(-1, (3, H, DH)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2) @ self.U
        inside, gate = (x @ self.S).chunk(2, dim=-1)
        return x + (inside * F.relu(gate)) @ self.R


MATRICES = {
    "W": cut(1, query=(D, H), key=(D, H), value=(D, H)),
    "b": Blocks(("bias",) * 3, None, Split(0, (D, D, D), (H, H, H))),
    "U": by_head("output"),
    "S": cut(1, mlp_in=(HIDDEN, HIDDEN), mlp_gate=(HIDDEN, HIDDEN)),
    "R": rows("mlp_out", D, dim=1),
}


class HeadByHead(nn.Module):
    """A list of heads, each with linear maps of its own, whose results are concatenated."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.query, self.value = (nn.Linear(D, DH, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            k, q = self.key(x), self.query(x)
            return causal(q @ k.transpose(-2, -1)).softmax(dim=-1) @ self.value(x)

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(self.Head() for _ in range(H))
        self.mix = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(torch.cat([head(x) for head in self.heads], dim=-1))


HEAD_BY_HEAD = {
    **{
        f"heads.{i}.{role}.weight": by_head(role, size=DH, heads=1)._replace(layer=i)
        for i in range(H)
        for role in ("key", "query", "value")
    },
    **with_bias("mix", by_head("output", dim=1), whole_bias=True),
}


class StackedHeads(nn.Module):
    """One matrix for each head, stacked, and a loop over the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (matrix(H, D, DH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for h in range(H):
            q, k, v = x @ self.one[h], x @ self.two[h], x @ self.three[h]
            total = total + (q @ k.mT).softmax(dim=-1) @ v @ self.four[h].T
        return total


STACKED_HEADS = {
    "one": stack_of_heads("query"),
    "two": stack_of_heads("key"),
    "three": stack_of_heads("value"),
    "four": stack_of_heads("output"),
}


class Interleaved(nn.Module):
    """Groups of two queries, a key and a value in one linear map; keys shared within a group."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(D, 2 * 4 * 3), nn.Linear(12, D)

    def forward(self, x: Tensor) -> Tensor:
        groups = self.into(x).view(B, T, 2, 4, 3).permute(0, 2, 3, 1, 4)  # (B, G, 4, T, 3)
        q = groups[:, :, :2].flatten(1, 2)
        k, v = (groups[:, :, i].repeat_interleave(2, dim=1) for i in (2, 3))
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.back(y.transpose(1, 2).flatten(2))


INTERLEAVED = {
    **with_bias("into", cut(0, repeat=2, query=(6, 2), key=(3, 1), value=(3, 1))),
    **with_bias("back", by_head("output", dim=1, size=12, heads=4), whole_bias=True),
}


class HeadsLast(nn.Module):
    """Heads as the last axis, so that the rows of a head lie apart."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.h, self.i = (nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).view(B, T, DH, H) for m in (self.f, self.g, self.h))
        p = torch.einsum("btkh,bskh->bhts", q, k).softmax(dim=-1)
        return x + self.i(torch.einsum("bhts,bskh->btkh", p, v).reshape(B, T, D))


def heads_last(role: str, dim: int = 0) -> Blocks:
    return Blocks((role,), None, Split(dim, (H,), (H,), repeat=DH, pooled=True))


HEADS_LAST = {
    "f.weight": heads_last("query"),
    "g.weight": heads_last("key"),
    "h.weight": heads_last("value"),
    "i.weight": heads_last("output", dim=1),
}


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


class Columns(nn.Module):
    """Tokens as columns, `W @ x`, no batch, one head, and a softmax written out."""

    def __init__(self) -> None:
        super().__init__()
        self.P, self.Q, self.R, self.S = (matrix(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # (D, T)
        k, q, v = self.P @ x, self.Q @ x, self.R @ x
        weights = (k.T @ q / D**0.5).exp()  # (keys, queries)
        return x + self.S @ (v @ (weights / weights.sum(dim=0, keepdim=True)))


COLUMNS = {
    "P": by_head("key", heads=1),
    "Q": by_head("query", heads=1),
    "R": by_head("value", heads=1),
    "S": by_head("output", dim=1, heads=1),
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


class Convolutions(nn.Module):
    """Attention over pixels by 1x1 convolutions, on patches of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, D, 2, stride=2)
        self.c, self.d = nn.Conv2d(D, 3 * D, 1, bias=False), nn.Conv2d(D, D, 1)
        self.cls = nn.Linear(D, 7)

    def forward(self, image: Tensor) -> Tensor:  # (B, 3, 4, 4)
        x = self.patches(image)
        q, k, v = self.c(x).reshape(B, 3, H, DH, 4).unbind(1)  # (B, H, DH, pixels)
        p = (q.mT @ k).softmax(dim=-1)
        x = x + self.d((v @ p.mT).reshape(B, D, 2, 2))
        return self.cls(x.mean(dim=(2, 3)))


CONVOLUTIONS = {
    "patches.weight": whole("embedding"),
    "patches.bias": whole("bias"),
    "c.weight": cut(0, query=(D, H), key=(D, H), value=(D, H)),
    **with_bias("d", by_head("output", dim=1), whole_bias=True),
    **with_bias("cls", rows("head", 7)),
}


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


class Experts(nn.Module):
    """Attention of one head, then two of four experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.choose = nn.Linear(D, 4, bias=False)
        self.first, self.second = matrix(4, D, 2 * HIDDEN), matrix(4, HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.w(x).chunk(3, dim=-1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v))
        flat = x.flatten(0, 1)
        weights, chosen = self.choose(flat).softmax(dim=-1).topk(2)
        total = torch.zeros_like(flat)
        for expert in range(4):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, inside = (flat[token] @ self.first[expert]).chunk(2, dim=-1)
            y = (F.silu(gate) * inside) @ self.second[expert]
            total = total.index_add(0, token, y * weights[token, place, None])
        return x + total.view_as(x)


EXPERTS = {
    "w.weight": cut(0, query=(D, 1), key=(D, 1), value=(D, 1)),
    "o.weight": by_head("output", dim=1, heads=1),
    "choose.weight": rows("router", 4),
    "first": Blocks(("mlp_gate", "mlp_in"), None, Split(2, (HIDDEN,) * 2, (HIDDEN,) * 2, stack=4)),
    "second": Blocks(("mlp_out",), None, Split(2, (D,), (D,), stack=4)),
}


def memory() -> tuple[Tensor, Tensor]:
    return features(), features().flip(1)[:, :3]


def image() -> Tensor:
    return torch.randn(B, 3, 4, 4, generator=torch.Generator().manual_seed(0))


RESEARCH = {
    "letters": (Letters, tokens, LETTERS),
    "einsum": (Einsum, tokens, EINSUM),
    "matrices": (Matrices, features, MATRICES),
    "head-by-head": (HeadByHead, features, HEAD_BY_HEAD),
    "stacked-heads": (StackedHeads, features, STACKED_HEADS),
    "interleaved": (Interleaved, features, INTERLEAVED),
    "heads-last": (HeadsLast, features, HEADS_LAST),
    "rotary-grouped": (RotaryGrouped, features, ROTARY_GROUPED),
    "columns": (Columns, lambda: features()[0].T, COLUMNS),
    "cross-attending": (CrossAttending, memory, CROSS_ATTENDING),
    "convolutions": (Convolutions, image, CONVOLUTIONS),
    "parametrized": (Parametrized, features, PARAMETRIZED),
    "multi-query": (MultiQuery, features, MULTI_QUERY),
    "latent": (Latent, features, LATENT),
    "gated": (Gated, features, GATED),
    "convolved": (Convolved, features, CONVOLVED),
    "experts": (Experts, features, EXPERTS),
}


def research_model(name: str) -> nn.Module:
    """The seeded model of that name, in training mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return RESEARCH[name][0]()
