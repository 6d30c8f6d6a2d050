"""The large matrices of the ICLR 2025 paper: derivatives of softmax and data terms, row-major."""

from __future__ import annotations

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.attention_moments import attention_moment


def eye(n: int) -> Tensor:
    return torch.eye(n, dtype=torch.float64)


def kron(*factors: Tensor) -> Tensor:
    result = factors[0].contiguous()
    for factor in factors[1:]:
        result = torch.kron(result, factor.contiguous())
    return result


def softmax_jacobian(A: Tensor) -> Tensor:
    """Lemma B.1: `∂A/∂T`, (L², L²), block-diagonal with `diag(A_i) - A_i A_iᵀ`."""
    jacobian: Tensor = torch.block_diag(*(torch.diag(row) - torch.outer(row, row) for row in A))
    return jacobian


def softmax_row_hessian(row: Tensor) -> Tensor:
    """The second derivatives of each entry of `row = softmax(t)` by t, (L, L, L): entry j first.

    `∂²a_j/∂t² = a_j (2 a aᵀ + e_j e_jᵀ - diag(a) - e_j aᵀ - a e_jᵀ)`.

    Example:
        >>> a = torch.tensor([0.5, 0.5])
        >>> softmax_row_hessian(a).sum(0).abs().max()  # the entries sum to 1, whatever t is
        tensor(0.)
    """
    unit = torch.eye(len(row), dtype=row.dtype, device=row.device)
    from_mean = unit - row  # e_j - a
    covariance = torch.diag(row) - torch.outer(row, row)
    hessian: Tensor = row[:, None, None] * (
        from_mean[:, :, None] * from_mean[:, None, :] - covariance
    )
    return hessian


def softmax_hessian(A: Tensor) -> Tensor:
    """Lemma C.1: `∂²A/∂T²` of the row-wise softmax, (L⁴, L²), block-diagonal.

    The block `D_i` (L³, L) stacks `e_i ⊗ ∂²A_ij/∂T_i²` over j, where i is the attention **row**
    (with e_j it is wrong). The paper prints `∂²F` for `∂²A` on the left.
    """
    length = len(A)
    blocks = []
    for i, row in enumerate(A):
        block = A.new_zeros(4 * (length,))  # entry j, the row of T, and its two entries
        block[:, i] = softmax_row_hessian(row)
        blocks.append(block.reshape(length**3, length))
    whole: Tensor = torch.block_diag(*blocks)
    return whole


def first_data_term(A: Tensor, X: Tensor) -> Tensor:
    """Remark 3.1: `Z_1 = (I ⊗ Xᵀ) ∂A/∂T (X ⊗ X) = X * M_2`, (L d, d²).

    Its row block i is `x_iᵀ ⊗ [M_2]_i`.
    """
    second = attention_moment(A, X, 2)
    return torch.einsum("ia,ibc->ibac", X, second).reshape(X.numel(), -1)


def second_data_term(A: Tensor, X: Tensor) -> Tensor:
    """Remark 3.1: `Z_2 = (I ⊗ Xᵀ ⊗ Xᵀ ⊗ Xᵀ) ∂²A/∂T² (X ⊗ X)`, (L d³, d²).

    It is `(I_L ⊗ K_dd ⊗ I_d)` times the row blocks `x_i x_iᵀ ⊗ [M_3]_i`, which is what "X * Xᵀ *
    M_3" must mean in the paper for the sizes to fit. Its proof prints (L d², d), and ends in
    "M_3 =" for "Z_2 =".
    """
    length, width = X.shape
    third = attention_moment(A, X, 3)  # (L, d, d, d)
    # x_i x_iᵀ ⊗ [M_3]_i has rows (a, b, c) and columns (e, f): x_a x_e M_bcf. K ⊗ I swaps a and b.
    return torch.einsum("ia,ie,ibcf->ibacef", X, X, third).reshape(length * width**3, width**2)


def commutation_matrix(m: int, n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """`K_mn` of the paper's equation 18: `K_mn vec(X) = vec(Xᵀ)`, row-major, for X of shape (n, m).

    The paper's Lemma B.2 writes `K(M, N)` for what is `K_NM` here.

    Example:
        >>> X = torch.arange(6.0).reshape(2, 3)
        >>> torch.equal(commutation_matrix(3, 2, X.dtype) @ X.flatten(), X.T.flatten())
        True
    """
    return torch.eye(m * n, dtype=dtype)[torch.arange(m * n).view(n, m).T.flatten()]
