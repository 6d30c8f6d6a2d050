"""A learning rate for every Hessian block, kept up to date while training.

`BlockLR` measures the curvature of the blocks now and then, makes a multiplier of it and gives it
to the optimizer. The schedule keeps `group["lr"]`, the optimizer keeps its moments, and a refresh
leaves no other trace: gradients, random numbers, buffers and modes are those that training would
have without it.
"""

from __future__ import annotations

import math
import random
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blockopt.block_lr.history import History, Refresh, ScaleTable
from blockopt.block_lr.optimizer_hooks import AttachedOptimizer
from blockopt.block_lr.scales import block_scales
from blockopt.blocks import Blocks, Level, block_groups, block_numel, sum_groups
from blockopt.curvature import ESTIMATORS, Request
from blockopt.distributed import agreed, is_sharded, mean_over_ranks, rank
from blockopt.measure.closures import Losses, check_probes, trainable, undisturbed

CurvatureFunction = Callable[[nn.Module, Any], Mapping[str, Tensor]]
FAILURES_IN_A_ROW = 3


class NowherePositive(FloatingPointError):
    """The curvature of no group of blocks is positive, as may happen where the loss is not convex: no sign of an error."""


class BlockLR:
    """Gives every Hessian block of a model its own learning rate, `lr * scale[block]`, from its curvature.

    A refresh measures the curvature, makes `block_scales` of it, and moves the logarithm of each
    scale towards them by `1 - beta` (the first takes them as they are). The geometric mean of the
    scales over all entries stays 1, and all stay within the bounds. Call `step` after
    `optimizer.step()` and before `zero_grad()`; it does nothing unless a refresh is due:

        optimizer = blockopt.BlockAdamW(blockopt.param_groups(model), lr=3e-3)
        block_lr = blockopt.BlockLR(optimizer, model, every=50)
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            scheduler.step()
            block_lr.step(lambda: model(**batch).loss)
            optimizer.zero_grad()

    With the optimizers of blockopt each block has its scale. Any other needs several groups, best
    `torch.optim.AdamW(blockopt.param_groups(model, by="parameter"), ...)`: while its step runs, the
    `lr` of each group is multiplied by the geometric mean of the scales of the group's blocks;
    schedules see their own value. Its weight decay is then scaled too, since `torch.optim` decays
    by `lr * weight_decay`; with blockopt's optimizers it is not.

    Refreshes go by the number of steps that the optimizer has taken, from 1: step `warmup + 1`, and
    each `every` later. Micro-batches of gradient accumulation, steps that a `GradScaler` leaves out
    and steps that the optimizer refuses do not count.

    A loss or a curvature that is not finite, a lack of memory and a closure that returns no loss
    leave the scales as they are, warn once, and are counted in `failures`; the third in a row
    raises. So does curvature that is nowhere positive, but without ever raising. Other errors raise
    at once.

    Under DDP and FSDP2 all ranks call `step` with their own batches. The curvature is averaged, and
    all hold the same scales.

    A refresh runs in evaluation mode, where transformers does no activation checkpointing: a model
    that needs that to fit into memory must be measured on a smaller batch.

    Args:
        optimizer: One of blockopt's, or any `torch.optim.Optimizer` with several groups, wrapped by
            `accelerate` or not. A second BlockLR on an optimizer takes the place of the first.
        model: The model that it trains, under any wrapper.
        curvature: One of "newton", "secant", "directional", "gauss_newton", "analytic",
            "hutchinson", "gradient" and "power_law", see `blockopt.curvature`; or a function of the
            model and of what `step` is given, which returns `{parameter name: tensor of
            num_blocks}`, and which runs in evaluation mode and without gradients to see.
            "directional", "secant" (the same from two gradients) and "newton" look along the
            optimizer's update, for which they keep a copy of the parameters from before the step
            that a refresh follows.
        every: Optimizer steps from one refresh to the next.
        warmup: Optimizer steps before the first one counts.
        until: The last optimizer step that a refresh may follow; from then on the scales stay.
        power: Of the curvature, see `block_scales`.
        bounds: The smallest and the largest scale.
        by: Which blocks share a scale: "role", "layer", "tensor" or "head", see `block_scales`.
        beta: Weight of the past in the smoothed scales; 0 for none.
        num_probes: Samples a batch, for "analytic", "gauss_newton" and "hutchinson".
        seed: Of these samples, which differ from step to step and from rank to rank.

    Attributes:
        history: Curvature and scale of each group of blocks at each refresh; of each role in each
            parameter for `by="head"`.
        failures: How many refreshes have failed.

    Raises:
        ValueError: If an option is out of range, the optimizer has a parameter that the model
            lacks, is one of blockopt's without blocks, or another with one group or without `lr`.
        TypeError: If the optimizer is not a `torch.optim.Optimizer`.

    Example:
        >>> from blockopt import BlockSGD, param_groups
        >>> model, x = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), torch.tensor([[3.0, 4.0]])
        >>> optimizer = BlockSGD(param_groups(model), lr=0.1)
        >>> block_lr = BlockLR(optimizer, model, curvature=lambda *_: {
        ...     "0.weight": torch.tensor([4.0]), "0.bias": torch.tensor([1.0]),
        ...     "1.weight": torch.tensor([1.0]), "1.bias": torch.tensor([1.0])})
        >>> model(x).sum().backward()
        >>> optimizer.step()
        >>> block_lr.step(lambda: model(x).sum())
        >>> block_lr.last_scales
        role   blocks   min  median   max
        norm        2  1.32    1.32  1.32
        bias        1  1.32    1.32  1.32
        other       1  0.66    0.66  0.66
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        *,
        curvature: str | CurvatureFunction = "newton",
        every: int = 100,
        warmup: int = 0,
        until: int | None = None,
        power: float = -0.5,
        bounds: tuple[float, float] = (0.1, 10.0),
        by: Level = "role",
        beta: float = 0.9,
        num_probes: int = 1,
        seed: int = 0,
    ) -> None:
        if not callable(curvature) and curvature not in ESTIMATORS:
            names = ", ".join(map(repr, ESTIMATORS))
            raise ValueError(
                f"Invalid curvature={curvature!r}. Must be one of {names}, or a function."
            )
        for name, value, low in (("every", every, 1), ("warmup", warmup, 0), ("until", until, 0)):
            if (name, value) != ("until", None) and (not isinstance(value, int) or value < low):
                raise ValueError(f"Invalid {name}={value!r}. Must be an integer >= {low}.")
        if not 0 <= beta < 1:
            raise ValueError(f"Invalid beta={beta}. Must be in [0, 1).")
        check_probes(num_probes)
        self._model, self._curvature, self._num_probes, self._seed = (
            model,
            curvature,
            num_probes,
            seed,
        )
        self._estimator = None if callable(curvature) else ESTIMATORS[curvature]
        self._needs_update = self._estimator is not None and self._estimator.needs_update
        self._every, self._warmup, self._until, self._beta = every, warmup, until, beta
        self._options: dict[str, Any] = {"power": power, "bounds": bounds, "by": by}
        self.history = History()
        self.failures = 0
        self._failures_in_a_row = 0
        self._served = 0  # the last due step that was followed by a refresh
        self._log_scales: dict[str, Tensor] = {}
        self._attached = AttachedOptimizer(optimizer, model, self._wants_update)
        blocks = self._attached.blocks()
        block_scales(_ones(blocks), model, blocks, **self._options)  # checks the options
        self._attached.attach()

    @property
    def num_steps(self) -> int:
        """How many steps the optimizer has taken, with those before the checkpoint that was loaded."""
        return self._attached.num_steps

    @property
    def last_scales(self) -> ScaleTable:
        """The scales of all blocks after the last refresh. Prints as a table by role."""
        blocks = self._attached.blocks()
        scales = _ones(blocks) | {
            name: logs.exp().float() for name, logs in self._log_scales.items() if name in blocks
        }
        return ScaleTable(scales, blocks)

    def step(self, losses: Losses | None = None) -> None:
        """Refresh the scales if that is due; otherwise do nothing, and do not call the closure.

        Args:
            losses: A closure that returns the mean loss of a batch, or that and its number of
                tokens, or several of them, which are averaged by tokens. A closure is called twice
                by "secant" and "newton", and must then take the same batch: draw it before.
                "gradient" and "power_law" need none.

        Raises:
            ValueError: If the curvature needs a loss and there is none; or about the model, the
                loss function, or what a function of your own returned.
            RuntimeError: If this was the third failure in a row, or if another BlockLR has taken
                the place of this one.
        """
        if not self._attached.is_attached:
            raise RuntimeError(
                "Another BlockLR has taken the place of this one on the same optimizer. Call that one's step."
            )
        self._attached.restore()
        if losses is None and self._estimator is not None and self._estimator.needs_loss:
            raise ValueError(
                f"curvature={self._curvature!r} needs a loss: block_lr.step(lambda: model(**batch).loss)."
            )
        due = self._last_due(self.num_steps)
        if due > self._served and (not self._needs_update or self._attached.has_update):
            self._served = due
            self._refresh(losses)

    def _last_due(self, number: int) -> int:
        """The last step up to this one that a refresh is due after, 0 if there is none."""
        number = number if self._until is None else min(number, self._until)
        beyond = number - self._warmup - 1
        return number - beyond % self._every if beyond >= 0 else 0

    def _wants_update(self, number: int) -> bool:
        return self._needs_update and self._last_due(number) > self._served

    def _refresh(self, losses: Losses | None) -> None:
        blocks = self._attached.blocks()
        values, error = self._try_to_measure(losses, blocks)
        # A rank that has failed takes part with NaN, which the mean shows to all: they decide
        # alike, and none waits.
        values = mean_over_ranks(values, next(self._model.parameters()).device)
        curvature = dict(zip(blocks, values.split([entry.num_blocks for entry in blocks.values()])))
        scales: dict[str, Tensor] = {}
        if error is None:
            scales, error = self._try_to_scale(curvature, blocks)
        if error is not None:
            if not _may_pass(error):
                raise error
            self._fail(error)
            return
        self._failures_in_a_row = 0
        parameters = trainable(self._model)
        numel = {
            name: block_numel(tuple(parameters[name].shape), entry.split).double()
            for name, entry in blocks.items()
        }
        smoothed = {
            name: self._smoothed(name, scale.double().log()) for name, scale in scales.items()
        }
        self._log_scales |= self._attached.pool(smoothed, numel)
        self._attached.write(self._log_scales)
        self._record(curvature, blocks, numel)

    def _try_to_measure(
        self, losses: Losses | None, blocks: Mapping[str, Blocks]
    ) -> tuple[Tensor, Exception | None]:
        """The curvature of all blocks in a row; or NaN and the error."""
        try:
            return _flat(self._measure(losses, blocks), blocks), None
        except Exception as error:
            if _may_pass(error):
                traceback.clear_frames(
                    error.__traceback__
                )  # they hold the graph of the loss, which may be all of the memory
            return torch.full(
                (sum(entry.num_blocks for entry in blocks.values()),), math.nan, dtype=torch.float64
            ), error

    def _measure(self, losses: Losses | None, blocks: Mapping[str, Blocks]) -> Mapping[str, Tensor]:
        model = self._model
        sharded = next((p.device for p in model.parameters() if is_sharded(p)), None)
        if losses is not None and sharded is not None:
            losses = (
                agreed(losses, sharded)
                if callable(losses)
                else [agreed(closure, sharded) for closure in losses]
            )
        if callable(self._curvature):
            with undisturbed(model):
                return self._curvature(model, losses)
        assert self._estimator is not None
        # From seed, step and rank alone: a resumed run draws the same samples, and no two ranks do.
        seed = random.Random(f"{self._seed} {self.num_steps} {rank()}").getrandbits(32)
        request = Request(
            model,
            blocks,
            () if losses is None else losses,
            self._attached.take_update() if self._needs_update else {},
            self.last_scales.as_dict(),  # which the update was made with
            self._options["by"],
            self._num_probes,
            torch.Generator().manual_seed(seed),
        )
        return self._estimator.measure(request)

    def _try_to_scale(
        self, curvature: Mapping[str, Tensor], blocks: Mapping[str, Blocks]
    ) -> tuple[dict[str, Tensor], Exception | None]:
        if not all(bool(torch.isfinite(values).all()) for values in curvature.values()):
            return {}, FloatingPointError("The curvature of some blocks is not finite.")
        try:
            return block_scales(curvature, self._model, blocks, **self._options), None
        except (
            ValueError
        ) as error:  # options, names and lengths have been checked: nothing positive was measured
            return {}, NowherePositive(str(error))

    def _smoothed(self, name: str, new: Tensor) -> Tensor:
        old = self._log_scales.get(name)
        return new if old is None else self._beta * old + (1 - self._beta) * new

    def _record(
        self,
        curvature: Mapping[str, Tensor],
        blocks: Mapping[str, Blocks],
        numel: Mapping[str, Tensor],
    ) -> None:
        by = self._options["by"]
        groups, numbers = block_groups(blocks, "tensor" if by == "head" else by)
        entries = sum_groups(numel, numbers, len(groups))

        def means(values: Mapping[str, Tensor]) -> list[float]:
            weighted = {name: values[name] * numel[name] for name in blocks}
            return (sum_groups(weighted, numbers, len(groups)) / entries).tolist()

        scales = [math.exp(mean) for mean in means(self._log_scales)]
        self.history.append(
            Refresh(self.num_steps, dict(zip(groups, means(curvature))), dict(zip(groups, scales)))
        )

    def _fail(self, error: Exception) -> None:
        """Keep the scales for now."""
        self.failures += 1
        self._failures_in_a_row += not isinstance(error, NowherePositive)
        cause = f"{type(error).__name__}: {error}"
        if self._failures_in_a_row >= FAILURES_IN_A_ROW:
            raise RuntimeError(
                f"{self._failures_in_a_row} refreshes of the block learning rates in a row have failed, the last after step "
                f"{self.num_steps}. {cause}"
            ) from error
        if self.failures == 1:
            warnings.warn(
                f"The refresh of the block learning rates after step {self.num_steps} has failed, and the scales stay as they "
                f"are. {cause} Later ones are counted in block_lr.failures without a warning.",
                stacklevel=4,
            )

    def state_dict(self) -> dict[str, Any]:
        """The state as numbers, strings and tensors, which `torch.load(weights_only=True)` takes."""
        return {
            "num_steps": self.num_steps,
            "served": self._served,
            "failures": self.failures,
            "failures_in_a_row": self._failures_in_a_row,
            "log_scales": {
                _unwrapped_name(name): logs.clone() for name, logs in self._log_scales.items()
            },
            "history": [refresh.to_plain() for refresh in self.history],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state, and give its scales to the optimizer. Load the optimizer's own state first.

        Raises:
            ValueError: If the scales are those of another model or of other blocks.
        """
        names = {_unwrapped_name(name): name for name, _ in self._model.named_parameters()}
        blocks = self._attached.blocks()
        loaded = {}
        for saved, logs in state_dict["log_scales"].items():
            if saved not in names:
                raise ValueError(
                    f"The checkpoint has scales for {saved!r}, which is no parameter of the model."
                )
            entry = blocks.get(names[saved])
            if entry is not None and len(logs) != entry.num_blocks:
                raise ValueError(
                    f"The checkpoint has {len(logs)} scales for {saved!r}. Must be {entry.num_blocks}, one a block."
                )
            loaded[names[saved]] = logs.clone()
        self._attached.num_steps, self._served = state_dict["num_steps"], state_dict["served"]
        self.failures, self._failures_in_a_row = (
            state_dict["failures"],
            state_dict["failures_in_a_row"],
        )
        self._log_scales = loaded
        self.history = History(Refresh.from_plain(refresh) for refresh in state_dict["history"])
        if loaded:
            self._attached.write(loaded)


