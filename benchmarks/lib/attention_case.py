"""One self-attention layer for the Hessian benchmarks: closed forms, torch.func and curvlinops on the same numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt.analysis.closed_forms.self_attention import SelfAttentionHessian

ROLES = ("query", "key", "value")


class Attention(nn.Module):
    """Single-head causal attention in plain operations, with the papers' weights and no others."""

    def __init__(self, width: int, spread: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Parameter(spread * torch.randn(width, width)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, L, d)
        """Mix each position with those before it."""
        scores = x @ self.query @ (x @ self.key).mT / math.sqrt(x.shape[-1])
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ (x @ self.value)


class AttentionCase:
    """A layer, tokens and targets in float64.

    Args:
        length: Of the sequence.
        width: Of tokens, keys and values.
    """

    def __init__(self, length: int, width: int) -> None:
        torch.manual_seed(0)
        self.model = Attention(width, 1 / math.sqrt(width)).double()
        self.x, self.y = torch.randn(2, 1, length, width, dtype=torch.float64)
        self.mask = torch.ones(length, length, dtype=torch.bool).tril()

    def closed_form(self) -> SelfAttentionHessian:
        """Ours, made anew: its forward quantities are part of what is timed."""
        weights = [getattr(self.model, role) for role in ROLES]
        return SelfAttentionHessian(self.x, *weights, self.y, mask=self.mask)

    def by_torch(self) -> Tensor:
        """`torch.func.hessian` of all weights at once."""
        shapes = [p.shape for p in self.model.parameters()]

        def loss(vector: Tensor) -> Tensor:
            parts = vector.split([shape.numel() for shape in shapes])
            weights = {role: part.view(shape) for role, part, shape in zip(ROLES, parts, shapes)}
            return F.mse_loss(torch.func.functional_call(self.model, weights, (self.x,)), self.y)

        return torch.func.hessian(loss)(
            torch.cat([p.detach().flatten() for p in self.model.parameters()])
        )

    def curvlinops(self, role: str | None = None) -> Any:
        """The Hessian of curvlinops, of all weights or of one."""
        from curvlinops import HessianLinearOperator

        parameters = [p for name, p in self.model.named_parameters() if role in (None, name)]
        for p in self.model.parameters():
            p.requires_grad_(any(p is q for q in parameters))
        return HessianLinearOperator(
            self.model, nn.MSELoss(), parameters, [(self.x, self.y)], check_deterministic=False
        )

    def by_curvlinops(self) -> Tensor:
        """`H @ I`."""
        operator = self.curvlinops()
        return operator @ torch.eye(operator.shape[1], dtype=torch.float64)
