"""Run a model without leaving a trace: what it changes is put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, then restore gradients, random state, buffers and training modes.

    Evaluation mode shows the model itself, without the noise of a dropout mask. DDP wrappers that
    run inside exchange nothing, so that no rank waits for another. A caller that needs averages
    over ranks takes them.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    wrappers: dict[DistributedDataParallel, tuple[bool, bool, Any]] = {}

    def stop_synchronizing(module: nn.Module, _: Any) -> None:
        if isinstance(module, DistributedDataParallel) and module not in wrappers:
            flags = (module.require_backward_grad_sync, module.require_forward_param_sync)
            wrappers[module] = (*flags, module.reducer)
            module.require_backward_grad_sync = module.require_forward_param_sync = False
            module.reducer = _ReducerAtRest(module.reducer)  # type: ignore[assignment]

    # Hook only where there can be wrappers: torch.compile warns about hooks on all modules.
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    hook = register_module_forward_pre_hook(stop_synchronizing) if distributed else None
    try:
        with torch.random.fork_rng(devices=devices):
            model.eval()
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        if hook is not None:
            hook.remove()
        for wrapper, (backward, forward, reducer) in wrappers.items():
            wrapper.require_backward_grad_sync = backward
            wrapper.require_forward_param_sync = forward
            wrapper.reducer = reducer
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, saved in buffers:
                # Write only if changed: a write would break a backward pass that is still to come.
                # Versions do not tell, since batch norm writes its buffers without counting.
                if not torch.equal(buffer, saved):
                    buffer.copy_(saved)
        for parameter, gradient in gradients:
            parameter.grad = gradient


class _ReducerAtRest:
    """A reducer of DDP that leaves it to the next training step to rebuild its buckets.

    DDP does so in the first forward pass after a backward one, and its ranks wait for each other.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
