"""Lanczos and its quadrature against dense eigenvalues and all possible probes."""

import numpy as np
import pytest
import torch

from blockopt.analysis.spectral.density import (
    SpectralDensity,
    check_symmetric,
    lanczos,
    spectral_density,
)
from blockopt.analysis.spectral.log_axis import symmetric_log
from tests.helpers.matrices import (
    SPECTRA,
    AttentionHessian,
    Products,
    all_signs,
    normal,
    random_symmetric,
    with_spectrum,
)


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("steps", [1, 7, 60, 200])
def test_recurrence(name, steps):
    A = Products(with_spectrum(SPECTRA[name]))
    found = lanczos(A, steps)
    V, T, made = found.basis, found.matrix(), min(steps, 60)
    assert V.shape == (60, made)
    assert A.count == made
    torch.testing.assert_close(V.T @ V, torch.eye(made, dtype=torch.float64), rtol=0, atol=1e-13)
    torch.testing.assert_close(V.T @ A.matrix @ V, T, rtol=0, atol=1e-12)
    last = A.matrix @ V - V @ T
    assert float(last[:, :-1].abs().max() if made > 1 else 0) < 1e-12
    assert float(last[:, -1].norm()) == pytest.approx(found.remainder, abs=1e-12)


@pytest.mark.parametrize("name", SPECTRA)
def test_all_eigenvalues_with_their_copies(name):
    found = torch.linalg.eigvalsh(lanczos(with_spectrum(SPECTRA[name]), 60).matrix())
    torch.testing.assert_close(found, SPECTRA[name].sort().values, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "distinct"), [("repeated", 4), ("low rank", 4), ("equal", 1), ("zero", 1)]
)
def test_without_restart_it_ends_with_the_krylov_space(name, distinct):
    A = Products(with_spectrum(SPECTRA[name]))
    found = lanczos(A, 60, restart=False)
    assert len(found.alphas) == A.count == distinct
    assert found.remainder == 0
    expected = SPECTRA[name].unique()
    torch.testing.assert_close(torch.linalg.eigvalsh(found.matrix()), expected, rtol=0, atol=1e-12)


def test_no_ghosts():
    """An outlier that converges early makes plain Lanczos lose orthogonality and find it again."""
    A = with_spectrum(torch.cat([torch.tensor([1e3]), normal(299)]))
    found = torch.linalg.eigvalsh(lanczos(A, 150).matrix())
    assert int((found > 100).sum()) == 1
    v, w, alphas, betas = normal(300) / normal(300).norm(), 0, [], []
    for _ in range(150):  # the plain recurrence, as a control
        u = A @ v - w
        alphas.append(float(u @ v))
        u = u - alphas[-1] * v
        betas.append(float(u.norm()))
        v, w = u / u.norm(), betas[-1] * v
    plain = np.diag(alphas) + np.diag(betas[:-1], 1) + np.diag(betas[:-1], -1)
    assert (np.linalg.eigvalsh(plain) > 100).sum() > 1


def test_float32_operator_float64_recurrence():
    A = Products(with_spectrum(SPECTRA["indefinite"]).float())
    found = lanczos(A, 60)
    torch.testing.assert_close(
        found.basis.T @ found.basis, torch.eye(60, dtype=torch.float64), rtol=0, atol=1e-13
    )
    eigenvalues = torch.linalg.eigvalsh(found.matrix())
    torch.testing.assert_close(eigenvalues, SPECTRA["indefinite"].sort().values, rtol=0, atol=2e-6)


def test_start_is_used_whatever_its_length():
    A, u = random_symmetric(9), normal(9)
    torch.testing.assert_close(lanczos(A, 3, start=7 * u).basis[:, 0], u / u.norm())
    torch.testing.assert_close(lanczos(A, 3, start=7 * u).alphas, lanczos(A, 3, start=u).alphas)


