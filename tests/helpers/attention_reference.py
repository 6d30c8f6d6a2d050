"""Self-attention in plain operations and its Hessian by autograd, to judge the closed forms."""

import math

import torch
import torch.nn.functional as F
from torch.func import jacrev, vjp


def hessian(f):
    """Reverse over reverse: torch.func.hessian scripts its forward mode, of which it warns."""
    return jacrev(jacrev(f))


def attend(X, weights, mask=None, scale=None, activation="softmax", biases=None):
    """X (B, L, d); weights by role, each (H, rows, columns); biases by role, each (H, columns)."""
    single = "query_key" in weights
    add = {
        role: (biases or {})
        .get(role, torch.zeros(()))
        .unsqueeze(-2 if role in (biases or {}) else 0)
        for role in weights
    }
    keys = X.unsqueeze(1) if single else X.unsqueeze(1) @ weights["key"] + add["key"]
    queries = (
        X.unsqueeze(1) @ weights["query_key"]
        if single
        else X.unsqueeze(1) @ weights["query"] + add["query"]
    )
    scale = scale or (1.0 if single else 1 / math.sqrt(weights["query"].shape[-1]))
    scores = scale * queries @ keys.mT
    if activation == "linear":
        A = scores if mask is None else torch.where(mask, scores, torch.zeros_like(scores))
    else:
        if mask is not None:
            scores = (
                scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
            )
        A = scores.softmax(-1)
    mixed = A @ (X.unsqueeze(1) @ weights["value"] + add["value"])
    return (mixed @ weights["output"] if "output" in weights else mixed).sum(1)


def draw(L=4, d=3, dk=2, dv=None, heads=1, batch=1, d_out=None, single=False, seed=0):
    """Tokens and weights in float64, far from uniform attention."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: 0.8 * torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    dv = d if dv is None else dv
    X = normal(batch, L, d)
    weights = (
        {"query_key": normal(heads, d, d)}
        if single
        else {"query": normal(heads, d, dk), "key": normal(heads, d, dk)}
    )
    weights["value"] = normal(heads, d, dv)
    if d_out is not None:
        weights["output"] = normal(heads, dv, d_out)
    return X, weights, normal(batch, L, dv if d_out is None else d_out)


def flat(weights):
    return torch.cat([w.flatten() for w in weights.values()])


def unflat(vector, weights):
    sizes = [w.numel() for w in weights.values()]
    return {
        role: part.view(w.shape) for (role, w), part in zip(weights.items(), vector.split(sizes))
    }


def mean_squared(output, Y):
    return F.mse_loss(output, Y)


def autograd_hessian(X, weights, loss, **options):
    """The whole Hessian of `loss(output)`, roles in the order of `weights`, row-major."""
    return hessian(lambda vector: loss(attend(X, unflat(vector, weights), **options)))(
        flat(weights)
    )


def autograd_jacobian(X, weights, **options):
    jacobian = jacrev(lambda vector: attend(X, unflat(vector, weights), **options))(flat(weights))
    return jacobian.flatten(0, -2)


def autograd_outer(X, weights, loss, **options):
    """`Jᵀ Λ J`."""
    J = autograd_jacobian(X, weights, **options)
    output = attend(X, weights, **options)
    curvature = hessian(lambda o: loss(o.view(output.shape)))(output.flatten())
    return J.mT @ curvature @ J


def autograd_functional(X, weights, loss, **options):
    """`Σ g · ∂²F`, with g fixed."""
    output = attend(X, weights, **options)
    _, pull = vjp(loss, output)
    g = pull(torch.ones((), dtype=output.dtype))[0]
    return hessian(lambda vector: (g * attend(X, unflat(vector, weights), **options)).sum())(
        flat(weights)
    )


def sizes_of(weights):
    """The slice of each role in the whole Hessian."""
    slices, start = {}, 0
    for role, w in weights.items():
        slices[role] = slice(start, start + w.numel())
        start += w.numel()
    return slices


def assert_close(found, exact, tolerance=1e-10):
    """Within `tolerance` of the largest entry."""
    assert found.shape == exact.shape
    largest = float(exact.abs().max())
    error = float((found - exact).abs().max())
    assert error <= tolerance * max(largest, 1e-3), f"off by {error:.3g}, largest {largest:.3g}"
