"""The largest eigenvalue of each group equals that of its dense Hessian block."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import blockopt
from blockopt import BlockAdamW, BlockLR, param_groups
from blockopt.analysis import HessianOperator, dense
from blockopt.curvature import top_eigenvalue
from recipes.common.gpt2 import GPT2, GPT2Config


def tiny_gpt():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=7, context=5, depth=1, heads=2, width=4)
    model = GPT2(config).double()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    batches = torch.randint(7, (2, 2, 2, 5)).unbind()

    def loss_of(batch, tokens):
        return lambda: (F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()), tokens)

    return model, [loss_of(batch, 1 + number) for number, batch in enumerate(batches)]


@pytest.mark.parametrize("by", ["role", "head"])
def test_equals_dense_blocks(by):
    """Lanczos of as many steps as it takes, over several batches of different weights."""
    model, losses = tiny_gpt()
    blocks = blockopt.find_blocks(model, per_row=())
    steps = 14 if by == "head" else 30
    found = top_eigenvalue(model, losses, blocks=blocks, by=by, num_products=steps)
    operator = HessianOperator(model, losses, blocks=blocks)
    groups, numbers = blockopt.blocks.block_groups(blocks, by)
    parts = operator.blocks(by)
    exact = torch.stack([torch.linalg.eigvalsh(dense(parts[group]))[-1] for group in groups])
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, values in found.items():
        torch.testing.assert_close(values, exact[numbers[name]], rtol=1e-4, atol=1e-9)


def test_few_products_are_from_below_and_close():
    model, losses = tiny_gpt()
    blocks = blockopt.find_blocks(model, per_row=())
    few, many = (top_eigenvalue(model, losses[0], blocks=blocks, num_products=n) for n in (8, 40))
    for name, values in few.items():
        assert bool((values <= many[name] * (1 + 1e-9) + 1e-12).all())
        assert bool((values >= 0.7 * many[name]).all()), name


def test_a_group_that_the_loss_does_not_see_and_a_negative_one():
    model = nn.ParameterDict({"w": torch.ones(3), "unused": torch.ones(2), "v": torch.ones(2)})
    x = torch.tensor([1.0, 2.0])

    def loss():
        return model["w"].square().sum() - (model["v"] * x).sum().square()

    roles = {"w": "query", "unused": "key", "v": "value"}
    blocks = blockopt.find_blocks(model, overrides=roles)
    found = top_eigenvalue(model, loss, blocks=blocks)
    torch.testing.assert_close(found["w"], torch.tensor([2.0]))
    assert float(found["unused"]) == 0
    assert abs(float(found["v"])) < 1e-5  # eigenvalues -10 and 0


def test_gradients_and_modes_are_untouched():
    model, losses = tiny_gpt()
    model.train()
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    before = [p.clone() for p in model.parameters()]
    top_eigenvalue(model, losses[0], num_products=2)
    assert model.training
    assert [p.grad is None for p in model.parameters()].count(False) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_block_lr_takes_it():
    model, losses = tiny_gpt()
    optimizer = BlockAdamW(param_groups(model), lr=1e-2)
    block_lr = BlockLR(optimizer, model, curvature="top_eigenvalue", every=1)
    losses[0]()[0].backward()
    optimizer.step()
    block_lr.step(losses[0])
    assert len({round(float(scale), 6) for scale in block_lr.history[-1].scale.values()}) > 3


def test_errors():
    model, losses = tiny_gpt()
    with pytest.raises(ValueError, match="Invalid num_products=0"):
        top_eigenvalue(model, losses, num_products=0)
