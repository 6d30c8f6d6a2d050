"""Predicted against actual differences of the loss, along updates and from sample to sample."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blockopt import find_blocks
from blockopt.analysis.taylor import loss_difference, sample_bound, sample_differences, sample_rate
from blockopt.blocks import BlockGroup, block_groups
from tests.helpers.dense_hessians import (
    build,
    hessian,
    language_loss,
    random_update,
    trainable,
)
from tests.helpers.models import block_index
from tests.helpers.optimizers import tiny_gpt, token_loss


@pytest.fixture
def model():
    return build(layers=1, heads=2, top=nn.LayerNorm(6))


def group_directions(model, update, by):
    """One row per group: the update where the group is, and zero elsewhere."""
    labels, groups = block_groups(find_blocks(model), by)
    rows = torch.zeros(
        len(labels), sum(p.numel() for p in trainable(model).values()), dtype=torch.float64
    )
    start = 0
    for name, p in trainable(model).items():
        group = groups[name][block_index(tuple(p.shape), find_blocks(model)[name].split).flatten()]
        columns = torch.arange(start, start + p.numel())
        rows[group, columns] = update[name].flatten() if name in update else 0.0
        start += p.numel()
    return labels, rows


def loss_at(model, loss, direction):
    """The loss at the weights plus a flat direction."""
    saved = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, d in zip(model.parameters(), direction.split([p.numel() for p in saved])):
            p += d.view_as(p)
        value = loss().item()
        for p, s in zip(model.parameters(), saved):
            p.copy_(s)
    return value


@pytest.mark.parametrize("by", ["role", "layer", "tensor", "head"])
def test_against_the_dense_hessian(model, by):
    loss, update = language_loss(model), random_update(model, 0.1)
    found = loss_difference(model, loss, update, by=by)
    labels, directions = group_directions(model, update, by)
    gradient, dense = hessian(model, loss)
    start, total = loss().item(), directions.sum(0)
    curvature = directions @ dense @ directions.T
    assert found.labels == tuple(labels)
    close = {"rtol": 1e-10, "atol": 1e-13}
    torch.testing.assert_close(found.curvature, curvature, **close)
    torch.testing.assert_close(found.group_first_order, directions @ gradient, **close)
    torch.testing.assert_close(
        found.group_second_order, directions @ gradient + curvature.diagonal() / 2, **close
    )
    torch.testing.assert_close(
        found.interaction, (curvature.sum(1) - curvature.diagonal()) / 2, **close
    )
    actual = torch.tensor(
        [loss_at(model, loss, d) - start for d in directions], dtype=torch.float64
    )
    torch.testing.assert_close(found.group_actual, actual, **close)
    assert found.loss == pytest.approx(start, rel=1e-14)
    assert found.actual == pytest.approx(loss_at(model, loss, total) - start, rel=1e-12)
    assert found.first_order == pytest.approx((gradient @ total).item(), rel=1e-10)
    assert found.second_order == pytest.approx(
        (gradient @ total + total @ dense @ total / 2).item(), rel=1e-10
    )
    assert found.second_order == pytest.approx(
        (found.group_second_order + found.interaction).sum().item(), rel=1e-12
    )
    assert found.actual_interaction == pytest.approx(found.actual - actual.sum().item(), rel=1e-10)


def test_exact_for_a_quadratic_loss():
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(5, 3).double()
    x, y = (torch.randn(7, n, generator=generator, dtype=torch.float64) for n in (5, 3))
    found = loss_difference(
        model, lambda: F.mse_loss(model(x), y), random_update(model), by="tensor"
    )
    assert found.actual == pytest.approx(found.second_order, rel=1e-12)
    assert abs(found.actual - found.first_order) > 0.1
    torch.testing.assert_close(found.group_actual, found.group_second_order, rtol=1e-12, atol=0)
    assert found.actual_interaction == pytest.approx(found.interaction.sum().item(), rel=1e-12)
    assert abs(found.actual_interaction) > 1e-3


def test_the_error_on_a_gpt_is_of_third_order():
    model = tiny_gpt(dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():  # far from the initial weights, where attention is uniform
            p.mul_(3.0)
    update = random_update(model, 1e-3)
    found = [
        loss_difference(
            model, lambda: token_loss(model), {n: t * u for n, u in update.items()}, by="role"
        )
        for t in (1.0, 0.5, 0.25)
    ]
    joint = torch.tensor([abs(f.actual - f.second_order) for f in found]).log2().diff()
    alone = (
        torch.stack([(f.group_actual - f.group_second_order).abs() for f in found])
        .log2()
        .diff(dim=0)
    )
    first = torch.tensor([abs(f.actual - f.first_order) for f in found]).log2().diff()
    torch.testing.assert_close(joint, torch.full_like(joint, -3), rtol=0, atol=0.2)
    torch.testing.assert_close(first, torch.full_like(first, -2), rtol=0, atol=0.2)
    torch.testing.assert_close(alone[-1], torch.full_like(alone[-1], -3), rtol=0, atol=0.2)


def test_several_batches_weighted_by_tokens(model):
    update = random_update(model, 0.1)
    batches = [language_loss(model, 2, 4), language_loss(model, 1, 3, seed=1)]

    def together():
        return (8 * batches[0]() + 3 * batches[1]()) / 11

    # A generator: it can be used once
    closures = ((lambda b=b, n=n: (b(), n)) for b, n in zip(batches, (8, 3)))
    found, expected = (
        loss_difference(model, closures, update),
        loss_difference(model, together, update),
    )
    for name in ("loss", "actual", "first_order", "second_order"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-11)
    for name in ("group_actual", "group_second_order", "interaction", "curvature"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=1e-10, atol=1e-13
        )


def test_only_what_moves_is_a_group(model):
    whole = random_update(model, 0.1)
    update = {name: whole[name] for name in ("head.weight", "layers.0.q_proj.weight")}
    found = loss_difference(model, language_loss(model), update)
    query = BlockGroup("query", 0, "layers.0.q_proj.weight")
    assert found.labels == (query, BlockGroup("head", None, "head.weight"))
    assert found.curvature.shape == (2, 2)
    assert "layers.0.q_proj.weight query" in str(found)
    assert "jointly" in str(found)
    assert f"{found.actual:.4g}" in str(found)


def state(model):
    """Bits, storage and version of each parameter."""
    return [(p.detach().clone(), p.data_ptr(), p._version, p.grad) for p in model.parameters()]


def assert_same_state(before, after):
    for (value, *rest), (now, *others) in zip(before, after, strict=True):
        assert torch.equal(value.view(torch.int64), now.view(torch.int64))
        assert rest == others


def test_leaves_no_trace(model):
    with torch.no_grad():
        model.head.bias[0] = -0.0
    model.train()
    before = state(model)
    loss_difference(model, language_loss(model), random_update(model))
    assert_same_state(before, state(model))
    assert model.training


@pytest.mark.parametrize("call", [2, 3, 4])
def test_weights_are_put_back_after_an_error(model, call):
    calls, loss = 0, language_loss(model)

    def fails():
        nonlocal calls
        calls += 1
        if calls == call:  # the second is at the start, the third moves all, the fourth one group
            raise RuntimeError("out of luck")
        return loss()

    before = state(model)
    with pytest.raises(RuntimeError, match="out of luck"):
        loss_difference(model, fails, random_update(model))
    assert_same_state(before, state(model))


def test_a_backward_pass_that_is_still_to_come(model):
    loss = language_loss(model)
    value = loss()
    loss_difference(model, loss, random_update(model))
    value.backward()
    expected = torch.autograd.grad(loss(), list(model.parameters()))
    for p, g in zip(model.parameters(), expected):
        assert torch.equal(p.grad, g)


def test_wrong_updates(model):
    with pytest.raises(ValueError, match="no trainable parameter"):
        loss_difference(model, language_loss(model), {"nothing": torch.zeros(1)})
    with pytest.raises(ValueError, match="of shape"):
        loss_difference(model, language_loss(model), {"head.weight": torch.zeros(1)})


def test_differences_of_means():
    losses = torch.rand(4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    means = torch.stack([losses[:, :k].mean(1) for k in range(1, 51)], 1)
    torch.testing.assert_close(sample_differences(losses), means.diff(dim=1), rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(
        sample_differences(losses[0]), means[0].diff(), rtol=1e-9, atol=1e-14
    )
    assert sample_differences(torch.tensor([2**24, 1.0, 1.0])).dtype == torch.float64
    with pytest.raises(ValueError, match="two samples"):
        sample_differences(torch.ones(1))


def quadratic_samples(number=400, width=6, seed=0):
    """Losses `c_i + ½ (w - w*)ᵀ H_i (w - w*)` with indefinite `H_i`."""
    generator = torch.Generator().manual_seed(seed)
    constants = torch.rand(number, generator=generator, dtype=torch.float64)
    hessians = torch.randn(number, width, width, generator=generator, dtype=torch.float64)
    hessians = (hessians + hessians.mT) / 2
    step = 0.3 * torch.randn(width, generator=generator, dtype=torch.float64)
    losses = constants + torch.einsum("i,nij,j->n", step, hessians, step) / 2
    return losses, constants, torch.linalg.matrix_norm(hessians, 2).max().item(), step.norm().item()


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_holds_for_quadratic_losses(seed):
    losses, constants, curvature, distance = quadratic_samples(seed=seed)
    sizes = torch.arange(1, len(losses))
    differences = sample_differences(losses).abs()
    sharp = sample_bound(sizes, constants.max().item(), curvature, distance)
    printed = sample_bound(sizes, constants.max().item(), curvature, distance, sharp=False)
    assert (differences <= sharp).all()
    assert (sharp < printed).all()
    torch.testing.assert_close(printed - sharp, constants.max() / (sizes + 1))
    assert not (
        differences <= sample_bound(sizes, 0.1 * constants.max().item())
    ).all()  # a bound that is too small is seen


def test_the_bound_by_hand():
    sizes = torch.tensor([1, 4])
    assert sample_bound(sizes, 2.0, 3.0, 0.5).tolist() == pytest.approx([2.75 / 2, 2.75 / 5])
    assert sample_bound(sizes, 2.0, 3.0, 0.5, sharp=False).tolist() == pytest.approx(
        [4.75 / 2, 4.75 / 5]
    )


def test_the_bound_is_attained():
    """One loss of L̄ after zeros, at w* itself, attains the bound: no rate beats 1/k."""
    for k in (1, 10, 1000):
        losses = torch.zeros(k + 1, dtype=torch.float64)
        losses[-1] = 3.0
        bound = sample_bound(torch.tensor([k]), 3.0)
        torch.testing.assert_close(sample_differences(losses)[-1:], bound)


def test_logistic_losses_at_any_weights():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(500, 4, generator=generator), torch.randn(4, generator=generator)
    losses = F.softplus(-(x @ w) * torch.randint(0, 2, (500,), generator=generator).mul(2).sub(1))
    differences = sample_differences(losses).abs()
    assert (differences <= sample_bound(torch.arange(1, 500), losses.max().item())).all()


def test_the_rate_is_one_over_k():
    losses, *_ = quadratic_samples(number=2000)
    generator = torch.Generator().manual_seed(1)
    orders = torch.stack([losses[torch.randperm(2000, generator=generator)] for _ in range(20)])
    rate = sample_rate(sample_differences(orders))
    assert abs(rate.value + 1) < 4 * rate.standard_error
    assert 0 < rate.standard_error < 0.05
    single = sample_rate(sample_differences(losses))
    assert abs(single.value + 1) < 4 * single.standard_error
    assert single.standard_error > rate.standard_error


def test_a_sample_equal_to_the_mean_is_left_out_of_the_rate():
    differences = 1 / torch.arange(2.0, 12.0, dtype=torch.float64)
    differences[3] = 0.0
    assert sample_rate(differences).value == pytest.approx(-1)


@pytest.mark.parametrize(
    "wrong", [{"largest_loss": -1.0}, {"curvature": -1.0}, {"distance": math.nan}]
)
def test_wrong_bounds(wrong):
    with pytest.raises(ValueError, match="negative"):
        sample_bound(torch.tensor([1]), **({"largest_loss": 1.0} | wrong))
