"""What every training loop of the recipes does: clip, step, evaluate, save and resume."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockopt import BlockLR
from blockopt.block_lr.wrappers import unwrapped
from blockopt.distributed import full
from recipes.common.optimizers import take_step

Batch = tuple[Tensor, Tensor]  # inputs and targets, (B, T) each


def token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a model that returns logits or an output that has them."""
    output: Any = model(inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    if logits.dtype.itemsize < 4:  # FSDP2 in bfloat16 leaves them so, too coarse for a loss
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass
class Training:
    """A model, its optimizer, and its `BlockLR` if blocks have learning rates of their own.

    One step is: set the learning rates, compute gradients, `clip`, `step`.
    """

    model: nn.Module
    optimizer: Any
    block_lr: BlockLR | None

    @property
    def plain(self) -> nn.Module:
        """The model without wrappers."""
        return self.model

    def clip(self, largest: float) -> float:
        """Scale the gradients down to the norm `largest`, and return the norm that they had.

        They stay as they are for `largest=0`, and if their norm is not finite.
        """
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = full(nn.utils.get_total_norm([p.grad for p in parameters]))
        if largest > 0 and bool(torch.isfinite(norm)):
            nn.utils.clip_grads_with_norm_(parameters, largest, norm)
        return float(norm)

    def step(self, batches: Sequence[Batch]) -> float:
        """Move the weights, refresh the block learning rates if that is due, clear the gradients.

        Args:
            batches: What the gradients were computed on. A refresh measures all of them, Sophia
                the last one.

        Returns:
            The seconds that a refresh took, 0 if there was none.
        """
        take_step(self.optimizer, lambda: token_loss(self.plain, *batches[-1]))
        seconds = self._refresh(batches)
        self.optimizer.zero_grad()
        return seconds

    def _refresh(self, batches: Sequence[Batch]) -> float:
        if self.block_lr is None:
            return 0.0
        measured, begun = False, time.perf_counter()

        def loss(batch: Batch) -> Tensor:
            nonlocal measured
            measured = True
            return token_loss(self.model, *batch)

        self.block_lr.step([partial(loss, batch) for batch in batches])
        return time.perf_counter() - begun if measured else 0.0

    @torch.no_grad()
    def losses(self, batches: Iterable[Batch]) -> list[Tensor]:
        """Return the loss of each batch in evaluation mode, as the trained model would have it."""
        with averaged_weights(self.optimizer):
            self.model.eval()
            losses = [token_loss(self.model, *batch) for batch in batches]
            self.model.train()
        return losses

    def state_dict(self) -> dict[str, Any]:
        """Return the weights and the optimizer's state, which includes the block scales."""
        return {
            "model": dict(self.plain.state_dict()),
            "optimizer": unwrapped(self.optimizer).state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self.plain.load_state_dict(state["model"])
        unwrapped(self.optimizer).load_state_dict(state["optimizer"])


@contextmanager
def averaged_weights(optimizer: Any) -> Iterator[None]:
    """Put the average of the weights in their place for a while, if the optimizer keeps one."""
    inner: Any = unwrapped(optimizer)
    switches = callable(getattr(inner, "eval", None)) and callable(getattr(inner, "train", None))
    if switches:
        inner.eval()
    try:
        yield
    finally:
        if switches:
            inner.train()
