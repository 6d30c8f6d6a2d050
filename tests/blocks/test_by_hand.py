"""Attention and adapters as tutorials and papers write them, read by their names alone."""

import re

import pytest
import torch
from torch import nn

from blockopt import Blocks, Split, find_blocks
from blockopt.blocks import UnknownBlocksError
from blockopt.blocks.overrides import parse_override
from tests.helpers.expected_blocks import cut, rows, whole


def linear(inputs=16, outputs=16):
    return nn.Linear(inputs, outputs, bias=False)


class Head(nn.Module):
    """One head, as in the first lectures on GPT."""

    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (linear(16, 4) for _ in range(3))


class MultiHeadAttention(nn.Module):
    def __init__(self, head, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.heads = nn.ModuleList(head() for _ in range(num_heads))
        self.proj = linear()


def test_heads_that_are_modules_have_one_head_each_and_the_layer_of_the_list_around_them():
    model = nn.Sequential(*(nn.Sequential(MultiHeadAttention(Head)) for _ in range(2)))
    blocks = find_blocks(model)
    for layer in range(2):
        start = f"{layer}.0."
        assert blocks[f"{start}proj.weight"] == cut(1, output=(16, 4))._replace(layer=layer)
        for head in range(4):
            for role in ("key", "query", "value"):
                entry = blocks[f"{start}heads.{head}.{role}.weight"]
                assert entry == Blocks((role,), layer)


class MultiHeadedAttention(nn.Module):
    """The Annotated Transformer's."""

    def __init__(self):
        super().__init__()
        self.h = 4
        self.linears = nn.ModuleList(linear() for _ in range(4))


def test_projections_in_a_list_are_refused_with_overrides_that_serve_all_layers():
    model = nn.ModuleList(MultiHeadedAttention() for _ in range(3))
    with pytest.raises(UnknownBlocksError, match="keeps its projections in a list") as raised:
        find_blocks(model)
    assert len(raised.value.overrides) == 4
    pasted = re.search(r"(?s)Pass overrides=(\{.*?\n\})", str(raised.value))[1]
    blocks = find_blocks(model, overrides=eval(pasted, {"Blocks": Blocks, "Split": Split}))
    for number, role in enumerate(("query", "key", "value", "output")):
        entry = blocks[f"2.linears.{number}.weight"]
        assert entry == cut(int(role == "output"), **{role: (16, 4)})._replace(layer=2)
    flags = re.findall(r"--override '(.*)'", raised.value.for_a_command())
    assert find_blocks(model, overrides=dict(map(parse_override, flags))) == blocks


class LinearWithLoRA(nn.Module):
    """A layer, and factors in a module of their own, stored input first."""

    class LoRALayer(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.A, self.B = (
                nn.Parameter(torch.rand(inputs, 4)),
                nn.Parameter(torch.rand(4, outputs)),
            )

    def __init__(self, inputs=16, outputs=16):
        super().__init__()
        self.linear = linear(inputs, outputs).requires_grad_(False)
        self.lora = self.LoRALayer(inputs, outputs)


class LoRALinear(nn.Module):
    """A layer, and factors beside it, stored output first."""

    def __init__(self, inputs=16, outputs=16):
        super().__init__()
        self.base = linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.rand(4, inputs))
        self.lora_B = nn.Parameter(torch.rand(outputs, 4))


class Adapted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.o = (layer() for _ in range(4))
        self.fc, self.proj = layer(16, 24), layer(24, 16)


@pytest.mark.parametrize(
    ("layer", "first", "second", "out_dim"),
    [(LinearWithLoRA, "lora.A", "lora.B", 1), (LoRALinear, "lora_A", "lora_B", 0)],
)
def test_adapters_written_by_hand_have_the_role_and_heads_of_the_layer(
    layer, first, second, out_dim
):
    blocks = find_blocks(Adapted(layer))
    assert len(blocks) == 12
    for name, role in (("q", "query"), ("k", "key"), ("v", "value")):
        assert blocks[f"{name}.{first}"] == whole(role)
        assert blocks[f"{name}.{second}"] == cut(out_dim, **{role: (16, 4)})
    assert blocks[f"o.{first}"] == cut(1 - out_dim, output=(16, 4))
    assert blocks[f"o.{second}"] == whole("output")
    assert blocks[f"fc.{second}"] == rows("mlp_in", 24, dim=out_dim)
    assert blocks[f"proj.{first}"] == whole("mlp_out")


def module(type_name, children, **attributes):
    made = type(type_name, (nn.Module,), {})()
    for name, value in {**attributes, **children}.items():
        setattr(made, name, value)
    return made


def test_letters_are_gates_only_where_no_other_word_says_what_the_map_is():
    maps = {n: linear() for n in ("linear_q", "linear_k", "linear_v", "linear_o", "linear_g")}
    maps |= {"up_a": linear(16, 3), "up_b": linear(3, 64)}
    maps |= {"down_a": linear(64, 3), "down_b": linear(3, 16)}
    blocks = find_blocks(nn.ModuleList([module("Block", maps, num_heads=4)]))
    found = {name.split(".")[1]: entry for name, entry in blocks.items()}
    assert found["linear_g"] == cut(0, gate=(16, 4))._replace(layer=0)
    roles = [found[name].roles for name in ("up_a", "up_b", "down_a", "down_b")]
    assert roles == [("mlp_in",), ("mlp_in",), ("mlp_out",), ("mlp_out",)]


def test_attention_that_takes_the_keys_of_another_layer_is_no_mlp():
    attention = module("Attn", {"q_proj": linear(), "o_proj": linear()}, num_heads=4)
    blocks = find_blocks(attention)
    assert blocks["q_proj.weight"] == cut(0, query=(16, 4))
    assert blocks["o_proj.weight"] == cut(1, output=(16, 4))


def test_two_streams_have_two_outputs():
    maps = {f"{stream}_qkv": linear(16, 48) for stream in ("img", "txt")}
    maps |= {f"{stream}_proj": linear() for stream in ("img", "txt")}
    blocks = find_blocks(module("JointAttention", maps, num_heads=4))
    for stream in ("img", "txt"):
        assert blocks[f"{stream}_qkv.weight"] == cut(0, query=(16, 4), key=(16, 4), value=(16, 4))
        assert blocks[f"{stream}_proj.weight"] == cut(1, output=(16, 4))


def test_a_model_called_normalized_is_no_norm():
    model = module("NormalizedModel", {"fc": linear(16, 64), "out": linear(64, 16)})
    model.table_of_costs = nn.Parameter(torch.ones(7))
    assert find_blocks(model)["table_of_costs"] == whole("other")


class FlatBlock(nn.Module):
    """Attention and MLP in one module that nobody can run alone."""

    num_heads = 4

    def __init__(self, names, attention="q_proj k_proj v_proj o_proj", hidden=32):
        super().__init__()
        for name in attention.split():
            self.add_module(name, linear())
        *into, out = names.split()
        for name in into:
            self.add_module(name, linear(16, hidden))
        self.add_module(out, linear(hidden, 16))

    def forward(self, x, options):
        return getattr(self, options.first_map)(x)


@pytest.mark.parametrize(
    "names",
    [
        "gate_proj up_proj down_proj",
        "g u d",
        "mlp_gate mlp_up mlp_down",
        "w_gate w_in w_out",
        "f1 f2",
        "A B",
        "r z",
    ],
)
def test_maps_of_an_mlp_beside_those_of_attention_are_no_gates_of_it(names):
    blocks = find_blocks(nn.ModuleList(FlatBlock(names) for _ in range(2)))
    roles = ("mlp_gate", "mlp_in", "mlp_out")[3 - len(names.split()) :]
    for name, role in zip(names.split(), roles):
        size = 16 if role == "mlp_out" else 32
        assert blocks[f"1.{name}.weight"] == rows(role, size)._replace(layer=1), name
    assert blocks["1.o_proj.weight"] == cut(1, output=(16, 4))._replace(layer=1)


def test_an_output_is_what_takes_as_much_as_values_have_and_is_in_no_mlp():
    model = FlatBlock("expand contract", "queries keys values unifyheads")
    assert find_blocks(model)["unifyheads.weight"] == cut(1, output=(16, 4))


def test_a_map_of_one_letter_and_another_size_makes_no_keys():
    model = FlatBlock("f1 f2")
    model.r = linear(16, 3)
    assert find_blocks(model)["r.weight"] == whole("other")


def test_two_square_maps_beside_attention_are_no_mlp():
    model = FlatBlock("f1 f2")
    model.wz, model.uz = linear(), linear()
    with pytest.warns(UserWarning, match="no role in a transformer"):
        blocks = find_blocks(model)
    assert blocks["wz.weight"] == blocks["uz.weight"] == whole("other")
