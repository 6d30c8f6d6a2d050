"""The split of the Hessian at the scores: Remark D.1 and Lemma D.2."""

import pytest
import torch

from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from tests.analysis.closed_forms.test_self_attention import SHAPES, make
from tests.helpers.attention_reference import assert_close, draw
from tests.helpers.attention_reference import hessian as autograd_second


def score_outer(hessian):
    """The outer part at the scores, of queries and keys together."""
    return torch.cat(
        [
            torch.cat([hessian.block(r, c, "score_outer") for c in ("query", "key")], 1)
            for r in ("query", "key")
        ]
    )


@pytest.mark.parametrize("shape", ["paper", "wide keys", "heads", "heads with output matrices"])
def test_parts_sum_up_and_have_their_structure(shape):
    X, weights, target = draw(**SHAPES[shape])
    hessian, _ = make(X, weights, target, True)
    for row in ("query", "key"):
        assert float(hessian.block(row, row, "score_functional").abs().max()) == 0
        for column in ("query", "key"):
            parts = hessian.block(row, column, "score_outer") + hessian.block(
                row, column, "score_functional"
            )
            assert_close(parts, hessian.block(row, column))


@pytest.mark.parametrize("shape", ["paper", "wide keys", "heads"])
def test_outer_is_what_is_left_when_the_scores_are_linear_in_the_weights(shape):
    """The Gauss-Newton split by autograd, with scores linearised at the weights."""
    X, weights, target = draw(**SHAPES[shape])
    hessian, plain = make(X, weights, target, False)
    q0, k0 = weights["query"], weights["key"]

    def loss_of(vector):
        q, k = vector.view(2, *q0.shape)
        linear = q @ k0.mT + q0 @ k.mT - q0 @ k0.mT
        scores = X.unsqueeze(1) @ linear @ X.unsqueeze(1).mT / q0.shape[-1] ** 0.5
        return plain((scores.softmax(-1) @ (X.unsqueeze(1) @ weights["value"])).sum(1))

    exact = autograd_second(loss_of)(torch.cat([q0.flatten(), k0.flatten()]))
    assert_close(score_outer(hessian), exact)


@pytest.mark.parametrize("shape", ["paper", "wide keys", "one head with an output matrix"])
def test_spectrum_of_the_functional_part(shape):
    X, weights, target = draw(**SHAPES[shape])
    hessian, _ = make(X, weights, target, False)
    mixed = hessian.block("query", "key", "score_functional")
    zero = torch.zeros_like(mixed @ mixed.mT)
    whole = torch.cat(
        [
            torch.cat([zero, mixed], 1),
            torch.cat([mixed.mT, torch.zeros_like(mixed.mT @ mixed)], 1),
        ]
    )
    assert_close(hessian.score_functional_spectrum(), torch.linalg.eigvalsh(whole))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("L", "d", "dk"), [(4, 3, 2), (12, 3, 2), (3, 4, 2), (2, 4, 3), (9, 3, 4), (5, 2, 2)]
)
def test_rank_bound_holds_and_is_attained(L, d, dk, causal):
    X, weights, target = draw(L=L, d=d, dk=dk)
    mask = torch.ones(L, L, dtype=torch.bool).tril() if causal else None
    hessian, _ = make(X, weights, target, False, mask=mask)
    part = score_outer(hessian)
    assert int(torch.linalg.matrix_rank(part, hermitian=True)) == hessian.score_outer_rank_bound()


@pytest.mark.parametrize("t", [0.4, 2.5])
def test_temperature(t):
    """At fixed weights and attention: 1/t² for the outer part, 1/t for the other."""
    X, weights, target = draw()
    q, k, v = weights.values()
    cold = SelfAttentionHessian(X, q, k, v, target)
    scale = cold.attention.scale
    scores = scale * (X @ q[0]) @ (X @ k[0]).mT
    hot = SelfAttentionHessian(X, q, k, v, target, scale=scale / t, mask=(1 - 1 / t) * scores)
    assert_close(hot.attention.heads[0].weights, cold.attention.heads[0].weights)
    for row, column in (("query", "query"), ("query", "key"), ("key", "key")):
        assert_close(
            hot.block(row, column, "score_outer") * t**2, cold.block(row, column, "score_outer")
        )
    mixed = hot.block("query", "key", "score_functional")
    assert float(mixed.abs().max()) > 0
    assert_close(mixed * t, cold.block("query", "key", "score_functional"))


@pytest.mark.parametrize("activation", ["softmax", "linear"])
@pytest.mark.parametrize("biased", [("query",), ("key",), ("query", "key")])
@pytest.mark.parametrize(("d", "dk"), [(3, 2), (5, 3), (2, 3), (3, 3)])
def test_rank_bound_with_biases(activation, biased, d, dk):
    """With a bias of queries, Lemma D.2 fails and the corrected bound is attained."""
    X, weights, target = draw(L=40, d=d, dk=dk)
    generator = torch.Generator().manual_seed(3)
    biases = {role: torch.randn(1, dk, generator=generator, dtype=torch.float64) for role in biased}
    hessian, _ = make(X, weights, target, False, biases=biases, activation=activation)
    part = score_outer(hessian)
    rank = int(torch.linalg.matrix_rank(part, hermitian=True))
    bound, lemma = hessian.score_outer_rank_bound(), 2 * dk * d - dk**2 if dk < d else d**2
    assert rank <= bound
    if activation == "softmax" or biased == ("query",):
        assert rank == bound
    assert rank > lemma if "query" in biased else rank == lemma


def test_a_single_matrix_has_no_such_part():
    X, weights, target = draw(single=True)
    hessian, _ = make(X, weights, target, False)
    with pytest.raises(ValueError, match="Queries and keys are one matrix"):
        hessian.score_functional_spectrum()
    with pytest.raises(ValueError, match="there are queries and keys only"):
        hessian.block("value", "value", "score_outer")
