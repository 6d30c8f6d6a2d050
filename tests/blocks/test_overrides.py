"""What the block finder refuses to guess, and the options that settle it."""

import re

import pytest
import torch
from torch import nn

from blockopt import Blocks, Split, find_blocks
from blockopt.blocks import ROW_ROLES, UnknownBlocksError, parse_override
from blockopt.blocks.overrides import as_text
from tests.helpers.expected_blocks import EXPECTED, cut
from tests.helpers.models import CAUSAL, FAMILIES


class FusedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.query_key_value = nn.Linear(8, 24)
        self.dense = nn.Linear(8, 8)


class HeadlessAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class MisfitAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 3, 4
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class MisfitFusedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(8, 23)
        self.proj = nn.Linear(8, 8)


class StrangeAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = nn.Linear(8, 8)


class FusedGateMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 32), nn.Linear(16, 8)


QKV = Blocks(("query", "key", "value"), split=Split(0, (8, 8, 8), (2, 2, 2)))
HEADS = {role: Blocks((role,), split=Split(0, (8,), (2,))) for role in ("query", "key", "value")}
SEPARATE = {f"*.{role[0]}_proj.weight": blocks for role, blocks in HEADS.items()}
HALVES = Blocks(("mlp_gate", "mlp_in"), split=Split(0, (16, 16), (16, 16)))
AMBIGUOUS = {  # the parameter that the error names, its shape, and overrides that settle it
    FusedAttention: (
        "query_key_value",
        (24, 8),
        {"*.query_key_value.weight": QKV, "*.dense.weight": "output"},
    ),
    HeadlessAttention: ("q_proj", (8, 8), SEPARATE),
    MisfitAttention: ("q_proj", (8, 8), SEPARATE),
    MisfitFusedAttention: ("qkv", (23, 8), {"*.qkv.weight": "other", "*.proj.weight": "output"}),
    StrangeAttention: ("mixer", (8, 8), {"*.mixer.weight": "query"}),
    FusedGateMLP: ("fc1", (32, 8), {"*.fc1.weight": HALVES}),
}


def model_with(module_class):
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleDict({"part": module_class()}) for _ in range(2))
    return model


@pytest.mark.parametrize("module_class", AMBIGUOUS)
def test_what_cannot_be_read_in_one_way_raises_and_names_the_override(module_class):
    attribute, shape, _ = AMBIGUOUS[module_class]
    with pytest.raises(ValueError, match="Cannot tell the blocks of") as error:
        find_blocks(model_with(module_class))
    message = str(error.value)
    assert f"'layers.0.part.{attribute}.weight' of shape {shape} and 1 like it: " in message
    assert f"Pass overrides={{\n    'layers.*.part.{attribute}.weight': " in message
    assert module_class.__name__ in message


@pytest.mark.parametrize("module_class", AMBIGUOUS)
def test_the_overrides_of_the_message_can_be_pasted_and_work(module_class):
    model = model_with(module_class)
    with pytest.raises(UnknownBlocksError) as error:
        find_blocks(model)
    pasted = re.search(r"overrides=(\{.*?\n\})", str(error.value), re.DOTALL)[1]
    overrides = eval(pasted, {"Blocks": Blocks, "Split": Split})
    found = find_blocks(model, overrides=overrides)
    assert found == find_blocks(model, overrides=error.value.overrides)
    assert found.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("module_class", AMBIGUOUS)
def test_commands_take_the_same_overrides_as_text(module_class):
    with pytest.raises(UnknownBlocksError) as error:
        find_blocks(model_with(module_class))
    for name, blocks in error.value.overrides.items():
        assert parse_override(as_text(name, blocks)) == (name, blocks)


def test_all_that_cannot_be_told_is_in_one_message():
    model = nn.ModuleList([FusedAttention(), StrangeAttention(), FusedGateMLP()])
    with pytest.raises(UnknownBlocksError, match="Cannot tell the blocks of 3 parameters") as error:
        find_blocks(model)
    names = {"*.query_key_value.weight", "*.mixer.weight", "*.fc1.weight"}
    assert error.value.overrides.keys() == names


def test_an_override_for_layers_of_unequal_sizes_names_each():
    model = nn.ModuleList([FusedAttention(), FusedAttention()])
    model[1].query_key_value, model[1].dense = nn.Linear(16, 48), nn.Linear(16, 16)
    with pytest.raises(UnknownBlocksError) as error:
        find_blocks(model)
    assert error.value.overrides.keys() == {f"{i}.query_key_value.weight" for i in (0, 1)}
    assert find_blocks(model, overrides=error.value.overrides)["1.dense.weight"].num_blocks == 2


@pytest.mark.parametrize(
    "text", ["weight", "w=attention", "w=query:0/4", "=query", "w=query+key:0/a/b", "w="]
)
def test_a_text_of_another_form_raises(text):
    with pytest.raises(ValueError, match=r"Invalid override .* Must be NAME=ROLE"):
        parse_override(text)


@pytest.mark.parametrize("module_class", AMBIGUOUS)
def test_overrides_settle_it_in_every_layer(module_class):
    overrides = AMBIGUOUS[module_class][2]
    blocks = find_blocks(model_with(module_class), overrides=overrides)
    for pattern, value in overrides.items():
        for layer in (0, 1):
            expected = Blocks((value,)) if isinstance(value, str) else value
            name = pattern.replace("*", f"layers.{layer}.part")
            assert blocks[name] == expected._replace(layer=layer)


