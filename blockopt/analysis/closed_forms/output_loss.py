"""The loss on the output of a layer or a block, with its gradient and curvature there.

Both losses act on each position alone, so the Hessian of the loss in the outputs F is
block-diagonal in the positions: one matrix Λ_i for each.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from blockopt.analysis.closed_forms.checks import check_tensors

# Products of a projection with all probabilities of one position are formed for as many positions
# at once as fit in here.
CHUNK_BYTES = 2**27
IGNORED = -100  # the target of positions that do not count, as in torch


class OutputLoss(Protocol):
    """A loss on the output F (B, L, d) of a layer, in which each position acts alone."""

    def value(self, output: Tensor) -> Tensor:
        """Return the loss, a scalar."""

    def gradient(self, output: Tensor) -> Tensor:
        """Return its derivative by each output, (B, L, d)."""

    def curvature(
        self, output: Tensor, left: Tensor | None = None, right: Tensor | None = None
    ) -> Tensor:
        """Return `left Λ_i rightᵀ` of each position, (B, L, r, s).

        `left` (r, d) and `right` (s, d) are the identity by default.
        """


class SquaredError:
    """`ℓ(F) = mean (F - Y)²` over all elements, as `F.mse_loss`.

    The gradient is `c (F - Y)` and `Λ_i = c I`, with `c = 2 / numel`. For one sequence of length L
    this is the papers' `|F - Y|² / (L d_V)`.

    Args:
        target: Y, of the shape of the output.

    Example:
        >>> SquaredError(torch.zeros(1, 2, 1)).gradient(torch.tensor([[[1.0], [3.0]]])).flatten()
        tensor([1., 3.])
    """

    def __init__(self, target: Tensor) -> None:
        self.target = target.detach()

    def value(self, output: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        return F.mse_loss(output, self._target(output))

    def gradient(self, output: Tensor) -> Tensor:
        """Return its derivative by each output, (B, L, d)."""
        return 2 / output.numel() * (output - self._target(output))

    def curvature(
        self, output: Tensor, left: Tensor | None = None, right: Tensor | None = None
    ) -> Tensor:
        """Return `left Λ_i rightᵀ` of each position, see `OutputLoss`."""
        if left is None:
            left = torch.eye(output.shape[-1], dtype=output.dtype, device=output.device)
        product = left if right is None else left @ right.mT
        return (2 / output.numel() * product).expand(*output.shape[:-1], *product.shape)

    def _target(self, output: Tensor) -> Tensor:
        if self.target.shape[-2:] != output.shape[-2:] or self.target.numel() != output.numel():
            given, wanted = tuple(self.target.shape), tuple(output.shape)
            raise ValueError(
                f"Invalid target of shape {given}. Must be that of the output, {wanted}."
            )
        return self.target.reshape(output.shape)


class CrossEntropy:
    """`ℓ(F) = mean -log softmax(F W + b)[target]`, a linear head and `F.cross_entropy`.

    With `p_i` the probabilities of position i of N, the gradient is `W (p_i - e_target) / N`, and
    `Λ_i = W (diag(p_i) - p_i p_iᵀ) Wᵀ / N`. Positions with the target -100 do not count, as in
    torch: both are zero there, and N is the number of the others.

    Args:
        weight: W, (d, V): the transposed weight of an `nn.Linear` head.
        targets: The class of each position, or -100, (B, L) or (L,).
        bias: b, (V,).
    """

    def __init__(self, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> None:
        if weight.ndim != 2:
            raise ValueError(
                f"Invalid weight of shape {tuple(weight.shape)}. Must be (d, V): width of the "
                "output, classes."
            )
        if targets.dtype != torch.int64:
            raise ValueError(
                f"Invalid targets of {targets.dtype}. Must be the numbers of the classes, of "
                "torch.int64."
            )
        classes = weight.shape[1]
        if bias is not None and bias.shape != (classes,):
            raise ValueError(f"Invalid bias of shape {tuple(bias.shape)}. Must be ({classes},).")
        counted = targets != IGNORED
        if not bool((((targets >= 0) & (targets < classes)) | ~counted).all()):
            raise ValueError(
                f"Invalid targets: classes must be from 0 to {classes - 1}, or {IGNORED} for "
                "positions that do not count."
            )
        if not bool(counted.any()):
            raise ValueError(
                f"Invalid targets: none counts, so there is no loss. All are {IGNORED}."
            )
        check_tensors({"weight": weight} | ({} if bias is None else {"bias": bias}))
        self.weight, self.targets = weight.detach(), targets
        self.bias = None if bias is None else bias.detach()

    def value(self, output: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        return F.cross_entropy(self._logits(output).flatten(0, -2), self._targets(output).flatten())

    def gradient(self, output: Tensor) -> Tensor:
        """Return its derivative by each output, (B, L, d)."""
        probabilities = self._logits(output).softmax(-1)
        targets = self._targets(output)
        counted = (targets != IGNORED).unsqueeze(-1)
        hits = F.one_hot(targets.clamp(min=0), probabilities.shape[-1]).to(probabilities)
        return (probabilities - hits) * counted @ self.weight.mT / counted.sum()

    def curvature(
        self, output: Tensor, left: Tensor | None = None, right: Tensor | None = None
    ) -> Tensor:
        """Return `left Λ_i rightᵀ` of each position, see `OutputLoss`.

        No matrix of classes by classes is formed, so large vocabularies are fine.
        """
        rows = self.weight if left is None else left @ self.weight  # (r, V)
        columns = self.weight if right is None else right @ self.weight  # (s, V)
        probabilities = self._logits(output).softmax(-1).flatten(0, -2)
        number = max(1, CHUNK_BYTES // (rows.numel() * rows.element_size()))
        products = []
        for p in probabilities.split(number):
            mean_of_rows, mean_of_columns = p @ rows.mT, p @ columns.mT
            products.append(
                (rows * p.unsqueeze(1)) @ columns.mT
                - mean_of_rows.unsqueeze(-1) * mean_of_columns.unsqueeze(-2)
            )
        counted = self._targets(output).flatten() != IGNORED
        share = counted.to(output) / counted.sum()
        mean: Tensor = torch.cat(products).mul_(share[:, None, None])
        return mean.reshape(*output.shape[:-1], *mean.shape[1:])

    def _logits(self, output: Tensor) -> Tensor:
        if output.shape[-1] != self.weight.shape[0]:
            raise ValueError(
                f"Invalid weight of shape {tuple(self.weight.shape)}. Its first size must be "
                f"{output.shape[-1]}."
            )
        check_tensors({"output": output, "weight of the head": self.weight})
        logits = output @ self.weight
        return logits if self.bias is None else logits + self.bias

    def _targets(self, output: Tensor) -> Tensor:
        fits = self.targets.shape == output.shape[-1 - self.targets.ndim : -1]
        if not fits or self.targets.numel() * output.shape[-1] != output.numel():
            given, wanted = tuple(self.targets.shape), tuple(output.shape[:-1])
            raise ValueError(
                f"Invalid targets of shape {given}. Must be one per position: {wanted}."
            )
        return self.targets.reshape(output.shape[:-1])
