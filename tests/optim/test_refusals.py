"""What the optimizers refuse, and that a refusal changes nothing."""

import math

import pytest
import torch
from torch import nn

import blockopt
from tests.helpers.optimizers import (
    OPTIMIZERS,
    assert_same_weights,
    random_gradients,
    set_gradients,
    tiny_gpt,
)


@pytest.fixture(params=OPTIMIZERS)
def make(request):
    return OPTIMIZERS[request.param]


def test_a_model_is_no_parameters(make):
    with pytest.raises(TypeError, match=r"takes parameters, not a model.*param_groups\(model\)"):
        make(tiny_gpt())


def test_sparse_gradient_is_refused(make):
    model = nn.Embedding(5, 4, sparse=True)
    model(torch.tensor([1])).sum().backward()
    optimizer = make(blockopt.param_groups(model))
    with pytest.raises(ValueError, match=r"'weight' is sparse.*sparse=False"):
        optimizer.step()


def test_complex_parameter_is_refused(make):
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    weight.abs().sum().backward()
    optimizer = make([{"params": [("weight", weight)], "blocks": [(("other",), None, None)]}])
    with pytest.raises(ValueError, match="complex64"):
        optimizer.step()


@pytest.mark.parametrize("lr", [math.nan, math.inf, -1.0, torch.tensor([1.0, 2.0])])
def test_bad_learning_rate_is_refused(make, lr):
    with pytest.raises(ValueError, match="Invalid lr"):
        make(blockopt.param_groups(tiny_gpt()), lr=lr)


def test_learning_rate_ruined_by_a_schedule_is_refused(make):
    model, untouched = tiny_gpt(), tiny_gpt()
    optimizer = make(blockopt.param_groups(model))
    optimizer.param_groups[0]["lr"] = math.nan
    set_gradients(model, random_gradients(model, 0))
    with pytest.raises(ValueError, match="Invalid lr=nan"):
        optimizer.step()
    assert_same_weights(model, untouched)


@pytest.mark.parametrize(
    ("build", "options", "match"),
    [
        (
            blockopt.BlockAdamW,
            {"betas": (1.0, 0.9)},
            r"Invalid betas\[0\]=1.0. Must be in \[0, 1.0\)",
        ),
        (blockopt.BlockAdamW, {"betas": (0.9, math.nan)}, r"Invalid betas\[1\]=nan"),
        (blockopt.BlockAdamW, {"eps": -1.0}, "Invalid eps"),
        (blockopt.BlockAdamW, {"weight_decay": math.inf}, "Invalid weight_decay"),
        (
            blockopt.BlockAdamW,
            {"second_moment": "row"},
            "Invalid second_moment='row'. Must be one of 'coordinate', 'block'",
        ),
        (blockopt.BlockAdamW, {"nonfinite": "warn"}, "Invalid nonfinite='warn'"),
        (blockopt.BlockSGD, {"momentum": 1.5}, "Invalid momentum"),
        (blockopt.BlockSGD, {"weight_decay": -0.1}, "Invalid weight_decay"),
        (blockopt.BlockMuon, {"momentum": -0.5}, "Invalid momentum"),
        (blockopt.BlockMuon, {"iterations": 0}, "Invalid iterations"),
    ],
)
def test_bad_hyperparameter_is_refused(build, options, match):
    with pytest.raises(ValueError, match=match):
        build(blockopt.param_groups(tiny_gpt()), **options)


def test_block_options_need_blocks():
    with pytest.raises(ValueError, match="param_groups"):
        blockopt.BlockAdamW(tiny_gpt().parameters(), second_moment="block")
    with pytest.raises(ValueError, match="param_groups"):
        blockopt.BlockMuon(tiny_gpt().parameters())


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": math.nan},
        {"betas": (2.0, 3.0)},
        {"eps": -1.0},
        {"nonfinite": "warn"},
        {"second_moment": "row"},
    ],
)
def test_bad_options_of_a_group_are_refused_and_it_is_not_added(options):
    optimizer = blockopt.BlockAdamW(blockopt.param_groups(tiny_gpt()))
    count = len(optimizer.param_groups)
    with pytest.raises(ValueError, match=f"Invalid {next(iter(options))}"):
        optimizer.add_param_group(
            {"params": [("x", nn.Parameter(torch.ones(2)))], "blocks": [(("norm",), 0, None)]}
            | options
        )
    assert len(optimizer.param_groups) == count
