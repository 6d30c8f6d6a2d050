"""Parameter groups that carry the blocks."""

import io
from collections import Counter

import pytest
import torch

from blockopt import Blocks, find_blocks, param_groups
from blockopt.blocks import from_plain, to_plain
from tests.helpers.expected_blocks import cut
from tests.helpers.models import FAMILIES, loss_of


@pytest.mark.parametrize("by", ["role", "parameter"])
@pytest.mark.parametrize("name", FAMILIES)
def test_param_groups_hold_every_parameter_once_with_its_blocks(name, by):
    model = FAMILIES[name]()
    blocks = find_blocks(model)
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = param_groups(model, by=by)
    seen = [
        (n, p, from_plain(b))
        for g in groups
        for (n, p), b in zip(g["params"], g["blocks"], strict=True)
    ]
    assert Counter(n for n, _, _ in seen) == Counter(list(trainable))
    for n, p, b in seen:
        assert p is trainable[n]
        assert b == blocks[n]
    if by == "parameter":
        assert [[n for n, _ in g["params"]] for g in groups] == [[n] for n in trainable]
    else:
        assert max(Counter((g["role"], "weight_decay" in g) for g in groups).values()) == 1


@pytest.mark.parametrize("by", ["role", "parameter"])
@pytest.mark.parametrize("name", FAMILIES)
def test_weight_decay_is_for_matrices_that_are_neither_norm_bias_nor_position(name, by):
    for group in param_groups(FAMILIES[name](), weight_decay=0.3, by=by):
        for (_, parameter), (roles, _, _) in zip(group["params"], group["blocks"]):
            is_matrix = parameter.squeeze().ndim >= 2  # a class token is a vector
            decays = is_matrix and roles[0] not in ("norm", "bias", "position")
            assert group["weight_decay"] == (0.3 if decays else 0.0)


def test_no_weight_decay_for_biases_of_three_dimensions():
    groups = param_groups(FAMILIES["attention-bias-kv"](), by="parameter")
    groups = {name: group for group in groups for name, _ in group["params"]}
    assert groups["attention.bias_k"]["weight_decay"] == 0.0
    assert "weight_decay" not in groups["attention.in_proj_weight"]  # left to the optimizer


def test_the_role_of_a_group_joins_the_roles_of_a_fused_matrix():
    roles = ["embedding", "output", "query+key+value", "mlp_gate+mlp_in", "mlp_out", "norm", "head"]
    assert [group["role"] for group in param_groups(FAMILIES["phi3"]())] == roles


@pytest.mark.parametrize("name", FAMILIES)
def test_groups_are_plain_data_that_torch_loads_as_weights_only(name):
    groups = param_groups(FAMILIES[name]())
    for group in groups:
        del group["params"]
    file = io.BytesIO()
    torch.save(groups, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == groups

    def types(value):
        inner = value.values() if isinstance(value, dict) else value
        inner = inner if isinstance(value, (dict, list, tuple)) else ()
        return {type(value)}.union(*(types(v) for v in inner))

    assert types(groups) <= {list, dict, tuple, str, int, float, bool, type(None)}


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_blocks_come_back_also_from_lists(name):
    def listed(value):
        return [listed(v) for v in value] if isinstance(value, tuple) else value

    for blocks in find_blocks(FAMILIES[name]()).values():
        assert from_plain(to_plain(blocks)) == blocks
        assert from_plain(listed(to_plain(blocks))) == blocks


def test_param_groups_carry_the_blocks_they_are_given():
    model = FAMILIES["gpt_neox"]()
    merged = find_blocks(model, per_head=False, per_row=())
    carried = {
        n: from_plain(b)
        for g in param_groups(model, merged)
        for (n, _), b in zip(g["params"], g["blocks"])
    }
    assert carried == merged


def test_blocks_that_do_not_cover_the_model_exactly_raise():
    model = FAMILIES["encoder_layer"]()
    blocks = find_blocks(model)
    with pytest.raises(ValueError, match=r"\['norm1.weight'\] are missing, and \[\] are not"):
        param_groups(model, {n: b for n, b in blocks.items() if n != "norm1.weight"})
    with pytest.raises(ValueError, match=r"\[\] are missing, and \['extra'\] are not trained"):
        param_groups(model, {**blocks, "extra": Blocks(("other",))})
    model.norm1.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"\['norm1.weight'\] are not trained"):
        param_groups(model, blocks)


def test_blocks_that_do_not_fit_a_shape_raise():
    model = FAMILIES["encoder_layer"]()
    with pytest.raises(ValueError, match="cover 8 of the 24"):
        param_groups(model, {**find_blocks(model), "linear1.weight": cut(0, mlp_in=(8, 8))})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "layer"}, "Invalid by='layer'"),
        ({"weight_decay": -0.1}, r"Invalid weight_decay=-0\.1"),
        ({"weight_decay": float("nan")}, "Invalid weight_decay=nan"),
        ({"weight_decay": float("inf")}, "Invalid weight_decay=inf"),
    ],
)
def test_param_groups_refuse_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        param_groups(FAMILIES["mlp"](), **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_torch_adamw_trains_with_the_groups(name):
    model = FAMILIES[name]()
    optimizer = torch.optim.AdamW(param_groups(model), lr=3e-3)
    losses = []
    for _ in range(3):
        loss = loss_of(name, model)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    optimizer.load_state_dict(torch.load(buffer, weights_only=True))


@pytest.mark.parametrize("function", [param_groups, find_blocks])
def test_parameters_are_no_model(function):
    with pytest.raises(TypeError, match="takes the model, not a generator"):
        function(torch.nn.Linear(2, 2).parameters())
