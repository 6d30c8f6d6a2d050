"""Maps of low rank and maps that serve two purposes: factors, side paths, a shared map in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.expected_blocks import cut, rows, whole
from tests.helpers.research_models.layers import FUSED, Attending
from tests.helpers.research_models.parts import DH, HIDDEN, B, D, H, T, by_head, with_bias


class SharedMapIn(Attending):
    """One map into multi-query attention and a gated MLP, each with an output of its own: PaLM."""

    def __init__(self) -> None:
        super().__init__()
        self.i = nn.Linear(D, D + 2 * DH + 2 * HIDDEN, bias=False)
        self.j, self.k = nn.Linear(D, D, bias=False), nn.Linear(HIDDEN, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, hidden = self.i(x).split([D, DH, DH, 2 * HIDDEN], dim=-1)
        q = q.unflatten(-1, (H, DH)).transpose(1, 2)
        p = torch.einsum("bhid,bjd->bhij", q, k).softmax(dim=-1)
        y = torch.einsum("bhij,bjd->bhid", p, v).transpose(1, 2).flatten(2)
        inside, gate = hidden.chunk(2, dim=-1)
        return x + self.j(y) + self.k(F.silu(gate) * inside)


SHARED_MAP_IN = {
    "i.weight": cut(
        0,
        query=(D, H),
        key=(DH, 1),
        value=(DH, 1),
        mlp_in=(HIDDEN, HIDDEN),
        mlp_gate=(HIDDEN, HIDDEN),
    ),
    "j.weight": by_head("output", dim=1),
    "k.weight": rows("mlp_out", D),
}


class Factored(Attending):
    """An output projection and an MLP of two factors for each map."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b1, self.b2 = nn.Linear(D, 3 * D), nn.Linear(D, 5), nn.Linear(5, D)
        self.c, self.d = nn.Linear(D, 4, bias=False), nn.Linear(4, HIDDEN)
        self.e, self.f = nn.Linear(HIDDEN, 4, bias=False), nn.Linear(4, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b2(self.b1(self.attend(self.a(x))))
        return x + self.f(self.e(F.gelu(self.d(self.c(x)))))


FACTORED = {
    **with_bias("a", FUSED),
    **with_bias("b1", by_head("output", dim=1), whole_bias=True),
    **{"b2.weight": whole("output"), "b2.bias": whole("bias")},
    "c.weight": whole("mlp_in"),
    **with_bias("d", rows("mlp_in", HIDDEN)),
    "e.weight": whole("mlp_out"),
    **with_bias("f", rows("mlp_out", D)),
}


class SidePaths(Attending):
    """Beside every map a narrow one, as adapters have it, in attention and a gated MLP."""

    class Both(nn.Module):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__()
            self.m = nn.Linear(inputs, outputs, bias=False)
            self.x, self.y = nn.Linear(inputs, 3, bias=False), nn.Linear(3, outputs, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.m(x) + 0.5 * self.y(self.x(x))

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = self.Both(D, 3 * D), self.Both(D, D + 1)
        self.c, self.d, self.e = self.Both(D, 20), self.Both(D, 20), self.Both(20, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(self.attend(self.a(x)))[..., :D]
        return x + self.e(F.silu(self.c(x)) * self.d(x))


SIDE_PATHS = {
    **{"a.m.weight": FUSED, "a.x.weight": whole("value"), "a.y.weight": FUSED},
    **{f"b.{name}.weight": by_head("output", dim=1) for name in "mx"},
    "b.y.weight": whole("output"),
    **{f"c.{name}.weight": rows("mlp_gate", 20) for name in "my"},
    **{f"d.{name}.weight": rows("mlp_in", 20) for name in "my"},
    **{f"e.{name}.weight": rows("mlp_out", D) for name in "my"},
    **{"c.x.weight": whole("mlp_gate"), "d.x.weight": whole("mlp_in")},
    "e.x.weight": whole("mlp_out"),
}


class Sets(nn.Module):
    """The Set Transformer: heads along the batch, and queries that are also the residual."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.s, self.t, self.u, self.w = (nn.Linear(D, D) for _ in range(4))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            q, k, v = (torch.cat(z.split(DH, dim=2)) for z in (self.s(x), self.t(y), self.u(y)))
            p = (q @ k.mT / D**0.5).softmax(dim=2)
            z = torch.cat((q + p @ v).split(B), dim=2)
            return z + F.relu(self.w(z))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.Block(), self.Block()
        self.n = nn.Linear(D, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.n(self.second(x, self.first(x[:, :2], x)))


SETS = {
    **{
        f"{block}.{name}": blocks
        for block in ("first", "second")
        for name, blocks in {
            **with_bias("s", by_head("query")),
            **with_bias("t", by_head("key")),
            **with_bias("u", by_head("value")),
            **with_bias("w", by_head("output", dim=1), whole_bias=True),
        }.items()
    },
    **with_bias("n", rows("head", 7)),
}


class Biases(nn.Module):
    """Biases of queries and values beside their map, one after a sum, and learned scales."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.o = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.r, self.s = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))
        self.t, self.u = nn.Parameter(torch.randn(D)), nn.Parameter(torch.ones(D))
        self.v = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat([self.r, torch.zeros_like(self.s), self.s])
        fused = F.linear(x, self.m.weight, bias).unflatten(-1, (3, H, DH))
        y = F.scaled_dot_product_attention(*fused.permute(2, 0, 3, 1, 4))
        y = self.o(y.transpose(1, 2).reshape(B, T, D))
        return self.v * x + self.u * y + self.t


BIASES = {
    "m.weight": FUSED,
    "o.weight": by_head("output", dim=1),
    **{name: cut(0, bias=(D, H)) for name in "rs"},
    "t": whole("bias"),
    **{name: whole("norm") for name in "uv"},
}
