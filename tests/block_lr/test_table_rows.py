"""Rows of tables differ by their shares in the squared gradient: the default for SGD."""

import pytest
import torch
from torch import nn

import blockopt
from blockopt.block_lr import BlockLR
from blockopt.block_lr.table_rows import FLOOR
from tests.helpers.block_lr import constant
from tests.helpers.optimizers import OPTIMIZERS, tiny_gpt, token_loss

TABLE = "wte.weight"


def trained(name="sgd", steps=1, scale=1.0, **options):
    """A few steps with equal curvature everywhere; also returns the squared gradients of each."""
    model = tiny_gpt()
    optimizer = OPTIMIZERS[name](blockopt.param_groups(model), lr=1e-3 / scale)
    block_lr = BlockLR(optimizer, model, curvature=constant(model), **options)
    squares = []
    for number in range(steps):
        optimizer.zero_grad()
        (scale * token_loss(model, number)).backward()
        squares.append(model.get_parameter(TABLE).grad.double().square().sum(dim=1))
        optimizer.step()
        block_lr.step()
    return optimizer.block_scales(), squares


@pytest.mark.parametrize("power", [-1.0, -0.5])
def test_rows_get_the_power_of_their_share(power):
    scales, squares = trained(steps=4, every=3, power=power)
    shares = sum(of_one / of_one.sum() for of_one in squares)
    factors = (shares / shares.mean() + FLOOR) ** power
    expected = factors / factors.log().mean().exp()
    torch.testing.assert_close(scales[TABLE].double(), expected, rtol=1e-5, atol=0)
    assert expected.max() / expected.min() > 1.5
    others = torch.cat([scale for name, scale in scales.items() if name != TABLE])
    torch.testing.assert_close(others, torch.ones_like(others), rtol=0, atol=1e-6)


def test_the_size_of_the_gradient_does_not_matter():
    plain, scaled = (trained(scale=scale)[0][TABLE] for scale in (1.0, 1024.0))
    torch.testing.assert_close(plain, scaled, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "options", "differ"),
    [
        ("sgd", {}, True),
        ("sgd", {"rows": False}, False),
        ("sgd", {"by": "head"}, False),  # each row is a group, which a measured curvature scales
        ("adamw", {}, False),
        ("muon", {}, False),
        ("adamw", {"rows": True}, True),
    ],
)
def test_who_has_rows_that_differ(name, options, differ):
    table = trained(name, **options)[0][TABLE]
    assert bool(table.max() > 1.1 * table.min()) == differ


def test_frequent_tokens_get_smaller_steps():
    """The law behind it: the curvature of a row goes with the frequency of its token."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12))
    blocks = blockopt.find_blocks(model, overrides={"2.weight": "other", "2.bias": "bias"})
    optimizer = blockopt.BlockSGD(blockopt.param_groups(model, blocks), lr=0.05, momentum=0.9)
    values = {name: torch.ones(entry.num_blocks) for name, entry in blocks.items()}
    block_lr = BlockLR(optimizer, model, curvature=lambda *_: values, every=10)
    frequency = 0.5 ** torch.arange(12.0)
    for _ in range(101):
        tokens = torch.multinomial(frequency, 64, replacement=True)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
        optimizer.step()
        block_lr.step()
    pairs = torch.stack([frequency[:6].log(), optimizer.block_scales()["0.weight"][:6].log()])
    assert torch.corrcoef(pairs)[0, 1] < -0.9


def test_gradients_that_are_missing_or_not_finite_add_nothing():
    model = tiny_gpt()
    groups = blockopt.param_groups(model)
    optimizer = OPTIMIZERS["sgd"](groups, lr=0.0, nonfinite="ignore")
    block_lr = BlockLR(optimizer, model, curvature=constant(model), every=1)
    token_loss(model).backward()
    optimizer.step()
    before = block_lr.state_dict()["rows"][TABLE].clone()
    model.get_parameter(TABLE).grad[0, 0] = float("nan")
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(block_lr.state_dict()["rows"][TABLE], before)
    assert before.sum() == pytest.approx(1.0)


def test_optimizers_of_torch_have_no_rows():
    model = tiny_gpt()
    optimizer = torch.optim.SGD(blockopt.param_groups(model, by="parameter"), lr=1e-3)
    BlockLR(optimizer, model)
    with pytest.raises(ValueError, match="one learning rate for all rows of a table"):
        BlockLR(optimizer, model, rows=True)
