"""Curvature along an update against the dense Hessian, and the squared gradient."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blockopt import find_blocks
from blockopt.blocks import block_groups, sum_groups
from blockopt.curvature import along_update, directional, gradient, newton
from tests.helpers.dense_hessians import (
    assert_means,
    build,
    hessian,
    language_loss,
    means_by_block,
    random_update,
    trainable,
)
from tests.helpers.models import block_index
from tests.helpers.optimizers import TINY, tiny_gpt


@pytest.fixture
def model():
    return build(layers=1, heads=2, top=nn.LayerNorm(6))


def block_masks(model):
    """For every parameter the masks of its blocks among the entries of all parameters."""
    masks, total = {}, sum(p.numel() for p in trainable(model).values())
    start = 0
    for name, p in trainable(model).items():
        blocks = find_blocks(model)[name]
        index = block_index(tuple(p.shape), blocks.split).flatten()
        for block in range(blocks.num_blocks):
            mask = torch.zeros(total, dtype=torch.bool)
            mask[start : start + p.numel()] = index == block
            masks.setdefault(name, []).append(mask)
        start += p.numel()
    return masks


def flat(update):
    return torch.cat([u.flatten() for u in update.values()])


def dense(model, loss, update):
    """Return slopes, row sums and squares by block, from the whole Hessian."""
    g, h = hessian(model, loss)
    u = flat({n: update.get(n, torch.zeros_like(p)) for n, p in trainable(model).items()})
    parts = {"slope": g * u, "row_sum": (h @ u) * u, "square": u * u}
    return {
        kind: {
            name: torch.stack([values[m].sum() for m in masks])
            for name, masks in block_masks(model).items()
        }
        for kind, values in parts.items()
    }


def test_exact(model):
    loss, update = language_loss(model), random_update(model)
    found, expected = along_update(model, loss, update), dense(model, loss, update)
    for kind in ("slope", "row_sum", "square"):
        assert_means(getattr(found, kind), expected[kind], 1e-11)
    assert found.labels == ()
    assert found.matrix is None
    quotients = {n: row / expected["square"][n] for n, row in expected["row_sum"].items()}
    assert_means(directional(model, loss, update), quotients, 1e-11)


@pytest.mark.parametrize("by", ["role", "layer", "tensor", "head"])
def test_matrix(model, by):
    loss, update = language_loss(model), random_update(model)
    found = along_update(model, loss, update, matrix_by=by)
    labels, groups = block_groups(find_blocks(model), by)
    _, h = hessian(model, loss)
    directions = torch.zeros(len(labels), len(h), dtype=torch.float64)
    for name, masks in block_masks(model).items():
        for group, mask in zip(groups[name].tolist(), masks, strict=True):
            directions[group] += torch.where(mask, flat(update), 0.0)
    expected = directions @ h @ directions.T
    assert found.labels == tuple(labels)
    torch.testing.assert_close(found.matrix, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.matrix, found.matrix.T, rtol=1e-9, atol=1e-11)
    sums = sum_groups(found.row_sum, groups, len(labels))
    torch.testing.assert_close(found.matrix.sum(1), sums, rtol=1e-9, atol=1e-11)


def test_secant_converges_to_exact(model):
    """The error of a difference of two gradients is proportional to the update."""
    loss, errors = language_loss(model), []
    for size in (1e-2, 1e-3, 1e-4):
        update = random_update(model, size)
        exact, secant = (
            directional(model, loss, update, method=method) for method in ("exact", "secant")
        )
        errors.append(torch.cat([(secant[n] - exact[n]).flatten() for n in exact]).norm())
        slope = along_update(model, loss, update, method="secant").slope
        assert_means(slope, dense(model, loss, update)["slope"], 1e-11)
    assert errors[0] > 0
    for larger, smaller in itertools.pairwise(errors):
        assert 0.05 * larger < smaller < 0.2 * larger


def test_secant_is_the_difference_of_gradients_before_and_after(model):
    loss, update = language_loss(model), random_update(model, 0.1)
    before = {n: (p.detach() - update[n]).clone() for n, p in trainable(model).items()}
    found = along_update(model, loss, update, method="secant", matrix_by="role")
    now = torch.autograd.grad(loss(), list(trainable(model).values()))
    with torch.no_grad():
        for n, p in trainable(model).items():
            p.copy_(before[n])
    then = torch.autograd.grad(loss(), list(trainable(model).values()))
    products = {n: (a - b) * update[n] for n, a, b in zip(update, now, then)}
    means = means_by_block(model, products)
    sizes = means_by_block(model, {n: u.square() for n, u in update.items()})
    quotients = {n: row / found.square[n] for n, row in found.row_sum.items()}
    assert_means(quotients, {n: means[n] / sizes[n] for n in means}, 1e-11)


@pytest.mark.parametrize("method", ["exact", "secant"])
def test_parameters_are_back_bit_for_bit(model, method):
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    loss, update = language_loss(model), random_update(model, 1e-3)
    along_update(model, loss, update, method=method, matrix_by="role")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    calls = []

    def fails_later():
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return language_loss(model)()

    if method == "secant":
        with pytest.raises(RuntimeError, match="out of memory"):
            along_update(model, fails_later, random_update(model), method=method)
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize("method", ["exact", "secant"])
def test_parameters_that_did_not_move(model, method):
    loss = language_loss(model)
    update = {n: u for n, u in random_update(model, 1e-6).items() if "q_proj" in n or "head" in n}
    model.embedding.requires_grad_(False)
    found, expected = along_update(model, loss, update, method=method), dense(model, loss, update)
    assert "embedding.weight" not in found.slope
    for kind in ("slope", "row_sum", "square"):
        assert_means(getattr(found, kind), expected[kind], 1e-11 if method == "exact" else 1e-4)
    assert not directional(model, loss, update, method=method)["layers.0.k_proj.weight"].any()


@pytest.mark.parametrize("method", ["exact", "secant"])
def test_loss_without_curvature(method):
    model = nn.Linear(3, 1)
    update = {"weight": torch.ones(1, 3)}
    found = along_update(model, lambda: model(torch.ones(2, 3)).sum(), update, method=method)
    assert found.row_sum == {"weight": torch.zeros(1), "bias": torch.zeros(1)}
    assert found.slope == {"weight": torch.tensor([6.0]), "bias": torch.zeros(1)}


def test_newton_divides_curvature_by_the_slope_before_the_update(model):
    loss, update = language_loss(model), random_update(model, 0.01)
    scales = {n: torch.linspace(1, 2, b.num_blocks) for n, b in find_blocks(model).items()}
    labels, groups = block_groups(find_blocks(model), "role")
    expected = dense(model, loss, update)
    row_sum, slope, logs, number = torch.zeros(4, len(labels), dtype=torch.float64)
    for name, group in groups.items():
        row_sum.index_add_(0, group, expected["row_sum"][name])
        slope.index_add_(0, group, expected["slope"][name] - expected["row_sum"][name])
        logs.index_add_(0, group, scales[name].double().log())
        number.index_add_(0, group, torch.ones(len(group), dtype=torch.float64))
    values = row_sum / -slope / (logs / number).exp()
    assert (slope < 0).any()
    assert (slope > 0).any()
    values = torch.where(slope < 0, values, values[slope < 0].max())
    found = newton(model, loss, update, scales=scales, method="exact")
    assert_means(found, {name: values[group] for name, group in groups.items()}, 1e-9)
    (1e-6 * loss()).backward()
    uphill = {n: p.grad for n, p in trainable(model).items()}
    assert all(torch.equal(v, torch.zeros_like(v)) for v in newton(model, loss, uphill).values())


def test_wrong_updates(model):
    loss, update = language_loss(model), random_update(model)
    with pytest.raises(ValueError, match="empty"):
        directional(model, loss, {})
    with pytest.raises(ValueError, match="'nothing' is no trainable parameter"):
        directional(model, loss, {"nothing": torch.ones(1)})
    with pytest.raises(ValueError, match=r"of shape \(1,\) for 'head.bias'. Must be \(5,\)"):
        directional(model, loss, {"head.bias": torch.ones(1)})
    with pytest.raises(ValueError, match="Invalid method='newton'"):
        directional(model, loss, update, method="newton")
    with pytest.raises(ValueError, match="Invalid by='rows'"):
        along_update(model, loss, update, matrix_by="rows")


def test_gradient(model):
    language_loss(model)().backward()
    model.head.bias.grad = None
    squares = {
        n: torch.zeros_like(p) if p.grad is None else p.grad.square()
        for n, p in trainable(model).items()
    }
    assert_means(gradient(model), means_by_block(model, squares), 1e-14)
    model.head.weight.requires_grad_(False)
    assert "head.weight" not in gradient(model)


def test_gradient_without_gradients(model):
    with pytest.raises(ValueError, match=r"has a gradient. Call this after loss.backward\(\)"):
        gradient(model)
    frozen = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    F.mse_loss(frozen(torch.ones(1, 2)), torch.zeros(1, 2)).backward()
    assert set(gradient(frozen)) == {"1.weight", "1.bias"}


def descend(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adapt(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.parametrize("optimizer_of", [descend, adapt])
@pytest.mark.parametrize(
    "estimate", [partial(newton, by="head"), directional, partial(directional, method="secant")]
)
def test_rounding_decides_nothing(estimate, optimizer_of):
    """A bias of the keys has no gradient; the order of the sequences changes its rounding only."""
    model = tiny_gpt(dtype=torch.float64)
    size, generator = (8, TINY.context + 1), torch.Generator().manual_seed(0)
    tokens = torch.randint(TINY.vocab_size, size, generator=generator)
    optimizer = optimizer_of(model.parameters())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    update = {n: p.detach() - before[n] for n, p in model.named_parameters()}

    def measured(order):
        some = tokens[order]
        return estimate(model, lambda: model(some[:, :-1], some[:, 1:]), update)

    assert find_blocks(model)["h.0.attn.c_attn.bias"].num_blocks == 3 * TINY.heads
    first, second = measured(range(8)), measured([5, 2, 7, 0, 3, 6, 1, 4])
    for name, values in first.items():
        torch.testing.assert_close(second[name], values, rtol=1e-6, atol=0, msg=name)