def test_an_override_of_the_fused_weight_alone_is_enough():
    overrides = {"layers.*.part.query_key_value.weight": QKV}
    blocks = find_blocks(model_with(FusedAttention), overrides=overrides)
    output = cut(1, output=(8, 2))
    for layer in (0, 1):
        assert blocks[f"layers.{layer}.part.query_key_value.weight"] == QKV._replace(layer=layer)
        assert blocks[f"layers.{layer}.part.dense.weight"] == output._replace(layer=layer)


def test_an_override_replaces_what_would_be_found_and_nothing_else():
    model = FAMILIES["gpt2"]()
    name = "transformer.h.1.mlp.c_fc.weight"
    mine = Blocks(("mlp_in",), layer=7, split=Split(1, (64,), (2,)))
    assert find_blocks(model, overrides={name: mine}) == {**find_blocks(model), name: mine}


def test_a_later_override_wins():
    overrides = {"*.c_fc.weight": "other", "transformer.h.1.mlp.c_fc.weight": "mlp_in"}
    blocks = find_blocks(FAMILIES["gpt2"](), overrides=overrides)
    assert blocks["transformer.h.0.mlp.c_fc.weight"] == Blocks(("other",), 0)
    assert blocks["transformer.h.1.mlp.c_fc.weight"] == Blocks(("mlp_in",), 1)


def mlp_in(*split):
    return Blocks(("mlp_in",), split=Split(*split))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("nothing.*", "other", r"key 'nothing\.\*': it matches no trainable parameter"),
        ("self_attn.in_proj_weight", "attention", r"'self_attn.in_proj_weight'.*Invalid roles"),
        ("norm1.weight", Blocks(()), r"Invalid roles=\(\)"),
        ("linear1.weight", mlp_in(0, (23,), (1,)), r"of shape \(24, 16\).*cover 23 of the 24"),
        ("linear1.weight", mlp_in(2, (24,), (1,)), r"Invalid dim=2"),
        ("linear1.weight", mlp_in(0, (12, 12), (1, 1)), r"one for each of the 2 sections"),
        ("linear1.weight", Blocks(("mlp_in", "mlp_gate")), r"one for each of the 1 sections"),
    ],
)
def test_overrides_that_do_not_fit_raise(name, value, message):
    with pytest.raises(ValueError, match=f"Invalid overrides.*{message}"):
        find_blocks(FAMILIES["encoder_layer"](), overrides={name: value})


def test_an_override_of_a_frozen_parameter_raises():
    model = FAMILIES["encoder_layer"]()
    model.linear1.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="matches no trainable parameter"):
        find_blocks(model, overrides={"linear1.weight": "other"})


@pytest.mark.parametrize("per_row", ["head", ("query",), ("head", "norm"), ("rows",)])
def test_per_row_with_a_role_that_has_no_rows_raises(per_row):
    with pytest.raises(ValueError, match="Invalid per_row="):
        find_blocks(FAMILIES["mlp"](), per_row=per_row)


@pytest.mark.parametrize(
    "per_row",
    [(), ("embedding",), ("head", "position"), ["mlp_in"], {"mlp_gate", "mlp_out"}, ROW_ROLES],
)
@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_per_row_cuts_the_roles_it_names_and_no_others(name, per_row):
    model = FAMILIES[name]()
    for parameter, entry in find_blocks(model, per_row=per_row).items():
        default = EXPECTED[name][parameter]
        if len(entry.roles) == 1 and entry.roles[0] in ROW_ROLES:
            assert entry == (default if entry.roles[0] in per_row else default._replace(split=None))
        elif not set(entry.roles) <= {"bias"}:
            assert entry == default


def test_per_row_can_cut_one_half_of_a_fused_matrix():
    for per_row, parts in ((("mlp_gate",), (24, 1)), ((), (1, 1))):
        blocks = find_blocks(FAMILIES["phi3"](), per_row=per_row)
        expected = Blocks(("mlp_gate", "mlp_in"), 0, Split(0, (24, 24), parts))
        assert blocks["model.layers.0.mlp.gate_up_proj.weight"] == expected


def test_a_bias_follows_its_weight_when_rows_are_not_cut():
    blocks = find_blocks(FAMILIES["gpt2"](), per_row=())
    assert blocks["transformer.h.0.mlp.c_fc.bias"] == Blocks(("bias",), 0)
    assert blocks["transformer.h.0.attn.c_attn.bias"].num_blocks == 12


def test_the_meta_device_gives_the_same_blocks():
    with torch.device("meta"):
        model = CAUSAL["llama"]()
    assert next(model.parameters()).is_meta
    assert find_blocks(model) == EXPECTED["llama"]


def test_block_roles_names_every_block_in_storage_order():
    roles, once = ("query", "key", "value"), ("query", "query", "key", "value")
    split = Split(0, (4, 2, 2), (2, 1, 1), repeat=2)
    assert Blocks(roles, split=split).block_roles == once * 2
    assert Blocks(roles, split=split._replace(pooled=True)).block_roles == once
    assert Blocks(("norm",)).block_roles == ("norm",)


def test_overrides_of_stacked_experts_are_the_same_as_text():
    model = nn.Module()
    model.fused, model.down = (nn.Parameter(torch.zeros(3, *s)) for s in ((8, 64), (32, 8)))
    with pytest.raises(UnknownBlocksError, match="does not say in which order") as raised:
        find_blocks(model)
    overrides = raised.value.overrides
    assert overrides["fused"].split.stack == 3
    flags = re.findall(r"--override '(.*)'", raised.value.for_a_command())
    assert dict(map(parse_override, flags)) == overrides
