"""Block scales equal a reference with loops over entries, and keep their promises."""

import copy

import pytest
import torch
from torch import nn

from blockopt import find_blocks
from blockopt.block_lr.scales import block_scales, uniform
from tests.helpers.models import FAMILIES
from tests.helpers.scales_reference import (
    LEVELS,
    MODELS,
    check_against_reference,
    mean_log,
    random_curvature,
)


@pytest.mark.parametrize("by", LEVELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_scales_equal_the_reference_in_every_family(family, by):
    model = FAMILIES[family]()
    blocks = find_blocks(model)
    check_against_reference(random_curvature(blocks), model, blocks, -0.5, (0.1, 10.0), by)


@pytest.mark.parametrize("by", LEVELS)
@pytest.mark.parametrize("bounds", [(0.9, 1.5), (0.05, 1.01), (0.99, 30.0), (1e-30, 1e30)])
@pytest.mark.parametrize("power", [-1.0, -0.5, 0.3, 2.0])
def test_scales_equal_the_reference_however_they_are_clipped(power, bounds, by):
    model = MODELS["llama"]
    blocks = find_blocks(model)
    check_against_reference(random_curvature(blocks, seed=1), model, blocks, power, bounds, by)


@pytest.mark.parametrize("by", LEVELS)
@pytest.mark.parametrize(
    "options", [{"per_head": False, "per_row": ()}, {"per_row": ("embedding",)}]
)
def test_scales_follow_the_blocks_that_are_passed(options, by):
    model = MODELS["gpt_neox"]
    blocks = find_blocks(model, **options)
    assert sum(b.num_blocks for b in blocks.values()) < sum(
        b.num_blocks for b in find_blocks(model).values()
    )
    check_against_reference(random_curvature(blocks), model, blocks, -0.5, (0.3, 3.0), by)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("by", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_mean_bounds_and_order_hold_at_once(name, by, seed):
    model = MODELS[name]
    blocks = find_blocks(model)
    curvature = random_curvature(blocks, seed)
    power, low, high = -0.1 - 0.2 * seed, 0.95 - 0.1 * seed, 1.1 + seed
    scales = block_scales(curvature, model, blocks, power=power, bounds=(low, high), by=by)
    every = torch.cat(list(scales.values()))
    assert every.dtype == torch.float32
    assert abs(mean_log(scales, model, blocks)) < 1e-6
    assert torch.tensor(low) <= every.min() < 1 < every.max() <= torch.tensor(high)
    if by == "head":
        falling = every[torch.cat([curvature[n] for n in scales]).argsort()]
        assert (falling.diff() <= 0).all()


def test_a_mean_by_number_of_entries_worked_out_by_hand():
    model = nn.ModuleDict(
        {
            "a": nn.Linear(2, 1, bias=False),
            "b": nn.Linear(2, 3, bias=False),
            "norm": nn.LayerNorm(4),
        }
    )
    assert [entry.roles[0] for entry in find_blocks(model).values()] == [
        "other",
        "other",
        "norm",
        "norm",
    ]
    one = {
        "a.weight": 13.0,
        "b.weight": 1.0,
        "norm.weight": 0.5,
        "norm.bias": 1.5,
    }  # 2, 6, 4 and 4 entries
    curvature = {name: torch.tensor([value]) for name, value in one.items()}
    scales = block_scales(
        curvature, model, power=-1.0
    )  # (2 * 13 + 6 * 1) / 8 = 4 for others, 1 for norms, c_ref = 2
    assert {name: round(value.item(), 6) for name, value in scales.items()} == {
        **{"a.weight": 0.5, "b.weight": 0.5, "norm.weight": 2.0, "norm.bias": 2.0},
    }


def distinct(scales):
    return len({value.item() for value in torch.cat(scales)})


def test_roles_are_pooled_over_the_model():
    model = MODELS["nanogpt"]
    scales = block_scales(random_curvature(find_blocks(model)), model, bounds=(1e-3, 1e3))
    first, last = (scales[f"h.{layer}.attn.c_attn.weight"] for layer in (0, 1))
    assert torch.equal(first, last)
    assert [distinct([first[i : i + 4]]) for i in (0, 4, 8)] == [1, 1, 1]
    assert distinct([first]) == 3
    assert distinct(list(scales.values())) == len(
        {role for b in find_blocks(model).values() for role in b.roles}
    )


def test_a_layer_pools_the_parameters_of_a_role_in_it():
    model = MODELS["nanogpt"]
    scales = block_scales(
        random_curvature(find_blocks(model)), model, bounds=(1e-3, 1e3), by="layer"
    )
    fused = [scales[f"h.{layer}.attn.c_attn.weight"] for layer in (0, 1)]
    assert distinct(fused) == 6
    norms = [scales[f"h.{layer}.{norm}.weight"] for layer in (0, 1) for norm in ("ln_1", "ln_2")]
    assert distinct(norms) == distinct(norms[:2]) + distinct(norms[2:]) == 2


@pytest.mark.parametrize(
    ("name", "parameter", "sections"),
    [
        ("nanogpt", "h.0.attn.c_attn.weight", "qqqqkkkkvvvv"),
        ("gpt_neox", "gpt_neox.layers.1.attention.query_key_value.weight", "qkvqkvqkvqkv"),
        ("gpt_neox", "gpt_neox.layers.1.attention.query_key_value.bias", "bbbbbbbbbbbb"),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", "qqqqkkvv"),
        ("llama", "model.layers.0.self_attn.k_proj.weight", "kk"),
    ],
)
def test_a_tensor_keeps_its_sections_apart_and_a_head_every_block(name, parameter, sections):
    model = MODELS[name]
    curvature = random_curvature(find_blocks(model))
    pooled = block_scales(curvature, model, bounds=(1e-3, 1e3), by="tensor")[parameter].tolist()
    by_section = {
        section: {s for s, c in zip(pooled, sections, strict=True) if c == section}
        for section in sections
    }
    assert all(len(found) == 1 for found in by_section.values())
    assert len(set(pooled)) == len(set(sections))
    each = block_scales(curvature, model, bounds=(1e-3, 1e3), by="head")[parameter]
    assert distinct([each]) == len(sections)


def test_a_tensor_does_not_share_with_others_of_its_role():
    model = MODELS["llama"]
    scales = block_scales(
        random_curvature(find_blocks(model)), model, bounds=(1e-3, 1e3), by="tensor"
    )
    queries = [scales[f"model.layers.{layer}.self_attn.q_proj.weight"] for layer in (0, 1)]
    assert distinct(queries) == 2


@pytest.mark.parametrize("by", LEVELS)
def test_power_zero_and_bounds_of_one_give_exact_ones(by):
    model = MODELS["llama"]
    curvature = random_curvature(find_blocks(model))
    ones = uniform(model)
    assert not all(
        torch.equal(values, ones[n]) for n, values in block_scales(curvature, model, by=by).items()
    )
    for options in (
        {"power": 0.0},
        {"bounds": (1.0, 1.0)},
        {"bounds": (0.1, 1.0)},
        {"bounds": (1.0, 10.0)},
    ):
        for sign in (-1, 1):
            scales = block_scales(curvature, model, **{"power": 0.5 * sign, **options}, by=by)
            assert all(torch.equal(values, ones[name]) for name, values in scales.items()), options


@pytest.mark.parametrize("by", LEVELS)
def test_equal_curvature_gives_exact_ones(by):
    model = MODELS["llama"]
    scales = block_scales(
        {name: values * 0.3 for name, values in uniform(model).items()}, model, by=by
    )
    assert all(torch.equal(values, torch.ones(len(values))) for values in scales.values())


@pytest.mark.parametrize("by", LEVELS)
@pytest.mark.parametrize(
    ("factor", "dtype", "rtol"),
    [
        *((2.0**power, torch.float64, 0.0) for power in (-1000, -60, 1, 60, 1015)),
        *((2.0**power, torch.float32, 0.0) for power in (-90, 90)),
        *(
            (factor, dtype, 2e-6)
            for factor in (1e-30, 3.0, 1e30)
            for dtype in (torch.float32, torch.float64)
        ),
    ],
)
def test_the_unit_of_the_curvature_does_not_matter(factor, dtype, rtol, by):
    model = MODELS["gpt_neox"]
    curvature = random_curvature(find_blocks(model), dtype=dtype)
    scales = block_scales(curvature, model, by=by)
    scaled = block_scales(
        {name: values * factor for name, values in curvature.items()}, model, by=by
    )
    for name, values in scales.items():
        torch.testing.assert_close(scaled[name], values, rtol=rtol, atol=0.0)


def test_the_sign_of_rounding_does_not_matter():
    """Softmax does not see a bias of the keys: its curvature is zero, but for rounding."""
    model = FAMILIES["bert"]()
    curvature = {name: values + 1.0 for name, values in uniform(model).items()}
    name = next(name for name in curvature if name.endswith("key.bias"))
    found = []
    for rounding in (-1e-17, 0.0, 1e-17, 3e-16):
        curvature[name] = torch.full_like(curvature[name], rounding)
        found.append(block_scales(curvature, model, by="head"))
    for other in found[1:]:
        assert all(torch.equal(values, other[n]) for n, values in found[0].items())


def test_the_result_depends_on_values_only_and_the_input_stays_as_it_was():
    model = MODELS["nanogpt"]
    blocks = find_blocks(model)
    curvature = random_curvature(blocks, dtype=torch.bfloat16)
    before = copy.deepcopy(curvature)
    backwards = {name: curvature[name].float().requires_grad_() for name in reversed(curvature)}
    a, b = (
        block_scales(curvature, model),
        block_scales(backwards, model, dict(reversed(blocks.items()))),
    )
    assert list(a) == list(b) == list(blocks)
    for name, values in a.items():
        assert torch.equal(values, b[name])
        assert not b[name].requires_grad
        assert torch.equal(curvature[name], before[name])
