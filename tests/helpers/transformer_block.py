"""Transformer blocks of all arrangements in elementary operations, to judge closed forms."""

import torch
import torch.nn.functional as F

from tests.helpers.matrices import normal as draw

L, D, M = 3, 4, 5
ACTS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def close(a, b, tolerance=1e-10):
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


def normalize(x, kind, gain, bias, epsilon):
    if kind is None:
        return x
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    y = centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
    y = y if gain is None else gain * y
    return y if bias is None else y + bias


def bias(w, role, head):
    given = w.get(f"{role}_bias", torch.zeros(()))
    return given if given.ndim < 2 else given[head]


def turn(v, rotary):
    """Rotate v (..., L, dk) by the angles of `rotary`, whose planes are f and f + dk/2."""
    half = v.shape[-1] // 2
    quarter = torch.cat([-v[..., half:], v[..., :half]], -1)
    return v * rotary.cos[0] + quarter * rotary.sin[0]


def attend(x, w, mask, rotary=None, norms=None):
    """Written head by head, with the usual softmax."""
    total = 0
    heads = {
        role: w[role] if w[role].ndim == 3 else w[role][None]
        for role in ("query", "key", "value", "output")
        if role in w
    }
    for h in range(len(heads["query"])):
        shared = h * len(heads["key"]) // len(heads["query"])
        q = x @ heads["query"][h] + bias(w, "query", h)
        k, v = (x @ heads[role][shared] + bias(w, role, shared) for role in ("key", "value"))
        for role, norm in (norms or {}).items():
            y = normalize(q if role == "query" else k, norm.kind, norm.gain, None, norm.epsilon)
            q, k = (y, k) if role == "query" else (q, y)
        if rotary is not None:
            q, k = turn(q, rotary), turn(k, rotary)
        scores = q @ k.transpose(-1, -2) / k.shape[-1] ** 0.5
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        value = scores.softmax(-1) @ v
        total = total + (value @ heads["output"][h] if "output" in heads else value)
    return total + w.get("output_bias", 0)


def forward(X, w, arrangement, norm, final_norm=True, activation="gelu", epsilon=1e-5, **attention):
    attention = {"mask": None} | attention

    def norm_of(x, name):
        return normalize(x, norm, w.get(f"{name}_gain"), w.get(f"{name}_bias"), epsilon)

    pre = arrangement == "pre"
    R = X + attend(norm_of(X, "first") if pre else X, w, **attention)
    Y = norm_of(R, "middle")
    u = Y @ w["mlp_in"] + w.get("mlp_in_bias", 0)
    hidden = ACTS[activation](Y @ w["mlp_gate"]) * u if "mlp_gate" in w else ACTS[activation](u)
    S = (R if pre else Y) + hidden @ w["mlp_out"] + w.get("mlp_out_bias", 0)
    return norm_of(S, "final") if final_norm else S


def make_weights(heads=1, gated=False, extras=(), dk=2, groups=None):
    groups = groups or heads
    shape = {"query": (D, dk), "key": (D, dk), "value": (D, D)}
    if heads > 1:
        shape = {
            "query": (heads, D, dk),
            "key": (groups, D, dk),
            "value": (groups, D, dk),
            "output": (heads, dk, D),
        }
    shape |= {"mlp_in": (D, M), "mlp_out": (M, D)} | ({"mlp_gate": (D, M)} if gated else {})
    sizes = {"mlp_in_bias": (M,)}
    sizes |= {
        f"{role}_bias": (shape[role][0], dk) if heads > 1 else shape[role][-1:]
        for role in ("query", "key", "value")
    }
    shape |= {role: sizes.get(role, (D,)) for role in extras}
    return {
        role: draw(*size, seed=number) for number, (role, size) in enumerate(shape.items(), start=1)
    }
