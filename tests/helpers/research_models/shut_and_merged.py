"""What a token does not show: heads and experts it does not choose, weights made of several."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt import Blocks, Split
from tests.helpers.expected_blocks import cut, rows, whole
from tests.helpers.research_models.attention_kinds import in_heads
from tests.helpers.research_models.layers import FUSED, Attending
from tests.helpers.research_models.parts import (
    DH,
    HIDDEN,
    B,
    D,
    H,
    T,
    by_head,
    matrix,
    stack_of_heads,
)


class ChosenHeads(nn.Module):
    """Each token chooses two heads and shuts the third, as in a mixture of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.c = nn.Linear(D, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*(in_heads(z) for z in self.m(x).chunk(3, dim=-1)))
        weights = self.c(x).softmax(dim=-1)
        chosen = torch.zeros_like(weights).scatter(-1, weights.topk(2).indices, 1.0)
        y = y * (weights * chosen).mT.unsqueeze(-1)
        return x + self.o(y.transpose(1, 2).flatten(2))


CHOSEN_HEADS = {
    "m.weight": FUSED,
    "o.weight": by_head("output", dim=1),
    "c.weight": cut(0, gate=(H, 1)),  # a softmax ties them
}


class GainPerHead(nn.Module):
    """Unit queries with a gain for each head, and one key and value in a stack of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = matrix(H, DH, D), matrix(1, DH, D), matrix(1, DH, D)
        self.o, self.g = matrix(D, H, DH), nn.Parameter(torch.ones(H, DH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,hkd->bhtk", x, w) for w in (self.a, self.b, self.c))
        q, k = F.normalize(q, dim=-1) * self.g.unsqueeze(1), F.normalize(k, dim=-1)
        return x + torch.einsum("bhtk,dhk->btd", (q @ k.mT).softmax(dim=-1) @ v, self.o)


GAIN_PER_HEAD = {
    "a": stack_of_heads("query", DH),
    "b": cut(1, key=(DH, 1)),
    "c": cut(1, value=(DH, 1)),
    "o": cut(1, output=(H, H)),
    "g": whole("norm"),
}


class BiasedExperts(Attending):
    """One expert for each token, with biases in two dimensions, and a shared one with a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.r, self.s = matrix(D, 4), nn.Linear(D, 1, bias=False)
        self.u, self.d = matrix(4, D, 2 * HIDDEN), matrix(4, HIDDEN, D)
        self.p, self.q = nn.Parameter(torch.zeros(4, 2 * HIDDEN)), nn.Parameter(torch.zeros(4, D))
        self.e, self.f = nn.Linear(D, HIDDEN, bias=False), nn.Linear(HIDDEN, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.attend(self.m(x)))
        flat = x.flatten(0, 1)
        weight, index = (flat @ self.r).softmax(dim=-1).max(dim=-1)
        sent = F.one_hot(index, 4).float()
        inside, gate = (sent.T.unsqueeze(-1) * flat @ self.u + self.p.unsqueeze(1)).chunk(2, dim=-1)
        y = (inside * F.silu(gate)) @ self.d + self.q.unsqueeze(1)
        y = torch.einsum("end,ne->nd", y, sent * weight.unsqueeze(-1)).view(B, T, D)
        return x + y + self.s(x).sigmoid() * self.f(F.gelu(self.e(x)))


BIASED_EXPERTS = {
    "m.weight": FUSED,
    "o.weight": by_head("output", dim=1),
    "r": rows("router", 4, dim=1),
    "s.weight": whole("router"),
    "u": Blocks(("mlp_in", "mlp_gate"), None, Split(2, (HIDDEN,) * 2, (HIDDEN,) * 2, stack=4)),
    "d": Blocks(("mlp_out",), None, Split(2, (D,), (D,), stack=4)),
    "p": whole("bias"),
    "q": whole("bias"),
    "e.weight": rows("mlp_in", HIDDEN),
    "f.weight": rows("mlp_out", D),
}


class Merged(Attending):
    """Weights with adapters added to them, and weights divided by their largest singular value."""

    def __init__(self) -> None:
        super().__init__()
        spectral_norm = nn.utils.parametrizations.spectral_norm
        self.W, self.A, self.B = matrix(3 * D, D), matrix(2, D), nn.Parameter(torch.zeros(3 * D, 2))
        self.o = spectral_norm(nn.Linear(D, D, bias=False))
        self.U, self.C, self.E = matrix(HIDDEN, D), matrix(2, D), matrix(HIDDEN, 2)
        self.d = spectral_norm(nn.Linear(HIDDEN, D, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self.attend(F.linear(x, self.W + 2 * (self.B @ self.A))))
        return x + self.d(F.gelu(F.linear(x, torch.addmm(self.U, self.E, self.C))))


MERGED = {
    "W": FUSED,
    "A": whole("value"),
    "B": FUSED,
    "o.parametrizations.weight.original": by_head("output", dim=1),
    "U": rows("mlp_in", HIDDEN),
    "C": whole("mlp_in"),
    "E": rows("mlp_in", HIDDEN),
    "d.parametrizations.weight.original": rows("mlp_out", D),
}
