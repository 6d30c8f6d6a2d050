"""The loss of any network that acts on each position alone, as a loss on a layer's output.

Above the last attention layer of a transformer there are residual connections, norms, an MLP, an
unembedding and a cross-entropy. None of them mixes positions. So the Hessian of the loss in the
outputs F of that layer is still one small matrix Λ_i per position, and the blocks of the attention
weights of a whole transformer block are exact through
`SelfAttentionHessian(..., loss=PositionwiseLoss(...))`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.checks import Part, check_part


class _Known(NamedTuple):
    """`left Λ_i` of each position, and for which tensors: blocks of one weight share it."""

    tensors: tuple[Tensor | None, ...]
    versions: tuple[int, ...]
    gradient: Tensor
    rows: Tensor


class PositionwiseLoss:
    """`ℓ(F) = function(network(F))` for `SelfAttentionHessian(loss=...)`; neither mixes positions.

    A product of the Hessian with the same direction `e_a` at all positions gives column a of every
    `Λ_i = ∂²ℓ / ∂F_i²` at once: d products for all. With predictions `z_i = network(F)_i` of
    Jacobians J_i, it is the sum of two parts,

        outer       J_iᵀ (∂²function / ∂z_i²) J_i      Gauss-Newton; one backward pass per entry
        functional  Σ_v (∂function / ∂z_iv) ∂²z_iv     zero for a ReLU MLP without norms

    `part` says which of them `curvature` returns; value and gradient are always those of ℓ. They
    split the Hessian of the attention weights at the predictions of the whole network, into the
    papers' `H_o` and `H_f` of a transformer block:

        H    part "full" of SelfAttentionHessian with PositionwiseLoss(function, network)
        H_o  part "outer" of it with PositionwiseLoss(function, network, part="outer")
        H_f  part "full" of it with PositionwiseLoss(function, network, part="functional")

    where the last adds the second derivatives of attention to those of the network. `H = H_o + H_f`
    without cancellation.

    Args:
        function: Maps the predictions (B, L, V), or without a network F (B, L, d), to a scalar,
            such as a cross-entropy.
        network: Maps F (B, L, d) to the predictions; the identity by default.
        part: "full", "outer" or "functional".
        check: Whether `curvature` checks with one more product that no position acts on another.

    Raises:
        ValueError: If `part` is unknown; from `curvature`, if positions are mixed, or `function`
            returns no scalar.

    Example:
        The loss a²b² at (1, 2):

        >>> F = torch.tensor([[[1.0, 2.0]]])
        >>> loss = PositionwiseLoss(torch.sum, lambda F: F.prod(-1, keepdim=True).square())
        >>> loss.value(F), loss.gradient(F), loss.curvature(F)
        (tensor(4.), tensor([[[8., 4.]]]), tensor([[[[8., 8.],
                  [8., 2.]]]]))
    """

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        network: Callable[[Tensor], Tensor] | None = None,
        *,
        part: Part = "full",
        check: bool = True,
    ) -> None:
        check_part(part)
        self.function, self.network, self.part, self.check = function, network, part, check
        self._known: _Known | None = None

    def value(self, output: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        return self._scalar(self._predictions(output))

    def gradient(self, output: Tensor) -> Tensor:
        """Return its derivative by each output, (B, L, d)."""
        with torch.enable_grad():
            output = output.detach().requires_grad_()
            return _derivative(self.value(output), output)

    def curvature(
        self, output: Tensor, left: Tensor | None = None, right: Tensor | None = None
    ) -> Tensor:
        """Return `left Λ_i rightᵀ` of each position, see `OutputLoss`.

        `left Λ_i` is kept, and used again for the same tensors while the gradient is the same. If
        the network has been trained further, make a new `SelfAttentionHessian`, whose gradient is
        that of the time when it was made.
        """
        tensors = (output, left)
        versions = tuple(t._version for t in tensors if t is not None)
        gradient, known = self.gradient(output), self._known
        if (
            known is None
            or versions != known.versions
            or any(a is not b for a, b in zip(tensors, known.tensors))
            or not torch.equal(gradient, known.gradient)
        ):
            known = self._known = _Known(tensors, versions, gradient, self._rows(output, left))
        return known.rows if right is None else known.rows @ right.detach().mT

    def _rows(self, output: Tensor, left: Tensor | None) -> Tensor:
        """Return `left Λ_i` of each position, (B, L, r, d): one product per row."""
        identity = torch.eye(output.shape[-1], dtype=output.dtype, device=output.device)
        rows = identity if left is None else left.detach()
        with torch.enable_grad():
            point = output.detach().requires_grad_()
            predictions = self._predictions(point)
            if self.part == "outer":
                found = self._outer(point, predictions, rows)
            else:
                slope = self._slope(point, predictions)
                along = [_derivative(slope, point, row.expand_as(slope)) for row in rows]
                found = torch.stack(along, -2)
        if self.check:
            self._check(output)
        return found

    def _predictions(self, output: Tensor) -> Tensor:
        return output if self.network is None else self.network(output)

    def _scalar(self, predictions: Tensor) -> Tensor:
        value = self.function(predictions)
        if value.ndim != 0:
            raise ValueError(
                f"Invalid function: its value has the shape {tuple(value.shape)}. Must be a "
                "scalar, a mean loss."
            )
        return value

    def _slope(self, point: Tensor, predictions: Tensor) -> Tensor:
        """Return the gradient of ℓ, or of ℓ made linear in the predictions, with its graph."""
        value = self._scalar(predictions)
        if self.part == "functional":
            residual = _derivative(value, predictions).detach()
            value = (residual * predictions).sum()
        return _derivative(value, point, create_graph=True)

    def _outer(self, point: Tensor, predictions: Tensor, rows: Tensor) -> Tensor:
        """Return `rows J_iᵀ Λ J_i` with Λ of the predictions."""
        middle = predictions.detach().requires_grad_()
        slope = _derivative(self._scalar(middle), middle, create_graph=True)
        identity = torch.eye(middle.shape[-1], dtype=middle.dtype, device=middle.device)
        inner = torch.stack([_derivative(slope, middle, e.expand_as(slope)) for e in identity], -1)
        backward = [_derivative(predictions, point, e.expand_as(predictions)) for e in identity]
        J = torch.stack(backward, -2)  # (B, L, V, d)
        return (J @ rows.mT).mT @ inner @ J

    def _check(self, output: Tensor) -> None:
        """Move a random half of the positions; the gradient at the others must not change."""
        generator, finfo = torch.Generator().manual_seed(0), torch.finfo(output.dtype)
        change = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        change = change * output.detach().square().mean().sqrt().clamp(min=finfo.tiny)
        moved = torch.zeros(output.shape[:-1], dtype=torch.bool, device=output.device)
        moved.view(-1)[torch.randperm(moved.numel(), generator=generator)[::2]] = True
        before = self.gradient(output)
        after = self.gradient(torch.where(moved.unsqueeze(-1), output + change, output))
        others = (after - before)[~moved]
        if not others.numel():
            return
        error, size = float(others.abs().max()), float(before.abs().max())
        if not error <= finfo.eps**0.75 * size:
            raise ValueError(
                "Invalid function or network: moving some positions changes the gradient at others "
                f"by {error:.3g}, of {size:.3g}. Each position must act alone; use HessianOperator "
                "for layers that mix them."
            )


def _derivative(
    value: Tensor, by: Tensor, along: Tensor | None = None, *, create_graph: bool = False
) -> Tensor:
    """Return `alongᵀ ∂value/∂by`, zero where there is no dependence."""
    if not value.requires_grad:
        return torch.zeros_like(by)
    found = torch.autograd.grad(
        value, by, along, create_graph=create_graph, retain_graph=True, materialize_grads=True
    )
    return found[0]
