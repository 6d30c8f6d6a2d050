"""The GPT-2 with random gradients on which all optimizers step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockopt import Split, param_groups
from blockopt.blocks import from_plain
from blockopt.optim.matrix_sections import is_hidden_matrix
from recipes.common.gpt2 import GPT2, PRESETS, GPT2Config, to_huggingface


@dataclass(frozen=True)
class Problem:
    """A model with gradients, which all optimizers of a benchmark share.

    Attributes:
        model: The model.
        config: Its sizes.
        layout: "linear" or "conv1d", the modules that hold its matrices.
    """

    model: nn.Module
    config: GPT2Config
    layout: str

    def groups(self, weight_decay: float = 0.1) -> list[dict[str, Any]]:
        """Return the groups that blockopt and torch take; torch ignores the blocks in them."""
        return param_groups(self.model, weight_decay=weight_decay)

    def matrix_groups(self) -> list[dict[str, Any]]:
        """Return the groups of the matrices that `BlockMuon` orthogonalizes."""
        return [
            group
            for group in self.groups()
            if all(
                is_hidden_matrix(p, from_plain(blocks))
                for (_, p), blocks in zip(group["params"], group["blocks"])
            )
        ]

    def matrices(self) -> list[tuple[str, nn.Parameter]]:
        """Return these matrices with query, key and value apart, in the model's memory."""
        found = []
        for group in self.matrix_groups():
            for (name, parameter), plain in zip(group["params"], group["blocks"]):
                blocks = from_plain(plain)
                found += take_apart(name, parameter, blocks.roles, blocks.split)
        return found

    def describe(self) -> dict[str, Any]:
        """Return the sizes that belong to a result."""
        sizes = [p.numel() for p in self.model.parameters()]
        return {
            "layout": self.layout,
            "parameters": sum(sizes),
            "tensors": len(sizes),
            "matrices_of_muon": sum(p.numel() for _, p in self.matrices()),
        }


def take_apart(
    name: str, parameter: Tensor, roles: tuple[str, ...], split: Split | None
) -> list[tuple[str, nn.Parameter]]:
    """Return the sections of a fused matrix as parameters that share its memory and gradient."""
    if len(roles) == 1 or split is None:
        dim, sizes = 0, (parameter.shape[0],)
    else:
        dim, sizes = split.dim, split.sizes
    found = []
    for role, values, gradient in zip(
        roles, parameter.detach().split(sizes, dim), parameter.grad.split(sizes, dim)
    ):
        section = nn.Parameter(values)
        section.grad = gradient
        found.append((f"{name}.{role}", section))
    return found


def make_problem(size: str, layout: str) -> Problem:
    """Return a GPT-2 of a preset of `recipes/common/gpt2.py`, with gradients of realistic size."""
    torch.manual_seed(0)
    model = GPT2(PRESETS[size])
    if layout == "conv1d":
        model = to_huggingface(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter).mul_(1e-3)
    return Problem(model, PRESETS[size], layout)
