"""Linear maps of a user's own class: which parameter is the weight, and which way it is stored.

A class that writes `x @ self.weight` stores inputs first, one that calls `F.linear` outputs first,
and a square weight shows neither. So a copy of the module is tried on a tiny weight that is not
square: only one of the two ways runs.
"""

from __future__ import annotations

import copy
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_ROWS, _COLUMNS = 2, 3  # of the tiny weight


class OwnMap(NamedTuple):
    """A linear map of a user's own class.

    Attributes:
        weight: The name of its weight.
        bias: The name of its bias, if there is one.
        out_dim: The dimension of the weight that runs over the outputs.
    """

    weight: str
    bias: str | None
    out_dim: int


_known: WeakKeyDictionary[nn.Module, OwnMap | None] = WeakKeyDictionary()


def own_map(module: nn.Module) -> OwnMap | None:
    """Read a module that holds one matrix, and a bias or not; None if that is no linear map.

    Modules of torch are left out, and all that have children or buffers.

    Example:
        >>> class Mine(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.kernel = nn.Parameter(torch.ones(4, 4))
        ...
        ...     def forward(self, x):
        ...         return x @ self.kernel
        >>> own_map(Mine())
        OwnMap(weight='kernel', bias=None, out_dim=1)
    """
    if module not in _known:
        _known[module] = _tried(module)
    return _known[module]


def _tried(module: nn.Module) -> OwnMap | None:
    held = {name: p for name, p in module._parameters.items() if p is not None}
    matrices = [name for name, p in held.items() if p.ndim == 2]
    vectors = [name for name, p in held.items() if p.ndim == 1]
    is_torch = type(module).__module__.startswith("torch.")
    if is_torch or module._modules or module._buffers or len(matrices) != 1:
        return None
    if len(vectors) > 1 or len(held) != 1 + len(vectors):
        return None
    weight, bias = matrices[0], vectors[0] if vectors else None
    ways = [out_dim for out_dim in (0, 1) if _runs(module, weight, bias, out_dim)]
    return OwnMap(weight, bias, ways[0]) if len(ways) == 1 else None


def _runs(module: nn.Module, weight: str, bias: str | None, out_dim: int) -> bool:
    """Whether a module maps linearly if its weight has outputs along `out_dim`."""
    outputs, inputs = (_ROWS, _COLUMNS) if out_dim == 0 else (_COLUMNS, _ROWS)
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    tiny = copy.copy(module)
    tiny.__dict__["_parameters"] = {weight: nn.Parameter(some(_ROWS, _COLUMNS))}
    if bias is not None:
        tiny._parameters[bias] = nn.Parameter(some(outputs))
    x, y = some(1, 4, inputs), some(1, 4, inputs)
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng([]):
            both, first, second, none = (
                tiny.forward(value) for value in (x + y, x, y, torch.zeros_like(x))
            )
            fits = isinstance(both, Tensor) and both.shape == (1, 4, outputs)
            return fits and torch.allclose(both + none, first + second, atol=1e-4)
    except Exception:
        return False
