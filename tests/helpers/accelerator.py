"""A stand-in for an accelerator: tensors that compute on the CPU and refuse to be waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

DEVICE = "meta"  # the one kind that torch lets us compute for ourselves
READS = {  # what `torch.cuda.set_sync_debug_mode` reports too
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._linalg_check_errors.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.unique_dim.default,
    torch.ops.aten.unique_consecutive.default,
    torch.ops.aten.repeat_interleave.Tensor,
}


class Waited(Exception):
    """The host has asked for a number of the device, or the device for one of the host."""


class Graph:
    """What the device was told to do in a step, to be done again with what its tensors hold then.

    The host takes no part in that, as in a CUDA graph: its numbers and branches stay what they were
    when the step was recorded.
    """

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def add(self, function: Any, arguments: Any, keywords: Any, results: Any) -> None:
        """Note one operation, on plain tensors."""
        self._calls.append((function, arguments, keywords, results))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all operations of the device; for blockopt this is a step that is captured."""
        OnAccelerator.graph = self
        try:
            with (
                mock.patch("torch.cuda.is_initialized", return_value=True),
                mock.patch("torch.cuda.is_current_stream_capturing", return_value=True),
            ):
                yield
        finally:
            OnAccelerator.graph = None

    def replay(self) -> None:
        """Do it again: results that are no views go where those of the recording are."""
        for function, arguments, keywords, results in self._calls:
            inputs = {_memory(x) for x in pytree.tree_leaves((arguments, keywords))}
            again = function(*arguments, **keywords)
            for old, new in zip(pytree.tree_leaves(results), pytree.tree_leaves(again)):
                if isinstance(old, Tensor) and _memory(old) not in inputs:
                    old.copy_(new)


class OnAccelerator(Tensor):
    """A tensor that says it is not on the CPU; only a copy that does not block gets it there."""

    may_wait = False
    graph: Graph | None = None

    @staticmethod
    def __new__(cls, values: Tensor) -> OnAccelerator:
        return Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=DEVICE
        )

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def __repr__(self) -> str:
        return f"OnAccelerator({self.values})"

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        if not cls.may_wait and _waits(function, arguments, keywords):
            raise Waited(str(function))
        device = keywords.pop("device", None)
        plain, plain_keywords = pytree.tree_map(_values, (arguments, keywords))
        to_host = device is not None and torch.device(device).type == "cpu"
        if to_host:
            return function(*plain, device=device, **plain_keywords)
        results = function(*plain, **plain_keywords)
        if cls.graph is not None:
            cls.graph.add(function, plain, plain_keywords, results)
        if function in READS:
            return results
        if function._schema.name.endswith("_") and results is not None:
            return arguments[0]
        return pytree.tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, results)


class Accelerator(TorchFunctionMode):
    """While this is entered, new tensors of the device are such tensors."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        made = function in (torch.zeros, torch.ones, torch.empty, torch.full, torch.eye)
        if made and _is_there(keywords.get("device")):
            keywords["device"] = "cpu"
            values = function(*arguments, **keywords)
            if OnAccelerator.graph is not None:
                OnAccelerator.graph.add(function, arguments, keywords, values)
            return OnAccelerator(values)
        copies = function in (torch.tensor, torch.as_tensor, Tensor.to)
        targets = (*arguments[1:], *keywords.values())
        if copies and not _is_there(arguments[0]) and any(map(_is_there, targets)):
            raise Waited("a copy to the device")
        return function(*arguments, **keywords)


@contextmanager
def waiting_allowed():
    """Let the host read from the device, as it may between steps."""
    OnAccelerator.may_wait = True
    try:
        yield
    finally:
        OnAccelerator.may_wait = False


@contextmanager
def answers_come_late() -> Iterator[None]:
    """Let the CPU be an accelerator in one respect: a step does not wait for its check."""
    with ExitStack() as stack:
        for module in ("finite_gradients", "adamw_update", "refused_steps"):
            stack.enter_context(mock.patch(f"blockopt.optim.{module}.READ_AT_ONCE", ()))
        stack.enter_context(mock.patch("torch.Event"))
        yield


def _waits(function: Any, arguments: Any, keywords: dict[str, Any]) -> bool:
    if function is torch.ops.aten.repeat_interleave.Tensor:
        return keywords.get("output_size") is None
    if function in READS:
        return True
    if function is torch.ops.aten.index.Tensor:  # a mask is turned into places, which are counted
        return any(index is not None and index.dtype == torch.bool for index in arguments[1])
    device, blocks = keywords.get("device"), not keywords.get("non_blocking")
    if function is torch.ops.aten.copy_.default:
        sides = {isinstance(x, OnAccelerator) for x in arguments[:2]}
        return len(sides) == 2 and len(arguments) < 3
    return device is not None and torch.device(device).type == "cpu" and blocks


def _is_there(what: Any) -> bool:
    if isinstance(what, OnAccelerator):
        return True
    return isinstance(what, (str, torch.device)) and torch.device(what).type == DEVICE


def _memory(x: Any) -> int | None:
    return x.untyped_storage().data_ptr() if isinstance(x, Tensor) else None


def _values(x):
    return x.values if isinstance(x, OnAccelerator) else x


def on_accelerator(model: nn.Module) -> nn.Module:
    """Move the parameters of a model there, in place; tied ones stay tied."""
    moved = {p: OnAccelerator(p.detach().clone()).requires_grad_() for p in model.parameters()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = moved[parameter]
    return model
