"""One self-attention layer, whose Hessian closed forms, torch.func and curvlinops compute."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt.analysis import SelfAttentionHessian

ROLES = ("query", "key", "value")


class Attention(nn.Module):
    """Single-head causal attention in plain operations, with the papers' weights and no others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Parameter(torch.randn(width, width) / math.sqrt(width)) for _ in ROLES
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, L, d)
        """Mix each position with those before it."""
        scores = x @ self.query @ (x @ self.key).mT / math.sqrt(x.shape[-1])
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ (x @ self.value)


class AttentionCase:
    """A layer, its tokens and its targets in float64.

    Args:
        length: Length of the sequence.
        width: Width of tokens, keys and values.
    """

    def __init__(self, length: int, width: int) -> None:
        torch.manual_seed(0)
        self.model = Attention(width).double()
        self.x, self.y = torch.randn(2, 1, length, width, dtype=torch.float64)
        self.mask = torch.ones(length, length, dtype=torch.bool).tril()

    def closed_form(self) -> SelfAttentionHessian:
        """Return our closed form, made anew: its forward pass is part of what is timed."""
        weights = [getattr(self.model, role) for role in ROLES]
        return SelfAttentionHessian(self.x, *weights, self.y, mask=self.mask)

    def by_torch(self) -> Tensor:
        """Return `torch.func.hessian` of all weights at once."""
        parameters = list(self.model.parameters())

        def loss(vector: Tensor) -> Tensor:
            parts = vector.split([p.numel() for p in parameters])
            weights = {role: part.view_as(p) for role, part, p in zip(ROLES, parts, parameters)}
            return F.mse_loss(torch.func.functional_call(self.model, weights, (self.x,)), self.y)

        return torch.func.hessian(loss)(torch.cat([p.detach().flatten() for p in parameters]))

    def curvlinops(self, role: str | None = None) -> Any:
        """Return the operator of curvlinops for all weights, or for those of one role."""
        from curvlinops import HessianLinearOperator

        for name, p in self.model.named_parameters():
            p.requires_grad_(role in (None, name))
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        data = [(self.x, self.y)]
        loss = nn.MSELoss()
        return HessianLinearOperator(self.model, loss, parameters, data, check_deterministic=False)

    def by_curvlinops(self) -> Tensor:
        """Return the dense Hessian as `H @ I`."""
        operator = self.curvlinops()
        return operator @ torch.eye(operator.shape[1], dtype=torch.float64)
