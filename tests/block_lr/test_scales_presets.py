"""Scales without a measurement, and scales of optimizers and of sharded models."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from blockopt import BlockAdamW, find_blocks, param_groups
from blockopt.block_lr.scales import block_scales, sharpness_disparity, uniform
from blockopt.blocks import ROLES
from tests.helpers.models import FAMILIES
from tests.helpers.scales_reference import LEVELS, MODELS, mean_log, random_curvature

PUBLISHED = {
    **{
        "norm": 1,
        "value": 4,
        "output": 4,
        "mlp_in": 6,
        "mlp_gate": 6,
        "mlp_out": 6,
        "query": 8,
        "key": 8,
        "embedding": 10,
    },
    **{"position": 10, "head": 1, "bias": 1, "gate": 1, "router": 1, "other": 1},  # our choice
}


@pytest.mark.parametrize("family", FAMILIES)
def test_sharpness_disparity_has_the_published_ratios_and_mean_one(family):
    model = FAMILIES[family]()
    blocks = find_blocks(model)
    scales = sharpness_disparity(model)
    roles = [role for entry in blocks.values() for role in entry.block_roles]
    units = torch.cat([scales[name] for name in blocks]) / torch.tensor(
        [PUBLISHED[role] for role in roles]
    )
    torch.testing.assert_close(units, units[:1].expand(len(units)), rtol=1e-6, atol=0.0)
    assert abs(mean_log(scales, model, blocks)) < 1e-6


def test_the_families_hold_every_role():
    found = {
        role
        for build in FAMILIES.values()
        for entry in find_blocks(build()).values()
        for role in entry.roles
    }
    assert found | {"gate"} == set(ROLES) == set(PUBLISHED)


def test_presets_take_blocks():
    model = MODELS["llama"]
    blocks = find_blocks(model, per_head=False, per_row=())
    assert all(torch.equal(values, torch.ones(1)) for values in uniform(model, blocks).values())
    assert {len(values) for values in sharpness_disparity(model, blocks).values()} == {1}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_optimizer_takes_every_result(family):
    model = FAMILIES[family]()
    optimizer = BlockAdamW(param_groups(model), lr=1e-3)
    for scales in (
        block_scales(random_curvature(find_blocks(model)), model, by="head"),
        sharpness_disparity(model),
        uniform(model),
    ):
        optimizer.set_block_scales(scales)
        kept = optimizer.block_scales()
        assert kept.keys() == scales.keys()
        assert all(torch.equal(kept[name], values) for name, values in scales.items())


@pytest.fixture
def two_ranks_of_which_one_is_here():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks_of_which_one_is_here")
def test_a_sharded_model_counts_whole_parameters():
    plain, model = FAMILIES["llama"](), FAMILIES["llama"]()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    assert all(
        isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters()
    )
    curvature = random_curvature(find_blocks(plain))
    for by in LEVELS:
        expected = block_scales(curvature, plain, by=by)
        assert all(
            torch.equal(v, expected[n]) for n, v in block_scales(curvature, model, by=by).items()
        )


@pytest.mark.usefixtures("two_ranks_of_which_one_is_here")
def test_a_replicated_model_goes_by_its_own_names():
    plain = FAMILIES["llama"]()
    model = nn.parallel.DistributedDataParallel(FAMILIES["llama"]())
    curvature = random_curvature(find_blocks(plain))
    expected = block_scales(curvature, plain)
    scales = block_scales({f"module.{name}": values for name, values in curvature.items()}, model)
    assert list(scales) == [f"module.{name}" for name in expected]
    assert all(torch.equal(scales[f"module.{n}"], v) for n, v in expected.items())
    with pytest.raises(
        ValueError, match=r"\['module\..* are missing, and \['lm_head.* not trained"
    ):
        block_scales(curvature, model)
