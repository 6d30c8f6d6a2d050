"""A diagonal block of a Hessian as an operator that is never built: what all kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from blockopt.analysis.spectral.eigenpairs import top_eigenpairs

# Products with several columns at once take about this much memory.
CHUNK_BYTES = 2**28


class FactoredBlock(ABC):
    """A symmetric operator with a trace, a diagonal, a Frobenius norm and products.

    Args:
        size: The number of entries of the weight.
        dtype: The dtype of all results.
        device: Their device.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = (size, size)
        self.dtype, self.device = dtype, device

    @abstractmethod
    def trace(self) -> Tensor:
        """Return the trace."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonal, in the order of the weight's entries."""

    @abstractmethod
    def squared_frobenius(self) -> Tensor:
        """Return the sum of the squares of all entries."""

    @abstractmethod
    def _product(self, columns: Tensor) -> Tensor:
        """Return `H V` for V of shape (n, k)."""

    def frobenius(self) -> Tensor:
        """Return the Frobenius norm."""
        return self.squared_frobenius().clamp(min=0).sqrt()

    def top_eigenvalue(self) -> Tensor:
        """Return `λ_max`, the largest eigenvalue, from products alone.

        Gradient descent on this weight alone is stable only for learning rates below `2 / λ_max`.
        """
        return top_eigenpairs(self, 1, which="largest").values[0]

    def __matmul__(self, v: Tensor) -> Tensor:
        """Return `H v` for v of shape (n,) or (n, k)."""
        n = self.shape[0]
        if v.ndim not in (1, 2) or v.shape[0] != n:
            raise ValueError(
                f"Invalid vector of shape {tuple(v.shape)}. Must be ({n},) or ({n}, k)."
            )
        return self._product(v.reshape(n, -1)).reshape(v.shape)

    def _squares_of_columns(self, entries_per_column: int) -> Tensor:
        """Return the squared Frobenius norm as the sum of `|H e|²` over all unit vectors e.

        A product must hold about `entries_per_column` numbers for each column.
        """
        n = self.shape[0]
        step = max(1, CHUNK_BYTES // (8 * entries_per_column))
        total = torch.zeros((), dtype=self.dtype, device=self.device)
        for start in range(0, n, step):
            columns = torch.zeros(n, min(step, n - start), dtype=self.dtype, device=self.device)
            columns[start : start + step].fill_diagonal_(1)
            total += self._product(columns).square().sum()
        return total
