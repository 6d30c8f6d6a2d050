"""Grouped, rotated and normalized attention: closed forms equal autograd, dense and factored."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import vjp

from blockopt.analysis import (
    CrossEntropy,
    HeadNorm,
    RotaryPositions,
    SelfAttentionHessian,
)
from tests.helpers.attention_reference import assert_close, flat, hessian, sizes_of, unflat

CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril()
# Numbers added to the scores of each of three sequences; the second sees nothing ahead.
ADDED = torch.linspace(-2, 2, 48, dtype=torch.float64).sin().reshape(3, 4, 4)
ADDED[1].masked_fill_(~CAUSAL[:4, :4], -math.inf)


def turn(v, cos, sin, layout):
    """RoPE of v (B, H, L, dk) in plain operations; entries beyond the angles stay."""
    r = cos.shape[-1]
    v, rest = v[..., :r], v[..., r:]
    if layout == "half":
        quarter = torch.cat([-v[..., r // 2 :], v[..., : r // 2]], -1)
    else:
        quarter = torch.stack([-v[..., 1::2], v[..., 0::2]], -1).flatten(-2)
    return torch.cat([v * cos + quarter * sin, rest], -1)


class Case:
    """Tokens, weights and options, with the same attention in plain operations."""

    def __init__(self, *, heads=4, groups=2, dk=4, dv=3, d=5, L=5, B=2, rotary=None, norms=(),
                 biases=(), mask=CAUSAL, activation="softmax", d_out=6, ignored=()):  # fmt: skip
        generator = torch.Generator().manual_seed(heads + 7 * groups + L)
        normal = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.X, self.activation, self.mask = normal(B, L, d), activation, mask
        self.weights = {
            "query": normal(heads, d, dk),
            "key": normal(groups, d, dk),
            "value": normal(groups, d, dv),
            "output": normal(heads, dv, d_out),
        }
        self.biases = {role: 0.5 * normal(*self.weights[role].shape[::2]) for role in biases}
        self.gains = {role: 1 + 0.3 * normal(dk) for role in norms}
        self.layout, self.angles = rotary, None
        if rotary is not None:
            width = dk - 2 if rotary == "partial" else dk
            self.layout = "half" if rotary == "partial" else rotary
            angles = torch.arange(L).double().unsqueeze(1) * normal(width // 2).abs()
            both = torch.cat([angles, angles], 1)
            both = both if self.layout == "half" else angles.repeat_interleave(2, 1)
            self.angles = both.cos(), both.sin()
        self.head, self.classes = normal(d_out, 7), torch.randint(7, (B, L), generator=generator)
        self.classes.flatten()[list(ignored)] = -100

    def closed_form(self):
        return SelfAttentionHessian(
            *(self.X, self.weights["query"], self.weights["key"], self.weights["value"]),
            W_U=self.weights["output"],
            loss=CrossEntropy(self.head, self.classes),
            mask=self.mask,
            activation=self.activation,
            biases=self.biases,
            rotary=self.angles and RotaryPositions(*self.angles, layout=self.layout),
            norms={role: HeadNorm(gain, epsilon=1e-3) for role, gain in self.gains.items()},
        )

    def attend(self, weights):
        def vectors(role):
            v = self.X.unsqueeze(1) @ weights[role]
            if role in self.biases:
                v = v + self.biases[role].unsqueeze(1)
            if role in self.gains:
                v = v * (v.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * self.gains[role]
            return (
                v if self.angles is None or role == "value" else turn(v, *self.angles, self.layout)
            )

        heads = len(weights["query"])
        q, k, v = (vectors(role) for role in ("query", "key", "value"))
        k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        mask = self.mask if self.mask.ndim == 2 else self.mask.unsqueeze(1)
        if self.activation == "linear":
            A = scores * mask
        elif mask.dtype == torch.bool:
            A = scores.masked_fill(~mask, -math.inf).softmax(-1)
        else:
            A = (scores + mask).softmax(-1)
        return (A @ v @ weights["output"]).sum(1)

    def loss(self, output):
        return F.cross_entropy((output @ self.head).flatten(0, 1), self.classes.flatten())

    def exact(self):
        """The full Hessian and its functional part by autograd."""
        start = flat(self.weights)
        output = self.attend(self.weights)
        g = vjp(self.loss, output)[1](torch.ones((), dtype=torch.float64))[0]
        full = hessian(lambda v: self.loss(self.attend(unflat(v, self.weights))))(start)
        linear = hessian(lambda v: (g * self.attend(unflat(v, self.weights))).sum())(start)
        return full, linear


CASES = {
    "grouped": {},
    "one key for all": {"heads": 3, "groups": 1, "L": 4, "mask": CAUSAL[:4, :4]},
    "grouped, linear": {"activation": "linear", "heads": 2, "groups": 1},
    "rotary": {"heads": 2, "groups": 2, "rotary": "half"},
    "rotary, interleaved": {"heads": 2, "groups": 1, "rotary": "interleaved", "dk": 6, "d": 3},
    "rotary, partial": {"heads": 2, "groups": 2, "rotary": "partial"},
    "rotary, linear": {"heads": 2, "groups": 1, "rotary": "half", "activation": "linear"},
    "normalized": {"heads": 2, "groups": 2, "norms": ("query", "key")},
    "normalized queries": {"heads": 1, "groups": 1, "norms": ("query",)},
    "normalized keys, biased": {
        "heads": 2,
        "groups": 1,
        "norms": ("key",),
        "biases": ("query", "key", "value"),
    },
    "all at once": {
        "rotary": "half",
        "norms": ("query", "key"),
        "biases": ("query", "key", "value"),
        "mask": CAUSAL.mT | torch.eye(5, dtype=torch.bool),
    },
    "all at once, other sizes": {
        "heads": 6,
        "groups": 2,
        "dk": 6,
        "dv": 2,
        "d": 4,
        "B": 3,
        "L": 4,
        "d_out": 3,
        "rotary": "partial",
        "norms": ("query", "key"),
        "biases": ("query", "key", "value"),
        "mask": ADDED,
        "ignored": (0, 5, 6, 11),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_dense_and_factored_equal_autograd(name):
    case = Case(**CASES[name])
    closed, (full, functional) = case.closed_form(), case.exact()
    assert_close(closed.attention.output, case.attend(case.weights), 1e-13)
    assert_close(closed.dense(), full)
    assert_close(closed.dense("functional"), functional)
    assert_close(closed.dense("outer"), full - functional)
    slices, generator = sizes_of(case.weights), torch.Generator().manual_seed(0)
    exact = {"full": full, "functional": functional, "outer": full - functional}
    for role, number in ((r, n) for r in closed.roles for n in range(closed.counts[r])):
        size = closed.attention.size(role)
        start = slices[role].start + number * size
        v = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        for part, whole in exact.items():
            block = closed.factored(role, number, part)
            wanted = whole[start : start + size, start : start + size]
            assert_close(closed.block(role, role, part, heads=(number, number)), wanted)
            assert_close(block.trace(), wanted.trace())
            assert_close(block.diagonal(), wanted.diagonal())
            assert_close(block.squared_frobenius(), wanted.square().sum())
            assert_close(block @ v, wanted @ v)
            assert_close(block @ v[:, 0], wanted @ v[:, 0])


@pytest.mark.parametrize("name", ["grouped", "rotary, interleaved", "all at once"])
def test_jacobians_and_pairs(name):
    case = Case(**CASES[name])
    closed, (full, functional) = case.closed_form(), case.exact()
    slices = sizes_of(case.weights)
    jacobian = torch.func.jacrev(lambda v: case.attend(unflat(v, case.weights)))(flat(case.weights))
    found = torch.cat([closed.attention.jacobian(role) for role in closed.roles], 1)
    assert_close(found, jacobian.flatten(0, -2))
    for row, column in itertools.product(closed.roles, repeat=2):
        assert_close(closed.block(row, column), full[slices[row], slices[column]])
        by_map = closed.attention.functional(row, column, closed.gradient_of_output)
        assert_close(by_map, functional[slices[row], slices[column]])
    for row, column in itertools.product(("query", "key"), repeat=2):
        parts = [closed.block(row, column, part) for part in ("score_outer", "score_functional")]
        assert_close(sum(parts), full[slices[row], slices[column]])


@pytest.mark.parametrize("name", ["grouped", "all at once"])
def test_split_at_the_scores(name):
    """What is left when the scores are linear in the weights is the outer part at the scores."""
    case = Case(**CASES[name])
    closed = case.closed_form()
    slices = sizes_of(case.weights)
    full, _ = case.exact()
    heads = len(case.weights["query"])
    w = torch.stack(closed.score_gradients, 1)  # (B, H, L, L)

    def weighted_scores(vector):
        weights = unflat(vector, case.weights)
        q, k = (case.X.unsqueeze(1) @ weights[role] for role in ("query", "key"))
        q, k = (v + case.biases[r].unsqueeze(1) if r in case.biases else v
                for r, v in (("query", q), ("key", k)))  # fmt: skip
        q, k = (
            v * (v.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * case.gains[r]
            if r in case.gains
            else v
            for r, v in (("query", q), ("key", k))
        )
        if case.angles is not None:
            q, k = (turn(v, *case.angles, case.layout) for v in (q, k))
        k = k.repeat_interleave(heads // k.shape[1], 1)
        return (w * (q @ k.mT)).sum() / math.sqrt(q.shape[-1])

    exact = hessian(weighted_scores)(flat(case.weights))
    for row, column in itertools.product(("query", "key"), repeat=2):
        wanted = exact[slices[row], slices[column]]
        assert_close(closed.block(row, column, "score_functional"), wanted)
        rest = full[slices[row], slices[column]] - wanted
        assert_close(closed.block(row, column, "score_outer"), rest)


def test_key_blocks_in_many_slices(monkeypatch):
    from blockopt.analysis.closed_forms import factored_block

    closed = Case(**CASES["all at once"]).closed_form()
    exact = closed.block("key", "key", heads=(1, 1))
    for size in (1, 3000, 20000):
        monkeypatch.setattr(factored_block, "CHUNK_BYTES", size)
        block = closed.factored("key", 1)
        assert_close(block.trace(), exact.trace())
        assert_close(block.diagonal(), exact.diagonal())
        assert_close(block.squared_frobenius(), exact.square().sum())
        values = closed.factored("value", 0)
        dense = closed.block("value", "value", heads=(0, 0))
        assert_close(values.squared_frobenius(), dense.square().sum())


def test_usual_rotations_and_errors():
    rotary = RotaryPositions.of_length(5, 4, base=100.0)
    v = torch.arange(20.0, dtype=torch.float64).view(1, 5, 4)
    angles = torch.arange(5).double().unsqueeze(1) * torch.tensor([1.0, 0.1], dtype=torch.float64)
    as_complex = torch.complex(v[..., :2], v[..., 2:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    assert_close(rotary.rotate(v), torch.cat([as_complex.real, as_complex.imag], -1), 1e-14)
    assert_close(rotary.matrices(4) @ v.unsqueeze(-1), rotary.rotate(v).unsqueeze(-1), 1e-14)
    interleaved = RotaryPositions.of_length(5, 4, base=100.0, layout="interleaved")
    order = [0, 2, 1, 3]
    assert_close(interleaved.rotate(v[..., order])[..., order], rotary.rotate(v), 1e-14)
    with pytest.raises(ValueError, match=r"Invalid width=3\. Must be an even number"):
        RotaryPositions.of_length(5, 3)
    half = torch.tensor([[1.0, 2.0, 1.0, 2.0]])
    stored = RotaryPositions(half, half, layout="interleaved")  # planes as such, angles in halves
    assert stored.cos.tolist() == [[[1.0, 1.0, 2.0, 2.0]]]
    assert stored.given["cos"].tolist() == [half.tolist()]
    with pytest.raises(ValueError, match=r"different angles\. Is the layout 'interleaved'\?"):
        RotaryPositions(stored.cos, stored.sin)
    four = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    with pytest.raises(ValueError, match=r"layout='interleaved': .* have different angles\.$"):
        RotaryPositions(four, four, layout="interleaved")
    with pytest.raises(ValueError, match=r"Both must be \(L, r\) or \(B, L, r\)"):
        RotaryPositions(half, half[:, :2])
    X, W = torch.randn(5, 4).double(), torch.randn(4, 4).double()
    for options, message in (
        ({"rotary": RotaryPositions.of_length(4, 4)}, "Must be one per position"),
        ({"rotary": RotaryPositions.of_length(5, 6)}, "turns 6 entries of heads that have 4"),
        ({"norms": {"value": HeadNorm()}}, r"Invalid norms \['value'\]"),
        ({"norms": {"query": HeadNorm(torch.ones(3).double())}}, "Invalid gain of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            SelfAttentionHessian(X, W, W, W, X, **options)
    with pytest.raises(ValueError, match="leaves no queries and keys to rotate"):
        SelfAttentionHessian(
            *(X, W, None, W, X), parametrization="single", norms={"query": HeadNorm()}
        )
    grouped = Case().closed_form()
    with pytest.raises(ValueError, match="for heads with keys of their own"):
        grouped.score_functional_spectrum()
    with pytest.raises(ValueError, match=r"Invalid head=2\. Must be an integer from 0 to 1"):
        grouped.factored("key", 2)
    four, three = (torch.randn(n, 4, 4, dtype=torch.float64) for n in (4, 3))
    with pytest.raises(ValueError, match="must be a multiple"):
        SelfAttentionHessian(X, four, three, three, X)
