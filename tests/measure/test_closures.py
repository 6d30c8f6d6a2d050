"""What all estimators share: weights of batches, passes that leave no trace, clear errors."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blockopt import find_blocks
from blockopt.curvature import (
    along_update,
    analytic,
    directional,
    gauss_newton,
    gradient,
    hutchinson,
    newton,
    power_law,
)
from blockopt.errors import NoLossError, NonFiniteError
from blockopt.no_trace import preserved_state
from tests.helpers.dense_hessians import (
    Attention,
    assert_means,
    build,
    language_loss,
    tokens_of,
    trainable,
)


def with_update(estimator, **options):
    def estimate(model, losses, **others):
        update = {
            n: -0.01 * (torch.arange(p.numel(), dtype=p.dtype) + 1).sin().view_as(p)
            for n, p in trainable(model).items()
        }
        return estimator(model, losses, update, **options, **others)

    return estimate


SAMPLED = {"analytic": analytic, "gauss_newton": gauss_newton, "hutchinson": hutchinson}
ESTIMATORS = {
    **SAMPLED,
    "directional": with_update(directional),
    "secant": with_update(directional, method="secant"),
    "newton": with_update(newton),
}
all_estimators = pytest.mark.parametrize("name", ESTIMATORS)


@pytest.fixture
def rows():
    """A model whose weights see one row of data each, so that every estimator is exact."""
    model = nn.Linear(7, 1, bias=False, dtype=torch.float64)
    x = torch.linspace(1, 3, 7, dtype=torch.float64).diag()
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 7))
    blocks = find_blocks(model)

    def batch(start, stop, tokens=None):
        def loss():
            targets = torch.ones(stop - start, 1, dtype=torch.float64)
            value = F.mse_loss(model(x[start:stop]), targets)
            return value if tokens is None else (value, tokens)

        return loss

    return model, blocks, batch


@all_estimators
def test_batches_are_weighted_by_tokens(name, rows):
    model, blocks, batch = rows
    estimate = ESTIMATORS[name]
    whole = estimate(model, batch(0, 7), blocks=blocks)
    for losses in (
        [batch(0, 2, 2), batch(2, 7, torch.tensor(5))],
        iter([batch(0, 2, 4), batch(2, 7, 10)]),
        (batch(0, 7, 3),),
    ):
        assert_means(estimate(model, losses, blocks=blocks), whole)
    alike = estimate(model, [batch(0, 2), batch(2, 7)], blocks=blocks)
    assert not torch.allclose(alike["weight"], whole["weight"], rtol=1e-2)
    if name != "newton":  # which is not a mean
        one, two = (estimate(model, batch(*rows), blocks=blocks) for rows in ((0, 2), (2, 7)))
        torch.testing.assert_close(alike["weight"], (one["weight"] + two["weight"]) / 2)


def whole_and_halves(model, *numbers, ignored=0):
    """Return the loss of five sequences, and the losses of the first two and of the others."""
    tokens, targets = tokens_of(5, 4)
    targets[0, 4 - ignored :] = -100

    def batch(rows, number):
        return lambda: (
            F.cross_entropy(model(tokens[rows]).flatten(0, 1), targets[rows].flatten()),
            number,
        )

    halves = [batch(rows, n) for rows, n in zip((slice(2), slice(2, 5)), numbers)]
    return batch(slice(5), 1), halves


@pytest.mark.parametrize("part", ["outer", "functional", "full"])
def test_analytic_of_two_batches_is_that_of_both_together(part):
    model = build(layers=2)
    losses = whole_and_halves(model, 5, 12, ignored=3)
    halves, whole = (analytic(model, x, part=part, num_probes=None) for x in reversed(losses))
    assert_means(halves, whole)


def test_along_update_of_two_batches_is_that_of_both_together():
    model = build(layers=1)
    update = {n: torch.ones_like(p) for n, p in trainable(model).items()}
    losses = whole_and_halves(model, 2, 3)
    whole, parts = (along_update(model, x, update, matrix_by="role") for x in losses)
    for kind in ("slope", "row_sum", "square"):
        assert_means(getattr(parts, kind), getattr(whole, kind))
    torch.testing.assert_close(parts.matrix, whole.matrix, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", SAMPLED)
def test_every_batch_has_draws_of_its_own(name):
    model = build(layers=1)
    first, second = (language_loss(model, seed=seed) for seed in (0, 1))
    generator = torch.Generator().manual_seed(3)
    together = SAMPLED[name](model, [first, second], generator=torch.Generator().manual_seed(3))
    one, two = (SAMPLED[name](model, loss, generator=generator) for loss in (first, second))
    assert_means(together, {n: (one[n] + two[n]) / 2 for n in one})


@all_estimators
def test_wrong_batches(name, rows):
    model, blocks, batch = rows
    estimate = ESTIMATORS[name]
    with pytest.raises(ValueError, match="returned a number of tokens and some did not"):
        estimate(model, [batch(0, 2, 2), batch(2, 7)], blocks=blocks)
    with pytest.raises(ValueError, match="there is no closure"):
        estimate(model, [], blocks=blocks)
    with pytest.raises(ValueError, match=r"Invalid numbers of tokens \[0.0\]"):
        estimate(model, batch(0, 2, 0), blocks=blocks)


WRONG_LOSSES = {
    "returned None": lambda loss: None,
    "returned 1.5": lambda loss: 1.5,
    r"a tensor of shape \(2,\)": lambda loss: loss.repeat(2),
    "which requires no gradient": lambda loss: loss.detach(),
    r"lambda: \(model": lambda loss: (loss, 3, 4),
    r"a pair that begins with a tensor of shape \(2,\)": lambda loss: (loss.repeat(2), loss),
}


@all_estimators
@pytest.mark.parametrize("message", WRONG_LOSSES)
def test_wrong_losses(name, message, rows):
    model, blocks, batch = rows
    with pytest.raises(TypeError, match=message) as raised:
        ESTIMATORS[name](model, lambda: WRONG_LOSSES[message](batch(0, 7)()), blocks=blocks)
    assert isinstance(raised.value, NoLossError) == (message == "returned None")


@all_estimators
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_loss_that_is_not_finite(name, value, rows):
    model, blocks, batch = rows
    with pytest.raises(NonFiniteError, match=f"returned {value}"):
        ESTIMATORS[name](model, lambda: batch(0, 7)() + value, blocks=blocks)


@all_estimators
def test_wrong_blocks(name):
    model = build(layers=1)
    blocks = find_blocks(model)
    loss = language_loss(model)
    with pytest.raises(ValueError, match=r"Invalid blocks: .*\['other'\] are not trained"):
        ESTIMATORS[name](model, loss, blocks=blocks | {"other": blocks["head.bias"]})
    del blocks["head.bias"]
    with pytest.raises(ValueError, match=r"Invalid blocks: \['head.bias'\] are missing"):
        ESTIMATORS[name](model, loss, blocks=blocks)
    with pytest.raises(ValueError, match="They must cover all of them"):
        ESTIMATORS[name](model, loss, blocks=find_blocks(build(layers=1, vocabulary=9)))
    for without_loss in (gradient, power_law):
        with pytest.raises(ValueError, match="Invalid blocks"):
            without_loss(model, blocks={})


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("number", [0, -1, 1.5])
def test_wrong_numbers_of_probes(name, number):
    model = build()
    with pytest.raises(ValueError, match=f"Invalid num_probes={number}"):
        SAMPLED[name](model, language_loss(model), num_probes=number)


def test_wrong_part():
    with pytest.raises(ValueError, match=r"'all'. Must be one of 'outer', 'functional', 'full'"):
        analytic(build(), lambda: None, part="all")


class Restless(nn.Module):
    """Has all that a pass may change: dropout, batch norm, a counting buffer, random numbers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.attention = Attention(6)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens):
        self.calls += 1
        torch.rand(1)
        x = self.embedding(tokens)
        x = self.dropout(x + self.attention(x)).flatten(0, 1)
        return self.head(self.norm(x))


