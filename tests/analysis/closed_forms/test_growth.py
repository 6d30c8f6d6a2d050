"""Exponents against numpy's regression, and those of attention against autograd."""

import math
from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jacrev

from blockopt.analysis.closed_forms.attention_growth import (
    BlockPart,
    attention_exponents,
    attention_norms,
    linear_attention_exponents,
)
from blockopt.analysis.closed_forms.exponents import fit_exponent
from blockopt.analysis.closed_forms.growth import Growth, growth
from blockopt.analysis.closed_forms.output_loss import CrossEntropy, SquaredError
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from tests.helpers.matrices import normal as randn

SMALL = [0.01, 0.02, 0.04]
PREDICTED = attention_exponents()


def test_slope_and_error_of_one_series():
    scales = torch.logspace(-2, 1, 7, dtype=torch.float64)
    norms = 3 * scales**2.5 * randn(7).mul(0.1).exp()
    found = fit_exponent(scales, norms)
    (slope, intercept), covariance = np.polyfit(
        scales.log().numpy(), norms.log().numpy(), 1, cov=True
    )
    assert found == pytest.approx((slope, math.sqrt(covariance[0, 0]), intercept), rel=1e-10)


def test_repeats_are_averaged_before_the_logarithm():
    scales = [0.1, 0.5, 1.0, 2.0]
    norms = torch.tensor(scales).double() ** 2 * randn(5, 4).exp()
    found = fit_exponent(scales, norms)
    slope, intercept = np.polyfit(np.log(scales), np.log(norms.numpy().mean(0)), 1)
    assert (found.value, found.intercept) == pytest.approx((slope, intercept), rel=1e-10)
    assert slope != pytest.approx(
        np.polyfit(np.log(scales), np.log(norms.numpy()).mean(0), 1)[0], rel=1e-3
    )


def test_the_error_over_repeats_is_a_jackknife():
    scales, norms = np.array([0.1, 0.5, 1.0]), randn(4, 3).exp().numpy()
    slopes = [
        np.polyfit(np.log(scales), np.log(np.delete(norms, r, 0).mean(0)), 1)[0] for r in range(4)
    ]
    expected = math.sqrt(3 / 4 * np.square(np.array(slopes) - np.mean(slopes)).sum())
    assert fit_exponent(
        torch.from_numpy(scales), torch.from_numpy(norms)
    ).standard_error == pytest.approx(expected, rel=1e-10)


def test_the_error_over_repeats_is_that_of_other_draws():
    """Repeats that scale a whole series move no slope; others by the standard error."""
    scales = torch.tensor([0.1, 0.2, 0.4, 0.8], dtype=torch.float64)
    alike = scales**2 * randn(20, 1).mul(0.3).exp()
    assert fit_exponent(scales, alike).standard_error < 1e-12
    slopes, errors = [], []
    for seed in range(200):
        found = fit_exponent(scales, scales**2 * randn(20, 4, seed=seed).mul(0.3).exp())
        slopes.append(found.value)
        errors.append(found.standard_error)
    assert np.mean(errors) == pytest.approx(np.std(slopes), rel=0.15)
    assert abs(np.mean(slopes) - 2) < 4 * np.std(slopes) / math.sqrt(200)


def test_two_scales_leave_no_error():
    found = fit_exponent([1.0, 2.0], [1.0, 8.0])
    assert found.value == pytest.approx(3)
    assert math.isnan(found.standard_error)


@pytest.mark.parametrize(
    ("scales", "norms", "message"),
    [
        ([1.0, 2.0], [1.0], "shapes"),
        ([1.0, 1.0], [1.0, 2.0], "two different"),
        ([1.0, 2.0], [0.0, 2.0], r"norms: \[0.0\]"),
        ([0.0, 2.0], [1.0, 2.0], "scales"),
        ([1.0, 2.0], [1.0, math.inf], r"norms: \[inf\]"),
        ([1.0, 2.0], [1.0, math.nan], r"norms: \[nan\]"),
    ],
)
def test_numbers_without_a_fit(scales, norms, message):
    with pytest.raises(ValueError, match=message):
        fit_exponent(scales, norms)


def power_laws(sigma, seed):
    factor = 1 + 0.1 * seed
    return {"two": factor * sigma**2, "bent": sigma**2 + sigma**6, "zero": torch.zeros(())}


def test_growth_of_power_laws():
    found = growth(power_laws, [10.0, 0.01, 0.1, 1.0, 100.0], repeats=3)
    assert found.scales.tolist() == [0.01, 0.1, 1.0, 10.0, 100.0]
    assert found.norms["two"].shape == (3, 5)
    torch.testing.assert_close(found.mean()["two"], 1.1 * found.scales**2)
    expected = 0.1 / math.sqrt(3) * found.scales**2
    torch.testing.assert_close(found.standard_error()["two"], expected)
    assert found.exponents().keys() == {"two", "bent"}
    assert found.exponents()["two"].value == pytest.approx(2)
    assert found.exponents(high=1.0)["bent"].value == pytest.approx(2, abs=1e-4)
    assert found.exponents(low=10.0)["bent"].value == pytest.approx(6, abs=1e-4)
    slopes = found.local_slopes()["bent"]
    assert slopes.tolist() == pytest.approx([2, 2.3, 5.7, 6], abs=0.01)
    assert found.differences({"two": 3, "other": 1}) == pytest.approx({"two": -1})


