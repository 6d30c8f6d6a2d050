"""The paper's formulas, corrected where they are wrong, against autograd in float64.

Definition 3.1, Theorems 3.1 and 3.2, Remarks 3.1, 4.1, C.1, D.1 and E.1, Lemmas 4.1, B.1, C.1 and
D.1 of "What does it mean to be a transformer?" (ICLR 2025); its matrix calculus is in
test_analysis_matrix_calculus.py. One sequence, squared error.
"""

import math

import pytest
import torch
from torch.func import jacrev

from blockopt.analysis.closed_forms.attention_moments import attention_moment
from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian
from tests.helpers.attention_reference import (
    assert_close,
    attend,
    autograd_functional,
    autograd_hessian,
    autograd_jacobian,
    autograd_outer,
    draw,
    flat,
    mean_squared,
    sizes_of,
    unflat,
)
from tests.helpers.paper_matrices import (
    commutation_matrix,
    eye,
    first_data_term,
    kron,
    second_data_term,
    softmax_hessian,
    softmax_jacobian,
    softmax_row_hessian,
)

SIZES = [(4, 3, 2, 0), (4, 3, 2, 1), (3, 2, 4, 2), (3, 2, 2, 3)]


def vec_of_identity(n):
    return eye(n).reshape(-1, 1)


class Paper:
    """The matrices of the paper for one draw."""

    def __init__(self, L, d, dk, seed, causal=False, single=False):
        self.L, self.d, self.dk = L, d, dk
        self.X3, self.weights, self.Y3 = draw(L=L, d=d, dk=dk, seed=seed, single=single)
        self.X, self.Y = self.X3[0], self.Y3[0]
        self.mask = torch.ones(L, L, dtype=torch.bool).tril() if causal else None
        self.W_V = self.weights["value"][0]
        if single:
            self.W_QK = self.weights["query_key"][0]
            scores = self.X @ self.W_QK @ self.X.T
        else:
            self.W_Q, self.W_K = self.weights["query"][0], self.weights["key"][0]
            scores = self.X @ self.W_Q @ self.W_K.T @ self.X.T / math.sqrt(dk)
        self.T = scores
        self.A = (
            scores if self.mask is None else scores.masked_fill(~self.mask, -math.inf)
        ).softmax(-1)
        self.residual = (self.A @ self.X @ self.W_V - self.Y).reshape(1, -1)
        self.c = 2 / (L * d)
        self.M1, self.Z1, self.Z2 = (
            self.A @ self.X,
            first_data_term(self.A, self.X),
            second_data_term(self.A, self.X),
        )
        self.S = kron(eye(d), commutation_matrix(d, d)) @ kron(vec_of_identity(d), eye(d))

    def R(self, m):
        return kron(self.residual, eye(m))

    @property
    def query_side(self):
        return kron(eye(self.d), self.W_K)

    @property
    def key_side(self):
        return kron(self.W_Q, eye(self.d)) @ commutation_matrix(self.dk, self.d)

    def loss(self, output):
        return mean_squared(output, self.Y3)


def papers(**options):
    return [Paper(*sizes, **options) for sizes in SIZES]


def blocks_of(whole, weights):
    slices = sizes_of(weights)
    return lambda row, column: whole[slices[row], slices[column]]


@pytest.mark.parametrize("causal", [False, True])
def test_theorem_3_1(causal):
    for p in papers(causal=causal):
        exact = blocks_of(autograd_outer(p.X3, p.weights, p.loss, mask=p.mask), p.weights)
        middle = p.Z1.T @ kron(eye(p.L), p.W_V @ p.W_V.T) @ p.Z1
        left = kron(p.M1.T, p.W_V.T) @ p.Z1
        root = math.sqrt(p.dk)
        assert_close(p.c * kron(p.M1.T @ p.M1, eye(p.d)), exact("value", "value"))
        assert_close(p.c / p.dk * p.query_side.T @ middle @ p.query_side, exact("query", "query"))
        assert_close(p.c / root * left @ p.query_side, exact("value", "query"))
        assert_close(p.c / p.dk * p.query_side.T @ middle @ p.key_side, exact("query", "key"))
        # Not printed: by symmetry
        assert_close(p.c / p.dk * p.key_side.T @ middle @ p.key_side, exact("key", "key"))
        assert_close(p.c / root * left @ p.key_side, exact("value", "key"))


