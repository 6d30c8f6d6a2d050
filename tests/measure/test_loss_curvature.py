"""The loss's curvature Λ in the predictions, against autograd, for every way to call a loss."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blockopt.curvature import analytic, gauss_newton, hutchinson
from blockopt.measure.loss_curvature import CaptureLosses, LossCurvature
from tests.helpers.matrices import normal

ROWS, IMAGE, ONE = normal(6, 4), normal(2, 4, 3), normal(4)
LABELS = torch.tensor([0, 1, 2, 3, 1, 0])
PIXELS = torch.tensor([[3, 1], [0, 2], [1, 1]]).T  # not contiguous
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)
SOFT = normal(6, 4, seed=1).abs()  # rows need not add up to 1
CROSS_ENTROPY = {
    "plain": (ROWS, lambda p: F.cross_entropy(p, LABELS)),
    "module": (ROWS, lambda p: nn.CrossEntropyLoss()(p, LABELS)),
    "sum": (ROWS, lambda p: F.cross_entropy(p, LABELS, reduction="sum")),
    "none": (ROWS, lambda p: F.cross_entropy(p, LABELS, reduction="none") @ WEIGHT[LABELS]),
    "ignored": (ROWS, lambda p: F.cross_entropy(p, LABELS.where(LABELS != 1, -100))),
    "ignored class": (ROWS, lambda p: F.cross_entropy(p, LABELS, ignore_index=1)),
    "weights": (ROWS, lambda p: F.cross_entropy(p, LABELS, weight=WEIGHT)),
    "weights, ignored": (ROWS, lambda p: F.cross_entropy(p, LABELS, weight=WEIGHT, ignore_index=1)),
    "smoothed": (ROWS, lambda p: F.cross_entropy(p, LABELS, label_smoothing=0.2)),
    "smoothed, ignored": (
        ROWS,
        lambda p: F.cross_entropy(p, LABELS, label_smoothing=0.2, ignore_index=1),
    ),
    "smoothed, weights": (
        ROWS,
        lambda p: F.cross_entropy(p, LABELS, weight=WEIGHT, label_smoothing=0.2),
    ),
    "all": (
        ROWS,
        lambda p: F.cross_entropy(
            p, LABELS, weight=WEIGHT, label_smoothing=0.2, ignore_index=1, reduction="sum"
        ),
    ),
    "soft": (ROWS, lambda p: F.cross_entropy(p, SOFT)),
    "soft, weights": (ROWS, lambda p: F.cross_entropy(p, SOFT, weight=WEIGHT)),
    "soft, smoothed": (
        ROWS,
        lambda p: F.cross_entropy(p, SOFT, label_smoothing=0.2, weight=WEIGHT),
    ),
    "image": (IMAGE, lambda p: F.cross_entropy(p, PIXELS)),
    "image, weights": (IMAGE, lambda p: F.cross_entropy(p, PIXELS, weight=WEIGHT, ignore_index=2)),
    "image, none": (
        IMAGE,
        lambda p: (F.cross_entropy(p, PIXELS, reduction="none") * normal(2, 3).abs()).sum(),
    ),
    "image, soft": (IMAGE, lambda p: F.cross_entropy(p, IMAGE.abs())),
    "no batch": (ONE, lambda p: F.cross_entropy(p, torch.tensor(2))),
    "no batch, soft": (ONE, lambda p: F.cross_entropy(p, SOFT[0])),
    "times a number": (ROWS, lambda p: 3 * F.cross_entropy(p, LABELS)),
    "two": (
        ROWS,
        lambda p: (
            F.cross_entropy(p, LABELS) + 0.5 * F.cross_entropy(p, LABELS.flip(0), reduction="sum")
        ),
    ),
}
ELEMENTWISE = {
    "squared": (ROWS, lambda p: F.mse_loss(p, SOFT)),
    "squared, module": (ROWS, lambda p: nn.MSELoss(reduction="sum")(p, SOFT)),
    "squared, masked": (
        ROWS,
        lambda p: (F.mse_loss(p, SOFT, reduction="none") * (SOFT > 0.5)).sum() / 3,
    ),
    "squared, one": (normal(), lambda p: F.mse_loss(p, torch.ones((), dtype=torch.float64))),
    "binary": (ROWS, lambda p: F.binary_cross_entropy_with_logits(p, SOFT)),
    "binary, sum": (
        ROWS,
        lambda p: 2 * F.binary_cross_entropy_with_logits(p, SOFT, reduction="sum"),
    ),
    "binary, none": (
        ROWS,
        lambda p: F.binary_cross_entropy_with_logits(p, SOFT, reduction="none").mean(0) @ WEIGHT,
    ),
}
LOSSES = CROSS_ENTROPY | ELEMENTWISE


def curvature_of(prediction, loss_of):
    prediction = prediction.clone().requires_grad_()
    with CaptureLosses() as seen:
        loss = loss_of(prediction)
    return LossCurvature(loss, seen.calls)


def exact(prediction, loss_of):
    return torch.autograd.functional.hessian(loss_of, prediction).reshape(prediction.numel(), -1)


@pytest.mark.parametrize("name", LOSSES)
def test_factors_sum_to_the_hessian(name):
    prediction, loss_of = LOSSES[name]
    total = 0
    for vectors in curvature_of(prediction, loss_of).factors():
        assert sum(bool(v.any()) for v in vectors) == 1
        flat = sum(v.flatten() for v in vectors)  # all calls share one prediction
        total = total + torch.outer(flat, flat)
    torch.testing.assert_close(total, exact(prediction, loss_of), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "name",
    ["plain", "all", "soft, smoothed", "image, weights", "two", "squared, masked", "binary, none"],
)
def test_samples_have_the_hessian_as_their_covariance(name):
    prediction, loss_of = LOSSES[name]
    curvature, generator = curvature_of(prediction, loss_of), torch.Generator().manual_seed(0)
    number = 4000
    samples = (curvature.sample(generator) for _ in range(number))
    draws = torch.stack([sum(v.flatten() for v in sample) for sample in samples])
    products = draws.unsqueeze(2) * draws.unsqueeze(1)
    errors = (products.mean(0) - exact(prediction, loss_of)).abs()
    deviations = products.std(0) / number**0.5
    assert (errors <= 5 * deviations + 1e-12).all()
    assert (draws.mean(0).abs() <= 5 * draws.std(0) / number**0.5 + 1e-12).all()


def test_labels_are_drawn_by_their_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]], dtype=torch.float64).expand(20000, 4)
    labels = torch.zeros(20000, dtype=torch.long)
    curvature = curvature_of(logits, lambda p: F.cross_entropy(p, labels, reduction="sum"))
    (vector,) = curvature.sample(torch.Generator().manual_seed(0))
    p = logits[0].softmax(-1)
    drawn = (p - vector).mean(0)  # p - (p - onehot)
    assert (drawn - p).abs().max() < 5 * 0.5 / 20000**0.5
    assert drawn[3] == 0


def test_last_rows_touch_one_row_that_counts():
    curvature = curvature_of(ROWS, lambda p: F.cross_entropy(p, LABELS, ignore_index=0))
    (vectors,) = curvature.last_rows()
    rows = vectors[0].ne(0).nonzero()[:, 0].unique()
    assert rows.tolist() == [4]  # the labels at 0 and 5 are ignored
    (elementwise,) = curvature_of(*ELEMENTWISE["squared"]).last_rows()
    assert elementwise[0].nonzero().tolist() == [[5, 3]]


def test_low_precision_predictions():
    curvature = curvature_of(ROWS.bfloat16(), lambda p: F.cross_entropy(p, LABELS))
    vectors = curvature.sample(torch.Generator().manual_seed(0))
    assert all(v.dtype == torch.bfloat16 for v in vectors)


@pytest.fixture
def model():
    return nn.Linear(3, 4).double()


INPUTS = normal(6, 3)


@pytest.mark.parametrize("estimator", [analytic, gauss_newton])
class TestRefusals:
    def test_loss_that_is_not_seen(self, estimator, model):
        def loss():
            return -model(INPUTS).log_softmax(-1)[:, 0].mean()

        others = "'newton', 'secant', 'directional' and 'hutchinson'"
        with pytest.raises(ValueError, match=rf"No call of F.cross_entropy.*{others}"):
            estimator(model, loss)
        hutchinson(model, loss)  # as the message says

    def test_loss_that_is_seen_but_not_used(self, estimator, model):
        def loss():
            F.cross_entropy(model(INPUTS), LABELS)
            return model(INPUTS).square().mean()

        with pytest.raises(ValueError, match="No call of"):
            estimator(model, loss)

    def test_negative_sign(self, estimator, model):
        def loss():
            y = model(INPUTS)
            return 2.0 * F.cross_entropy(y, LABELS) - F.mse_loss(y, SOFT)

        with pytest.raises(ValueError, match="negative sign"):
            estimator(model, loss)

    def test_target_that_depends_on_parameters(self, estimator, model):
        with pytest.raises(ValueError, match="detach it"):
            estimator(model, lambda: F.mse_loss(model(INPUTS), model(2 * INPUTS)))

    def test_weighted_elementwise(self, estimator, model):
        def loss():
            return F.binary_cross_entropy_with_logits(model(INPUTS), SOFT, pos_weight=WEIGHT)

        with pytest.raises(ValueError, match="is weighted"):
            estimator(model, loss)

    def test_broadcast_target(self, estimator, model):
        def loss():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return F.mse_loss(model(INPUTS), SOFT[:1])

        with pytest.raises(ValueError, match="differ in shape"):
            estimator(model, loss)

    def test_old_reduction(self, estimator, model):
        def loss():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return F.cross_entropy(model(INPUTS), LABELS, size_average=True)

        with pytest.raises(ValueError, match="size_average"):
            estimator(model, loss)

    def test_other_terms_warn(self, estimator, model):
        def loss(factor):
            return F.cross_entropy(model(INPUTS), LABELS) + factor * model.weight.square().sum()

        with pytest.warns(UserWarning, match="Gauss-Newton leaves out its curvature"):
            found = estimator(model, lambda: loss(1.0))
        small = estimator(model, lambda: loss(1e-4))  # no warning, as for the balance of experts
        torch.testing.assert_close(found["weight"], small["weight"])