def _unwrapped_name(name: str) -> str:
    """The name of a parameter without what DDP and `torch.compile` put before it, so that a checkpoint serves any wrapper."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _ones(blocks: Mapping[str, Blocks]) -> dict[str, Tensor]:
    return {name: torch.ones(entry.num_blocks) for name, entry in blocks.items()}


def _flat(curvature: Mapping[str, Tensor], blocks: Mapping[str, Blocks]) -> Tensor:
    """The values of all blocks in a row, or `ValueError` if some are missing."""
    wrong = sorted(curvature.keys() ^ blocks.keys())
    if wrong:
        raise ValueError(
            f"Invalid curvature: {wrong[:3]} are in it or among the model's trainable parameters, not in both."
        )
    for name, entry in blocks.items():
        if (shape := tuple(curvature[name].shape)) != (entry.num_blocks,):
            raise ValueError(
                f"Invalid curvature of shape {shape} for {name!r}. Must be {(entry.num_blocks,)}, one a block."
            )
    return torch.cat([curvature[name].detach().to("cpu", torch.float64) for name in blocks])


def _may_pass(error: Exception) -> bool:
    """Whether the next refresh may well succeed: numbers that are not finite, no memory, a closure that returned no loss."""
    if isinstance(error, RuntimeError):
        return any(sign in str(error) for sign in ("out of memory", "can't allocate memory"))
    return isinstance(error, (FloatingPointError, TypeError, MemoryError))
