"""The arms of the comparison: what is tuned, how scales reach the groups, and controls."""

from dataclasses import replace

import pytest
import torch

import blockopt
from blockopt.blocks.split import block_numel
from recipes.common.gpt2 import GPT2
from recipes.comparison.arms import ARMS, build
from recipes.comparison.controls import controlled, role_cycle, shuffle_roles
from recipes.comparison.studies import presets
from tests.helpers.comparison import MODEL


def weighted_mean_of_logs(scales, model):
    blocks, parameters = blockopt.find_blocks(model), dict(model.named_parameters())
    logs = torch.cat([scales[name].double().log() for name in blocks])
    sizes = torch.cat(
        [
            block_numel(tuple(parameters[name].shape), entry.split).double()
            for name, entry in blocks.items()
        ]
    )
    return float(logs @ sizes / sizes.sum())


@pytest.mark.parametrize("control", ["shuffled", "inverted"])
@pytest.mark.parametrize("seed", range(3))
def test_controls_keep_the_geometric_mean(control, seed):
    model = GPT2(replace(MODEL, depth=2))
    scales = blockopt.sharpness_disparity(model)
    changed = controlled(scales, model, control, seed)
    assert weighted_mean_of_logs(changed, model) == pytest.approx(0, abs=1e-6)
    if control == "inverted":
        products = torch.cat([scales[name] * changed[name] for name in scales])
        assert torch.allclose(products, products[0].expand_as(products), rtol=1e-5)
        assert float(products.max()) != pytest.approx(
            float(torch.cat(list(scales.values())).max()) ** 2
        )


@pytest.mark.parametrize("seed", range(5))
def test_shuffling_gives_every_role_the_value_of_another(seed):
    roles = ["query", "key", "value", "norm", "bias"]
    cycle = role_cycle(roles, seed)
    assert sorted(cycle.values()) == sorted(roles)
    assert all(cycle[role] != role for role in roles)
    model = GPT2(MODEL)
    blocks = blockopt.find_blocks(model)
    labels = sorted({role for entry in blocks.values() for role in entry.roles})
    values = {
        n: torch.tensor([1.0 + labels.index(r) for r in entry.block_roles])
        for n, entry in blocks.items()
    }
    shuffled = shuffle_roles(values, model, seed)
    expected = role_cycle_of_model(blocks, seed)
    for name, entry in blocks.items():
        assert shuffled[name].tolist() == pytest.approx(
            [1.0 + labels.index(expected[r]) for r in entry.block_roles]
        )


def role_cycle_of_model(blocks, seed):
    found = dict.fromkeys(role for entry in blocks.values() for role in entry.roles)
    return role_cycle(list(found), seed)


@pytest.mark.filterwarnings("ignore:No block had")
@pytest.mark.parametrize(
    "arm", ["block-adamw+newton", "block-adamw+newton-shuffled", "block-adamw+newton-inverted"]
)
def test_scales_of_a_run_keep_the_geometric_mean_and_controls_differ(arm):
    torch.manual_seed(0)
    model = GPT2(MODEL)
    training = build(
        ARMS[arm], model, {"lr": 3e-3, "power": -0.5, "weight_decay": 0.1}, steps=4, seed=0
    )
    tokens = torch.randint(256, (4, 17))
    for _ in range(4):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        training.optimizer.step()
        training.block_lr.step(lambda: model(tokens[:, :-1], tokens[:, 1:]))
        training.optimizer.zero_grad()
    scales = training.optimizer.block_scales()
    assert weighted_mean_of_logs(scales, model) == pytest.approx(0, abs=1e-5)
    refresh = training.block_lr.history[0]
    low, high = (pick(refresh.curvature, key=refresh.curvature.get) for pick in (min, max))
    if arm.endswith("inverted"):
        assert refresh.scale[low] < refresh.scale[high]
    else:  # the history of the shuffled arm shows the curvature that each role was given
        assert refresh.scale[low] > refresh.scale[high]


def test_free_ratios_reach_the_groups_they_are_for():
    model = GPT2(MODEL)
    values = {"lr": 1e-3, "embedding_ratio": 4.0, "vector_ratio": 0.5, "weight_decay": 0.1}
    optimizer = build(ARMS["adamw-groups"], model, values, steps=10, seed=0).optimizer
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    found = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert found["wte.weight"] == found["wpe.weight"] == pytest.approx(4e-3)
    assert found["h.0.ln_1.weight"] == found["h.0.mlp.c_fc.bias"] == pytest.approx(5e-4)
    assert found["h.0.attn.c_attn.weight"] == found["h.0.mlp.c_proj.weight"] == pytest.approx(1e-3)


def test_values_of_another_arm_are_refused():
    with pytest.raises(ValueError, match="power"):
        build(
            ARMS["block-adamw+newton"],
            GPT2(MODEL),
            {"lr": 1e-3, "weight_decay": 0.1},
            steps=10,
            seed=0,
        )


def test_shipped_arms_tune_their_learning_rate_only():
    study, longer = presets()["small"]
    assert study.baseline == longer.baseline == "shipped-muon"
    shipped = [arm for arm in map(ARMS.get, study.arms) if arm.shipped]
    assert {arm for arm in map(ARMS.get, longer.arms) if arm.shipped} < set(shipped)
    for arm in shipped:
        assert [axis.name for axis in arm.space] == ["lr"]
        training = build(arm, GPT2(MODEL), {"lr": 1e-3}, steps=1200, seed=5)
        decays = {group["weight_decay"] for group in training.optimizer.param_groups}
        assert decays == {0.0, 1e-3 if "sgd" in arm.name else 0.1}
        assert (training.block_lr is None) == (arm.scales is None)
    for kind, optimizer in (("sgd", blockopt.BlockSGD), ("muon", blockopt.BlockMuon)):
        arm = ARMS[f"shipped-block-{kind}+newton"]
        training = build(arm, GPT2(MODEL), {"lr": 1e-3}, steps=9, seed=5)
        plain = GPT2(MODEL)
        default = blockopt.BlockLR(optimizer(blockopt.param_groups(plain), lr=1e-3), plain)
        for name, value in vars(default).items():
            if isinstance(value, (int, float, str, dict)):
                assert getattr(training.block_lr, name) == value
