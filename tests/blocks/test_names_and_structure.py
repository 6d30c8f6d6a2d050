"""Names in common use, read rightly or refused, where storage or structure may mislead."""

import pytest
import torch
from torch import nn

from blockopt import Blocks, Split, find_blocks
from blockopt.blocks import ROW_ROLES, UnknownBlocksError
from blockopt.blocks.watch import layouts_of_pass
from tests.helpers.expected_blocks import cut, rows, whole
from tests.helpers.named_models import HIDDEN, NAMED, D, H, V, linear, named_model, tokens


@pytest.mark.parametrize("name", NAMED)
def test_names_tell_what_derivatives_show(name):
    model = named_model(name)
    seen = layouts_of_pass(model, tokens(), per_head=True, per_row=ROW_ROLES).layouts
    for parameter_name, entry in find_blocks(model).items():
        parameter = model.get_parameter(parameter_name)
        if parameter.ndim > 1 and "linear_b" not in parameter_name:  # what is added to scores
            roles, split = seen[parameter]
            assert roles == entry.roles, parameter_name
            in_one = split is not None and split.num_blocks == 1 == entry.num_blocks
            assert in_one or split == entry.split, parameter_name


def test_layers_in_a_dictionary_are_numbered_and_the_head_is_known_by_its_size():
    found = find_blocks(named_model("latent"))
    assert [found[f"net.layer_{i}.part_0.W_o.weight"].layer for i in (0, 1)] == [0, 1]
    assert found["final.weight"] == rows("head", V)
    assert found["net.layer_1.part_0.W_kr.weight"] == Blocks(("key",), 1)


def module(type_name, attributes=(), **children):
    made = type(type_name, (nn.Module,), {})()
    for name, value in {**dict(attributes), **children}.items():
        setattr(made, name, value)
    return made


def stack(*shape):
    return nn.Parameter(torch.zeros(*shape))


def test_stacked_experts_are_refused_where_nothing_tells_inputs_from_outputs():
    experts = module("Experts", w1=stack(3, D, HIDDEN), w2=stack(3, HIDDEN, D))
    with pytest.raises(UnknownBlocksError, match="stacks experts in w1, and does not say") as told:
        find_blocks(experts)
    found = find_blocks(experts, overrides=told.value.overrides)
    assert found["w1"] == Blocks(("mlp_in",), None, Split(1, (D,), (D,), stack=3))
    assert found["w2"] == Blocks(("mlp_out",), None, Split(1, (HIDDEN,), (HIDDEN,), stack=3))
    experts.dim = D
    assert find_blocks(experts)["w1"].split == Split(2, (HIDDEN,), (HIDDEN,), stack=3)
    experts.dim = HIDDEN
    assert find_blocks(experts)["w1"].split == Split(1, (D,), (D,), stack=3)


def test_of_two_alike_stacks_nothing_tells_the_gate():
    into = {"w_a": stack(3, HIDDEN, D), "w_b": stack(3, HIDDEN, D)}
    experts = module("Experts", {"dim": D}, **into, w_out=stack(3, D, HIDDEN))
    with pytest.raises(UnknownBlocksError) as told:
        find_blocks(experts)
    assert told.value.overrides.keys() == {"w_a", "w_b", "w_out"}


def test_an_unknown_gate_is_a_whole_map():
    maps = {"left": linear(D, HIDDEN), "right": linear(D, HIDDEN), "back": linear(HIDDEN, D)}
    with pytest.raises(UnknownBlocksError, match="which of left and right is the gate") as told:
        find_blocks(module("MLP", **maps))
    assert told.value.overrides["left.weight"] == rows("mlp_gate", HIDDEN)
    assert told.value.overrides["right.weight"] == rows("mlp_in", HIDDEN)


def test_a_unit_called_swiglu_may_take_either_half_as_the_gate():
    unit = module("SwiGLU")
    with pytest.raises(UnknownBlocksError, match="in an order that it does not tell"):
        find_blocks(nn.Sequential(linear(D, 2 * HIDDEN), unit, linear(HIDDEN, D)))


