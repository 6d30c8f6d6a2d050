"""The Gauss-Newton matrix and the functional part, against Jacobians and curvlinops."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockopt.analysis.operators.model_operators import (
    FunctionalOperator,
    GaussNewtonOperator,
    HessianOperator,
)
from blockopt.measure.loss_curvature import CaptureLosses, LossCurvature
from tests.analysis.operators.test_model_operators import OPERATORS, assert_near, normal
from tests.helpers.dense_hessians import build, language_loss, tokens_of
from tests.helpers.models import FAMILIES
from tests.measure.test_loss_curvature import LOSSES, exact

with warnings.catch_warnings():
    # torch.jit warns, in a library that curvlinops imports
    warnings.simplefilter("ignore", DeprecationWarning)
    import curvlinops

# torch.func.jvp uses it
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")


@pytest.mark.parametrize("name", LOSSES)
def test_gauss_newton_of_every_loss(name):
    """J by `jacrev` and Λ by autograd, for predictions that are not linear in the parameters."""
    prediction, loss_of_prediction = LOSSES[name]
    model = nn.ParameterDict({"a": normal(3, seed=4), "b": normal(*prediction.shape, seed=5)})
    mix = normal(3, prediction.numel(), seed=6)

    def predict(parameters):
        return (parameters["a"].tanh() @ mix).view_as(prediction) * parameters[
            "b"
        ] ** 2 + prediction

    def closure():
        return loss_of_prediction(predict(model))

    parameters = {n: p.detach() for n, p in model.named_parameters()}
    jacobian = jacrev(predict)(parameters)
    J = torch.cat([jacobian[n].reshape(prediction.numel(), -1) for n in parameters], 1)
    expected = J.T @ exact(predict(parameters), loss_of_prediction) @ J
    H, G, R = (cls(model, closure) for cls in OPERATORS)
    unit = torch.eye(G.shape[0], dtype=G.dtype)
    assert_near(G @ unit, expected, 1e-11)
    full = torch.autograd.functional.hessian(
        lambda flat: loss_of_prediction(
            predict(H.to_dict(flat) if not flat.requires_grad else split(flat, model))
        ),
        H.to_vector(parameters),
    )
    assert_near(H @ unit, full, 1e-11)
    assert_near(R @ unit, full - expected, 1e-10)


def split(flat, model):
    sizes = [p.numel() for p in model.parameters()]
    return {n: part.view_as(p) for (n, p), part in zip(model.named_parameters(), flat.split(sizes))}


@pytest.mark.parametrize("name", LOSSES)
def test_product_with_the_curvature_of_the_loss(name):
    prediction, loss_of_prediction = LOSSES[name]
    leaf = prediction.clone().requires_grad_()
    with CaptureLosses() as seen:
        loss = loss_of_prediction(leaf)
    curvature = LossCurvature(loss, seen.calls)
    u = normal(*prediction.shape, seed=9)
    found = sum(curvature.product([u] * len(curvature.predictions)))
    torch.testing.assert_close(
        found.flatten(), exact(prediction, loss_of_prediction) @ u.flatten(), rtol=1e-12, atol=1e-14
    )


def test_curvlinops_with_ragged_batches():
    """Batches of 2, 5 and 1 sequences, averaged by their numbers of tokens and not one by one."""
    model = build(layers=2, top=nn.RMSNorm(6))
    data = [tokens_of(number, 4, seed=number) for number in (2, 5, 1)]
    model.eval()

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(tokens).flatten(0, 1)

    def closure(tokens, targets):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()), targets.numel()

    closures = (partial(closure, *batch) for batch in data)  # a generator serves many products
    H = HessianOperator(model, closures)
    G = GaussNewtonOperator(model, [partial(closure, *batch) for batch in data])
    pairs = [(tokens, targets.flatten()) for tokens, targets in data]
    v = normal(H.shape[0], 3)
    with sdpa_kernel(SDPBackend.MATH):
        for ours, theirs in (
            (H, curvlinops.HessianLinearOperator),
            (G, curvlinops.GGNLinearOperator),
        ):
            options = {"batch_size_fn": torch.numel, "check_deterministic": False}
            expected = (
                theirs(Rows(), nn.CrossEntropyLoss(), list(model.parameters()), pairs, **options)
                @ v
            )
            assert_near(ours @ v, expected)
            assert_near(ours @ v, expected)
    unweighted = HessianOperator(model, [lambda batch=batch: closure(*batch)[0] for batch in data])
    assert float((unweighted @ v - H @ v).norm() / (H @ v).norm()) > 1e-2


def test_squared_error_equals_curvlinops():
    model = FAMILIES["attention"]().double().eval()
    x, y = normal(2, 6, 16), normal(2, 6, 16, seed=1)
    H, G, R = (cls(model, lambda: F.mse_loss(model(x), y)) for cls in OPERATORS)
    v = normal(H.shape[0])
    with sdpa_kernel(SDPBackend.MATH):
        options = {"check_deterministic": False}
        theirs = [
            cls(model, nn.MSELoss(), list(model.parameters()), [(x, y)], **options) @ v
            for cls in (curvlinops.HessianLinearOperator, curvlinops.GGNLinearOperator)
        ]
    assert_near(H @ v, theirs[0])
    assert_near(G @ v, theirs[1])
    assert_near(R @ v, theirs[0] - theirs[1])


def test_functional_part_keeps_its_digits():
    """In float32, H - G would leave rounding where the functional part is zero."""
    model = build().float()
    R = FunctionalOperator(model, language_loss(model), names=["layers.0.o_proj.weight"])
    G = GaussNewtonOperator(model, language_loss(model), names=["layers.0.o_proj.weight"])
    v = normal(R.shape[0], dtype=torch.float32)
    assert float((G @ v).abs().max()) > 1e-3
    assert not (R @ v).any()


def test_what_else_the_loss_holds_belongs_to_the_functional_part():
    model = build()
    plain = language_loss(model)

    def closure():
        return plain() + 0.3 * model.head.weight.pow(4).sum()

    with pytest.warns(UserWarning, match="Gauss-Newton leaves out its curvature"):
        G, R = (
            cls(model, closure) @ normal(HessianOperator(model, closure).shape[0])
            for cls in OPERATORS[1:]
        )
    H = HessianOperator(model, closure)
    v = normal(H.shape[0])
    assert_near(G, GaussNewtonOperator(model, plain) @ v)
    assert_near(G + R, H @ v)


def test_large_vocabulary_without_its_square():
    vocabulary = 300_000  # its square would be 360 GB
    model = nn.Linear(2, vocabulary, bias=False)
    x, y = normal(3, 2, dtype=torch.float32), torch.tensor([0, 7, vocabulary - 1])
    G = GaussNewtonOperator(model, lambda: F.cross_entropy(model(x), y))
    H = HessianOperator(model, lambda: F.cross_entropy(model(x), y))
    v = normal(G.shape[0], dtype=torch.float32)
    assert_near(G @ v, H @ v, 1e-5)
