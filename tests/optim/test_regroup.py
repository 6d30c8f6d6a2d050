"""Checkpoints of `torch.optim.AdamW` go on in `BlockAdamW(param_groups(model))`, and back."""

import copy

import pytest
import torch
from torch import nn

import blockopt
from blockopt.block_lr import BlockLR
from tests.helpers.optimizers import assert_same_weights, tiny_gpt, token_loss, train

LR = 3e-3


def one_group(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95))


def one_named_group(model):
    pairs = list(model.named_parameters())[::-1]
    return torch.optim.AdamW(pairs, lr=LR, betas=(0.9, 0.95))


def decay_and_no_decay(model):
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))


BUILD = {"one": one_group, "named": one_named_group, "two": decay_and_no_decay}


def ours(model):
    return blockopt.BlockAdamW(blockopt.param_groups(model), lr=1.0, betas=(0.5, 0.5))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", BUILD)
def test_a_checkpoint_of_torch_goes_on_in_ours_and_back(kind, frozen):
    old, new, last = (tiny_gpt() for _ in range(3))
    for model in (old, new, last):
        model.h[0].attn.c_attn.weight.requires_grad_(not frozen)
    build = BUILD[kind]
    first = build(old)
    train(old, first, range(5))
    new.load_state_dict(old.state_dict())
    second = ours(new)
    checkpoint = copy.deepcopy(first.state_dict())
    second.load_state_dict(blockopt.regroup_state_dict(checkpoint, second, new))
    assert {(group["lr"], group["betas"]) for group in second.param_groups} == {(LR, (0.9, 0.95))}
    train(old, first, range(5, 10))
    train(new, second, range(5, 10))
    assert_same_weights(new, old, rtol=1e-4, atol=1e-5)

    last.load_state_dict(new.state_dict())
    third = build(last)
    if kind == "two":
        third.param_groups[0]["weight_decay"] = 0.7  # comes back from the checkpoint
    third.load_state_dict(
        blockopt.regroup_state_dict(copy.deepcopy(second.state_dict()), third, last)
    )
    assert [g["weight_decay"] for g in third.param_groups] == [
        g["weight_decay"] for g in first.param_groups
    ]
    train(old, first, range(10, 13))
    train(last, third, range(10, 13))
    assert_same_weights(last, old, rtol=1e-4, atol=1e-5)


def test_the_state_of_block_lr_goes_along():
    model, other = tiny_gpt(), tiny_gpt()
    optimizer = torch.optim.AdamW(blockopt.param_groups(model, by="parameter"), lr=LR)
    block_lr = BlockLR(optimizer, model, curvature="gradient", every=1)
    token_loss(model).backward()
    optimizer.step()
    block_lr.step()
    target = blockopt.BlockAdamW(blockopt.param_groups(other), lr=LR)
    target.load_state_dict(blockopt.regroup_state_dict(optimizer.state_dict(), target, other))
    assert BlockLR(target, other).history == block_lr.history
    expected = block_lr.last_scales.as_dict()
    assert all(torch.equal(s, expected[name]) for name, s in target.block_scales().items())


def test_options_on_which_the_saved_groups_differ_stay():
    model = tiny_gpt()
    first = decay_and_no_decay(model)
    train(model, first, range(1))
    single = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.03)
    single.load_state_dict(blockopt.regroup_state_dict(first.state_dict(), single, model))
    assert single.param_groups[0]["weight_decay"] == 0.03
    assert single.param_groups[0]["lr"] == LR


def test_what_cannot_be_matched_is_refused():
    model = tiny_gpt()
    target = ours(model)
    optimizer = one_group(model)
    train(model, optimizer, range(1))
    with pytest.raises(
        ValueError, match=r"groups of \[28\] parameters, and this.*regroup_state_di"
    ):
        target.load_state_dict(optimizer.state_dict())
    shuffled = torch.optim.AdamW(list(model.parameters())[::-1], lr=LR)
    train(model, shuffled, range(1))
    with pytest.raises(ValueError, match=r"without names, and they do not follow the order"):
        blockopt.regroup_state_dict(shuffled.state_dict(), target, model)
    halves = list(model.parameters())
    mixed = torch.optim.AdamW([{"params": halves[:9]}, {"params": halves[9:]}], lr=LR)
    train(model, mixed, range(1))
    with pytest.raises(ValueError, match=r"groups of \[9, 19\] parameters without names"):
        blockopt.regroup_state_dict(mixed.state_dict(), target, model)
    part = torch.optim.AdamW(list(model.named_parameters())[1:], lr=LR)
    with pytest.raises(ValueError, match=r"has no parameter 'wte.weight' of shape \(19, 16\)"):
        blockopt.regroup_state_dict(part.state_dict(), target, model)
    by_block = blockopt.BlockAdamW(blockopt.param_groups(model), second_moment="block")
    train(model, by_block, range(1))
    with pytest.raises(ValueError, match=r"'exp_avg_sq' of 'wte.weight' .* AdamW cannot use"):
        blockopt.regroup_state_dict(by_block.state_dict(), optimizer, model)


def test_parameters_that_start_to_train_later_join_with_their_blocks():
    model = tiny_gpt()
    model.h[0].requires_grad_(False)
    optimizer = blockopt.BlockAdamW(blockopt.param_groups(model), lr=LR)
    block_lr = BlockLR(optimizer, model, every=1)

    def step(seed):
        optimizer.zero_grad()
        token_loss(model, seed).backward()
        optimizer.step()
        block_lr.step(lambda: token_loss(model, seed))

    step(0)
    model.h[0].requires_grad_(True)
    for group in ({"params": model.h[0].parameters()}, {"params": [("a", nn.Parameter())]}):
        with pytest.raises(ValueError, match=r"have blocks, and the new one has none. Pass each"):
            optimizer.add_param_group(group)
    for group in blockopt.param_groups(model, only=model.h[0].parameters()):
        optimizer.add_param_group(group)
    before = model.h[0].attn.c_attn.weight.detach().clone()
    step(1)
    step(2)
    assert not torch.equal(before, model.h[0].attn.c_attn.weight)
    scales = optimizer.block_scales()
    assert scales.keys() == dict(model.named_parameters()).keys()
    assert not bool((scales["h.0.attn.c_attn.weight"] == 1).all())