def test_the_maps_into_a_model_and_out_of_it_are_no_mlp():
    layer = nn.TransformerEncoderLayer(D, H, HIDDEN)
    found = find_blocks(module("Model", first=linear(8, D), layer=layer, last=linear(D, 8)))
    assert found["first.weight"] == found["last.weight"] == whole("other")
    assert found["layer.linear1.weight"] == rows("mlp_in", HIDDEN)
    found = find_blocks(module("Model", first=linear(8, D), act=nn.GELU(), last=linear(D, 8)))
    assert found["first.weight"] == rows("mlp_in", D)


def test_a_map_of_another_width_is_no_output_of_attention():
    found = find_blocks(module("Pointer", inp=linear(2, D), Wq=linear(D, D), Wk=linear(D, D)))
    assert found["inp.weight"] == whole("other")
    assert found["Wq.weight"] == whole("query")


def test_values_that_learned_weights_mix_are_no_mlp():
    found = find_blocks(module("Mix", value=linear(D, D), out=linear(D, D)))
    assert found["value.weight"] == found["out.weight"] == whole("other")


def test_declared_heads_that_do_not_fit_the_output_are_refused():
    heads = {"num_heads": 2, "head_dim": 6}  # the queries of differential attention come in pairs
    maps = {name: linear(D, D) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
    with pytest.raises(UnknownBlocksError, match="24 outputs are not the 2 heads of 6"):
        find_blocks(module("DiffAttn", heads, **maps))


def test_key_value_may_be_interleaved_and_kv_is_stored_in_a_row():
    def attention(name):
        maps = {"query": linear(D, D), name: linear(D, 2 * D), "dense": linear(D, D)}
        return module("CrossAttention", {"num_heads": H}, **maps)

    with pytest.raises(UnknownBlocksError, match="interleaved by head") as told:
        find_blocks(attention("key_value"))
    expected = cut(0, key=(D, H), value=(D, H))
    assert told.value.overrides["key_value.weight"] == expected
    assert find_blocks(attention("kv"))["kv.weight"] == expected


def test_keys_have_the_heads_of_queries_of_low_rank():
    maps = {"q_down": linear(D, 4), "q_up": linear(4, D), "k_proj": linear(D, D // H)}
    maps |= {"v_proj": linear(D, D // H), "o_proj": linear(D, D)}
    found = find_blocks(module("Attn", {"num_heads": H}, **maps))
    assert found["q_down.weight"] == whole("query")
    assert found["q_up.weight"] == cut(0, query=(D, H))
    assert found["k_proj.weight"] == whole("key")
    assert found["v_proj.weight"] == whole("value")


def test_of_heads_in_a_list_or_dictionary_the_last_map_is_the_head():
    inner = nn.Sequential(module("Residual", linear=linear(D, D)), linear(D, V))
    tasks = nn.ModuleDict({"kind": linear(D, 3), "topic": nn.Sequential(linear(D, D), nn.Tanh())})
    tasks["topic"].append(linear(D, 5))
    model = module("Model", medusa_head=nn.ModuleList([inner]), heads=tasks)
    with pytest.warns(UserWarning, match="no role in a transformer"):
        found = find_blocks(model)
    assert found["medusa_head.0.0.linear.weight"].roles == ("other",)
    assert found["medusa_head.0.1.weight"] == rows("head", V)._replace(layer=0)
    assert found["heads.kind.weight"] == rows("head", 3)
    assert found["heads.topic.0.weight"].roles == ("other",)
    assert found["heads.topic.2.weight"] == rows("head", 5)


def test_square_maps_of_what_nobody_calls_an_mlp_are_none():
    maps = {name: linear(D, D) for name in ("toqk", "tov", "to_out")}
    found = find_blocks(nn.ModuleList([module("Shared", **maps)]))
    assert {entry.roles for entry in found.values()} == {("other",)}
