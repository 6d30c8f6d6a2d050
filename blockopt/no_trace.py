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
    run inside synchronize neither gradients nor buffers, so that no rank waits for another. A
    caller that needs averages over ranks takes them.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(p, p.grad) for p in model.parameters()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    wrappers: dict[DistributedDataParallel, tuple[bool, bool]] = {}

    def stop_synchronizing(module: nn.Module, _: Any) -> None:
        if isinstance(module, DistributedDataParallel) and module not in wrappers:
            flags = (module.require_backward_grad_sync, module.require_forward_param_sync)
            wrappers[module] = flags
            module.require_backward_grad_sync = module.require_forward_param_sync = False

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
        for wrapper, flags in wrappers.items():
            wrapper.require_backward_grad_sync, wrapper.require_forward_param_sync = flags
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