def test_same_seed_same_result():
    A = random_symmetric(20)
    default, again, other = (
        lanczos(A, 5, generator=g)
        for g in (None, torch.Generator().manual_seed(0), torch.Generator())
    )
    assert torch.equal(default.alphas, again.alphas)
    assert not torch.equal(default.alphas, other.alphas)
    first, second, third = (
        spectral_density(
            A, num_steps=4, num_probes=2, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(first.nodes, second.nodes)
    assert not torch.equal(first.nodes, third.nodes)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_quadrature_is_exact_to_its_degree_and_not_beyond(steps):
    A, u = random_symmetric(12) / 5, normal(12)
    found = lanczos(A, steps, start=u).quadrature()
    assert float(found.weights.sum()) == pytest.approx(1, abs=1e-14)
    for power in range(2 * steps + 1):
        exact = float(u @ torch.linalg.matrix_power(A, power) @ u / (u @ u))
        assert (found.moment(power) == pytest.approx(exact, rel=1e-11)) == (power < 2 * steps)


def test_no_bias_over_all_probes():
    A = random_symmetric(6) / 3
    mean = torch.zeros(4, dtype=torch.float64)
    for z in all_signs(6):
        found = lanczos(A, 2, start=z, restart=False).quadrature()
        mean += (
            torch.tensor([found.moment(power) for power in range(4)], dtype=torch.float64) / 2**6
        )
    exact = torch.tensor(
        [float(torch.linalg.matrix_power(A, power).trace()) / 6 for power in range(4)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(mean, exact, rtol=1e-12, atol=1e-12)


def test_moments_are_the_mean_over_the_probes_drawn(monkeypatch):
    A, probes = random_symmetric(10) / 4, all_signs(10)[[3, 500, 811]]
    draws = iter(probes)
    monkeypatch.setattr("blockopt.analysis.spectral.density.random_signs", lambda *_: next(draws))
    found = spectral_density(A, num_steps=4, num_probes=3)
    for power in range(8):
        exact = sum(float(z @ torch.linalg.matrix_power(A, power) @ z) for z in probes) / 30
        assert found.moment(power) == pytest.approx(exact, rel=1e-11)


def test_density_of_a_diagonal_matrix_is_exact():
    """Every sign vector weighs all eigenvectors of a diagonal matrix alike."""
    from scipy import stats

    values = torch.tensor([-2.0, 0.5, 0.5, 0.5, 7.0], dtype=torch.float64)
    found = spectral_density(torch.diag(values), num_probes=3)
    grid = torch.tensor([-3.0, -1.99, 0.0, 0.6, 8.0], dtype=torch.float64)
    torch.testing.assert_close(
        found.cdf(grid), torch.tensor([0.0, 0.2, 0.2, 0.8, 1.0], dtype=torch.float64)
    )
    expected = stats.norm.pdf(grid[:, None], loc=values, scale=0.3).mean(1)
    torch.testing.assert_close(found.density(grid, 0.3), torch.as_tensor(expected))
    two = SpectralDensity(torch.tensor([0.0, 1.0]), torch.tensor([0.25, 0.75]))
    assert str(two) == "SpectralDensity(2 nodes from 0 to 1)"
    assert two.cdf(torch.tensor([0.0, 0.5, 1.0])).tolist() == [0.25, 0.25, 1.0]  # at or below
    log = found.on_log_axis(0.1)
    torch.testing.assert_close(
        log.nodes.unique().round(decimals=9), symmetric_log(values.unique(), 0.1).round(decimals=9)
    )
    assert torch.equal(log.weights, found.weights)
    fine = torch.linspace(-6, 12, 5001, dtype=torch.float64)
    assert float(torch.trapezoid(found.density(fine, 0.3), fine)) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("name", SPECTRA)
def test_density_of_each_spectrum(name):
    A = Products(with_spectrum(SPECTRA[name]))
    found = spectral_density(A, num_steps=80, num_probes=4)
    assert A.count <= 4 * 60
    assert float(found.weights.sum()) == pytest.approx(1, abs=1e-13)
    assert bool((found.weights >= 0).all())
    assert bool((found.nodes.diff() >= 0).all())
    # As many steps as needed: nodes are eigenvalues
    distance = (found.nodes[:, None] - SPECTRA[name]).abs().min(1).values
    assert float(distance[found.weights > 1e-9].max()) < 1e-6


def test_cdf_of_a_larger_matrix():
    values = normal(400)
    found = spectral_density(with_spectrum(values), num_steps=40, num_probes=20)
    grid = torch.linspace(-3, 3, 25, dtype=torch.float64)
    exact = (values <= grid[:, None]).double().mean(1)
    assert float((found.cdf(grid) - exact).abs().max()) < 0.05


def test_hessian_of_attention():
    H = AttentionHessian()
    dense = H.dense()
    assert float((dense - dense.T).abs().max()) < 1e-14
    torch.testing.assert_close(
        torch.linalg.eigvalsh(lanczos(H, 45).matrix()), torch.linalg.eigvalsh(dense)
    )
    assert check_symmetric(H) < 1e-13
    found = spectral_density(H, num_steps=45, num_probes=2)
    assert (
        float((found.nodes[:, None] - torch.linalg.eigvalsh(dense)).abs().min(1).values.max())
        < 1e-9
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_check_symmetric(dtype):
    A = random_symmetric(50).to(dtype)
    assert check_symmetric(A) < torch.finfo(dtype).eps * 100
    assert check_symmetric(torch.zeros(3, 3)) == 0
    A[3, 7] += 1
    with pytest.raises(
        ValueError,
        match=r"Invalid operator: \|u·Av − v·Au\| is .* Must be symmetric and deterministic",
    ):
        check_symmetric(A)
    assert check_symmetric(A, tolerance=1.0) > 1e-3

    class Noisy(Products):
        def __matmul__(self, v):
            return super().__matmul__(v) * (1 + 0.1 * self.count)

    with pytest.raises(ValueError, match="deterministic"):
        check_symmetric(Noisy(random_symmetric(5)))


@pytest.mark.parametrize("n", [1, 2])
def test_tiny(n):
    found = lanczos(torch.eye(n) * 3, 10)
    torch.testing.assert_close(found.alphas, torch.full((n,), 3.0, dtype=torch.float64))
    assert found.betas.tolist() == [0.0] * (n - 1)
    assert spectral_density(torch.eye(n) * 3, num_probes=1).nodes.tolist() == pytest.approx([3.0])


def test_no_graph_is_kept():
    A = random_symmetric(5).requires_grad_()
    assert not lanczos(A, 3).basis.requires_grad


def test_not_finite():
    class Named(Products):
        pass

    A = Named(torch.full((4, 4), torch.nan))
    with pytest.raises(
        FloatingPointError,
        match=r"the Named of shape \(4, 4\) and dtype torch.float32 .* not finite",
    ):
        lanczos(A, 2)
    with pytest.raises(FloatingPointError, match="not finite"):
        spectral_density(torch.full((4, 4), torch.inf))


def test_errors():
    A = torch.eye(4)
    for bad in (torch.ones(4), torch.ones(4, 3), torch.ones(0, 0)):
        with pytest.raises(
            ValueError, match=r"Invalid operator of shape .* Must be \(n, n\) with n >= 1"
        ):
            lanczos(bad, 2)
    for bad in (np.eye(3), [[1.0]], None):
        with pytest.raises(
            TypeError,
            match=rf"Invalid operator of type {type(bad).__name__}. Must be a tensor, "
            "or have shape",
        ):
            lanczos(bad, 2)
    with pytest.raises(
        ValueError,
        match=r"Invalid operator of dtype torch.int64. Must be a real floating-point one",
    ):
        lanczos(torch.eye(4, dtype=torch.int64), 2)
    for bad in (0, 2.0, True):
        with pytest.raises(ValueError, match=f"Invalid num_steps={bad}. Must be an integer >= 1"):
            lanczos(A, bad)
    for bad in (torch.zeros(4), torch.ones(3), torch.ones(4, 1), torch.full((4,), torch.nan)):
        with pytest.raises(
            ValueError,
            match=r"Invalid start of shape .* Must be a vector of shape \(4,\) "
            "that is finite and not 0",
        ):
            lanczos(A, 2, start=bad)
    with pytest.raises(ValueError, match=r"Invalid num_probes=0. Must be an integer >= 1"):
        spectral_density(A, num_probes=0)
    with pytest.raises(ValueError, match=r"Invalid num_steps=-1. Must be an integer >= 1"):
        spectral_density(A, num_steps=-1)
    with pytest.raises(ValueError, match=r"Invalid threshold=0. Must be > 0"):
        symmetric_log(torch.ones(2), 0)
    with pytest.raises(ValueError, match=r"Invalid width=0. Must be > 0"):
        SpectralDensity(torch.ones(1), torch.ones(1)).density(torch.ones(1), 0)

    class Short(Products):
        def __matmul__(self, v):
            return super().__matmul__(v)[:2]

    with pytest.raises(
        ValueError,
        match=r"Invalid the Short .* its product with \(4,\) has shape \(2,\). Must be \(4,\)",
    ):
        lanczos(Short(A), 2)


def test_progress_tells_the_time_left_where_there_is_no_terminal(monkeypatch, capsys):
    A = random_symmetric(5)
    monkeypatch.setattr("blockopt.analysis.progress.SECONDS", 0.0)
    assert torch.equal(spectral_density(A, progress=True).nodes, spectral_density(A).nodes)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].split(": ")[1] == "100%, 0.0 s left"
    assert all(line.endswith(" left") for line in lines)