def test_table():
    found = growth(power_laws, [0.01, 0.1, 1.0], repeats=2)
    lines = found.table({"two": 2}, high=1.0).splitlines()
    assert lines[0].split() == ["label", "σ=0.01", "σ=0.1", "exponent", "error", "predicted"]
    assert lines[1].split()[0::3] == ["two", "2.000"]
    assert lines[1].split()[-1] == "2"
    assert lines[2].split()[-1] == "-"
    assert lines[3].split() == ["zero", "0", "0", "-", "-", "-"]
    assert str(found) == found.table()


def test_one_repeat_has_no_error():
    found = growth(power_laws, [0.1, 1.0])
    assert found.standard_error()["two"].isnan().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: growth(power_laws, [1.0]), "two different"),
        (lambda: growth(power_laws, [-1.0, 1.0]), "positive"),
        (lambda: growth(power_laws, [0.1, 1.0], repeats=0), "repeats"),
        (lambda: growth(lambda sigma, seed: {str(sigma): 1.0}, [0.1, 1.0]), "always be the same"),
        (lambda: growth(power_laws, [0.1, 1.0]).exponents(high=0.5), "at least two"),
        (lambda: attention_exponents("relu"), "activation"),
        (lambda: linear_attention_exponents(0), "depth"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def attend(X, W_Q, W_K, W_V, activation="softmax"):
    scores = X @ W_Q @ W_K.mT @ X.mT / math.sqrt(W_Q.shape[1])
    return (scores.softmax(-1) if activation == "softmax" else scores) @ X @ W_V


def autograd_norms(parameters, function, loss):
    """Norms of all parts of all blocks: `H` and `Jᵀ Λ J` by reverse over reverse."""
    output = function(*parameters)
    inner = jacrev(grad(loss))(output).reshape(output.numel(), -1)
    norms = {}
    for i, p in enumerate(parameters):
        for j, q in enumerate(parameters[i:], start=i):
            full = jacrev(jacrev(lambda *both: loss(function(*both)), j), i)(*parameters)  # (q, p)
            left, right = (
                jacrev(function, k)(*parameters).reshape(output.numel(), -1) for k in (i, j)
            )
            outer = left.T @ inner @ right
            full = full.reshape(q.numel(), p.numel()).T
            for part, block in (("outer", outer), ("functional", full - outer), ("full", full)):
                norms[part, i, j] = block.norm().item()
    return norms


@pytest.mark.parametrize("activation", ["softmax", "linear"])
@pytest.mark.parametrize("sigma", [0.05, 1.0])
def test_norms_of_attention_against_autograd(sigma, activation):
    X, Y = sigma * randn(4, 3), randn(4, 3, seed=1)
    weights = [randn(3, 2, seed=2), randn(3, 2, seed=3), randn(3, 3, seed=4)]
    found = attention_norms(SelfAttentionHessian(X, *weights, Y, activation=activation), mixed=True)
    expected = autograd_norms(
        weights, lambda *w: attend(X, *w, activation), lambda f: F.mse_loss(f, Y)
    )
    roles = ("query", "key", "value")
    assert len(found) == len(expected) == 18
    for (part, i, j), norm in expected.items():
        scale = max(expected[other, i, j] for other in ("outer", "full"))
        assert found[BlockPart(part, roles[i], roles[j])] == pytest.approx(
            norm, rel=1e-9, abs=1e-13 * scale
        )


def test_norms_of_several_heads():
    X, Y = randn(4, 3), randn(4, 3, seed=1)
    weights = [randn(2, 3, 2, seed=2), randn(2, 3, 2, seed=3), randn(2, 3, 3, seed=4)]
    hessian = SelfAttentionHessian(X, *weights, Y)
    found = attention_norms(hessian, mixed=True)
    assert attention_norms(hessian).keys() == {
        label for label in found if label.role == label.column
    }
    for label, norm in found.items():
        blocks = [
            hessian.block(label.role, label.column, label.part, (head, head)) for head in range(2)
        ]
        assert norm == pytest.approx(
            math.hypot(*(block.norm().item() for block in blocks)), rel=1e-10
        )


def attention_measure(
    *,
    tokens=17,
    width=16,
    key_width=None,
    sequences=1,
    activation="softmax",
    causal=False,
    classes=None,
    target_scale=1.0,
    mixed=False,
):
    """What `growth` needs: tokens of `σ N(0, 1)`, weights of `N(0, 0.64 / width)` (Appendix F)."""

    spread = 0.8 / math.sqrt(width)

    def measure(sigma, seed):
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape, scale=spread):
            return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

        X = normal(sequences, tokens, width, scale=sigma)
        weights = [normal(width, n) for n in (key_width or width, key_width or width, width)]
        loss = SquaredError(normal(sequences, tokens, width, scale=target_scale))
        if classes is not None:
            targets = torch.randint(classes, (sequences, tokens), generator=generator)
            loss = CrossEntropy(normal(width, classes), targets)
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril() if causal else None
        hessian = SelfAttentionHessian(X, *weights, loss=loss, mask=mask, activation=activation)
        return attention_norms(hessian, mixed=mixed)

    return measure


