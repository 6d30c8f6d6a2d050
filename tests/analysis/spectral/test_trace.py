"""Trace, squared norm and diagonal: no bias, errors as in theory, the values of curvlinops."""

import math

import pytest
import torch

from blockopt.analysis.spectral.estimate import Estimate
from blockopt.analysis.spectral.trace import diagonal, squared_frobenius, trace
from tests.helpers.matrices import (
    AttentionHessian,
    Products,
    all_signs,
    normal,
    random_symmetric,
    with_spectrum,
)


def patch_signs(monkeypatch, probes):
    """Make the estimators draw these probes in turn."""
    draws = iter(probes)
    monkeypatch.setattr(
        "blockopt.analysis.spectral.products.random_signs", lambda *_: next(draws).clone()
    )


def test_mean_and_variance_over_all_probes(monkeypatch):
    """The mean over every vector of signs is exact, and their spread that of the docstring."""
    A, probes = random_symmetric(5), all_signs(5)
    exact, off_diagonal = float(A.trace()), float(A.square().sum() - A.diagonal().square().sum())
    values = []
    for z in probes:
        patch_signs(monkeypatch, [z])
        one = trace(A, num_products=1)
        assert one == (float(z @ A @ z), math.inf, 1) or one.value == pytest.approx(
            float(z @ A @ z), rel=1e-13
        )
        values.append(one.value)
    values = torch.tensor(values, dtype=torch.float64)
    assert float(values.mean()) == pytest.approx(exact, rel=1e-13)
    assert float(values.var(correction=0)) == pytest.approx(2 * off_diagonal, rel=1e-12)
    patch_signs(monkeypatch, probes)
    whole = squared_frobenius(Products(A), num_products=32, relative_error=1e-9)
    assert whole.num_products == 32
    assert whole.value == pytest.approx(float(A.square().sum()), rel=1e-13)
    each = torch.stack([(A @ z).square().sum() for z in probes])
    assert whole.standard_error == pytest.approx(float(each.std()) / 32**0.5, rel=1e-12)


def test_diagonal_over_all_probes(monkeypatch):
    A, probes = random_symmetric(6), all_signs(6)
    mean = torch.zeros(6, dtype=torch.float64)
    for z in probes.split(4):
        patch_signs(monkeypatch, z)
        found = diagonal(A, num_products=4, chunk=3)
        values = z * (z @ A)
        torch.testing.assert_close(found.value, values.mean(0))
        torch.testing.assert_close(found.standard_error, values.std(0) / 2)
        mean += found.value / 16
    torch.testing.assert_close(mean, A.diagonal())
    patch_signs(monkeypatch, probes)
    assert diagonal(A, num_products=1).standard_error.tolist() == [math.inf] * 6


