"""The spectrum of scalar attention against torch.func, and what a sink does to it."""

import math

import numpy as np
import pytest
import torch

from blockopt.analysis.closed_forms.scalar_attention import ScalarAttention

SIZES = [(1, 2, 2), (3, 5, 6), (4, 7, 1), (2, 1, 3), (5, 9, 10)]  # sequences, tokens, d_K


def draw(sequences=3, tokens=5, width=6, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, sequences, tokens, generator=generator, dtype=torch.float64)
    w_Q, w_K = scale * torch.randn(2, width, generator=generator, dtype=torch.float64)
    return x, y, w_Q, w_K, torch.tensor(0.7, dtype=torch.float64)


def output(parameters, x, bias=0.0):
    w_Q, w_K, w_V = (
        parameters[: len(parameters) // 2],
        parameters[len(parameters) // 2 : -1],
        parameters[-1],
    )
    scores = torch.einsum("nid,njd->nij", x.unsqueeze(-1) * w_Q, x.unsqueeze(-1) * w_K) / math.sqrt(
        len(w_Q)
    )
    sink = torch.zeros(x.shape[-1], dtype=x.dtype)
    sink[0] = bias
    return w_V * torch.einsum("nij,nj->ni", torch.softmax(scores + sink, -1), x)


def autograd(x, y, w_Q, w_K, w_V, bias=0.0):
    """The Hessian and the Gauss-Newton matrix."""
    parameters = torch.cat([w_Q, w_K, w_V.reshape(1)])
    hessian = torch.func.jacrev(
        torch.func.grad(lambda p: (output(p, x, bias) - y).square().mean())
    )(parameters)
    jacobian = torch.func.jacrev(lambda p: output(p, x, bias).flatten())(parameters)
    return hessian, 2 / x.numel() * jacobian.T @ jacobian


def close(found, expected, tolerance=1e-12):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("bias", [0.0, 1.5])
@pytest.mark.parametrize("sizes", SIZES)
def test_hessian_and_spectrum(sizes, bias):
    data = draw(*sizes)
    model = ScalarAttention(*data, score_bias=bias)
    hessian, gauss_newton = autograd(*data, bias=bias)
    close(model.dense(), hessian)
    close(model.eigenvalues(), torch.linalg.eigvalsh(hessian))
    close(model.gauss_newton_dense(), gauss_newton)
    close(model.gauss_newton_eigenvalues(), torch.linalg.eigvalsh(gauss_newton))
    close(
        model.loss,
        (output(torch.cat([data[2], data[3], data[4].reshape(1)]), data[0], bias) - data[1])
        .square()
        .mean(),
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("width", [1, 4])
def test_equal_and_opposite_weights(sign, width):
    x, y, w_Q, _, w_V = draw(width=width)
    model = ScalarAttention(x, y, w_Q, sign * w_Q, w_V)
    close(model.eigenvalues(), torch.linalg.eigvalsh(autograd(x, y, w_Q, sign * w_Q, w_V)[0]))
    assert (
        model.outliers + sign * model.beta
    ).abs().min() < 1e-14  # the direction that does not meet p


def test_bulk_and_outliers():
    model = ScalarAttention(*draw(width=6))
    assert model.bulk.tolist() == [-abs(model.beta.item())] * 5 + [abs(model.beta.item())] * 5
    assert len(model.outliers) == 3
    assert len(ScalarAttention(*draw(width=1)).bulk) == 0


def test_beta_is_the_slope_in_the_product():
    x, y, w_Q, w_K, w_V = draw()
    parameters = torch.cat([w_Q, w_K, w_V.reshape(1)])
    gradient = torch.func.grad(lambda p: (output(p, x) - y).square().mean())(parameters)
    close(gradient[:6], ScalarAttention(x, y, w_Q, w_K, w_V).beta * w_K)


@pytest.mark.parametrize("seed", range(5))
def test_roots_of_the_cubic(seed):
    model = ScalarAttention(*draw(seed=seed))
    coefficients = model.cubic()
    roots = np.sort(np.roots(coefficients.numpy()).real)
    np.testing.assert_allclose(
        roots, model.outliers.numpy(), rtol=0, atol=1e-9 * np.abs(roots).max()
    )
    close(coefficients, torch.from_numpy(np.poly(model.outliers.numpy())), 1e-11)


def test_no_curvature_in_the_bulk_where_the_residual_is_zero():
    x, _, w_Q, w_K, w_V = draw()
    y = output(torch.cat([w_Q, w_K, w_V.reshape(1)]), x)
    model = ScalarAttention(x, y, w_Q, w_K, w_V)
    assert model.bulk.abs().max() < 1e-15
    close(model.dense(), model.gauss_newton_dense())


def test_condition_numbers():
    data = draw()
    model = ScalarAttention(*data)
    hessian, gauss_newton = autograd(*data)
    close(model.condition_number(), torch.linalg.cond(hessian), 1e-10)
    two = torch.linalg.eigvalsh(gauss_newton)[-2:]
    close(model.gauss_newton_condition_number(), two[1] / two[0], 1e-10)


def test_conditioning_depends_on_the_norms_of_query_and_key():
    x, y, w_Q, w_K, w_V = draw()
    plain, uneven = (ScalarAttention(x, y, c * w_Q, w_K / c, w_V) for c in (1.0, 10.0))
    for name in ("alpha", "beta", "gamma", "nu", "loss"):
        close(getattr(uneven, name), getattr(plain, name))
    assert uneven.condition_number() > 10 * plain.condition_number()


def test_one_sequence_and_lower_precision():
    x, y, w_Q, w_K, w_V = draw(1)
    close(
        ScalarAttention(x[0], y[0], w_Q, w_K, 0.7).eigenvalues(),
        ScalarAttention(x, y, w_Q, w_K, w_V).eigenvalues(),
    )
    single = ScalarAttention(x.float(), y.float(), w_Q.float(), w_K.float(), 0.7)
    assert single.eigenvalues().dtype == torch.float32
    close(single.eigenvalues().double(), ScalarAttention(x, y, w_Q, w_K, w_V).eigenvalues(), 1e-5)


def sweep(model, biases, kind):
    """The size of the bulk and the largest outlier at each bias."""
    models = [model.with_sink(bias, kind) for bias in biases]
    return torch.stack([m.beta.abs() for m in models]), torch.stack(
        [m.outliers.abs().max() for m in models]
    )


def sink_data(seed, positive=True, first=1.5, s=0.4):
    """A first token larger than the others' mean, zero targets, and `w_Q·w_K / √d_K = s`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 16, generator=generator, dtype=torch.float64)
    x = x.abs() if positive else x
    x[:, 0] = first
    w_Q, w_K = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    w_Q, w_K = 0.5 * w_Q, 0.3 * w_K
    w_K += (math.sqrt(8) * s - w_Q @ w_K) / w_Q.square().sum() * w_Q
    return x, torch.zeros_like(x), w_Q, w_K, 1.0


@pytest.mark.parametrize("seed", range(5))
def test_a_bias_on_the_score_shrinks_the_bulk_and_stretches_the_outliers(seed):
    bulk, outlier = sweep(ScalarAttention(*sink_data(seed)), range(13), "score")
    assert (bulk.diff() < 0).all()
    assert (outlier.diff() > 0).all()
    # 2⟨x_1²⟩
    torch.testing.assert_close(outlier[-1], torch.tensor(2 * 1.5**2).double(), rtol=1e-3, atol=0)
    torch.testing.assert_close(
        bulk[10:] / bulk[9:-1], torch.full((3,), math.exp(-1)).double(), rtol=0.02, atol=0
    )


@pytest.mark.parametrize("seed", range(5))
def test_with_tokens_of_both_signs_the_bulk_shrinks_on_a_detour(seed):
    bulk, outlier = sweep(
        ScalarAttention(*sink_data(seed, positive=False, first=3.0)), range(21), "score"
    )
    assert not (bulk.diff() < 0).all()
    assert bulk[-1] < 1e-3 * bulk[0]
    assert outlier[-1] > outlier[0]


@pytest.mark.parametrize("seed", range(5))
def test_a_bias_on_the_score_shrinks_the_outliers_too_if_the_first_token_is_small(seed):
    bulk, outlier = sweep(ScalarAttention(*sink_data(seed, first=0.5)), range(13), "score")
    assert bulk[-1] < 1e-3 * bulk[0]
    assert outlier[-1] < outlier[0]
    assert (outlier / bulk)[-1] > 100 * (outlier / bulk)[0]


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_bias_on_the_input_stretches_the_outliers_and_the_bulk(seed, positive):
    bulk, outlier = sweep(
        ScalarAttention(*sink_data(seed, positive)), [4.0, 8.0, 16.0, 32.0], "input"
    )
    assert (outlier.diff() > 0).all()
    assert bulk[-1] > bulk[0]  # tokens close to zero are undecided at any bias


@pytest.mark.parametrize("seed", range(5))
def test_a_bias_on_the_input_shrinks_the_bulk_where_all_tokens_attend_to_it(seed):
    x, *rest = sink_data(seed, s=1.0)
    bulk, outlier = sweep(ScalarAttention(x + 0.5, *rest), [8.0, 16.0, 24.0, 32.0], "input")
    assert (bulk.diff() < 0).all()
    assert (outlier.diff() > 0).all()


def test_where_a_sink_is():
    x, *rest = draw()
    moved = x + torch.tensor([2.0, 0, 0, 0, 0])
    close(ScalarAttention(x, *rest).with_sink(2.0, "input").dense(), autograd(moved, *rest)[0])
    close(
        ScalarAttention(x, *rest).with_sink(2.0, "score").dense(), autograd(x, *rest, bias=2.0)[0]
    )


def test_a_sink_leaves_the_model_as_it_is():
    model = ScalarAttention(*draw())
    before = model.eigenvalues()
    assert not torch.equal(model.with_sink(1.0).eigenvalues(), before)
    assert not torch.equal(model.with_sink(1.0, "input").eigenvalues(), before)
    close(model.with_sink(1.0).with_sink(-1.0).eigenvalues(), before)
    close(model.with_sink(1.0, "input").with_sink(-1.0, "input").eigenvalues(), before)
    assert torch.equal(model.eigenvalues(), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 2, 2)}, "sequences, tokens"),
        ({"y": torch.zeros(3, 4)}, "Invalid y"),
        ({"w_K": torch.zeros(5)}, "d_K"),
        ({"w_Q": torch.zeros(6, dtype=torch.float32)}, "one floating dtype"),
    ],
)
def test_errors(change, message):
    arguments = dict(zip(("x", "y", "w_Q", "w_K", "w_V"), draw())) | change
    with pytest.raises(ValueError, match=message):
        ScalarAttention(**arguments)


def test_unknown_sink():
    with pytest.raises(ValueError, match="Invalid kind"):
        ScalarAttention(*draw()).with_sink(1.0, "value")