@pytest.mark.parametrize("causal", [False, True])
def test_theorem_3_2(causal):
    for p in papers(causal=causal):
        exact = blocks_of(autograd_functional(p.X3, p.weights, p.loss, mask=p.mask), p.weights)
        root = math.sqrt(p.dk)
        lifted = kron(eye(p.L), kron(p.W_V.T, eye(p.d)))
        second = p.R(p.d**2) @ kron(lifted, eye(p.d)) @ p.Z2
        B = p.R(p.d) @ lifted @ kron(p.Z1, eye(p.d)) @ p.S
        assert float(exact("value", "value").abs().max()) < 1e-14
        printed = p.R(p.d * p.dk) @ kron(lifted, p.W_K.T.contiguous()) @ p.Z2 @ p.query_side
        assert_close(p.c / p.dk * printed, exact("query", "query"))
        assert_close(p.c / p.dk * p.query_side.T @ second @ p.query_side, exact("query", "query"))
        assert_close(p.c / p.dk * p.key_side.T @ second @ p.key_side, exact("key", "key"))
        mixed = p.c / p.dk * p.query_side.T @ second @ p.key_side + p.c / root * kron(B, eye(p.dk))
        assert_close(mixed, exact("query", "key"))
        value = p.R(p.d**2) @ kron(eye(p.L), p.S) @ p.Z1
        assert_close(p.c / root * value @ p.query_side, exact("value", "query"))
        assert_close(p.c / root * value @ p.key_side, exact("value", "key"))


def test_remark_3_1_data_terms_by_moments():
    for p in papers():
        X, L = p.X, p.L
        assert_close(p.Z1, kron(eye(L), X.T.contiguous()) @ softmax_jacobian(p.A) @ kron(X, X))
        lifted = kron(eye(L), kron(X.T.contiguous(), kron(X.T.contiguous(), X.T.contiguous())))
        assert_close(p.Z2, lifted @ softmax_hessian(p.A) @ kron(X, X))


def test_definition_3_1_moments_by_sampling_every_token():
    p = papers()[0]
    for i in range(p.L):
        mean = sum(p.A[i, j] * p.X[j] for j in range(p.L))
        assert_close(attention_moment(p.A, p.X, 1)[i], mean)
        centred = p.X - mean
        second = sum(p.A[i, j] * torch.outer(centred[j], centred[j]) for j in range(p.L))
        assert_close(attention_moment(p.A, p.X, 2)[i], second)
        third = sum(
            p.A[i, j] * kron(centred[j].reshape(-1, 1), torch.outer(centred[j], centred[j]))
            for j in range(p.L)
        )
        assert_close(attention_moment(p.A, p.X, 3)[i].flatten(0, -2), third)
    one_hot = torch.eye(p.L, dtype=torch.float64)
    # A row that sees one token has no spread
    assert float(attention_moment(one_hot, p.X, 2).abs().max()) == 0
    assert float(attention_moment(one_hot, p.X, 3).abs().max()) == 0


def test_lemma_b_1_and_c_1_derivatives_of_softmax():
    for p in papers():
        softmax = lambda t: t.view(p.L, p.L).softmax(-1).flatten()  # noqa: B023, E731
        T = p.T.flatten()
        assert_close(softmax_jacobian(p.A), jacrev(softmax)(T))
        exact = jacrev(jacrev(softmax))(T)  # (L², L², L²): entry, then both scores
        assert_close(softmax_hessian(p.A), exact.flatten(0, 1))
        # e_j in the place of e_i
        wrong = softmax_hessian(p.A).view(p.L, p.L, p.L, p.L, p.L, p.L).transpose(1, 2)
        assert float((wrong.reshape(p.L**4, p.L**2) - exact.flatten(0, 1)).abs().max()) > 1e-3
        assert_close(softmax_row_hessian(p.A[0]), jacrev(jacrev(lambda t: t.softmax(-1)))(p.T[0]))


def test_remark_c_1_two_tokens():
    a1, a2 = 0.3, 0.7
    b1, b2 = 1 - 2 * a1, 1 - 2 * a2
    found = softmax_row_hessian(torch.tensor([a1, a2], dtype=torch.float64))
    printed = torch.tensor(
        [
            [[(a1 - a1**2) * b1, -a1 * a2 * b1], [-a1 * a2 * b1, -a1 * a2 * b2]],
            [[-a1 * a2 * b1, -a1 * a2 * b2], [-a1 * a2 * b2, (a2 - a2**2) * b2]],
        ],
        dtype=torch.float64,
    )
    assert_close(found, printed, 1e-14)


