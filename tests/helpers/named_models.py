"""Layers with names in common use, stored or put together in ways that names alone may mislead.

`NAMED[name]` builds a small language model of two such layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, H, V, HIDDEN = 24, 4, 31, 40


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def in_heads(x: Tensor, heads: int = H) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2)


class InputFirst(nn.Module):
    """A linear map of a user's own, stored input first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class OutputFirst(nn.Module):
    """A linear map of a user's own, whose weight has a name of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("oi,...i->...o", self.W, x)


class Attn(nn.Module):
    def __init__(self, kind: Callable[[int, int], nn.Module] = linear) -> None:
        super().__init__()
        self.n_head = H
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (kind(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o_proj(
            attend(*(in_heads(m(x)) for m in (self.q_proj, self.k_proj, self.v_proj)))
        )


class FeedForward(nn.Module):
    def __init__(self, kind: Callable[[int, int], nn.Module] = linear) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = kind(D, HIDDEN), kind(HIDDEN, D), kind(D, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Latent(nn.Module):
    """DeepSeek's latent attention with the names of its paper."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads = H
        self.W_dq, self.W_uq, self.W_qr = linear(D, 10), linear(10, H * 8), linear(10, H * 4)
        self.W_dkv, self.W_uk, self.W_uv = linear(D, 12), linear(12, H * 8), linear(12, H * 5)
        self.W_kr, self.W_o = linear(D, 4), linear(H * 5, D)

    def forward(self, x: Tensor) -> Tensor:
        queries, latent = self.W_dq(x), self.W_dkv(x)
        q = torch.cat([in_heads(self.W_uq(queries)), in_heads(self.W_qr(queries))], dim=-1)
        shared = self.W_kr(x).unsqueeze(1).expand(-1, H, -1, -1)
        k = torch.cat([in_heads(self.W_uk(latent)), shared], dim=-1)
        return self.W_o(attend(q, k, in_heads(self.W_uv(latent))))


class PairBias(nn.Module):
    """As in the folding of proteins: a bias for each head before the softmax, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.no_heads = H
        self.linear_q, self.linear_k, self.linear_v = (linear(D, D) for _ in range(3))
        self.linear_b, self.linear_g, self.linear_o = linear(D, H), linear(D, D), linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (in_heads(m(x)) for m in (self.linear_q, self.linear_k, self.linear_v))
        p = (q @ k.mT + self.linear_b(x).mT.unsqueeze(2)).softmax(dim=-1)
        y = (p @ v).transpose(1, 2).flatten(2)
        return self.linear_o(y * self.linear_g(x).sigmoid())


class TwoStreams(nn.Module):
    """Two halves of a sequence, each with maps of its own, in one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = H
        self.qkv_a, self.qkv_b = linear(D, 3 * D), linear(D, 3 * D)
        self.out_a, self.out_b = linear(D, D), linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.split([2, x.shape[1] - 2], dim=1)
        fused = torch.cat([self.qkv_a(a), self.qkv_b(b)], dim=1)
        y = attend(*(in_heads(z) for z in fused.chunk(3, dim=-1)))
        return torch.cat([self.out_a(y[:, :2]), self.out_b(y[:, 2:])], dim=1)


class GEGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inside, gate = x.chunk(2, dim=-1)
        return inside * F.gelu(gate)


class GatedUnit(nn.Sequential):
    """A gated unit without weights between two maps in a row."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(D), linear(D, 2 * HIDDEN), GEGLU(), linear(HIDDEN, D))


class Mixture(nn.Module):
    """Experts stacked input first, all of them computed, two of them taken."""

    def __init__(self) -> None:
        super().__init__()
        self.router = linear(D, 3)
        self.wi, self.wg = (nn.Parameter(torch.randn(3, D, HIDDEN) / 5) for _ in range(2))
        self.wo = nn.Parameter(torch.randn(3, HIDDEN, D) / 5)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(dim=-1)
        best = scores.topk(2)
        chosen = torch.zeros_like(scores).scatter(-1, best.indices, best.values)
        gate, inside = (torch.einsum("btd,edf->betf", x, w) for w in (self.wg, self.wi))
        y = torch.einsum("betf,efd->betd", F.silu(gate) * inside, self.wo)
        return torch.einsum("betd,bte->btd", y, chosen)


class LanguageModel(nn.Module):
    """Layers by name in a dictionary, and a head called as nobody else calls it."""

    def __init__(self, *parts: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.tok = nn.Embedding(V, D)
        layers = ({f"part_{i}": part() for i, part in enumerate(parts)} for _ in range(2))
        self.net = nn.ModuleDict({f"layer_{i}": nn.ModuleDict(p) for i, p in enumerate(layers)})
        self.final = linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        for layer in self.net.values():
            for part in layer.values():
                x = x + part(F.layer_norm(x, (D,)))
        return self.final(x)


def named_model(name: str) -> nn.Module:
    """The seeded model of that name."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LanguageModel(*NAMED[name])


def tokens() -> Tensor:
    return torch.randint(V, (2, 6), generator=torch.Generator().manual_seed(0))


NAMED: dict[str, tuple[Callable[[], nn.Module], ...]] = {
    "input-first": (lambda: Attn(InputFirst), lambda: FeedForward(InputFirst)),
    "output-first": (lambda: Attn(OutputFirst), lambda: FeedForward(OutputFirst)),
    "latent": (Latent, FeedForward),
    "pair-bias": (PairBias, FeedForward),
    "two-streams": (TwoStreams, FeedForward),
    "gated-unit": (Attn, GatedUnit),
    "mixture": (Attn, Mixture),
}
