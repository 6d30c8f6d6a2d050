"""Whole models, and layers of many kinds: experts, parallel MLPs, depths, images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt import Blocks, Split
from tests.helpers.expected_blocks import cut, rows, whole
from tests.helpers.research_models.parts import (
    DH,
    HIDDEN,
    B,
    D,
    H,
    T,
    V,
    by_head,
    causal,
    matrix,
    norm,
    with_bias,
)


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


class Attending(nn.Module):
    """Attention of fused queries, keys and values, for the layers below."""

    def attend(self, fused: Tensor) -> Tensor:
        q, k, v = fused.unflatten(-1, (3, H, DH)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).flatten(2)


FUSED = cut(0, query=(D, H), key=(D, H), value=(D, H))


class Parallel(Attending):
    """Attention and MLP of the same input, added up."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.w1, self.w2 = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.w3, self.w4 = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.n(x)
        return x + self.w2(self.attend(self.w1(y))) + self.w4(F.gelu(self.w3(y)))


PARALLEL = {
    **norm("n"),
    **with_bias("w1", FUSED),
    **with_bias("w2", by_head("output", dim=1), whole_bias=True),
    **with_bias("w3", rows("mlp_in", HIDDEN)),
    **with_bias("w4", rows("mlp_out", D)),
}


class ParallelInOne(Attending):
    """One map into attention and MLP, and one out of both."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(D, 3 * D + HIDDEN)
        self.back = nn.Linear(D + HIDDEN, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        fused, hidden = self.into(x).split([3 * D, HIDDEN], dim=-1)
        return x + self.back(torch.cat([self.attend(fused), F.relu(hidden)], dim=-1))


PARALLEL_IN_ONE = {
    **with_bias("into", cut(0, query=(D, H), key=(D, H), value=(D, H), mlp_in=(HIDDEN, HIDDEN))),
    "back.weight": cut(1, output=(D, H), mlp_out=(HIDDEN, 1)),
}


class OneOutput(Attending):
    """A gated MLP of its own, before attention in one map out of both."""

    def __init__(self) -> None:
        super().__init__()
        self.x1, self.x2 = nn.Linear(D, 3 * D), nn.Linear(D, 2 * HIDDEN)
        self.x3 = nn.Linear(HIDDEN + D, D)

    def forward(self, x: Tensor) -> Tensor:
        gate, inside = self.x2(x).chunk(2, dim=-1)
        return x + self.x3(torch.cat([F.silu(gate) * inside, self.attend(self.x1(x))], dim=-1))


ONE_OUTPUT = {
    **with_bias("x1", FUSED),
    **with_bias("x2", cut(0, mlp_gate=(HIDDEN, HIDDEN), mlp_in=(HIDDEN, HIDDEN))),
    **with_bias("x3", cut(1, mlp_out=(HIDDEN, 1), output=(D, H)), whole_bias=True),
}


def inside(prefix: str, layer: int | None = None) -> dict[str, Blocks]:
    """The blocks of `Letters.Block` as a part of another model."""
    start = "blocks.0."
    own = {n.removeprefix(start): b for n, b in LETTERS.items() if n.startswith(start)}
    return {f"{prefix}.{name}": blocks._replace(layer=layer) for name, blocks in own.items()}


class Universal(nn.Module):
    """One layer, applied three times, and logits by the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.step = nn.Embedding(V, D), Letters.Block()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.e(ids)
        for _ in range(3):
            x = self.step(x)
        return x @ self.e.weight.T


UNIVERSAL = {"e.weight": rows("embedding", V), **inside("step")}


