"""The Hessian of a loss on a linear network of any depth."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.checks import Part, check_number, check_part, check_tensors
from blockopt.analysis.closed_forms.output_loss import OutputLoss
from blockopt.analysis.memory import check_memory


class LinearNetworkHessian:
    """The Hessian of a loss on F = X W_1 ... W_D (Singh et al. 2021, in rows).

    With A_i = X W_1 ... W_{i-1} before and B_i = W_{i+1} ... W_D after weight i, and G the gradient
    of the loss in F,

        H_o(i, j)          = c A_iᵀ A_j ⊗ B_i B_jᵀ                         for the squared error
        H_f(i, j)[ac, eb]  = (A_iᵀ G B_jᵀ)_ab (W_{i+1} ... W_{j-1})_ce     for i < j

    with c = 2 / numel, and H_f(i, i) = 0: the functional part is block-hollow. H_o depends on the
    data through XᵀX alone, at any depth.

    Args:
        X: Input (..., d_0).
        weights: W_1 (d_0, d_1) to W_D (d_{D-1}, d_D).
        loss: `SquaredError(target)` or `CrossEntropy(W, targets)` on F.

    Example:
        >>> from blockopt.analysis.closed_forms.output_loss import SquaredError
        >>> two, loss = torch.full((1, 1), 2.0), SquaredError(torch.zeros(1, 1))
        >>> LinearNetworkHessian(torch.ones(1, 1), [two, two], loss).dense()  # of (w_1 w_2)²
        tensor([[ 8., 16.],
                [16.,  8.]])
    """

    def __init__(self, X: Tensor, weights: Sequence[Tensor], loss: OutputLoss) -> None:
        if not weights:
            raise ValueError("Invalid weights=[]. Must be at least one matrix.")
        check_tensors({"X": X} | {f"weight {number}": W for number, W in enumerate(weights)})
        self.weights = [W.detach() for W in weights]
        self._before = [X.detach()]
        for number, W in enumerate(self.weights):
            if W.ndim != 2 or W.shape[0] != self._before[-1].shape[-1]:
                needed = f"({self._before[-1].shape[-1]}, any)"
                raise ValueError(
                    f"Invalid weight {number} of shape {tuple(W.shape)}. Must be {needed} to "
                    "follow what is before it."
                )
            self._before.append(self._before[-1] @ W)
        self.output = self._before.pop()
        self._gradient = loss.gradient(self.output).flatten(0, -2)
        self._curvature = loss.curvature(self.output).flatten(0, -3)
        self._before = [before.flatten(0, -2) for before in self._before]

    def block(self, row: int, column: int, part: Part = "full") -> Tensor:
        """Return ∂²loss/∂W_row∂W_column, or one of its parts; weights count from 0."""
        check_part(part)
        for name, number in (("row", row), ("column", column)):
            check_number(name, number, len(self.weights))
        sizes = self.weights[row].numel(), self.weights[column].numel()
        check_memory(*sizes, self.output.dtype, self.output.device)
        after = [self._product(index + 1, len(self.weights)) for index in (row, column)]
        middle = after[0] @ self._curvature @ after[1].mT  # (N, r, s)
        outer = torch.einsum("na,nb,nrs->arbs", self._before[row], self._before[column], middle)
        outer = outer.flatten(0, 1).flatten(1)
        if part == "outer":
            return outer
        functional = self._functional(row, column)
        return functional if part == "functional" else outer + functional

    def dense(self, part: Part = "full") -> Tensor:
        """Return the whole matrix, the first weight first, each row-major."""
        size, numbers = sum(W.numel() for W in self.weights), range(len(self.weights))
        check_memory(size, size, self.output.dtype, self.output.device)
        rows = ([self.block(row, column, part) for column in numbers] for row in numbers)
        return torch.cat([torch.cat(row, 1) for row in rows])

    def _functional(self, row: int, column: int) -> Tensor:
        if row > column:
            return self._functional(column, row).mT
        if row == column:
            return self.output.new_zeros(self.weights[row].numel(), self.weights[row].numel())
        after = self._product(column + 1, len(self.weights))
        ends = self._before[row].mT @ self._gradient @ after.mT
        block = torch.einsum("ab,ce->aceb", ends, self._product(row + 1, column))
        return block.flatten(0, 1).flatten(1)

    def _product(self, start: int, stop: int) -> Tensor:
        """Return W_start ... W_{stop-1}, or the identity."""
        size = self.weights[start - 1].shape[1]  # start > 0
        product = torch.eye(size, dtype=self.output.dtype, device=self.output.device)
        for W in self.weights[start:stop]:
            product = product @ W
        return product
