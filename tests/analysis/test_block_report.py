"""What is measured of one symmetric operator."""

import pytest
import torch

from blockopt.analysis import Probes, measure_block
from tests.helpers.matrices import Products, normal, random_symmetric, with_spectrum


@pytest.mark.parametrize(
    ("name", "value", "smallest"),
    [("top", -1, 0), ("num_probes", 1, 2), ("num_steps", 1, 2), ("num_starts", -1, 0)],
)
def test_wrong_numbers_of_probes(name, value, smallest):
    with pytest.raises(ValueError, match="Invalid") as caught:
        Probes(**{name: value})
    assert str(caught.value) == f"Invalid {name}={value}. Must be an integer >= {smallest}."


def test_small_operators_are_measured_exactly():
    A = Products(random_symmetric(20))
    found = measure_block(A)
    values = torch.linalg.eigvalsh(A.matrix)
    assert A.count == found.dimension == 20
    assert found.exact
    assert found.trace == (pytest.approx(float(values.sum())), 0, 20)
    assert found.frobenius == (pytest.approx(float(A.matrix.norm())), 0, 20)
    assert float(found.top[0]) == pytest.approx(float(values[values.abs().argmax()]))
    assert found.negative == (
        pytest.approx(float((values < 0).double().mean())),
        pytest.approx(float(-values.clamp(max=0).sum() / values.abs().sum())),
    )
    torch.testing.assert_close(found.spectrum.nodes, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_operators_are_estimated(dtype):
    values = torch.cat([normal(290), torch.linspace(5, 9, 9), torch.tensor([-20.0])]).double()
    A = Products(with_spectrum(values).to(dtype))
    found = measure_block(A, Probes(num_probes=100, num_starts=9))
    assert not found.exact
    assert abs(found.trace.value - float(values.sum())) < 3 * found.trace.standard_error
    assert abs(found.frobenius.value - float(values.norm())) < 3 * found.frobenius.standard_error
    assert found.frobenius.standard_error < 0.1 * found.frobenius.value
    assert found.trace.num_products == found.frobenius.num_products == 100
    assert float(found.top[0]) == pytest.approx(-20, rel=1e-4)
    assert found.negative.of_count == pytest.approx(float((values < 0).double().mean()), abs=0.1)
    mass = float(-values.clamp(max=0).sum() / values.abs().sum())
    assert found.negative.of_mass == pytest.approx(mass, abs=0.03)


@pytest.mark.parametrize("size", [5, 150])
def test_zero_operators(size):
    found = measure_block(Products(torch.zeros(size, size)))
    assert found.trace.value == found.frobenius.value == float(found.top[0]) == 0
    assert found.negative == (0, 0)
    assert found.frobenius.standard_error == 0


def test_probes_decide_how_much_is_measured_of_an_operator():
    A = Products(random_symmetric(150))
    other = measure_block(A, Probes(num_probes=20, num_steps=10, num_starts=2, seed=3))
    assert len(other.spectrum.nodes) == 20
    assert other.trace.num_products == 20
    first, second = measure_block(A), measure_block(A)
    assert first.trace == second.trace != other.trace
    assert torch.equal(first.top, second.top)
    assert len(measure_block(A, Probes(top=4, num_starts=0)).top) == 4
    with pytest.raises(FloatingPointError, match="not finite"):
        measure_block(Products(random_symmetric(150) * torch.nan))