def test_hutch_plus_plus_over_all_probes(monkeypatch):
    """For each sketch, the mean over all probes is exact, without noise within its rank."""
    A, probes = random_symmetric(5), all_signs(5)
    for sketch in probes[:3]:
        mean = 0.0
        for z in probes:
            patch_signs(monkeypatch, [sketch, z])
            mean += trace(A, num_products=3, method="hutch++").value / 32
        assert mean == pytest.approx(float(A.trace()), rel=1e-12)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_equals_curvlinops_on_the_same_probes(monkeypatch, chunk):
    import importlib

    import curvlinops

    A = random_symmetric(40)
    probes = (
        torch.randint(0, 2, (12, 40), generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    )
    pairs = [
        (
            "trace.hutchinson",
            curvlinops.hutchinson_trace,
            lambda: trace(A, num_products=12, chunk=chunk),
        ),
        (
            "trace.meyer2020hutch",
            curvlinops.hutchpp_trace,
            lambda: trace(A, num_products=12, chunk=chunk, method="hutch++"),
        ),
        (
            "norm.hutchinson",
            curvlinops.hutchinson_squared_fro,
            lambda: squared_frobenius(A, num_products=12, chunk=chunk),
        ),
        (
            "diagonal.hutchinson",
            curvlinops.hutchinson_diag,
            lambda: diagonal(A, num_products=12, chunk=chunk),
        ),
    ]
    for module, theirs, ours in pairs:
        draws = iter(probes)
        monkeypatch.setattr(
            importlib.import_module(f"curvlinops.{module}"),
            "random_vector",
            lambda *_, draws=draws: next(draws),
        )
        patch_signs(monkeypatch, probes)
        torch.testing.assert_close(
            torch.as_tensor(ours().value, dtype=torch.float64),
            theirs(A, 12),
            rtol=1e-11,
            atol=1e-11,
        )


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_as_many_products_as_columns_are_exact(n):
    A = Products(random_symmetric(n))
    assert trace(A) == (pytest.approx(float(A.matrix.trace()), rel=1e-12), 0, n)
    assert squared_frobenius(A) == (pytest.approx(float(A.matrix.square().sum()), rel=1e-12), 0, n)
    assert A.count == 2 * n
    value, error, products = diagonal(A)
    torch.testing.assert_close(value, A.matrix.diagonal())
    assert products == n
    assert not error.any()
    assert trace(A, method="hutch++").num_products == n


def test_the_budget_is_kept():
    A = Products(random_symmetric(300))
    for method in ("hutchinson", "hutch++"):
        for budget in (3, 10, 100):
            before = A.count
            assert (
                trace(A, method=method, num_products=budget).num_products
                == A.count - before
                == budget
            )
    before = A.count
    assert diagonal(A, num_products=7).num_products == A.count - before == 7


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_standard_error_is_honest(method):
    """The error over many seeds is what is reported, on a Hessian-like spectrum."""
    A = with_spectrum(
        torch.cat([torch.tensor([50.0, 20.0, 10.0], dtype=torch.float64), 0.1 * normal(297)])
    )
    found = [
        trace(A, method=method, num_products=99, generator=torch.Generator().manual_seed(seed))
        for seed in range(200)
    ]
    scores = torch.tensor([(one.value - float(A.trace())) / one.standard_error for one in found])
    assert 0.85 < float(scores.square().mean().sqrt()) < 1.2
    assert abs(float(scores.mean())) < 0.25


def test_hutch_plus_plus_is_better_where_few_eigenvalues_dominate():
    A = with_spectrum(
        torch.cat([torch.tensor([50.0, 20.0, 10.0], dtype=torch.float64), 0.1 * normal(297)])
    )
    assert (
        trace(A, method="hutch++", num_products=30).standard_error
        < trace(A, num_products=30).standard_error / 10
    )


def test_relative_error_stops_early():
    A = with_spectrum(1 + 0.1 * normal(500)).float()
    loose = trace(A, num_products=1000, relative_error=0.01)
    tight = trace(A, num_products=1000, relative_error=0.001)
    assert 10 <= loose.num_products < tight.num_products < 1000
    for found, target in ((loose, 0.01), (tight, 0.001)):
        assert found.standard_error <= target * abs(found.value)
        assert abs(found.value - float(A.trace())) < 4 * target * abs(found.value)
    norm = squared_frobenius(A, num_products=1000, relative_error=0.003)
    assert norm.standard_error <= 0.003 * norm.value
    assert norm.num_products < 1000
    few = trace(A, num_products=600, relative_error=0.5, method="hutch++")
    assert few.num_products == 410  # all of the sketch, and the fewest probes
    assert trace(A, num_products=12, relative_error=1e-9).num_products == 12
    exact = trace(random_symmetric(4), num_products=30, relative_error=1e-9, method="hutch++")
    assert exact == (pytest.approx(float(random_symmetric(4).trace())), 0, 8)


def test_relative_error_is_that_of_the_whole():
    """What hutch++ knows exactly counts, even where the rest is next to nothing."""
    A = with_spectrum(
        torch.cat([torch.tensor([50.0, 20.0, 10.0], dtype=torch.float64), 0.1 * normal(297)])
    )
    found = trace(A, method="hutch++", num_products=150, relative_error=0.02)
    assert found.num_products == 100 + 10
    assert found.standard_error <= 0.02 * found.value


def test_same_seed_same_result():
    A = random_symmetric(150)
    for estimator in (trace, squared_frobenius, diagonal):
        first, second, other = (
            estimator(A, num_products=5, generator=torch.Generator().manual_seed(seed)).value
            for seed in (0, 0, 1)
        )
        assert torch.equal(torch.as_tensor(first), torch.as_tensor(second))
        assert torch.equal(
            torch.as_tensor(first), torch.as_tensor(estimator(A, num_products=5).value)
        )
        assert not torch.equal(torch.as_tensor(first), torch.as_tensor(other))


def test_zero():
    A = torch.zeros(200, 200)
    assert trace(A, num_products=20) == Estimate(0.0, 0.0, 20)
    assert trace(A, num_products=21, method="hutch++") == (0.0, 0.0, 21)
    assert squared_frobenius(A, num_products=20, relative_error=0.1) == (0.0, 0.0, 10)


def test_hessian_of_attention():
    H = AttentionHessian()
    dense = H.dense()
    assert trace(H).value == pytest.approx(float(dense.trace()), rel=1e-12)
    assert squared_frobenius(H).value == pytest.approx(float(dense.square().sum()), rel=1e-12)
    torch.testing.assert_close(diagonal(H).value, dense.diagonal())
    found = trace(H, num_products=40)
    assert abs(found.value - float(dense.trace())) < 3 * found.standard_error


def test_errors():
    A = torch.eye(4)
    with pytest.raises(
        ValueError, match=r"Invalid method='xtrace'. Must be one of 'hutchinson', 'hutch\+\+'"
    ):
        trace(A, method="xtrace")
    with pytest.raises(ValueError, match=r"Invalid num_products=2. Must be an integer >= 3"):
        trace(A, num_products=2, method="hutch++")
    for estimator in (trace, squared_frobenius, diagonal):
        with pytest.raises(ValueError, match=r"Invalid num_products=0. Must be an integer >= 1"):
            estimator(A, num_products=0)
        with pytest.raises(ValueError, match=r"Invalid chunk=0. Must be an integer >= 1"):
            estimator(A, chunk=0)
        with pytest.raises(ValueError, match=r"Invalid operator of shape \(4,\)"):
            estimator(torch.ones(4))
        with pytest.raises(FloatingPointError, match="not finite"):
            estimator(A * torch.inf)
    for estimator in (trace, squared_frobenius):
        for bad in (0, -1.0, math.nan):
            with pytest.raises(ValueError, match=rf"Invalid relative_error={bad}. Must be > 0"):
                estimator(A, relative_error=bad)


def test_progress():
    A = random_symmetric(150)
    for estimator in (trace, squared_frobenius, diagonal):
        assert torch.equal(
            torch.as_tensor(estimator(A, progress=True).value), torch.as_tensor(estimator(A).value)
        )
    trace(A, progress=True, method="hutch++")
