"""The fast optimizers equal their transparent references, with scales and without."""

import pytest
import torch

import blockopt
from tests.helpers.optimizers import random_gradients, random_scales, set_gradients, tiny_gpt
from tests.helpers.reference_optimizers import ReferenceAdamW, ReferenceMuon, ReferenceSGD

ADAM = {"betas": (0.9, 0.95), "eps": 1e-8}
CASES = {
    "adamw-coordinate": (
        blockopt.BlockAdamW,
        ReferenceAdamW,
        {**ADAM, "second_moment": "coordinate"},
    ),
    "adamw-block": (blockopt.BlockAdamW, ReferenceAdamW, {**ADAM, "second_moment": "block"}),
    "sgd": (blockopt.BlockSGD, ReferenceSGD, {"momentum": 0.9, "nesterov": False}),
    "sgd-nesterov": (blockopt.BlockSGD, ReferenceSGD, {"momentum": 0.9, "nesterov": True}),
    "sgd-plain": (blockopt.BlockSGD, ReferenceSGD, {"momentum": 0.0, "nesterov": False}),
    "muon": (
        blockopt.BlockMuon,
        ReferenceMuon,
        {
            **ADAM,
            "momentum": 0.95,
            "nesterov": True,
            "second_moment": "coordinate",
        },
    ),
    "muon-block": (
        blockopt.BlockMuon,
        ReferenceMuon,
        {**ADAM, "momentum": 0.9, "nesterov": False, "second_moment": "block"},
    ),
    "muon-uneven": (
        blockopt.BlockMuon,
        ReferenceMuon,
        {
            **ADAM,
            "momentum": 0.9,
            "nesterov": True,
            "precondition": False,
            "second_moment": "coordinate",
        },
    ),
}


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("chunk", [None, 64])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_reference(case, scaled, chunk, per_head, monkeypatch):
    if chunk is not None:  # so small that every matrix is worked on in several chunks
        monkeypatch.setattr("blockopt.optim.chunks.CPU_CHUNK", chunk)
        monkeypatch.setattr("blockopt.optim.muon_step.CPU_BATCH", chunk)
        monkeypatch.setattr("blockopt.optim.scale_runs.SHORTEST", 1)  # one call per head and row
    fast_class, slow_class, options = CASES[case]
    model = tiny_gpt(dtype=torch.float64)
    blocks = blockopt.find_blocks(model, per_head=per_head)
    groups = blockopt.param_groups(model, blocks, weight_decay=0.1)
    fast = fast_class(groups, lr=1e-2, **options)
    decays = {
        name: group["weight_decay"] for group in fast.param_groups for name in group["param_names"]
    }
    slow = slow_class(dict(model.named_parameters()), blocks, decays, **options)
    if scaled:
        scales = random_scales(fast)
        fast.set_block_scales(scales)
        slow.scales = {name: s.double() for name, s in scales.items()}
    for step, lr in enumerate([1e-2, 2e-2, 5e-3, 1e-2]):
        for group in fast.param_groups:
            group["lr"] = lr
        gradients = random_gradients(model, seed=step)
        set_gradients(model, gradients)
        fast.step()
        slow.step(gradients, lr)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), slow.p[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-4, 1.0, 1e4])
def test_extreme_scales_leave_the_decay_alone(scale):
    model = tiny_gpt(dtype=torch.float64)
    blocks = blockopt.find_blocks(model)
    fast = blockopt.BlockAdamW(blockopt.param_groups(model, blocks, weight_decay=0.1), lr=1e-2)
    decays = {n: g["weight_decay"] for g in fast.param_groups for n in g["param_names"]}
    options = {"betas": (0.9, 0.999), "eps": 1e-8, "second_moment": "coordinate"}
    slow = ReferenceAdamW(dict(model.named_parameters()), blocks, decays, **options)
    scales = {name: torch.full((b.num_blocks,), scale) for name, b in blocks.items()}
    fast.set_block_scales(scales)
    slow.scales = {name: s.double() for name, s in scales.items()}
    for step in range(2):
        gradients = random_gradients(model, seed=step)
        set_gradients(model, gradients)
        fast.step()
        slow.step(gradients, 1e-2)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), slow.p[name], rtol=1e-11, atol=1e-12)
