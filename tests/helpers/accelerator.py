"""A stand-in for an accelerator: tensors that compute on the CPU and refuse to be waited for."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

DEVICE = "meta"  # the one kind that torch lets us compute for ourselves
READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


class Waited(Exception):
    """The host has asked for a number of the device."""


class OnAccelerator(Tensor):
    """A tensor that says it is not on the CPU; only a copy that does not block gets it there."""

    may_wait = False

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
        if function in READS:
            if not cls.may_wait:
                raise Waited(str(function))
            return function(*pytree.tree_map(_values, arguments), **keywords)
        device = keywords.pop("device", None)
        if device is not None and torch.device(device).type == "cpu":
            if not keywords.get("non_blocking") and not cls.may_wait:
                raise Waited(f"{function} to the host")
            return function(*pytree.tree_map(_values, arguments), **keywords)
        results = function(
            *pytree.tree_map(_values, arguments), **pytree.tree_map(_values, keywords)
        )
        if function._schema.name.endswith("_") and results is not None:
            return arguments[0]
        return pytree.tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, results)


class Accelerator(TorchFunctionMode):
    """While this is entered, new tensors of the device are such tensors."""

    def __torch_function__(self, function, types, arguments=(), keywords=None):
        keywords = dict(keywords or {})
        device = keywords.get("device")
        made = function in (torch.zeros, torch.ones, torch.empty, torch.full)
        if made and device is not None and torch.device(device).type == DEVICE:
            return OnAccelerator(function(*arguments, **{**keywords, "device": "cpu"}))
        return function(*arguments, **keywords)


@contextmanager
def waiting_allowed():
    """Let the host read from the device, as it may between steps."""
    OnAccelerator.may_wait = True
    try:
        yield
    finally:
        OnAccelerator.may_wait = False


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
