"""How close a Kronecker product is to a Gauss-Newton block that is built, or known by products."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from blockopt.analysis.kronecker.factors import Factors
from blockopt.analysis.spectral.eigenpairs import top_eigenpairs
from blockopt.analysis.spectral.products import SymmetricOperator

TOLERANCE = 1e-3  # of eigenvectors that Lanczos finds: overlaps are shown with two digits


class Match(NamedTuple):
    """How well an approximation K matches a Gauss-Newton block G.

    Attributes:
        error: `‖G - K‖ / ‖G‖`, in Frobenius norms.
        error_error: The standard error of that, 0 if the block was built.
        trace: `tr K / tr G`.
        top: The largest eigenvalue of K over that of G.
        overlap: The share of the top eigenspace of G that lies in that of K, 0 to 1. Random spaces
            of k dimensions have k / n.
        spectrum: `‖λ(G) - λ(K)‖ / ‖λ(G)‖`, eigenvalues in their order, which is at most `error`;
            None if the block was not built.
    """

    error: float
    error_error: float
    trace: float
    top: float
    overlap: float
    spectrum: float | None


@dataclass(frozen=True)
class KroneckerFit:
    """What is known of one block.

    Attributes:
        shape: The number of its rows and columns, as it is stored.
        norm: The Frobenius norm of the Gauss-Newton block G.
        kfac: How well KFAC matches it.
        ekfac: How well EKFAC does.
        nearest: The error of the nearest of all Kronecker products, which no KFAC can go below;
            None if the block was not built.
    """

    shape: tuple[int, int]
    norm: float
    kfac: Match
    ekfac: Match
    nearest: float | None


def built_fit(G: Tensor, factors: Factors, top: int) -> KroneckerFit | None:
    """Compare with a block that was built, (n, n); None if it is zero.

    The eigenvalues of EKFAC are the diagonal of G in the eigenbasis of the factors.
    """
    norm = float(G.norm())
    if norm == 0:
        return None
    (U, V), products = factors.eigenbasis()
    Q = torch.kron(U, V)
    rotated = Q.T @ G @ Q
    diagonal = rotated.diagonal().clamp(min=0)
    true, vectors = torch.linalg.eigh(rotated)
    true, leading = true.flip(0), vectors[:, -min(top, len(G)) :]

    def match(values: Tensor) -> Match:
        """Compare with the matrix that has these eigenvalues on the columns of Q."""
        ordered, places = values.sort(descending=True)
        return Match(
            error=float((rotated - values.diag()).norm()) / norm,
            error_error=0.0,
            trace=float(values.sum() / rotated.trace()),
            top=float(ordered[0] / true[0]),
            overlap=float(leading[places[: leading.shape[1]]].square().sum()) / leading.shape[1],
            spectrum=float((ordered - true).norm()) / norm,
        )

    shape = (len(U), len(V))
    kfac, ekfac = match(products.flatten()), match(diagonal)
    return KroneckerFit(shape, norm, kfac, ekfac, nearest_error(G, shape))


def nearest_error(G: Tensor, shape: tuple[int, int]) -> float:
    """Return the relative error of the Kronecker product that is nearest to G.

    Van Loan and Pitsianis (1993): with the entries of G rearranged so that Kronecker products
    have rank one, it is what the largest singular value leaves out.

    Example:
        >>> A, B = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.eye(3)
        >>> nearest_error(torch.kron(A, B), (2, 3)) < 1e-3
        True
    """
    rows, columns = shape
    arranged = G.reshape(rows, columns, rows, columns).transpose(1, 2).reshape(rows**2, columns**2)
    short = arranged if rows <= columns else arranged.T
    largest = float(torch.linalg.eigvalsh(short @ short.T)[-1])
    return math.sqrt(max(0.0, 1 - largest / float(G.square().sum())))


def estimated_fit(
    G: SymmetricOperator,
    factors: Factors,
    corrected: Tensor,
    top: int,
    num_probes: int,
    generator: torch.Generator,
) -> KroneckerFit | None:
    """Compare with a block that is known by products alone; None if it is zero.

    Args:
        G: The block.
        factors: Those of KFAC.
        corrected: The eigenvalues of EKFAC, (rows, columns).
        top: Eigenvectors per overlap.
        num_probes: Random sign vectors z: the error is from the mean of `‖(G - K) z‖²`.
        generator: Draws them.
    """
    (U, V), products = factors.eigenbasis()
    n = corrected.numel()
    z = torch.randint(2, (n, num_probes), generator=generator).mul(2).sub(1).to(U)
    Gz = (G @ z.to(G.dtype)).to(U)
    squares = Gz.square().sum(0)  # (num_probes,)
    norm = float(squares.mean().sqrt())
    if norm == 0:
        return None
    pairs = top_eigenpairs(G, min(top, n), tolerance=TOLERANCE, generator=generator)
    leading = pairs.vectors.to(U).T.reshape(-1, *corrected.shape)  # (k, rows, columns)
    leading = (U.T @ leading @ V).flatten(1).T  # (n, k), in the basis of the factors
    z = (U.T @ z.T.reshape(-1, *corrected.shape) @ V).flatten(1).T
    Gz = (U.T @ Gz.T.reshape(-1, *corrected.shape) @ V).flatten(1).T
    trace = float((z * Gz).sum(0).mean())

    def match(values: Tensor) -> Match:
        """Compare with the matrix of these eigenvalues on products of columns of U and V."""
        values = values.flatten()
        missed = (Gz - values[:, None] * z).square().sum(0)
        ratio = float(missed.mean() / squares.mean())
        # To first order, the error of a ratio of two means is that of the mean of this difference.
        noise = float((missed - ratio * squares).std() / math.sqrt(num_probes) / squares.mean())
        places = values.topk(leading.shape[1]).indices
        return Match(
            error=math.sqrt(ratio),
            error_error=noise / (2 * math.sqrt(ratio)) if ratio > 0 else 0.0,
            trace=float(values.sum()) / trace,
            top=float(values.max() / pairs.values[0]),
            overlap=float(leading[places].square().sum()) / leading.shape[1],
            spectrum=None,
        )

    shape = (len(U), len(V))
    return KroneckerFit(shape, norm, match(products), match(corrected), None)
