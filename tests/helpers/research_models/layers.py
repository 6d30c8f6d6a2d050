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
