"""The matrix calculus of the ICLR 2025 paper's Appendices A and B against autograd."""

import pytest
import torch
from torch import kron
from torch.func import jacrev

from tests.helpers.attention_reference import assert_close
from tests.helpers.matrices import normal as draw
from tests.helpers.paper_matrices import commutation_matrix, eye


def vec(matrix):
    return matrix.reshape(-1, 1)


@pytest.mark.parametrize(("n", "m"), [(3, 4), (4, 3), (3, 3)])
def test_equation_13_is_wrong_in_print(n, m):
    """`vec(A) = (A ⊗ I_m) vec(I_m)` for A of shape (n, m); printed is `(A ⊗ I_n) vec(A)`."""
    A = draw(n, m)
    assert_close(kron(A, eye(m)) @ vec(eye(m)), vec(A), 1e-14)
    if n == m:  # otherwise the sizes do not even fit
        assert float((kron(A, eye(n)) @ vec(A) - vec(A)).abs().max()) > 0.1


def test_equation_14_block_diagonal_times_kronecker():
    A, B, C = draw(3, 2, 4), draw(3, 5, seed=1), draw(4, 2, seed=2)
    found = torch.block_diag(*A) @ kron(B, C)
    assert_close(
        found, torch.cat([kron(row.unsqueeze(0), block @ C) for row, block in zip(B, A)]), 1e-14
    )


def test_equation_15_matrix_product():
    A, X, B = draw(2, 3), draw(3, 4, seed=1), draw(4, 5, seed=2)
    assert_close(kron(A, B.T.contiguous()), jacrev(lambda x: A @ x @ B)(X).reshape(10, 12), 1e-14)


def test_equations_16_and_17_kronecker_product():
    (n, q), (p, r) = (2, 3), (4, 5)
    X, Y = draw(n, q), draw(p, r, seed=1)
    shuffle = kron(kron(eye(n), commutation_matrix(p, q)), eye(r))
    size = n * q * p * r
    assert_close(
        shuffle @ kron(eye(n * q), vec(Y)), jacrev(lambda x: kron(x, Y))(X).reshape(size, -1), 1e-14
    )
    assert_close(
        shuffle @ kron(vec(X), eye(p * r)), jacrev(lambda y: kron(X, y))(Y).reshape(size, -1), 1e-14
    )


def test_equation_18_transposition():
    X = draw(2, 3)
    K = commutation_matrix(3, 2)
    assert torch.equal(K @ X.flatten(), X.T.flatten())
    assert torch.equal(K, jacrev(lambda x: x.T)(X).reshape(6, 6))
    assert torch.equal(K @ K.T, eye(6))
    assert torch.equal(commutation_matrix(2, 3), K.T)


def test_lemma_b_2():
    """Its K(M, N) is K_NM of equation 18."""
    M, N = 3, 2
    left = kron(eye(M), commutation_matrix(N, M)) @ kron(vec(eye(M)), eye(N))
    assert torch.equal(left, kron(commutation_matrix(M, N), eye(M)) @ kron(eye(N), vec(eye(M))))


def test_lemma_b_3():
    m, n = 2, 3
    A = draw(m, n)
    left = kron(eye(m), commutation_matrix(m, n)) @ kron(vec(A), A)
    assert_close(
        left,
        kron(kron(A, A), eye(n))
        @ kron(eye(n), commutation_matrix(n, n))
        @ kron(vec(eye(n)), eye(n)),
        1e-14,
    )
