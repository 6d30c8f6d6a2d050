"""The closed forms of one attention layer against sums over positions, written out in loops."""

import pytest
import torch
import torch.nn.functional as F

from blockopt.curvature import analytic
from blockopt.curvature.analytic.attention_forms import (
    AttentionTensors,
    functional_key,
    functional_query,
    outer_key,
    outer_value,
    score_derivatives,
)
from tests.helpers.dense_hessians import build, tokens_of

SCALE = 0.7


def random_attention(heads, groups, queries=3, keys=4, width=5, batch=2):
    """A call of random numbers with a mask, its input, and a random factor δ."""
    generator = torch.Generator().manual_seed(heads + 7 * groups)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, x = normal(batch, heads, queries, 3), normal(batch, keys, width)
    delta = normal(batch, heads, queries, 2)
    key, value = (
        normal(batch, groups, keys, d).repeat_interleave(heads // groups, dim=1) for d in (3, 2)
    )
    masked = torch.tensor([False, False, False, True])
    weights = (SCALE * query @ key.mT).masked_fill(masked, -torch.inf).softmax(-1)
    return AttentionTensors(weights, query, key, value, SCALE, groups), x, delta


def moments(weights, v, y):
    """Return `Cov(v, y)` under the weights, (dv, dy), term by term."""
    mean_v, mean_y = sum(a * u for a, u in zip(weights, v)), sum(a * u for a, u in zip(weights, y))
    return sum(a * torch.outer(u - mean_v, w - mean_y) for a, u, w in zip(weights, v, y))


def third_moments(weights, v, y, g):
    """`Σ_j A_j s_j (y_j - ȳ)(y_j - ȳ)ᵀ`, s = g·v minus its mean: S_i for keys, T_i for inputs."""
    s = [g @ u for u in v]
    mean_s, mean_y = sum(a * u for a, u in zip(weights, s)), sum(a * u for a, u in zip(weights, y))
    return sum(
        a * (u - mean_s) * torch.outer(w - mean_y, w - mean_y) for a, u, w in zip(weights, s, y)
    )


def positions(attention):
    batch, heads, queries, _ = attention.query.shape
    return [(b, h, i) for b in range(batch) for h in range(heads) for i in range(queries)]


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("width", [1, 5])  # the two ways to order the products
def test_functional_parts(heads, groups, width):
    attention, x, g = random_attention(heads, groups, width=width)
    queries = torch.zeros_like(attention.query[..., 0])
    keys = torch.zeros(groups, dtype=torch.float64)
    for b, h, i in positions(attention):
        a, q = attention.weights[b, h, i], attention.query[b, h, i]
        v, k = attention.value[b, h], attention.key[b, h]
        of_keys, of_inputs = (third_moments(a, v, y, g[b, h, i]).trace() for y in (k, x[b]))
        queries[b, h, i] = SCALE**2 * of_keys
        keys[h * groups // heads] += SCALE**2 * (q @ q) * of_inputs
    scores = score_derivatives(attention, g)
    torch.testing.assert_close(functional_query(attention, scores), queries, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(functional_key(attention, scores, x), keys, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (4, 2), (3, 1)])
def test_outer_parts(heads, groups):
    """Heads share a key or value: the gradient of a factor is the sum of theirs, then squared."""
    attention, x, delta = random_attention(heads, groups)
    batch, _, queries, _ = attention.query.shape
    keys, values = torch.zeros(2, groups, dtype=torch.float64)
    for b in range(batch):
        for i in range(queries):
            for group in range(groups):
                key_gradient = torch.zeros(3, 5, dtype=torch.float64)
                value_gradient = torch.zeros(2, 5, dtype=torch.float64)
                for h in range(group * heads // groups, (group + 1) * heads // groups):
                    a, d = attention.weights[b, h, i], delta[b, h, i]
                    covariance = moments(a, attention.value[b, h], x[b])
                    key_gradient += SCALE * torch.outer(attention.query[b, h, i], covariance.T @ d)
                    value_gradient += torch.outer(d, a @ x[b])
                keys[group] += key_gradient.square().sum()
                values[group] += value_gradient.square().sum()
    torch.testing.assert_close(outer_key(attention, delta, x), keys, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(outer_value(attention, delta, x), values, rtol=1e-12, atol=0.0)


def test_score_derivatives():
    attention, _, g = random_attention(2, 1)
    scores = attention.weights.log().requires_grad_()  # their softmax is the weights again
    (expected,) = torch.autograd.grad((g * (scores.softmax(-1) @ attention.value)).sum(), scores)
    torch.testing.assert_close(score_derivatives(attention, g), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("part", ["outer", "full"])
@pytest.mark.parametrize("loss_function", ["cross-entropy", "squared error"])
def test_layer_from_its_moments(part, loss_function):
    """`H(Q,Q) = Σ x xᵀ ⊗ E_i / d`, `H(K,K) = Σ E^K_i ⊗ q qᵀ / d`, `H(V,V) = Σ m mᵀ ⊗ Λ_i`."""
    model = build(causal=True)
    (tokens, targets), layer = tokens_of(2, 4), model.layers[0]

    def predict():
        logits = model(tokens)
        if loss_function == "cross-entropy":
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return F.mse_loss(logits, F.one_hot(targets, 5).double())

    found = analytic(model, predict, part=part, num_probes=None)
    with torch.no_grad():
        logits, x = model(tokens), model.embedding(tokens)
        q, k, v = (
            p(x).unflatten(-1, (2, 4)).transpose(1, 2)
            for p in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        later = ~torch.ones(4, 4, dtype=torch.bool).tril()
        weights = (q @ k.mT / 2).masked_fill(later, -torch.inf).softmax(-1)
        expected = {role: torch.zeros(2, dtype=torch.float64) for role in "qkv"}
        for b in range(2):
            for i in range(4):
                p = logits[b, i].softmax(-1)
                onehot = F.one_hot(targets[b, i], 5).double()
                if loss_function == "cross-entropy":
                    curvature, residual = (p.diag() - torch.outer(p, p)) / 8, (p - onehot) / 8
                else:
                    curvature = 2 * torch.eye(5, dtype=torch.float64) / 40
                    residual = 2 * (logits[b, i] - onehot) / 40
                for h in range(2):
                    # From the output of head h to logits.
                    up = model.head.weight @ layer.o_proj.weight[:, 4 * h : 4 * h + 4]
                    inner, g = up.T @ curvature @ up, up.T @ residual
                    a, values, keys = weights[b, h, i], v[b, h], k[b, h]
                    c, d = moments(a, values, keys), moments(a, values, x[b])
                    e_query, e_key = c.T @ inner @ c, d.T @ inner @ d
                    if part == "full":
                        e_query = e_query + third_moments(a, values, keys, g)
                        e_key = e_key + third_moments(a, values, x[b], g)
                    mean = a @ x[b]
                    expected["q"][h] += x[b, i] @ x[b, i] * e_query.trace() / 4
                    expected["k"][h] += q[b, h, i] @ q[b, h, i] * e_key.trace() / 4
                    expected["v"][h] += mean @ mean * inner.trace()
    for role, trace in expected.items():
        mean = found[f"layers.0.{role}_proj.weight"]
        torch.testing.assert_close(mean, trace / (4 * 6), rtol=1e-10, atol=0.0)