class Depths(nn.Module):
    """A layer that only the three tokens of the largest scores pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.pick = Letters.Block(), nn.Linear(D, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.pick(x).squeeze(-1)
        chosen = scores.topk(3, dim=1).indices.sort(dim=1).values
        where = chosen.unsqueeze(-1).expand(-1, -1, D)
        taken = x.gather(1, where)
        weight = scores.gather(1, chosen).sigmoid().unsqueeze(-1)
        return x.scatter_add(1, where, weight * (self.inner(taken) - taken))


DEPTHS = {**inside("inner"), "pick.weight": whole("router")}


class Normalized(Attending):
    """Weights and activations of unit norm, and learned scales, as nGPT has them."""

    def __init__(self) -> None:
        super().__init__()
        self.E, self.W, self.O = matrix(V, D), matrix(3 * D, D), matrix(D, D)
        self.U, self.G, self.R = matrix(HIDDEN, D), matrix(HIDDEN, D), matrix(D, HIDDEN)
        self.u = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, ids: Tensor) -> Tensor:
        unit = F.normalize
        x = unit(unit(self.E, dim=-1)[ids], dim=-1)
        y = self.attend(F.linear(x, unit(self.W, dim=-1)))
        x = unit(x + 0.1 * (unit(F.linear(y, unit(self.O, dim=0)), dim=-1) - x), dim=-1)
        inner, gate = (F.linear(x, unit(w, dim=-1)) * self.u for w in (self.U, self.G))
        y = F.linear(F.silu(gate) * inner, unit(self.R, dim=0))
        return unit(x + 0.1 * (unit(y, dim=-1) - x), dim=-1) @ unit(self.E, dim=-1).T


NORMALIZED = {
    "E": rows("embedding", V),
    "W": FUSED,
    "O": by_head("output", dim=1),
    "U": rows("mlp_in", HIDDEN),
    "G": rows("mlp_gate", HIDDEN),
    "R": rows("mlp_out", D),
    "u": whole("norm"),
}


class Latents(nn.Module):
    """Learned tokens ask a sequence of another width, and are averaged for the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.x1 = matrix(4, D), nn.Linear(D, D, bias=False)
        self.x2, self.x3 = nn.Linear(7, 2 * D, bias=False), nn.Linear(D, D, bias=False)
        self.c = nn.Linear(D, 5)

    def forward(self, sequence: Tensor) -> Tensor:  # (B, T, 7)
        x = self.few.expand(B, 4, D)
        q = self.x1(x).unflatten(-1, (H, DH)).transpose(1, 2)
        k, v = self.x2(sequence).unflatten(-1, (2, H, DH)).permute(2, 0, 3, 1, 4)
        x = x + self.x3(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.c(x.mean(dim=1))


LATENTS = {
    "few": whole("embedding"),
    "x1.weight": by_head("query"),
    "x2.weight": cut(0, key=(D, H), value=(D, H)),
    "x3.weight": by_head("output", dim=1),
    **with_bias("c", rows("head", 5)),
}


class Patches(nn.Module):
    """Patches by `unfold` and a linear map, a class token, added positions, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.first, self.add = nn.Linear(12, D), matrix(1, 1, D), matrix(1, 5, D)
        self.layer, self.end = Letters.Block(), nn.Linear(D, 7)

    def forward(self, image: Tensor) -> Tensor:  # (B, 3, 4, 4)
        patches = image.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).reshape(B, 4, 12)
        x = torch.cat([self.first.expand(B, 1, D), self.cut(patches)], dim=1) + self.add
        return self.end(self.layer(x)[:, 0])


PATCHES = {
    **with_bias("cut", rows("embedding", D)),
    "first": whole("embedding"),
    "add": whole("position"),
    **inside("layer"),
    **with_bias("end", rows("head", 7)),
}


class SoftExperts(Attending):
    """Experts of weighted means of tokens: a softmax over tokens, and one over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.s, self.u, self.v = matrix(D, 2), matrix(2, D, HIDDEN), matrix(2, HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.w2(self.attend(self.w1(x)))
        scores = x @ self.s
        means = torch.einsum("btd,bte->bed", x, scores.softmax(dim=1))
        y = torch.einsum("bed,edf->bef", means, self.u)
        y = torch.einsum("bef,efd->bed", F.gelu(y), self.v)
        return x + torch.einsum("bed,bte->btd", y, scores.softmax(dim=2))


SOFT_EXPERTS = {
    "w1.weight": FUSED,
    "w2.weight": by_head("output", dim=1),
    "s": rows("router", 2, dim=1),
    "u": Blocks(("mlp_in",), None, Split(2, (HIDDEN,), (HIDDEN,), stack=2)),
    "v": Blocks(("mlp_out",), None, Split(2, (D,), (D,), stack=2)),
}