@pytest.fixture
def restless():
    model = build(Restless).train()
    model.attention.eval()
    tokens, targets = tokens_of(3, 4)

    def loss():
        return F.cross_entropy(model(tokens), targets.flatten())

    loss().backward()  # so that there are gradients and statistics
    model.head.bias.grad = None
    return model, loss


def state(model):
    return {
        "modes": [module.training for module in model.modules()],
        "gradients": [id(p.grad) for p in model.parameters()],
        "values": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "parameters": [p.detach().clone() for p in model.parameters()],
        "buffers": [b.clone() for b in model.buffers()],
        "random": torch.get_rng_state(),
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "global hooks": [torch.tensor(len(torch.nn.modules.module._global_forward_pre_hooks))],
        "modules": [
            torch.tensor(torch.is_grad_enabled()),
            torch.tensor(torch.backends.mha.get_fastpath_enabled()),
        ],
    }


def assert_same_state(before, after):
    for kind, values in before.items():
        for a, b in zip(values, after[kind], strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, kind


@all_estimators
def test_leaves_no_trace(name, restless):
    model, loss = restless
    before = state(model)
    found = ESTIMATORS[name](model, loss)
    assert_same_state(before, state(model))
    torch.manual_seed(7)
    model.dropout.p = 0.0
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e9)
    # It ran in evaluation mode, whatever dropout, seed and gradients there are.
    again = ESTIMATORS[name](model.eval(), loss)
    assert all(torch.equal(found[n], again[n]) for n in found)


