"""Curvature that cannot be used, and options that are refused."""

import math
import re
import warnings

import pytest
import torch
from torch import nn

from blockopt import find_blocks
from blockopt.block_lr.scales import block_scales, sharpness_disparity, uniform
from tests.helpers.scales_reference import (
    LEVELS,
    MODELS,
    check_against_reference,
    mean_log,
    random_curvature,
)

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
