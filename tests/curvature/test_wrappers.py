"""Models as they are trained: compiled, DDP, mixed precision, checkpointed, frozen or tied."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from blockopt import find_blocks
from blockopt.curvature import analytic, directional, gauss_newton, gradient, hutchinson, power_law
from tests.helpers.dense_hessians import (
    Net,
    assert_means,
    build,
    gauss_newton_means,
    hessian_means,
    language_loss,
    tokens_of,
    trainable,
)
from tests.helpers.models import FAMILIES, loss_of


def along(method):
    def estimate(model, losses):
        update = {
            n: 0.01 * (torch.arange(p.numel(), dtype=p.dtype) + 1).sin().view_as(p)
            for n, p in trainable(model).items()
        }
        return directional(model, losses, update, method=method)

    return estimate


ESTIMATORS = {
    "analytic": lambda model, losses: analytic(model, losses, part="full"),
    "gauss_newton": gauss_newton,
    "hutchinson": hutchinson,
    "directional": along("exact"),
    "secant": along("secant"),
}
all_estimators = pytest.mark.parametrize("name", ESTIMATORS)


def assert_same(found, expected, prefix="", rtol=1e-10):
    assert list(found) == [prefix + name for name in expected]
    assert_means({name: found[prefix + name] for name in expected}, expected, rtol)


def correlation(found, expected):
    both = [torch.cat([values[name] for name in sorted(values)]) for values in (found, expected)]
    return torch.corrcoef(torch.stack(both))[0, 1]


@all_estimators
def test_compiled(name):
    model = build(layers=2)
    expected = ESTIMATORS[name](model, language_loss(model))
    compiled = torch.compile(model, backend="eager")
    assert_same(ESTIMATORS[name](compiled, language_loss(compiled)), expected, "_orig_mod.")
    # Here only the closure runs the compiled one.
    assert_same(ESTIMATORS[name](model, language_loss(compiled)), expected)


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@all_estimators
def test_data_parallel(name, process_group):
    model = build(layers=2)
    expected = ESTIMATORS[name](model, language_loss(model))
    wrapped = DistributedDataParallel(model)
    waiting = []

    def loss():
        value = language_loss(wrapped)()
        waiting.append(wrapped.require_backward_grad_sync)
        return value

    assert_same(ESTIMATORS[name](wrapped, loss), expected, "module.")
    assert_same(ESTIMATORS[name](model, loss), expected)
    assert not any(waiting)  # for the gradients of other ranks, which may not measure
    assert wrapped.require_backward_grad_sync
    language_loss(wrapped)().backward()  # training goes on
    (expected_gradient,) = torch.autograd.grad(language_loss(model)(), model.head.weight)
    torch.testing.assert_close(model.head.weight.grad, expected_gradient)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast(name, where):
    """Close to full precision, whether the closure or its caller switches it on."""
    top = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.RMSNorm(6))
    model = build(layers=1, top=top).float()
    loss = language_loss(model)
    expected = ESTIMATORS[name](model, loss)

    def low():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss()

    if where == "inside":
        found = ESTIMATORS[name](model, low)
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = ESTIMATORS[name](model, loss)
        for parameter, values in ESTIMATORS[name](model, low).items():
            assert torch.equal(found[parameter], values)
    assert all(values.dtype == torch.float32 for values in found.values())
    # A secant is a difference of rounded gradients.
    assert correlation(found, expected) > (0.9 if name == "secant" else 0.95)


@pytest.mark.parametrize("name", ["analytic", "gauss_newton", "hutchinson"])
def test_low_precision_parameters(name):
    model = build(layers=2, top=nn.LayerNorm(6)).float()
    expected = ESTIMATORS[name](model, language_loss(model))
    model.bfloat16()
    found = ESTIMATORS[name](model, language_loss(model))
    assert all(values.dtype == torch.float32 for values in found.values())
    assert correlation(found, expected) > 0.95


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_loss_in_float32_of_a_model_in_float64(family):
    model = FAMILIES[family]().double()
    for name in ("analytic", "gauss_newton", "hutchinson"):
        found = ESTIMATORS[name](model, lambda: loss_of(family, model))
        assert all(values.dtype == torch.float64 for values in found.values())


class Checkpointed(Net):
    def features(self, tokens, mask=None):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.top(x)


@all_estimators
def test_checkpointed(name):
    models = build(layers=2), build(Checkpointed, layers=2)
    plain, checkpointed = (ESTIMATORS[name](model, language_loss(model)) for model in models)
    assert_same(checkpointed, plain)


@functools.cache
def nothing_frozen():
    model = build(layers=2)
    loss = language_loss(model)
    outer, full = (analytic(model, loss, part=part, num_probes=None) for part in ("outer", "full"))
    return outer, full, hessian_means(model, loss)


@pytest.mark.parametrize(
    "pattern", ["embedding", "q_proj", "k_proj", "v_proj", "layers.1", "bias", "weight"]
)
def test_frozen_parameters(pattern):
    """The other values stay as they were: nothing depends on gradients of frozen parameters."""
    model = build(layers=2)
    loss = language_loss(model)
    outer, full, whole = nothing_frozen()
    for n, p in model.named_parameters():
        p.requires_grad_(pattern not in n)
    left = trainable(model)
    assert_means(analytic(model, loss, num_probes=None), {n: outer[n] for n in left})
    assert_means(hessian_means(model, loss), {n: whole[n] for n in left})
    if pattern != "weight":  # the functional part of a bias is found by its weight
        found = analytic(model, loss, part="full", num_probes=None)
        assert_means(found, {n: full[n] for n in left})
    for name in ("gauss_newton", "hutchinson", "directional", "secant"):
        assert list(ESTIMATORS[name](model, loss)) == list(left)


def test_tied_weights():
    model = build(layers=1)
    model.head.weight = model.embedding.weight
    loss = language_loss(model)
    assert "head.weight" not in find_blocks(model)
    assert_means(analytic(model, loss, num_probes=None), gauss_newton_means(model, loss))
    model.head.bias = model.layers[0].o_proj.bias = nn.Parameter(torch.ones(5, dtype=torch.float64))
    model.layers[0].o_proj.weight = nn.Parameter(torch.ones(5, 8, dtype=torch.float64))
    tokens, targets = tokens_of(2, 4)

    def shared_bias():
        mixed = model.layers[0](model.embedding(tokens))
        return F.cross_entropy((mixed + model.head(model.embedding(tokens))).mT, targets)

    found = analytic(model, shared_bias, num_probes=None)
    assert_means(found, gauss_newton_means(model, shared_bias))


def test_module_called_twice():
    """Also on batches of different sizes."""
    model = build(layers=1)
    tokens, targets = tokens_of(3, 4)

    def loss():
        both = torch.cat([model(tokens[:1]), model(tokens[1:])])
        return F.cross_entropy(both.mT, targets)

    whole = analytic(model, lambda: F.cross_entropy(model(tokens).mT, targets), num_probes=None)
    assert_means(analytic(model, loss, num_probes=None), whole)


@pytest.mark.parametrize("family", ["mlp", "cnn"])
def test_models_without_attention(family):
    model = FAMILIES[family]().double().eval()

    def loss():
        return loss_of(family, model)

    found = analytic(model, loss, part="full", num_probes=None)
    assert_means(found, gauss_newton_means(model, loss))
    assert not any(v.any() for v in analytic(model, loss, part="functional").values())


def test_parameters_that_the_loss_does_not_use():
    model = build(layers=1)
    model.unused = nn.Linear(3, 3, dtype=torch.float64)
    loss = language_loss(model)
    loss().backward()
    for estimator in (*ESTIMATORS.values(), lambda model, _: gradient(model)):
        assert not estimator(model, loss)["unused.weight"].any()
    assert power_law(model, input_scale=1.0)["unused.weight"].isfinite().all()
