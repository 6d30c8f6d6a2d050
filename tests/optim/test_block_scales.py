"""Block scales of the optimizers: set, given back, refused."""

import math

import pytest
import torch
from torch import nn

import blockopt
from tests.helpers.optimizers import (
    OPTIMIZERS,
    random_gradients,
    random_scales,
    set_gradients,
    tiny_gpt,
)


@pytest.fixture(params=OPTIMIZERS)
def make(request):
    return OPTIMIZERS[request.param]


def test_scale_zero_freezes_a_head_and_one_changes_nothing(make):
    model, plain = tiny_gpt(), tiny_gpt()
    a, b = (
        make(blockopt.param_groups(model, weight_decay=0.0)),
        make(blockopt.param_groups(plain, weight_decay=0.0)),
    )
    name = "h.0.attn.c_attn.weight"
    scale = torch.ones(6)
    scale[3] = 0.0  # key of the second head
    a.set_block_scales({name: scale})
    set_gradients(model, random_gradients(model, 0))
    set_gradients(plain, random_gradients(plain, 0))
    a.step()
    b.step()
    start, frozen = dict(tiny_gpt().named_parameters())[name], slice(24, 32)
    moved = dict(model.named_parameters())[name]
    assert torch.equal(moved[frozen], start[frozen])
    others = [i for i in range(48) if not 24 <= i < 32]
    torch.testing.assert_close(
        moved[others], dict(plain.named_parameters())[name][others], rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize(
    ("scales", "error", "match"),
    [
        ({"nowhere": torch.ones(1)}, KeyError, "No parameter 'nowhere'"),
        (
            {"ln_f.weight": torch.ones(2)},
            ValueError,
            r"shape \(2,\) for 'ln_f.weight'. Must be \(1,\)",
        ),
        (
            {"h.0.attn.c_attn.weight": torch.full((6,), -1.0)},
            ValueError,
            "-1.0. Must be finite and >= 0",
        ),
        ({"h.0.attn.c_attn.weight": torch.full((6,), math.nan)}, ValueError, "nan. Must be finite"),
    ],
)
def test_bad_scales_are_refused_and_change_nothing(make, scales, error, match):
    optimizer = make(blockopt.param_groups(tiny_gpt()))
    good = {"wpe.weight": torch.full((8,), 2.0)}
    with pytest.raises(error, match=match):
        optimizer.set_block_scales({**good, **scales})
    assert all(bool((s == 1).all()) for s in optimizer.block_scales().values())


def test_scales_need_names():
    optimizer = blockopt.BlockAdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="Build it with param_groups"):
        optimizer.set_block_scales({"weight": torch.ones(1)})


def test_scales_given_back_are_copies(make):
    optimizer = make(blockopt.param_groups(tiny_gpt()))
    optimizer.set_block_scales(random_scales(optimizer))
    optimizer.block_scales()["ln_f.weight"].zero_()
    assert optimizer.block_scales()["ln_f.weight"].item() > 0


def test_scales_beyond_float32_and_duplicate_names_are_refused():
    model = tiny_gpt()
    optimizer = blockopt.BlockAdamW(blockopt.param_groups(model))
    with pytest.raises(ValueError, match=r"inf\. Must be finite"):
        optimizer.set_block_scales({"ln_f.weight": torch.tensor([1e39], dtype=torch.float64)})
    twice = blockopt.BlockAdamW(blockopt.param_groups(model) + blockopt.param_groups(tiny_gpt()))
    with pytest.raises(ValueError, match=r"two parameters are called 'wte\.weight'"):
        twice.block_scales()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_ignored_bad_gradient_with_scales_per_row_stays_in_its_entry(bad):
    """Rows of their own scale share scratch memory, which must not carry it to the next ones."""
    model, twin = tiny_gpt(), tiny_gpt()
    for each in (model, twin):
        optimizer = blockopt.BlockAdamW(blockopt.param_groups(each), nonfinite="ignore")
        optimizer.set_block_scales(random_scales(optimizer, 0))
        set_gradients(each, random_gradients(each, 0))
        if each is model:
            each.get_parameter("wte.weight").grad[0, 0] = bad
        optimizer.step()
    for (name, p), (_, q) in zip(model.named_parameters(), twin.named_parameters()):
        same = torch.ones_like(p, dtype=torch.bool)
        if name == "wte.weight":
            assert p[0, 0].isnan()
            same[0, 0] = False
        torch.testing.assert_close(p[same], q[same], msg=name)