@pytest.mark.parametrize(
    ("options", "residual"),
    [
        ({}, 0),
        ({"causal": True}, 0),
        ({"classes": 7, "causal": True, "sequences": 2}, 0),
        ({"target_scale": 0.0}, 1),
        ({"activation": "linear"}, 0),
        ({"activation": "linear", "target_scale": 0.0}, 3),
    ],
)
def test_measured_exponents_are_the_predicted_ones(options, residual):
    predicted = attention_exponents(options.get("activation", "softmax"), residual=residual)
    found = growth(attention_measure(tokens=6, width=5, key_width=4, mixed=True, **options), SMALL)
    assert found.exponents().keys() == predicted.keys()
    assert max(map(abs, found.differences(predicted).values())) < 0.03


def test_equation_5():
    pairs = list(combinations_with_replacement(("query", "key", "value"), 2))
    assert [PREDICTED[BlockPart("outer", *pair)] for pair in pairs] == [6, 6, 4, 6, 4, 2]
    assert [PREDICTED[BlockPart("functional", *pair)] for pair in pairs[:-1]] == [5, 3, 3, 5, 3]
    assert [PREDICTED[BlockPart("full", *pair)] for pair in pairs] == [5, 3, 3, 5, 3, 2]
    assert str(BlockPart("functional", "query", "key")) == "functional query key"
    assert str(BlockPart("outer", "value", layer=2)) == "outer value layer 2"


def test_the_power_laws_of_softmax_end_where_attention_saturates():
    found = growth(attention_measure(width=8), [0.01, 0.02, 20.0, 40.0])
    for part in ("outer", "full"):
        label = BlockPart(part, "query", "query")
        assert found.local_slopes()[label][-1] < PREDICTED[label] - 1


def test_causal_attention_averages_over_less():
    every, causal = (
        attention_measure(width=8, causal=causal)(0.01, 0)[BlockPart("outer", "value", "value")]
        for causal in (False, True)
    )
    assert causal > 2 * every


def test_repeats_of_attention():
    found = growth(attention_measure(tokens=9, width=8), [0.05, 0.1, 0.2, 0.4, 2.0], repeats=6)
    assert isinstance(found, Growth)
    for label, exponent in found.exponents(high=1.0).items():
        assert 0 < exponent.standard_error < 0.1, label
        assert abs(exponent.value - PREDICTED[label]) < 0.3, label


def deep_norms(depth, attention):
    """A measure of the diagonal blocks of linear attention or of a linear MLP, by layer."""
    width = 2
    matrices = [0.8 * randn(width, width, seed=n) for n in range(3 * depth if attention else depth)]
    tokens, targets = randn(3, width, seed=100), randn(3, width, seed=101)

    def function(X, *weights):
        for layer in range(depth):
            X = (
                attend(X, *weights[3 * layer : 3 * layer + 3], "linear")
                if attention
                else X @ weights[layer]
            )
        return X

    def measure(sigma, _):
        found = autograd_norms(
            matrices, lambda *w: function(sigma * tokens, *w), lambda f: F.mse_loss(f, targets)
        )
        blocks = {f"{part} {i}": norm for (part, i, j), norm in found.items() if i == j}
        floor = 1e-12 * max(blocks.values())  # what differences of equal numbers leave of zero
        return {label: norm if norm > floor else 0.0 for label, norm in blocks.items()}

    return measure


@pytest.mark.parametrize("depth", [1, 2])
def test_depth_of_linear_attention(depth):
    predicted = linear_attention_exponents(depth)
    assert predicted == {"outer": 2 * 3**depth, "functional": 3**depth}
    found = growth(deep_norms(depth, True), [0.3, 0.4, 0.5])
    exponents = found.exponents()
    last = 3 * (depth - 1)  # the first matrix of the last layer
    for number in range(3 * depth):
        assert exponents[f"outer {number}"].value == pytest.approx(predicted["outer"], abs=1e-9)
        if number >= last:
            assert exponents[f"full {number}"].value == pytest.approx(predicted["outer"], abs=1e-9)
        else:
            assert exponents[f"functional {number}"].value == pytest.approx(
                predicted["functional"], abs=0.05
            )
            assert exponents[f"full {number}"].value == pytest.approx(
                predicted["functional"], abs=0.05
            )


@pytest.mark.parametrize("depth", [1, 3])
def test_depth_of_a_linear_mlp(depth):
    found = growth(deep_norms(depth, False), [0.1, 1.0, 10.0])
    for number in range(depth):
        for part in ("outer", "full"):
            assert found.exponents()[f"{part} {number}"].value == pytest.approx(2, abs=1e-9)
