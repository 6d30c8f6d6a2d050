"""Block scales equal a reference with loops over entries, and keep their promises."""

import copy
import math
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from blockopt import BlockAdamW, find_blocks, param_groups
from blockopt.block_lr import scales as scales_module
from blockopt.block_lr.scales import block_scales, sharpness_disparity, uniform
from blockopt.blocks import ROLES
from tests.helpers.models import FAMILIES, block_index

LEVELS = ("role", "layer", "tensor", "head")
MODELS = {
    name: FAMILIES[name]() for name in ("nanogpt", "gpt_neox", "llama", "phi3")
}  # fused, interleaved, grouped-query


@pytest.fixture(autouse=True)
def nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(scales_module, "_warned", set())


def random_curvature(blocks, seed=0, dtype=torch.float64):
    """Between 1e-6 and 1e2, evenly in the logarithm."""
    generator = torch.Generator().manual_seed(seed)
    draw = {
        n: torch.rand(entry.num_blocks, generator=generator, dtype=torch.float64)
        for n, entry in blocks.items()
    }
    return {name: (10 ** (8 * u - 6)).to(dtype) for name, u in draw.items()}


def entries(model, blocks):
    """(parameter name, block) of every single entry of the model."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for block in block_index(tuple(parameter.shape), blocks[name].split).flatten().tolist():
                yield name, block


def group_of(name, block, blocks, by):
    role = blocks[name].block_roles[block]
    return {
        "role": role,
        "layer": (blocks[name].layer, role),
        "tensor": (name, role),
        "head": (name, block),
    }[by]


def reference(curvature, model, blocks, power, bounds, by):
    plain = {name: values.tolist() for name, values in curvature.items()}
    keys = {
        (n, b): group_of(n, b, blocks, by)
        for n, entry in blocks.items()
        for b in range(entry.num_blocks)
    }
    members, size = {}, {}
    for place in entries(model, blocks):
        members.setdefault(keys[place], []).append(plain[place[0]][place[1]])
        size[keys[place]] = size.get(keys[place], 0) + 1
    pooled = {}
    for key, values in members.items():
        finite = [v for v in values if math.isfinite(v)]
        pooled[key] = math.fsum(finite) / len(finite) if finite else sum(values)
    usable = [v for v in pooled.values() if 0 < v < math.inf]
    for key, value in pooled.items():
        if value <= 0:
            pooled[key] = min(usable)
        elif not math.isfinite(value):
            pooled[key] = max(usable)
    y = {key: power * math.log(value) for key, value in pooled.items()}
    low, high = map(math.log, bounds)

    def clipped(key, shift):
        return min(max(y[key] - shift, low), high)

    def total(shift):
        return math.fsum(size[key] * clipped(key, shift) for key in y)

    # The total is linear between the shifts at which some group meets a bound, and falls:
    # interpolate where it meets zero.
    corners = sorted({v - bound for v in y.values() for bound in (low, high)})
    above, below = 0, len(corners) - 1
    while below - above > 1:
        middle = (above + below) // 2
        above, below = (middle, below) if total(corners[middle]) > 0 else (above, middle)
    left, right = corners[above], corners[below]
    rise = total(left) - total(right)
    shift = left + (right - left) * total(left) / rise if rise else left
    return {
        n: [math.exp(clipped(keys[n, b], shift)) for b in range(entry.num_blocks)]
        for n, entry in blocks.items()
    }


def check_against_reference(curvature, model, blocks, power, bounds, by):
    scales = block_scales(curvature, model, blocks, power=power, bounds=bounds, by=by)
    expected = reference(curvature, model, blocks, power, bounds, by)
    assert scales.keys() == expected.keys()
    for name, values in scales.items():
        torch.testing.assert_close(values, torch.tensor(expected[name]), rtol=3e-6, atol=0.0)


def mean_log(scales, model, blocks):
    logs = {name: values.double().log().tolist() for name, values in scales.items()}
    found = [logs[name][block] for name, block in entries(model, blocks)]
    return math.fsum(found) / len(found)


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


LAYER = nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32)
FUSED = "self_attn.in_proj_weight"


def layer_scales(first=None, second=None, **options):
    """Scales of a layer whose norms are the sharpest and whose output is the flattest."""
    curvature = {
        name: torch.full((entry.num_blocks,), 1.0) for name, entry in find_blocks(LAYER).items()
    }
    curvature["self_attn.out_proj.weight"][:] = 0.25
    curvature["norm1.weight"][:] = curvature["norm1.bias"][:] = curvature["norm2.weight"][
        :
    ] = curvature["norm2.bias"][:] = 4.0
    for start, given in ((0, first), (2, second)):
        if given is not None:
            curvature[FUSED][start : start + 2] = torch.tensor(given)
    return block_scales(curvature, LAYER, **options)


@pytest.mark.parametrize(
    ("given", "like", "kind"),
    [
        ([0.0, 0.0], "self_attn.out_proj.weight", ""),
        ([-1.0, 0.5], "self_attn.out_proj.weight", ""),
        ([-math.inf, -math.inf], "self_attn.out_proj.weight", "not finite"),
        ([math.nan, math.nan], "norm1.weight", "not finite"),
        ([math.inf, math.inf], "norm1.weight", "not finite"),
        ([math.inf, -math.inf], "norm1.weight", "not finite"),
        ([math.nan, 1.0], "linear1.weight", "not finite"),
        ([math.inf, 1.0], "linear1.weight", "not finite"),
        ([1.0, -math.inf], "linear1.weight", "not finite"),
    ],
)
def test_curvature_that_cannot_be_inverted_counts_as_the_nearest_that_can(given, like, kind):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scales = layer_scales(first=given)
    assert [kind in str(warning.message) for warning in caught] == (
        [] if all(map(math.isfinite, given)) else [True]
    )
    torch.testing.assert_close(scales[FUSED][:2], scales[like][:1].expand(2), rtol=1e-6, atol=0.0)
    assert (
        scales["norm1.weight"]
        < scales["linear1.weight"][0]
        < scales["self_attn.out_proj.weight"][0]
    )
    assert abs(mean_log(scales, LAYER, find_blocks(LAYER))) < 1e-6


@pytest.mark.parametrize("by", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_broken_curvature_equals_the_reference(name, by):
    model = MODELS[name]
    blocks = find_blocks(model)
    curvature = random_curvature(blocks, seed=2)
    generator = torch.Generator().manual_seed(3)
    for values in curvature.values():
        kinds = torch.randint(8, values.shape, generator=generator)
        for kind, broken in enumerate((math.nan, math.inf, -math.inf, -1.0, 0.0)):
            values[kinds == kind] = broken
    with pytest.warns(UserWarning, match="not finite"):
        check_against_reference(curvature, model, blocks, -0.5, (0.1, 10.0), by)


def test_the_warning_names_three_parameters_at_most_and_points_at_the_caller():
    model = MODELS["llama"]
    curvature = random_curvature(find_blocks(model))
    for name, values in curvature.items():
        if "norm" in name:
            values[:] = math.nan
    message = r"some blocks of 5 parameters \([^,]+norm[^,]*, [^,]+, [^,]+, …\) is not finite"
    with pytest.warns(UserWarning, match=message) as caught:
        block_scales(curvature, model)
    assert {warning.filename for warning in caught} == {__file__}


def test_negative_curvature_warns_only_where_most_weights_have_it():
    blocks = find_blocks(LAYER)
    few = {name: torch.ones(b.num_blocks) for name, b in blocks.items()}
    few["norm1.weight"][:] = few["norm2.weight"][:] = -1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        block_scales(few, LAYER, by="tensor")
    most = {name: -values for name, values in few.items()}
    with pytest.warns(UserWarning, match=r"curvature of 9\d% of the weights is not positive"):
        block_scales(most, LAYER, by="tensor")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_no_positive_curvature_at_all_is_an_error(value):
    curvature = {name: ones * value for name, ones in uniform(LAYER).items()}
    message = (
        "None of the 8 groups of blocks has a positive and finite curvature. Measure on more data"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        block_scales(curvature, LAYER)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "row"}, "Invalid by='row'. Must be one of 'role', 'layer', 'tensor', 'head'."),
        ({"power": math.nan}, "Invalid power=nan. Must be finite."),
        ({"power": -math.inf}, "Invalid power=-inf. Must be finite."),
        *(
            (
                {"bounds": bounds},
                f"Invalid bounds={bounds}. Must be (low, high) with 1e-38 <= low <= 1 <= high "
                "<= 1e38.",
            )
            for bounds in (
                (0.0, 10.0),
                (-1.0, 2.0),
                (2.0, 3.0),
                (0.1, 0.9),
                (10.0, 0.1),
                (0.1, math.inf),
                (math.nan, 1.0),
            )
        ),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        block_scales(uniform(LAYER), LAYER, **options)


def test_curvature_that_does_not_fit_the_model_is_refused():
    curvature = uniform(LAYER)
    with pytest.raises(
        ValueError,
        match=r"shape \(5,\) for 'self_attn.in_proj_weight'. Must be \(6,\), one value per block",
    ):
        block_scales({**curvature, FUSED: torch.ones(5)}, LAYER)
    with pytest.raises(ValueError, match=r"shape \(\) for 'norm1.weight'. Must be \(1,\)"):
        block_scales({**curvature, "norm1.weight": torch.tensor(1.0)}, LAYER)
    del curvature["norm1.weight"]
    message = "Invalid curvature: ['norm1.weight'] are missing, and ['norm3'] are not trained."
    with pytest.raises(ValueError, match=re.escape(message)):
        block_scales({**curvature, "norm3": torch.ones(1)}, LAYER)


@pytest.mark.parametrize(
    "preset", [uniform, sharpness_disparity, lambda *args: block_scales(uniform(LAYER), *args)]
)
def test_blocks_that_do_not_fit_the_model_are_refused(preset):
    blocks = find_blocks(LAYER)
    with pytest.raises(ValueError, match=r"Invalid blocks: \['norm2.bias'\] are missing"):
        preset(LAYER, {name: entry for name, entry in blocks.items() if name != "norm2.bias"})
    with pytest.raises(ValueError, match="sections cover 48 of the 32 entries"):
        preset(LAYER, {**blocks, "linear1.weight": blocks[FUSED]})
    with pytest.raises(ValueError, match="ReLU has no trainable parameter"):
        preset(nn.ReLU())


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
    **{"position": 10, "head": 1, "bias": 1, "other": 1},  # our choice
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
    assert found == set(ROLES) == set(PUBLISHED)


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
        ValueError, match=r"Invalid curvature: lacks \['module\..*and has \['lm_head"
    ):
        block_scales(curvature, model)
