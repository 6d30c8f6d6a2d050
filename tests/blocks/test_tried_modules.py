"""Modules of a user's own whose order no name tells: they are tried alone, and leave no trace."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blockopt import find_blocks
from tests.helpers.expected_blocks import cut, rows

D, H, HIDDEN = 24, 3, 40
DH = D // H


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def merged(y):
    return y.transpose(1, 2).flatten(2)


class Interleaved(nn.Module):
    """Query, key and value of each head in turn, under the name that most store otherwise."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.calls = H, 0
        self.qkv_proj, self.o_proj = nn.Linear(D, 3 * D), linear(D, D)

    def forward(self, x, mask=None):
        self.calls += 1
        q, k, v = self.qkv_proj(x).unflatten(-1, (H, 3 * DH)).transpose(1, 2).chunk(3, dim=-1)
        return self.o_proj(merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


class Memory(nn.Module):
    """Keys and values of something else, head by head."""

    def __init__(self):
        super().__init__()
        self.heads = H
        self.to_q, self.to_kv, self.to_out = linear(D, D), linear(16, 2 * D), linear(D, D)

    def forward(self, x, memory):
        q = self.to_q(x).unflatten(-1, (H, DH)).transpose(1, 2)
        k, v = self.to_kv(memory).unflatten(-1, (H, 2, DH)).permute(3, 0, 2, 1, 4)
        return self.to_out(merged(F.scaled_dot_product_attention(q, k, v)))


class Rotary(Interleaved):
    """Needs positions that nobody can guess."""

    def forward(self, x, positions):
        return super().forward(x * positions["cos"])


class UpFirst(nn.Module):
    """A gated MLP that stores what it gates first, whatever its map is called."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = linear(D, 2 * HIDDEN), linear(HIDDEN, D)

    def forward(self, x):
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class TwoFactors(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.u, self.v = linear(5, outputs), linear(D, 5)

    def forward(self, x):
        return self.u(self.v(x))


class Nameless(nn.Module):
    """Parameters of three dimensions and a map of two factors; no name says anything."""

    def __init__(self):
        super().__init__()
        self.A, self.B = (nn.Parameter(torch.randn(H, D, DH) / 5) for _ in range(2))
        self.C, self.E = TwoFactors(D), nn.Parameter(torch.randn(H, DH, D) / 5)

    def forward(self, x):
        q, k = (torch.einsum("btd,hde->bhte", x, w) for w in (self.A, self.B))
        v = self.C(x).unflatten(-1, (H, DH)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return torch.einsum("bhte,hed->btd", y, self.E)


class Layers(nn.Module):
    def __init__(self, *kinds):
        super().__init__()
        self.layers = nn.ModuleList(kind() for kind in kinds)


QKV = cut(0, repeat=H, query=(DH, 1), key=(DH, 1), value=(DH, 1))


def stacked(role, size):
    return cut(1, **{role: (size, 1)}).split._replace(stack=H)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Interleaved, {"qkv_proj.weight": QKV, "o_proj.weight": cut(1, output=(D, H))}),
        (Memory, {"to_kv.weight": cut(0, repeat=H, key=(DH, 1), value=(DH, 1))}),
        (UpFirst, {"gate_up_proj.weight": cut(0, mlp_in=(HIDDEN, HIDDEN), mlp_gate=(HIDDEN,) * 2)}),
        (Nameless, {"C.u.weight": cut(0, value=(D, H)), "C.v.weight": cut(0, value=(5, 1))}),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_no_name_tells_is_seen(kind, expected, device):
    with torch.device(device):
        model = Layers(kind, kind)
    found = find_blocks(model)
    for name, blocks in expected.items():
        for layer in range(2):
            entry = found[f"layers.{layer}.{name}"]
            one = blocks.split.num_blocks == 1
            assert entry == blocks._replace(layer=layer, split=None if one else blocks.split)


def test_parameters_that_hold_heads_in_a_dimension_of_their_own():
    found = find_blocks(Layers(Nameless))
    assert found["layers.0.A"].roles == ("query",)
    assert found["layers.0.A"].split == stacked("query", D)
    assert found["layers.0.E"].split == stacked("output", DH)


def test_what_cannot_be_tried_says_so():
    with pytest.warns(UserWarning, match="nor does Rotary show it") as warned:
        found = find_blocks(model := Layers(Rotary, Rotary))
    assert "lie in 'layers.0.qkv_proj.weight' and 1 more" in str(warned[0].message)
    expected = cut(0, query=(D, H), key=(D, H), value=(D, H))
    assert found["layers.1.qkv_proj.weight"].split == expected.split
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_blocks(model) == found  # once for a model
        overridden = find_blocks(Layers(Rotary), overrides={"layers.*.qkv_proj.weight": QKV})
        assert overridden["layers.0.qkv_proj.weight"] == QKV._replace(layer=0)


def test_trying_leaves_no_trace():
    model, before = Layers(Interleaved, UpFirst), torch.get_rng_state()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.layers[0].register_forward_hook(lambda *_: pytest.fail("a hook was run"))
    find_blocks(model)
    assert model.layers[0].calls == 0
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


class OtherHeads(Interleaved):
    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)) for y in self.qkv_proj(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)))
        return self.o_proj(merged(y))


def test_modules_of_one_kind_and_other_numbers_are_tried_each_for_itself():
    model = Layers(OtherHeads, OtherHeads)
    model.layers[1].num_heads = 4
    found = find_blocks(model)
    parts = [found[f"layers.{i}.qkv_proj.weight"].split.parts for i in range(2)]
    assert parts == [(3, 3, 3), (4, 4, 4)]


class Speaking(Interleaved):
    def forward(self, x):
        return torch.ops._c10d_functional.all_reduce(super().forward(x), "sum", "nobody")


def test_a_module_that_speaks_with_other_processes_is_not_tried():
    with pytest.warns(UserWarning, match="nor does Speaking show it"):
        find_blocks(Layers(Speaking))


def test_a_mode_around_it_changes_nothing():
    found = find_blocks(Layers(Interleaved, UpFirst))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        again = find_blocks(Layers(Interleaved, UpFirst).double())
    assert again == found
    assert found["layers.1.down_proj.weight"] == rows("mlp_out", D)._replace(layer=1)
