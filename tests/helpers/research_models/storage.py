"""The same attention with its weights stored in many ways."""

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
    stack_of_heads,
    with_bias,
)


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
        f"heads.{i}.{role}.weight": whole(role)
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


class Scanned(nn.Module):
    """Weights of all layers in one parameter each, and a loop over them."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.O, self.G = (
            matrix(3, D, 3 * D),
            matrix(3, D, D),
            nn.Parameter(torch.ones(3, D)),
        )
        self.U, self.E = matrix(3, D, HIDDEN), matrix(3, HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        for w, o, g, u, e in zip(self.W, self.O, self.G, self.U, self.E):
            y = F.layer_norm(x, (D,)) * g
            q, k, v = (y @ w).view(B, T, 3, H, DH).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + y.transpose(1, 2).flatten(2) @ o
            x = x + F.gelu(x @ u) @ e
        return x


def in_stack(blocks: Blocks) -> Blocks:
    return blocks._replace(split=blocks.split._replace(stack=3))


SCANNED = {
    "W": in_stack(cut(2, query=(D, H), key=(D, H), value=(D, H))),
    "O": in_stack(by_head("output", dim=1)),
    "G": whole("norm"),
    "U": in_stack(rows("mlp_in", HIDDEN, dim=2)),
    "E": in_stack(rows("mlp_out", D, dim=2)),
}


class Mapped(nn.Module):
    """One head, mapped over the weights of all heads by `torch.func.vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three, self.four = (
            *(matrix(H, D, DH) for _ in range(3)),
            matrix(H, DH, D),
        )

    def forward(self, x: Tensor) -> Tensor:
        def head(q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
            return ((x @ q) @ (x @ k).mT).softmax(dim=-1) @ (x @ v) @ o

        return x + torch.func.vmap(head)(self.one, self.two, self.three, self.four).sum(dim=0)


MAPPED = {**STACKED_HEADS, "four": stack_of_heads("output", DH)}


class InOneStack(nn.Module):
    """Queries, keys and values stacked, once as matrices and once by head; then all four maps."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.V = matrix(3, D, D), matrix(D, D)
        self.X, self.Y = matrix(3, H, DH, D), matrix(H, DH, D)
        self.Z = matrix(4, D, D)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(*((x @ w).unflatten(-1, (H, DH)).transpose(1, 2) for w in self.W))
        x = x + y.transpose(1, 2).flatten(2) @ self.V
        y = self.attend(*torch.einsum("btd,chkd->cbhtk", x, self.X))
        x = x + torch.einsum("bhtk,hkd->btd", y, self.Y)
        *into, out = self.Z
        y = self.attend(*(F.linear(x, w).unflatten(-1, (H, DH)).transpose(1, 2) for w in into))
        return x + F.linear(y.transpose(1, 2).flatten(2), out)


QKV = ("query", "key", "value")
IN_ONE_STACK = {
    "W": Blocks(QKV, None, Split(2, (D,), (H,), stack=3)),
    "V": by_head("output"),
    "X": Blocks(QKV, None, Split(1, (H,), (H,), stack=3)),
    "Y": stack_of_heads("output", DH),
    "Z": Blocks((*QKV, "output"), None, Split(1, (D,), (1,), stack=4)),
}