@all_estimators
@pytest.mark.parametrize("when", ["first", "last"])
def test_leaves_no_trace_after_an_exception(name, when, restless):
    model, loss = restless
    before = state(model)

    def fails():
        value = loss()
        torch.rand(3)
        raise KeyError(f"after {value.item()}")

    with pytest.raises(KeyError, match="after"):
        ESTIMATORS[name](model, fails if when == "first" else [loss, fails])
    assert_same_state(before, state(model))


# The secant and newton move the weights.
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in ("secant", "newton")])
def test_between_forward_and_backward(name, restless):
    """Buffers that a waiting backward pass needs are not written to."""
    model, loss = restless
    tokens, targets = tokens_of(3, 4)
    waiting = loss()

    def pure():  # a loss that counts no calls
        x = model.embedding(tokens)
        features = model.norm((x + model.attention(x)).flatten(0, 1))
        return F.cross_entropy(model.head(features), targets.flatten())

    ESTIMATORS[name](model, pure)
    waiting.backward()


@all_estimators
def test_inside_no_grad(name):
    model = build()
    outside = ESTIMATORS[name](model, language_loss(model))
    with torch.no_grad():
        inside = ESTIMATORS[name](model, language_loss(model))
    assert all(torch.equal(inside[n], outside[n]) for n in outside)


@all_estimators
def test_frees_its_memory_at_once(name):
    """Activations wait for no garbage collection."""
    model, held = build(layers=2, rope=1.0), []

    def loss():
        features = model.features(tokens_of(2, 4)[0])
        held.append(weakref.ref(features))
        return F.cross_entropy(model.head(features).mT, tokens_of(2, 4)[1])

    gc.disable()
    try:
        ESTIMATORS[name](model, loss, **({"part": "full"} if name == "analytic" else {}))
        assert held
        assert all(reference() is None for reference in held)
    finally:
        gc.enable()


def test_preserved_state_restores_replaced_gradients(restless):
    model, _ = restless
    held = [p.grad for p in model.parameters()]
    with preserved_state(model):
        assert all(p.grad is None for p in model.parameters())
        assert not any(module.training for module in model.modules())
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