def test_remark_e_1_jacobians_of_many_heads():
    """With W_V^h = W_O^h W_U^h, in the paper's names; `value` and `output` here."""
    X3, weights, _ = draw(heads=2, dv=2, d_out=3)
    X, (L, d), dk = X3[0], X3[0].shape, 2
    J, slices = autograd_jacobian(X3, weights), sizes_of(weights)
    n = d * dk
    for h in range(2):
        W_Q, W_K, W_O, W_U = (weights[role][h] for role in ("query", "key", "value", "output"))
        A = (X @ W_Q @ W_K.T @ X.T / math.sqrt(dk)).softmax(-1)
        lifted = kron(eye(L), (X @ W_O @ W_U).T.contiguous()) @ softmax_jacobian(A)
        start = slices["query"].start + h * n
        assert_close(J[:, start : start + n], lifted @ kron(X, X @ W_K) / math.sqrt(dk))
        start = slices["value"].start + h * n
        # ∂F/∂W_V ∂W_V/∂W_O
        assert_close(
            J[:, start : start + n], kron(A @ X, eye(3)) @ kron(eye(d), W_U.T.contiguous())
        )
        start = slices["output"].start + h * 6
        assert_close(J[:, start : start + 6], kron(A @ X @ W_O, eye(3)))


def test_second_derivatives_of_the_layer():
    """Φ = ∂²F of Theorem 5, without its factor 2/(L d), and with I_L for its one I_{d_V}."""
    for p in papers():
        slices = sizes_of(p.weights)

        def output(v, p=p):
            return attend(p.X3, unflat(v, p.weights)).flatten()

        exact = jacrev(jacrev(output))(flat(p.weights))
        root = math.sqrt(p.dk)
        lifted = kron(eye(p.L), kron(p.W_V.T, eye(p.d)))

        def phi(row, column):
            return exact[:, slices[row], slices[column]].flatten(0, 1)  # noqa: B023

        queries = kron(lifted, p.W_K.T.contiguous()) @ p.Z2 / p.dk
        assert_close(queries @ p.query_side, phi("query", "query"))
        assert_close(kron(eye(p.L), p.S) @ p.Z1 @ p.query_side / root, phi("value", "query"))
        mixed = kron(lifted @ kron(p.Z1, eye(p.d)) @ p.S, eye(p.dk)) / root
        assert_close(queries @ p.key_side + mixed, phi("query", "key"))
        # As printed
        assert float((p.c * queries @ p.query_side - phi("query", "query")).abs().max()) > 1e-4


def test_lemma_b_1_jacobians():
    for p in papers():
        slices = sizes_of(p.weights)
        J = autograd_jacobian(p.X3, p.weights)
        lifted = kron(eye(p.L), (p.X @ p.W_V).T.contiguous()) @ softmax_jacobian(p.A)
        root = math.sqrt(p.dk)
        assert_close(J[:, slices["value"]], kron(p.M1, eye(p.d)))
        assert_close(J[:, slices["query"]], lifted @ kron(p.X, p.X @ p.W_K) / root)
        assert_close(
            J[:, slices["key"]],
            lifted @ kron(p.X @ p.W_Q, p.X) @ commutation_matrix(p.dk, p.d) / root,
        )


def test_remark_4_1_linear_attention():
    for p in papers():
        linear = {"activation": "linear"}
        slices = sizes_of(p.weights)
        outer = blocks_of(autograd_outer(p.X3, p.weights, p.loss, **linear), p.weights)
        functional = blocks_of(autograd_functional(p.X3, p.weights, p.loss, **linear), p.weights)
        sigma = p.X.T @ p.X / p.L
        factor = 2 * p.L**2 / (p.d * p.dk)
        root = math.sqrt(p.dk)
        q, k, v = p.W_Q, p.W_K, p.W_V
        through = sigma @ k @ q.T @ sigma
        values = sigma @ v @ v.T @ sigma
        assert_close(factor * kron(through @ q @ k.T @ sigma, eye(p.d)), outer("value", "value"))
        assert_close(factor * kron(sigma, k.T @ values @ k), outer("query", "query"))
        assert_close(factor * kron(through, v.T @ sigma @ k), outer("value", "query"))
        mixed = kron(sigma @ q, k.T @ values) @ commutation_matrix(p.dk, p.d)
        assert_close(factor * mixed, outer("query", "key"))
        residual = (attend(p.X3, p.weights, **linear) - p.Y3).reshape(1, -1)
        value = kron(residual, eye(p.d**2)) @ kron(eye(p.L), p.S) @ kron(p.X, sigma @ k)
        assert_close(2 / (p.d * root) * value, functional("value", "query"))
        between = kron(residual @ kron(p.X, v.T @ sigma), eye(p.d)) @ p.S
        assert_close(2 / (p.d * root) * kron(between, eye(p.dk)), functional("query", "key"))
        for role in slices:  # only off-diagonal functional blocks
            assert float(functional(role, role).abs().max()) < 1e-12


