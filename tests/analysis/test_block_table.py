"""The table of blocks against the dense matrix, and its width."""

import pytest
import torch

from blockopt.analysis.block_table import block_table, measure_blocks
from tests.helpers.matrices import Products, normal, random_symmetric, with_spectrum


def test_small_blocks_are_exact():
    A = Products(random_symmetric(20))
    found = measure_blocks({"a": A})["a"]
    values = torch.linalg.eigvalsh(A.matrix)
    assert A.count == found.dimension == 20
    assert found.trace == (pytest.approx(float(values.sum())), 0, 20)
    assert found.frobenius == (pytest.approx(float(A.matrix.norm())), 0, 20)
    assert found.top == pytest.approx(float(values[values.abs().argmax()]))
    assert found.negative == (
        pytest.approx(float((values < 0).double().mean())),
        pytest.approx(float(-values.clamp(max=0).sum() / values.abs().sum())),
    )
    torch.testing.assert_close(found.spectrum.nodes, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_blocks_are_estimated(dtype):
    values = torch.cat([normal(290), torch.linspace(5, 9, 9), torch.tensor([-20.0])]).double()
    A = with_spectrum(values)
    found = measure_blocks({"a": Products(A.to(dtype))}, num_probes=10)["a"]
    assert abs(found.trace.value - float(values.sum())) < 3 * found.trace.standard_error
    assert abs(found.frobenius.value - float(values.norm())) < 3 * found.frobenius.standard_error
    assert found.frobenius.standard_error < 0.1 * found.frobenius.value
    assert found.trace.num_products == found.frobenius.num_products == 100
    assert found.top == pytest.approx(-20, rel=1e-4)
    assert found.negative.of_count == pytest.approx(float((values < 0).double().mean()), abs=0.1)
    mass = float(-values.clamp(max=0).sum() / values.abs().sum())
    assert found.negative.of_mass == pytest.approx(mass, abs=0.03)


def test_zero_blocks():
    found = measure_blocks({"small": torch.zeros(5, 5), "large": torch.zeros(150, 150)})
    for block in found.values():
        assert (block.trace.value, block.frobenius.value, block.top, block.negative) == (
            0,
            0,
            0,
            (0, 0),
        )
        assert block.frobenius.standard_error == 0


def test_table():
    blocks = {
        "transformer.h.0.attn.c_attn.weight query head 11": random_symmetric(120),
        "a very long name that goes on and on " * 3 + "value head 2": -random_symmetric(3) * 1e-20,
    }
    lines = block_table(measure_blocks(blocks)).splitlines()
    assert [len(line) for line in lines] == [128] * 3
    assert lines[0].split() == [
        "block",
        "dimension",
        "trace",
        "±",
        "Frobenius",
        "±",
        "top",
        "negative",
        "of",
        "mass",
    ]
    assert lines[1].startswith("transformer.h.0.attn.c_attn.weight query head 11  ")
    assert lines[2].startswith("…")
    assert "value head 2  " in lines[2]
    trace, error, norm = lines[2].split()[-7:-4]
    assert float(trace) == pytest.approx(-1e-20 * float(random_symmetric(3).trace()), rel=1e-3)
    assert error == "0"
    assert float(norm) == pytest.approx(1e-20 * float(random_symmetric(3).norm()), rel=1e-3)
    assert float(lines[1].split()[-6]) > 0


def test_options():
    A = random_symmetric(150)
    generator = torch.Generator().manual_seed(3)
    other = measure_blocks(
        {"a": A}, num_products=20, num_steps=10, num_probes=2, generator=generator
    )["a"]
    assert len(other.spectrum.nodes) == 20
    assert other.trace.num_products == 20
    first, second = measure_blocks({"a": A})["a"], measure_blocks({"a": A}, progress=True)["a"]
    assert first.trace == second.trace
    assert first.top == second.top
    with pytest.raises(ValueError, match=r"Invalid num_products=0. Must be an integer >= 1"):
        measure_blocks({"a": A}, num_products=0)
    with pytest.raises(FloatingPointError, match="not finite"):
        measure_blocks({"a": A * torch.nan})
