"""What an attention module of any kind computes with, seen where it computes it.

A module runs alone, on the inputs that the model gave it. Products of two activations are
attention: the first is that of queries and keys, the last that of weights and values. Kernels of
state-space layers and of linear attention say by their arguments what is what.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tests.helpers.models import block_index

Signals = dict[str, Tensor]  # {role: what plays it, (batch, heads, ...)}
PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, torch.einsum)
QKV = ("query", "key", "value")


class Events(TorchFunctionMode):
    """Records one run of a module.

    Attributes:
        attention: The arguments of torch's own attention.
        pairs: The factors of each product of two activations.
        result: The last of these products.
        split: The last tensor that was split into three, as its parts.
        kernel: The arguments of the kernel that was to be watched.
        gate: What multiplies the result, where a norm is given both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention: Signals = {}
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.result: Tensor | None = None
        self.split: tuple[Tensor, ...] = ()
        self.kernel: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.gate: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and not self.attention:
            self.attention = {**dict(zip(QKV, args)), **{n: kwargs[n] for n in QKV if n in kwargs}}
        elif function in PRODUCTS:
            operands = args[1:] if function is torch.einsum else args
            operands = operands[0] if isinstance(operands[0], (tuple, list)) else operands
            tensors = [x for x in operands if isinstance(x, Tensor)]
            if len(tensors) == 2 and all(x.ndim > 2 and not _is_weight(x) for x in tensors):
                self.pairs.append((tensors[0], tensors[1]))
                self.result = function(*args, **kwargs)
                return self.result
        result = function(*args, **kwargs)
        if function is Tensor.split and len(result) == 3:
            self.split = result
        return result


def _is_weight(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


class Replay:
    """Runs one module of a model again and again, alone, and reports what its attention sees.

    Args:
        module: The module, inside of a model.
        run: Runs the model once.
        read: What the events of a run say.
        kernel: The name of the function to watch, in the file of the module.
        output: The linear map that takes what attention makes.
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[[], object],
        read: Callable[[Events], Signals],
        kernel: str = "",
        output: nn.Module | None = None,
    ) -> None:
        self.module, self.read, self.kernel, self.output = module, read, kernel, output
        self.call: tuple[Any, Any] | None = None
        forward = module.forward  # SqueezeBERT calls it without hooks

        def keep(*args: Any, **kwargs: Any) -> Any:
            self.call = self.call or (args, kwargs)
            return forward(*args, **kwargs)

        module.forward = keep
        with torch.no_grad():
            run()
        del module.forward
        assert self.call is not None, f"{type(module).__name__} does not run"

    def __call__(self) -> Signals:
        """What attention sees now; "output" is what the output projection takes, by column."""
        taken: list[Tensor] = []
        args, kwargs = self.call
        with torch.no_grad(), Events() as events, self._watched(events, taken):
            self.module(*args, **kwargs)
        signals = self.read(events)
        if taken:
            channels = 1 if hasattr(self.output, "kernel_size") else -1
            signals["output"] = taken[0].movedim(channels, 0).flatten(1)
        return {role: x.detach().clone() for role, x in signals.items()}

    @contextlib.contextmanager
    def _watched(self, events: Events, taken: list[Tensor]) -> Iterator[None]:
        holder = sys.modules[type(self.module).__module__]
        original = getattr(holder, self.kernel, None)
        hooks = []
        if self.output is not None:
            hooks.append(self.output.register_forward_pre_hook(lambda _, x: taken.append(x[0])))
        for name, child in self.module.named_children():
            if name == "norm":
                hooks.append(child.register_forward_pre_hook(lambda _, x: _set_gate(events, x)))

        def kernel(*args: Any, **kwargs: Any) -> Any:
            events.kernel = (args, kwargs)
            return original(*args, **kwargs)

        if original is not None:
            setattr(holder, self.kernel, kernel)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            if original is not None:
                setattr(holder, self.kernel, original)


def _set_gate(events: Events, args: tuple[Tensor, ...]) -> None:
    events.gate = args[1] if len(args) > 1 else None


def changed(before: Signals, after: Signals) -> set[tuple[str, int]]:
    """The heads of each role that differ, and the columns of "output" that do."""
    found = set()
    for role, old in before.items():
        along = 0 if role == "output" else 1
        difference = (old - after[role]).abs().movedim(along, 0).flatten(1).amax(dim=1)
        found |= {(role, int(i)) for i in (difference > 1e-5 * old.abs().max()).nonzero()}
    return found


@contextlib.contextmanager
def disturbed(parameter: Tensor, split: Any, block: int) -> Iterator[None]:
    """Noise in one block of a parameter."""
    original = parameter.detach().clone()
    noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(block))
    parameter.data += noise * (block_index(tuple(parameter.shape), split) == block)
    yield
    parameter.data.copy_(original)


def from_attention(events: Events) -> Signals:
    """Torch's own attention; dimensions before the heads are one batch."""
    return {role: x.flatten(0, -4) for role, x in events.attention.items()}


def from_products(heads: int = 0, dim: int = 1, last: int = -1) -> Callable[[Events], Signals]:
    """Queries and keys meet first, weights and values last.

    Args:
        heads: How many heads the batch dimension holds; 0 if they have one of their own.
        dim: That dimension.
        last: Which product is that of weights and values.
    """

    def read(events: Events) -> Signals:
        (query, key), value = events.pairs[0], events.pairs[last][1]
        signals = {"query": query, "key": key, "value": value}
        if key.shape != query.shape or key.shape[-1] != value.shape[-1]:
            signals["key"] = key.transpose(-1, -2)
        if heads:
            return {role: x.unflatten(0, (-1, heads)) for role, x in signals.items()}
        return {role: x.movedim(dim, 1) for role, x in signals.items()}

    return read
