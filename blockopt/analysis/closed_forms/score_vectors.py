"""Queries and keys as they enter the scores: `R_i N(W·x_i + b)`, with a norm N and rotations R.

Either may be absent. The vector of a token depends on that token alone, so its derivatives by
`W·x_i + b` are small matrices, one per position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from blockopt.analysis.closed_forms.normalization import Normalization, NormKind
from blockopt.analysis.closed_forms.rotary_positions import RotaryPositions


class HeadNorm(NamedTuple):
    """A norm of the queries or keys of each head (QK-norm), as Qwen3 has it.

    Attributes:
        gain: (dk,), shared by the heads, or None for ones.
        kind: "rms" or "layer".
        epsilon: Added to the mean square, or to the variance.
        bias: (dk,), added after the gain, or None.
    """

    gain: Tensor | None = None
    kind: NormKind = "rms"
    epsilon: float = 1e-6
    bias: Tensor | None = None


class ScoreVectors:
    """The queries or keys of one head, with their derivatives by `W·x + b`.

    Args:
        linear: `W·x_i + b`, (B, L, dk).
        norm: Applied first.
        rotary: Applied second.

    Attributes:
        value: What enters the scores, (B, L, dk).
        plain: Whether there is neither, so that `value` is `linear`.
    """

    def __init__(
        self, linear: Tensor, norm: HeadNorm | None = None, rotary: RotaryPositions | None = None
    ) -> None:
        self._rotary, self.plain = rotary, norm is None and rotary is None
        self._shape, self._norm, self.value = linear.shape, None, linear
        self._known: Tensor | None = None
        if norm is not None:
            self._norm = Normalization(
                linear, kind=norm.kind, gain=norm.gain, bias=norm.bias, epsilon=norm.epsilon
            )
            self.value = self._norm.output
        if rotary is not None:
            self.value = rotary.rotate(self.value)

    @property
    def jacobian(self) -> Tensor:
        """The derivative of each value by `W·x_i + b`, (B, L, dk, dk)."""
        if self._known is None:
            width = self._shape[-1]
            if self._rotary is None:
                found = torch.eye(width, dtype=self.value.dtype, device=self.value.device)
            else:
                found = self._rotary.matrices(width)
            if self._norm is not None:
                found = found @ self._norm.jacobian()
            self._known = found.expand(*self._shape, width)
        return self._known

    def hessian(self, g: Tensor) -> Tensor | None:
        """Return `Σ g_i · ∂²value_i`, (B, L, dk, dk), for g (B, L, dk); None if it is zero."""
        if self._norm is None:
            return None
        if self._rotary is not None:
            rotations = self._rotary.matrices(self._shape[-1])
            g = (rotations.mT @ g.unsqueeze(-1)).squeeze(-1)
        return self._norm.contracted_hessian(g)
