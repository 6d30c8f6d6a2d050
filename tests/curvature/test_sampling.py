"""The sampled estimators have the exact traces as their mean, and the noise that they promise."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from blockopt import find_blocks
from blockopt.blocks import block_sum
from blockopt.curvature import analytic, gauss_newton, hutchinson
from blockopt.curvature.hutchinson import LARGEST_FACTOR, probe_factors
from tests.helpers.dense_hessians import assert_means, gauss_newton_means, hessian_means
from tests.helpers.models import FAMILIES, VOCAB

LENGTH, GROUPS = 6, 40


@functools.cache
def network(batch=4, spread=0.1):
    """A GPT of two layers, `spread` away from its initialisation, and its loss on a batch."""
    model = FAMILIES["nanogpt"]().double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(spread * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    tokens, targets = (torch.randint(VOCAB, (batch, LENGTH), generator=generator) for _ in range(2))
    return model, lambda: model(tokens, targets)


@functools.cache
def exact(kind):
    return {"hessian": hessian_means, "gauss_newton": gauss_newton_means}[kind](*network())


@functools.cache
def draws(estimator, num_probes, **options):
    """Return {parameter: (GROUPS, blocks)}, each value an average over probes."""
    model, loss = network(**options)
    generator = torch.Generator().manual_seed(0)
    found = [
        estimator(model, loss, num_probes=num_probes, generator=generator) for _ in range(GROUPS)
    ]
    return {name: torch.stack([f[name] for f in found]) for name in found[0]}


def z_scores(samples, means):
    scores = {
        n: (s.mean(0) - means[n]) / (s.std(0) / len(s) ** 0.5).clamp(min=1e-16)
        for n, s in samples.items()
    }
    return torch.cat(list(scores.values()))


@pytest.mark.parametrize(
    ("estimator", "kind", "num_probes"),
    [(analytic, "gauss_newton", 8), (gauss_newton, "gauss_newton", 8), (hutchinson, "hessian", 8)],
)
def test_unbiased(estimator, kind, num_probes):
    scores = z_scores(draws(estimator, num_probes), exact(kind))
    assert len(scores) > 200
    assert scores.abs().max() < 5
    assert 0.6 < scores.square().mean() < 1.6


def test_more_probes_are_less_noise():
    for estimator in (analytic, gauss_newton, hutchinson):
        one, eight = draws(estimator, 1), draws(estimator, 8)
        ratios = torch.cat([(one[n].var(0) / eight[n].var(0)).log() for n in one])
        assert 5 < ratios.mean().exp() < 12, estimator


def test_hutchinson_sees_what_gauss_newton_leaves_out():
    whole, outer = exact("hessian"), exact("gauss_newton")
    bias = z_scores(draws(hutchinson, 8), outer)
    assert bias.abs().max() > 6  # so the test above tells the two apart
    assert any(bool((whole[n] < 0).any()) for n in whole)


@pytest.mark.parametrize("estimator", [analytic, gauss_newton, hutchinson])
def test_all_agree_where_the_model_is_linear(estimator):
    model = nn.Linear(3, 4, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (20,), generator=generator)

    def loss():
        return F.cross_entropy(model(x), y)

    whole = hessian_means(model, loss)
    assert_means(analytic(model, loss, num_probes=None), whole)
    found = [estimator(model, loss, num_probes=50, generator=generator) for _ in range(20)]
    for name, mean in whole.items():
        sample = torch.stack([f[name] for f in found])
        assert ((sample.mean(0) - mean).abs() < 4 * sample.std(0) / 20**0.5 + 1e-12).all()


def noise_ratio(estimator, other, **options):
    """Return {role: the variance of an estimator over another's, averaged over its blocks}."""
    ours, theirs = (draws(e, 1, **options) for e in (estimator, other))
    logs = {}
    for name, blocks in find_blocks(network()[0]).items():
        ratios = ours[name].var(0) / theirs[name].var(0)
        for role, ratio in zip(blocks.block_roles, ratios, strict=True):
            logs.setdefault(role, []).append(ratio.log())
    del logs["bias"]
    return {role: float(torch.stack(values).mean().exp()) for role, values in logs.items()}


def test_squares_of_sequences_are_less_noise_than_the_square_of_their_sum():
    """With as many backward passes. All sequences look up the same positions: no gain there."""
    ratios = noise_ratio(analytic, gauss_newton, batch=16)
    assert ratios.pop("position") == pytest.approx(1.0)
    assert max(ratios.values()) < 0.5, ratios
    low = [ratios[role] for role in ("value", "output", "mlp_in", "mlp_out", "norm")]
    assert max(low) < 0.15, ratios


def plain_hutchinson(model, loss, num_probes, generator):
    """The estimator of textbooks, with signs alone."""
    parameters = list(model.parameters())
    signs = [torch.randint(0, 2, p.shape, generator=generator).to(p) * 2 - 1 for p in parameters]
    with sdpa_kernel(SDPBackend.MATH):
        gradients = torch.autograd.grad(loss(), parameters, create_graph=True)
        products = torch.autograd.grad(gradients, parameters, signs)
    return {
        name: block_sum(s * h, b.split) / block_sum(torch.ones_like(s), b.split)
        for (name, b), s, h in zip(find_blocks(model).items(), signs, products)
    }


def test_scaled_probes_have_less_noise_in_small_blocks():
    ratios = noise_ratio(hutchinson, plain_hutchinson)
    assert max(ratios["query"], ratios["key"]) < 0.25, ratios
    assert max(ratios.values()) < 12, ratios  # the price, paid by the embeddings


def test_probe_factors():
    model, _ = network()
    blocks, parameters = find_blocks(model), dict(model.named_parameters())
    sizes = {"wte.weight": 1e-9, "h.0.attn.c_attn.weight": 100.0}
    gradients = {n: sizes.get(n, 1.0) * torch.ones_like(p) for n, p in parameters.items()}
    gradients["h.0.attn.c_attn.weight"][:16] = 1.0  # the queries
    gradients["h.1.mlp.c_fc.weight"][0] = 0.0  # one row of many
    factors = probe_factors(gradients, blocks)
    c_attn, unit = factors["h.0.attn.c_attn.weight"], float(factors["wpe.weight"][0])
    assert c_attn[:4].tolist() == [unit] * 4
    assert c_attn[4:].tolist() == [unit / 128] * 8  # the power of two that is nearest to 100
    assert factors["h.1.mlp.c_fc.weight"].unique().tolist() == [unit]
    assert LARGEST_FACTOR / 1.5 < float(factors["wte.weight"].unique()) < LARGEST_FACTOR * 1.5
    nowhere = probe_factors({n: torch.zeros_like(g) for n, g in gradients.items()}, blocks)
    assert all(torch.equal(f, torch.ones_like(f)) for f in nowhere.values())


@pytest.mark.parametrize("estimator", [analytic, gauss_newton, hutchinson])
def test_reproducible(estimator):
    model, loss = network()
    first, again = estimator(model, loss), estimator(model, loss)
    torch.manual_seed(1234)
    after = estimator(model, loss)
    other = estimator(model, loss, generator=torch.Generator().manual_seed(1))
    for name in first:
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], after[name])
    assert any(not torch.equal(first[n], other[n]) for n in first)


def test_low_precision_is_unbiased_up_to_rounding():
    """In bfloat16 the probes are exactly as large as in float64."""
    model = nn.Linear(64, 1, bias=False)
    x = torch.eye(64) * torch.linspace(1, 2, 64)
    whole = hutchinson(model, lambda: F.mse_loss(model(x), torch.zeros(64, 1), reduction="sum"))
    model.to(torch.bfloat16)
    x = x.bfloat16()
    rounded = hutchinson(model, lambda: F.mse_loss(model(x), x[:, :1] * 0, reduction="sum"))
    torch.testing.assert_close(rounded["weight"], whole["weight"], rtol=2e-3, atol=0.0)
