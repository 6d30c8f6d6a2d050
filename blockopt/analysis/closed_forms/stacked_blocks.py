"""The exact Hessian of the loss of several transformer blocks on top of each other.

With `Z_l` the output of block l and `M_θ = ∂Z_{l-1}/∂θ` the way of a weight θ below into it, the
Hessian of `ℓ(Z_n)` is

    H(θ, φ) = ∂Z_n/∂θᵀ ∇²ℓ ∂Z_n/∂φ + Σ_l M_θᵀ (Σ g_l·∂²Z_l by the input twice) M_φ
              outer                  functional; for weights of block l itself, the weight in the
                                     place of the input, without M

where `g_l` is the gradient at `Z_l`. Every block has its own second derivatives in closed form, so
nothing here is differentiated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.checks import Part, check_number, check_part
from blockopt.analysis.closed_forms.output_loss import OutputLoss
from blockopt.analysis.closed_forms.transformer_block import TransformerBlockHessian
from blockopt.analysis.closed_forms.transformer_sites import KnownLoss, between
from blockopt.checks import check_choice


class LayerWeight(NamedTuple):
    """A weight by its place.

    Attributes:
        layer: The number of its block, from 0; -1 for the input X of the first.
        role: Its role there; "input" for X.
    """

    layer: int
    role: str


INPUT = LayerWeight(-1, "input")


class StackedBlocksHessian:
    """Every pair of weights of a stack of transformer blocks, and of the input X.

    Blocks of embeddings and positions follow from those of `INPUT` by `lookup_rows`. Jacobians have
    B·L·d rows and are kept for all layers above a weight: for small sizes. `HessianOperator` has
    products with the Hessian of any model.

    Args:
        X: Tokens that enter the first block, (L, d) or (B, L, d).
        layers: The weights of each block, as `TransformerBlockHessian` takes them.
        loss: On the output of the last block.
        options: Those of `TransformerBlockHessian`, for each block: norms, activation, mask and so
            on. In most models only the last has `final_norm=True`.

    Attributes:
        weights: All weights, by layer and role; `INPUT` is not among them.
        output: The output of the last block, (B, L, d).

    Example:
        >>> from blockopt.analysis.closed_forms.output_loss import SquaredError
        >>> X, I = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 1.0]]), torch.eye(3)
        >>> layer = {"query": I, "key": I, "value": I, "mlp_in": I, "mlp_out": I}
        >>> hessian = StackedBlocksHessian(X, [layer, layer], SquaredError(torch.zeros(2, 3)))
        >>> hessian.block(LayerWeight(0, "query"), LayerWeight(1, "value")).shape
        torch.Size([9, 9])
    """

    def __init__(
        self,
        X: Tensor,
        layers: Sequence[Mapping[str, Tensor]],
        loss: OutputLoss,
        options: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if not layers:
            raise ValueError("Invalid layers: there are none. Must be the weights of each block.")
        if options is None:
            options = [{"final_norm": number == len(layers) - 1} for number in range(len(layers))]
        if len(options) != len(layers):
            raise ValueError(
                f"Invalid options for {len(options)} blocks. Must be for all {len(layers)}."
            )
        inputs = [X]
        for weights, chosen in zip(layers, options):  # forwards, for the inputs of all blocks
            zero = KnownLoss(*(torch.zeros_like(inputs[-1]),) * 3)
            inputs.append(TransformerBlockHessian(inputs[-1], weights, zero, **chosen).output)
        self.loss, self.output = loss, inputs.pop()
        gradient = loss.gradient(self.output)
        found = []
        for x, weights, chosen in reversed(list(zip(inputs, layers, options))):
            known = KnownLoss(loss.value(self.output), gradient, torch.zeros_like(gradient))
            found.append(TransformerBlockHessian(x, weights, known, **chosen))
            gradient = (gradient.reshape(1, -1) @ found[-1].jacobian("input")).view(gradient.shape)
        self._blocks = found[::-1]
        self.gradient_of_input = gradient
        self.weights = tuple(
            LayerWeight(number, role)
            for number, block in enumerate(self._blocks)
            for role in block.roles
        )
        self._reached: dict[LayerWeight, list[Tensor]] = {}
        self._by_input: dict[tuple[int, str], Tensor] = {}

    def value(self) -> Tensor:
        """Return the loss."""
        return self.loss.value(self.output)

    def jacobian(self, weight: LayerWeight) -> Tensor:
        """Return the derivative of the output of the last block, (B·L·d, n)."""
        return self._reach(weight)[-1]

    def block(self, row: LayerWeight, column: LayerWeight, part: Part = "full") -> Tensor:
        """Return ∂²loss/∂row∂column, (n_row, n_column), or one of its parts."""
        check_part(part)
        rows, columns = self._reach(row), self._reach(column)
        total = rows[-1].new_zeros(rows[-1].shape[1], columns[-1].shape[1])
        if part != "functional":
            curvature = self.loss.curvature(self.output).flatten(0, -3)
            total = total + between(rows[-1], curvature, columns[-1])
        if part == "outer":
            return total
        for layer in range(max(row.layer, column.layer, 0), len(self._blocks)):
            (left, before), (right, after) = (self._enters(w, layer) for w in (row, column))
            found = self._functional(layer, left, right)
            found = found if before is None else before.mT @ found
            total = total + (found if after is None else found @ after)
        return total

    def dense(self, part: Part = "full") -> Tensor:
        """Return the whole matrix, in the order of `weights`."""
        return torch.cat(
            [torch.cat([self.block(a, b, part) for b in self.weights], 1) for a in self.weights]
        )

    def _functional(self, layer: int, left: str, right: str) -> Tensor:
        """Return the second derivative of one block; those by its input serve all layers below."""
        block = self._blocks[layer]
        if "input" not in (left, right):
            return block.block(left, right, "functional")
        other = right if left == "input" else left
        if (layer, other) not in self._by_input:
            self._by_input[layer, other] = block.block("input", other, "functional")
        kept = self._by_input[layer, other]
        return kept if left == "input" else kept.mT

    def _enters(self, weight: LayerWeight, layer: int) -> tuple[str, Tensor | None]:
        """Return as which role a weight enters a block, and through which Jacobian."""
        if weight.layer == layer:
            return weight.role, None
        if layer == 0:  # X itself
            return "input", None
        return "input", self._reach(weight)[layer - 1 - max(weight.layer, 0)]

    def _reach(self, weight: LayerWeight) -> list[Tensor]:
        """Return the Jacobians of the outputs of its block and of all above it."""
        if weight not in self._reached:
            first = max(weight.layer, 0)
            if weight != INPUT:
                check_number("layer", weight.layer, len(self._blocks))
                check_choice("role", weight.role, self._blocks[first].roles)
            reached = [self._blocks[first].jacobian(weight.role)]
            for block in self._blocks[first + 1 :]:
                reached.append(block.jacobian("input") @ reached[-1])
            self._reached[weight] = reached
        return self._reached[weight]
