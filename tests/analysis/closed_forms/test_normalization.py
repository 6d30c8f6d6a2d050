"""LayerNorm and RMSNorm against autograd, and the corrected theorems of arXiv 2510.16927."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from blockopt.analysis.closed_forms.normalization import Normalization
from tests.helpers.paper_matrices import commutation_matrix as commutation
from tests.helpers.paper_matrices import eye, kron
from tests.helpers.transformer_block import close as nearly_equal
from tests.helpers.transformer_block import draw

close = partial(nearly_equal, tolerance=1e-11)
CASES = [
    (kind, epsilon, affine)
    for kind in ("layer", "rms")
    for epsilon in (0.0, 0.3)
    for affine in (False, True)
]


def reference(x, kind, gain, bias, epsilon):
    """By elementary operations: `jacrev` of `jacrev` of `layer_norm` is wrong in torch 2.13."""
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    return gain * centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt() + bias


def make(kind, epsilon, affine, d=5, scale=1.0, rows=(2, 3)):
    x = scale * draw(*rows, d)
    gain, bias = (draw(d, seed=1), draw(d, seed=2)) if affine else (None, None)
    norm = Normalization(x, kind=kind, gain=gain, bias=bias, epsilon=epsilon)
    return (
        norm,
        x,
        (torch.ones(d).double() if gain is None else gain),
        (torch.zeros(d).double() if bias is None else bias),
    )


@pytest.mark.parametrize(("kind", "epsilon", "affine"), CASES)
def test_derivatives_equal_autograd(kind, epsilon, affine):
    norm, x, gain, bias = make(kind, epsilon, affine)
    if kind == "layer":
        close(norm.output, torch.nn.functional.layer_norm(x, x.shape[-1:], gain, bias, epsilon))
    else:
        close(norm.output, torch.nn.functional.rms_norm(x, x.shape[-1:], gain, epsilon) + bias)
    flat, g, v = x.reshape(-1, 5), draw(6, 5, seed=3), draw(6, 5, seed=4)
    J = torch.stack(
        [jacrev(lambda r: reference(r, kind, gain, bias, epsilon))(row) for row in flat]
    )
    H = torch.stack(
        [jacrev(jacrev(lambda r: reference(r, kind, gain, bias, epsilon)))(row) for row in flat]
    )
    close(norm.jacobian().reshape(6, 5, 5), J)
    close(norm.hessian().reshape(6, 5, 5, 5), H)
    g_, v_ = g.reshape(2, 3, 5), v.reshape(2, 3, 5)
    close(norm.jacobian_product(v_).reshape(6, 5), torch.einsum("nab,nb->na", J, v))
    close(norm.transposed_product(g_).reshape(6, 5), torch.einsum("nab,na->nb", J, g))
    close(norm.contracted_hessian(g_).reshape(6, 5, 5), torch.einsum("nabc,na->nbc", H, g))
    close(norm.hessian_product(g_, v_).reshape(6, 5), torch.einsum("nabc,na,nc->nb", H, g, v))


@pytest.mark.parametrize(("kind", "epsilon", "affine"), CASES)
def test_derivatives_by_gain_and_bias(kind, epsilon, affine):
    norm, x, gain, bias = make(kind, epsilon, affine, rows=(3,))
    g = draw(3, 5, seed=3)
    by_gain, by_bias = jacrev(lambda a, b: reference(x, kind, a, b, epsilon), argnums=(0, 1))(
        gain, bias
    )
    close(norm.parameter_jacobian("gain"), by_gain)
    close(norm.parameter_jacobian("bias"), by_bias)
    mixed = jacrev(
        jacrev(lambda a, r: (g * reference(r, kind, a, bias, epsilon)).sum()), argnums=1
    )(gain, x)  # (d, 3, d)
    close(norm.gain_input_hessian(g), mixed.movedim(0, 1))


@pytest.mark.parametrize(("kind", "epsilon", "affine"), CASES)
@pytest.mark.parametrize("d", [2, 3, 4, 7])
@pytest.mark.parametrize("scale", [0.2, 1.0])
def test_norms_are_exact(kind, epsilon, affine, d, scale):
    norm, *_ = make(kind, epsilon, affine, d=d, scale=scale, rows=(3,))
    close(norm.jacobian_norm(), torch.linalg.matrix_norm(norm.jacobian(), ord=2))
    close(
        norm.hessian_norm(),
        torch.linalg.matrix_norm(norm.hessian().reshape(3, d * d, d), ord=2),
        tolerance=1e-9,
    )
    close(norm.trilinear_norm(), norm.gain.abs().max() * best_cube(norm), tolerance=1e-6)


def best_cube(norm: Normalization) -> Tensor:
    """The largest |Σ H_abc u_a u_b u_c| of each row, on a grid of the plane of y."""
    plain = norm.hessian() / norm.gain[:, None, None]
    y = norm.normalized / norm.normalized.norm(dim=-1, keepdim=True)
    other = norm.project(draw(*y.shape, seed=9))
    other = other - y * (other * y).sum(-1, keepdim=True)
    size = other.norm(dim=-1, keepdim=True)
    other = torch.where(size > 1e-9, other / size, 0.0)
    angle = torch.linspace(0, math.pi, 20001, dtype=torch.float64)[:, None, None]
    u = angle.cos() * y + angle.sin() * other
    return torch.einsum("nabc,mna,mnb,mnc->mn", plain, u, u, u).abs().amax(0)


def test_trilinear_norm_bounds_random_directions():
    norm, *_ = make("layer", 0.0, False, d=4, rows=(1,))
    u, v, w = (torch.nn.functional.normalize(draw(20000, 4, seed=s), dim=-1) for s in (5, 6, 7))
    values = torch.einsum("abc,ma,mb,mc->m", norm.hessian()[0], u, v, w).abs()
    assert 0.7 * norm.trilinear_norm() < values.max() <= norm.trilinear_norm()


def test_norm_without_epsilon_as_stated():
    norm, *_ = make("layer", 0.0, False, d=7, rows=(3,))
    close(norm.hessian_norm(), math.sqrt(5 / 7) / norm.sigma.squeeze(-1).square())
    # The printed lemma has the norm of the centred row in place of its standard deviation, and is
    # violated.
    assert (norm.jacobian_norm() > 1 / (math.sqrt(7) * norm.sigma.squeeze(-1))).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "batch"}, "kind='batch'"),
        ({"gain": torch.ones(4)}, "Invalid gain"),
        ({"epsilon": -1.0}, "epsilon=-1"),
        ({"epsilon": math.nan}, "epsilon=nan"),
        ({"epsilon": 0.0}, "no variance"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        Normalization(torch.ones(2, 3), **options)


def test_bad_numbers():
    with pytest.raises(ValueError, match="Invalid x: it has entries that are not finite"):
        Normalization(torch.tensor([1.0, math.nan, 2.0]))
    with pytest.raises(ValueError, match=r"Invalid x of torch\.int64"):
        Normalization(torch.ones(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"too large for torch\.float16\. Use x\.float\(\)"):
        Normalization(torch.tensor([1e3, 2e3, -3e3], dtype=torch.float16))
    with pytest.raises(ValueError, match=r"Invalid gain of torch\.float64"):
        Normalization(torch.tensor([1.0, 2.0]), gain=torch.ones(2).double())
    with pytest.raises(ValueError, match="Invalid role='gian'"):
        Normalization(torch.tensor([1.0, 2.0])).parameter_jacobian("gian")


# Theorems 2 and 3 of arXiv 2510.16927, in their own matrices (row-major vec, K_{q,n} vec X = vec Xᵀ
# for X of n × q).


def selection(n: int) -> Tensor:
    """[e_1 ⊗ e_1 ... e_n ⊗ e_n]: from a vector to the vec of its diagonal matrix."""
    return torch.stack([kron(e, e) for e in eye(n)], dim=1)


class KroneckerForms:
    """∂LN and ∂²LN of L rows; two factors are printed as 1 in place of 1/√d."""

    def __init__(self, X: Tensor, second_term: float | None = None, diagonal: float | None = None):
        L, d = X.shape
        ones, root = torch.ones(1, d).double(), 1 / math.sqrt(d)
        second_term = root if second_term is None else second_term
        diagonal = root if diagonal is None else diagonal
        M = X - X.mean(1, keepdim=True)
        G = eye(L * d) - kron(eye(L), torch.ones(d, d).double()) / d
        sizes = M.square().sum(1).sqrt()
        P, N, E = (root * sizes).reciprocal().diag(), sizes.reciprocal().diag(), selection(L)
        R = kron(eye(L), ones) @ M.flatten().diag() @ G
        U = -kron(P, P.T)
        dP = root * U @ E @ N @ R
        vec_P, vec_I = P.reshape(-1, 1), eye(d).reshape(-1, 1)
        # ∂(D⁻¹) = -(D⁻¹ ⊗ D⁻ᵀ) ∂D, where ∂D has the factor in question
        inverse = U @ E @ (diagonal * N @ R)
        dU = (
            -kron(eye(L), commutation(L, L), eye(L))
            @ (kron(eye(L * L), vec_P) + kron(vec_P, eye(L * L)))
            @ inverse
        )
        dR = kron(kron(eye(L), ones), G.T) @ selection(L * d) @ G
        dN = -E @ sizes.square().reciprocal().diag() @ N @ R
        d_NR = kron(eye(L), R.T) @ dN + kron(N, eye(L * d)) @ dR
        ddP = (
            root * kron(eye(L * L), (E @ N @ R).T) @ dU
            + second_term * kron(U @ E, eye(L * d)) @ d_NR
        )
        dPI = kron(eye(L), commutation(d, L), eye(d)) @ kron(eye(L * L), vec_I) @ dP
        dIM = (
            kron(eye(L), commutation(d, L), eye(L))
            @ kron(eye(L).reshape(-1, 1), eye(d * L))
            @ commutation(d, L)
            @ G
        )
        IM = kron(eye(L), M.T)
        self.jacobian = kron(P, eye(d)) @ G + IM @ dP
        self.hessian = (
            kron(eye(L * d), G.T) @ dPI + kron(IM, eye(L * d)) @ ddP + kron(eye(L * d), dP.T) @ dIM
        )


@pytest.mark.parametrize(("L", "d"), [(2, 3), (3, 4)])
def test_theorems_2_and_3(L, d):
    X = draw(L, d)
    norm, forms = Normalization(X, epsilon=0.0), KroneckerForms(X)
    close(forms.jacobian, torch.block_diag(*norm.jacobian()))
    compact = torch.zeros(L, d, L, d, L, d).double()
    for i in range(L):
        compact[i, :, i, :, i, :] = norm.hessian()[i]
    close(forms.hessian, compact.reshape(L * d * L * d, L * d), tolerance=1e-10)


@pytest.mark.parametrize("wrong", ["second_term", "diagonal"])
def test_theorem_3_as_printed_is_wrong(wrong):
    X = draw(3, 4)
    assert (KroneckerForms(X, **{wrong: 1.0}).hessian - KroneckerForms(X).hessian).abs().max() > 0.1
