"""Blocks of one group differ by their shares in the squared gradient: the default for SGD."""

import pytest
import torch
from torch import nn

import blockopt
from blockopt.block_lr import BlockLR
from blockopt.block_lr.gradient_shares import FLOOR, SPACING
from tests.helpers.block_lr import attached, constant, take_step
from tests.helpers.optimizers import OPTIMIZERS, tiny_gpt, token_loss


def sgd_with(by="role", steps=1, seed=0, scale=1.0, **options):
    """Steps of SGD with equal curvature everywhere; returns the squared gradients of each step."""
    model = tiny_gpt(seed)
    optimizer = OPTIMIZERS["sgd"](blockopt.param_groups(model), lr=1e-3 / scale)
    block_lr = BlockLR(optimizer, model, curvature=constant(model), by=by, **options)
    squares = []
    for number in range(steps):
        optimizer.zero_grad()
        (scale * token_loss(model, number)).backward()
        squares.append({n: p.grad.double().square() for n, p in model.named_parameters()})
        optimizer.step()
        block_lr.step()
    return model, optimizer, squares


def test_rows_of_a_table_get_the_root_of_their_share():
    _, optimizer, squares = sgd_with(steps=SPACING + 1, every=SPACING)
    rows = 0
    for step in (squares[0], squares[SPACING]):
        total = sum(square.sum() for square in step.values())
        rows = rows + step["wte.weight"].mean(dim=1) / total
    expected = (rows / rows.mean() + FLOOR) ** -0.5
    found = optimizer.block_scales()["wte.weight"].double()
    torch.testing.assert_close(found / found[0], expected / expected[0], rtol=1e-5, atol=0)
    assert found.max() / found.min() > 1.5


def test_groups_keep_their_scale_by_role_and_blocks_alone_have_no_share():
    model, optimizer, _ = sgd_with()
    roles: dict[str, list[torch.Tensor]] = {}
    for name, entry in blockopt.find_blocks(model).items():
        scales = optimizer.block_scales()[name]
        for role, scale in zip(entry.block_roles, scales, strict=True):
            roles.setdefault(role, []).append(scale.double().log())
    means = torch.stack([torch.stack(logs).mean() for logs in roles.values()])
    torch.testing.assert_close(means, means[:1].expand(len(means)), rtol=0, atol=1e-6)
    alone = sgd_with(by="head")[1].block_scales()
    assert all(torch.allclose(scale, torch.ones(())) for scale in alone.values())


def test_the_size_of_the_gradient_does_not_matter():
    plain, scaled = (sgd_with(scale=scale)[1].block_scales() for scale in (1.0, 1024.0))
    for name, scale in plain.items():
        torch.testing.assert_close(scale, scaled[name], rtol=1e-5, atol=0)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_others_have_one_scale_in_a_group_unless_asked(optimizer):
    for within, spread in ((None, False), (-0.5, True)):
        model, built, block_lr = attached(lambda *_: curvature, optimizer, within=within)
        curvature = constant(model)(model, None)
        take_step(model, built)
        block_lr.step()
        table = built.block_scales()["wte.weight"]
        assert bool(table.max() > table.min()) == spread


def test_frequent_tokens_get_smaller_steps():
    """The law behind it: the curvature of a row goes with the frequency of its token."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12))
    blocks = blockopt.find_blocks(model, overrides={"2.weight": "head", "2.bias": "bias"})
    optimizer = blockopt.BlockSGD(blockopt.param_groups(model, blocks), lr=0.05, momentum=0.9)
    block_lr = BlockLR(optimizer, model, curvature=constant_of(blocks), every=10)
    frequency = 0.5 ** torch.arange(12.0)
    for _ in range(101):
        tokens = torch.multinomial(frequency, 64, replacement=True)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
        optimizer.step()
        block_lr.step()
    pairs = torch.stack([frequency[:6].log(), optimizer.block_scales()["0.weight"][:6].log()])
    assert torch.corrcoef(pairs)[0, 1] < -0.8


def constant_of(blocks):
    values = {name: torch.ones(entry.num_blocks) for name, entry in blocks.items()}
    return lambda model, losses: values


def test_torch_sgd_has_them_as_far_as_its_groups_go():
    model = tiny_gpt()
    optimizer = torch.optim.SGD(blockopt.param_groups(model, by="parameter"), lr=1e-3)
    block_lr = BlockLR(optimizer, model, curvature=constant(model))
    take_step(model, optimizer)
    block_lr.step()
    scales = block_lr.last_scales.as_dict()
    table = scales["wte.weight"]
    assert table.max() == table.min()
    outputs = [scales[f"h.{layer}.attn.c_proj.weight"][0] for layer in range(2)]
    assert outputs[0] != outputs[1]


@pytest.mark.parametrize("within", [float("nan"), float("inf")])
def test_its_power_must_be_finite(within):
    model = tiny_gpt()
    optimizer = OPTIMIZERS["sgd"](blockopt.param_groups(model))
    with pytest.raises(ValueError, match=r"Invalid within=.* Must be finite"):
        BlockLR(optimizer, model, within=within)