def test_lemma_4_1_single_matrix_with_the_missing_factor():
    for sizes in SIZES:
        p = Paper(*sizes, single=True)
        whole = autograd_hessian(p.X3, p.weights, p.loss)
        exact = blocks_of(whole, p.weights)("query_key", "query_key")
        U = p.Z1.T @ kron(eye(p.L), p.W_V @ p.W_V.T) @ p.Z1
        U = U + kron(p.residual @ kron(eye(p.L), p.W_V.T), eye(p.d**2)) @ p.Z2
        assert_close(p.c * U, exact)
        assert float((U - exact).abs().max()) > 1e-3 * float(exact.abs().max())  # as printed


def test_remark_d_1_with_the_missing_factor_and_the_right_order():
    for p in papers():
        hessian = SelfAttentionHessian(p.X, p.W_Q, p.W_K, p.W_V, p.Y)
        U = p.Z1.T @ kron(eye(p.L), p.W_V @ p.W_V.T) @ p.Z1
        U = U + kron(p.residual @ kron(eye(p.L), p.W_V.T), eye(p.d**2)) @ p.Z2
        V = torch.cat([p.query_side, p.key_side], 1)
        B = p.R(p.d) @ kron(eye(p.L), kron(p.W_V.T, eye(p.d))) @ kron(p.Z1, eye(p.d)) @ p.S
        by_tokens = p.X.T @ torch.stack(
            [
                M2 @ p.W_V @ r
                for M2, r in zip(attention_moment(p.A, p.X, 2), p.residual.view(p.L, p.d))
            ]
        )
        assert_close(B, by_tokens)
        zero = torch.zeros_like(B)
        hollow = (
            p.c
            / math.sqrt(p.dk)
            * kron(torch.cat([torch.cat([zero, B], 1), torch.cat([B.T, zero], 1)]), eye(p.dk))
        )
        outer = p.c / p.dk * V.T @ U @ V
        n = p.d * p.dk
        exact = autograd_hessian(p.X3, p.weights, p.loss)[: 2 * n, : 2 * n]
        assert_close(outer + hollow, exact)
        swapped = torch.cat([p.key_side, p.query_side], 1)
        printed = swapped.T @ U @ swapped / p.dk + kron(
            torch.cat([torch.cat([zero, B.T], 1), torch.cat([B, zero], 1)]), eye(p.dk)
        ) / math.sqrt(p.dk)
        assert float((printed - exact).abs().max()) > 1e-3 * float(exact.abs().max())
        order = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])  # [W_K; W_Q], and the factor
        assert_close(p.c * printed, exact[order][:, order])
        found = torch.cat(
            [
                torch.cat([hessian.block(r, c, "score_outer") for c in ("query", "key")], 1)
                for r in ("query", "key")
            ]
        )
        assert_close(found, outer)
        assert_close(hessian.block("query", "key", "score_functional"), hollow[:n, n:])


def test_lemma_d_1_rank():
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(4, 2, generator=generator, dtype=torch.float64) @ torch.randn(
        2, 3, generator=generator, dtype=torch.float64
    )
    B = torch.randn(5, 1, generator=generator, dtype=torch.float64) @ torch.randn(
        1, 4, generator=generator, dtype=torch.float64
    )
    stacked = torch.cat([kron(eye(4), A), kron(B, eye(3))])
    assert int(torch.linalg.matrix_rank(stacked)) == 4 * 2 + 3 * 1 - 2 * 1


def test_errors():
    with pytest.raises(ValueError, match=r"Invalid order=4\. Must be 1, 2 or 3"):
        attention_moment(eye(2), eye(2), 4)
    with pytest.raises(ValueError, match=r"one head, one sequence"):
        attention_moment(eye(2), eye(3), 1)
