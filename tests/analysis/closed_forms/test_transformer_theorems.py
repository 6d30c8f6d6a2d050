"""Theorems 4 and 5 of arXiv 2510.16927, corrected as `transformer_block` says."""

import itertools

import pytest
from torch.func import jacrev

from blockopt.analysis.closed_forms.output_loss import SquaredError
from blockopt.analysis.closed_forms.transformer_block import TransformerBlockHessian
from tests.helpers.paper_matrices import commutation_matrix as commutation
from tests.helpers.paper_matrices import eye, kron
from tests.helpers.transformer_block import D, L, M, attend, close, draw, make_weights, normalize


class Paper:
    """What the theorems name, by autograd of single steps: one head, post-norm, ReLU, ε = 0."""

    def __init__(self):
        self.X, self.w = draw(L, D), make_weights()
        self.Y = self.middle(self.w)
        self.mask = (self.Y @ self.w["mlp_in"] > 0).double().flatten().diag()
        self.J_Y = jacrev(lambda r: normalize(r, "layer", None, None, 0.0))(
            self.X + attend(self.X, self.w, None)
        )
        self.J_Y = self.J_Y.reshape(L * D, L * D)
        W_1, W_2 = self.w["mlp_in"], self.w["mlp_out"]
        self.J_SY = kron(eye(L), W_2.T) @ self.mask @ kron(eye(L), W_1.T) + eye(L * D)

    def middle(self, w):
        return normalize(self.X + attend(self.X, w, None), "layer", None, None, 0.0)

    def summed(self, w):
        Y = self.middle(w)
        return (Y @ w["mlp_in"]).relu() @ w["mlp_out"] + Y

    def final(self, w):
        return normalize(self.summed(w), "layer", None, None, 0.0)

    def G(self, role):
        """∂F/∂W."""
        return jacrev(lambda p: attend(self.X, self.w | {role: p}, None))(self.w[role]).reshape(
            L * D, -1
        )

    def B(self, role, w=None):
        """∂S/∂W by autograd."""
        w = self.w if w is None else w
        return jacrev(lambda p: self.summed(w | {role: p}))(w[role]).reshape(L * D, -1)

    def xi(self, row, column):
        """∂B_row/∂W_column by autograd, (L·d·n_row, n_column)."""
        return jacrev(lambda p: self.B(row, self.w | {column: p}))(self.w[column]).reshape(
            -1, self.w[column].numel()
        )


@pytest.fixture(scope="module")
def paper():
    return Paper()


ATTENTION = ("query", "key", "value")


def test_theorem_4(paper):
    W_2 = paper.w["mlp_out"]
    close(kron(eye(L), W_2.T) @ paper.mask @ kron(paper.Y, eye(M)), paper.B("mlp_in"))
    close(kron((paper.Y @ paper.w["mlp_in"]).relu(), eye(D)), paper.B("mlp_out"))
    for role in ATTENTION:
        close(paper.J_SY @ paper.J_Y @ paper.G(role), paper.B(role))


def xi_12(paper):
    first = kron(eye(L * D), kron(paper.Y, eye(M)).T @ paper.mask)
    return (
        first
        @ kron(eye(L), commutation(D, L), eye(M))
        @ kron(eye(L).reshape(-1, 1), eye(D * M))
        @ commutation(D, M)
    )


def xi_21(paper):
    """The formula that is printed as ξ_12."""
    first = kron(eye(L), commutation(D, M), eye(D)) @ kron(eye(L * M), eye(D).reshape(-1, 1))
    return first @ paper.mask @ kron(paper.Y, eye(M))


def test_xi_between_the_weights_of_the_mlp(paper):
    close(xi_12(paper), paper.xi("mlp_in", "mlp_out"))
    close(xi_21(paper), paper.xi("mlp_out", "mlp_in"))
    assert xi_21(paper).shape == xi_12(paper).shape  # so that the swapped label is no error of size
    assert (xi_21(paper) - xi_12(paper)).abs().max() > 0.1
    for role in ("mlp_in", "mlp_out"):
        assert paper.xi(role, role).abs().max() == 0


@pytest.mark.parametrize("role", ATTENTION)
def test_xi_of_the_mlp_and_attention(paper, role):
    W_1, W_2 = paper.w["mlp_in"], paper.w["mlp_out"]
    into = paper.J_Y @ paper.G(role)
    # ∂(Y ⊗ I_m)/∂Y
    spread = kron(eye(L), commutation(M, D), eye(M)) @ kron(eye(L * D), eye(M).reshape(-1, 1))
    n_1 = W_1.numel()  # ⊗ I_{n_1} where ⊗ I_{n_k} is printed
    close(
        kron(kron(eye(L), W_2.T) @ paper.mask, eye(n_1)) @ spread @ into, paper.xi("mlp_in", role)
    )
    shuffle = kron(eye(L), commutation(D, M), eye(D)) @ kron(eye(L * M), eye(D).reshape(-1, 1))
    close(shuffle @ paper.mask @ kron(eye(L), W_1.T) @ into, paper.xi("mlp_out", role))


@pytest.mark.parametrize(("row", "column"), list(itertools.product(ATTENTION, ATTENTION)))
def test_xi_between_weights_of_attention(paper, row, column):
    residual = paper.X + attend(paper.X, paper.w, None)
    H_Y = jacrev(jacrev(lambda r: normalize(r, "layer", None, None, 0.0)))(residual).reshape(
        -1, L * D
    )

    def jacobian(w):
        return jacrev(lambda p: attend(paper.X, w | {row: p}, None))(w[row])

    Phi = jacrev(lambda p: jacobian(paper.w | {column: p}))(paper.w[column]).reshape(
        -1, paper.w[column].numel()
    )
    n = paper.w[row].numel()
    inner = kron(eye(L * D), paper.G(row).T) @ H_Y @ paper.G(column) + kron(paper.J_Y, eye(n)) @ Phi
    close(kron(paper.J_SY, eye(n)) @ inner, paper.xi(row, column))


@pytest.mark.parametrize(
    ("row", "column"),
    [("mlp_in", "mlp_out"), ("mlp_in", "query"), ("value", "key"), ("query", "query")],
)
def test_theorem_5(paper, row, column):
    """H_tr(i,j) of Z, and the loss Hessian from it, are what `TransformerBlockHessian` gives."""
    S = paper.summed(paper.w)
    J_Z = jacrev(lambda s: normalize(s, "layer", None, None, 0.0))(S).reshape(L * D, L * D)
    H_Z = jacrev(jacrev(lambda s: normalize(s, "layer", None, None, 0.0)))(S).reshape(-1, L * D)
    n = paper.w[row].numel()
    B_i, B_j = paper.B(row), paper.B(column)
    H_tr = kron(J_Z, eye(n)) @ paper.xi(row, column) + kron(eye(L * D), B_i.T) @ H_Z @ B_j
    target = draw(L, D, seed=90)
    gradient = 2 / (L * D) * (paper.final(paper.w) - target).reshape(1, -1)
    whole = 2 / (L * D) * (J_Z @ B_i).T @ (J_Z @ B_j) + kron(gradient, eye(n)) @ H_tr
    options = {"arrangement": "post", "activation": "relu", "epsilon": 0.0}
    ours = TransformerBlockHessian(paper.X, paper.w, SquaredError(target), **options)
    close(ours.block(row, column), whole)
