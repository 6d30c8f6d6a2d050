"""A learning rate for every Hessian block, kept up to date while training.

`BlockLR` measures the curvature of the blocks now and then, turns it into a multiplier and gives
that to the optimizer. The schedule keeps `group["lr"]`, the optimizer keeps its moments, and a
refresh leaves no other trace: gradients, random numbers, buffers and modes are those that training
would have without it.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blockopt.block_lr import defaults
from blockopt.block_lr.failed_refreshes import FailedRefreshes
from blockopt.block_lr.history import History, Refresh, ScaleTable
from blockopt.block_lr.optimizer_hooks import hooks_for
from blockopt.block_lr.saved_state import from_text, to_text
from blockopt.block_lr.scales import (
    ScaleOptions,
    centred,
    entries_of_blocks,
    flat_curvature,
    scales_and_guesses,
)
from blockopt.block_lr.smoothing import Smoothing
from blockopt.block_lr.wrappers import unwrapped
from blockopt.blocks import Blocks, Level, block_groups, by_name
from blockopt.checks import check_choice, check_count
from blockopt.curvature import ESTIMATORS, Request, SlopesAlongUpdates
from blockopt.distributed import (
    compute_device,
    is_same_everywhere,
    is_sharded,
    mean_over_ranks,
    together,
)
from blockopt.errors import NonFiniteError, may_pass
from blockopt.measure.closures import Losses, agreed
from blockopt.no_trace import preserved_state
from blockopt.optim import unwrapped_name

CurvatureFunction = Callable[[nn.Module, Any], Mapping[str, Tensor]]
EXAMPLE = "block_lr.step(lambda: model(**batch).loss)."


class BlockLR:
    """Gives every Hessian block of a model its own learning rate, `lr * scale[block]`.

    A refresh measures the curvature, turns it into scales (`block_scales`), and moves the logarithm
    of each scale towards them by `1 - beta`, from 0 on; scales whose measurements differ from
    refresh to refresh are drawn towards 1 by as much as that noise explains (`Smoothing`). The
    geometric mean of the scales over all weights stays 1. Call `step` after `optimizer.step()` and
    before `zero_grad()`; it does nothing unless a refresh is due:

        optimizer = blockopt.BlockAdamW(blockopt.param_groups(model), lr=3e-3)
        block_lr = blockopt.BlockLR(optimizer, model, every=50)
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            scheduler.step()
            block_lr.step(lambda: model(**batch).loss)
            optimizer.zero_grad()

    With the optimizers of blockopt each block has its scale. Any other optimizer needs several
    groups, best `torch.optim.AdamW(blockopt.param_groups(model, by="parameter"), ...)`: while its
    step runs, the `lr` of each group is multiplied by the geometric mean of the scales of its
    blocks; schedules see their own value. Its weight decay is then scaled too, since `torch.optim`
    decays by `lr * weight_decay`; blockopt's optimizers do not scale it.

    The first refresh follows optimizer step `warmup + 1`, and the next ones follow every `every`
    steps. Micro-batches of gradient accumulation, steps that a `GradScaler` skips and steps that
    the optimizer refuses do not count.

    If a loss or a curvature is not finite, memory runs out, or a closure returns None, the
    scales stay as they are: the first time there is a warning, `failures` counts them, and the
    third in a row raises. If no block has a positive curvature, as is common in the first steps,
    the scales stay too, and that never raises. All other errors are raised at once.

    The optimizer's `state_dict` carries the state of its BlockLR, and loading it restores that,
    before or after the BlockLR is made: a loop that resumes its optimizer resumes the block
    learning rates too. DCP loads into what is there already, so make the BlockLR before.

    On many ranks (DDP, FSDP2, tensor parallelism) all of them call `step` with their own batches.
    The curvature is that of the global batch, whatever the number of ranks; that of a function of
    your own is averaged. All ranks hold the same scales, and a refresh that fails on one rank fails
    on all of them.

    A refresh runs in evaluation mode, where transformers does no activation checkpointing. Measure
    on a smaller batch if the model needs that to fit into memory.

    Args:
        optimizer: One of blockopt's, or any `torch.optim.Optimizer` with several groups, wrapped by
            `accelerate` or not. A second BlockLR on an optimizer takes the place of the first.
        model: The model that it trains, under any wrapper.
        curvature: The name of an estimator in `blockopt.curvature.ESTIMATORS`; or a function of the
            model and of what `step` is given that returns `{parameter name: one value per block}`,
            which runs in evaluation mode and sees no gradients. "newton", "secant" and
            "directional" look along the optimizer's update, and for that keep a copy of the
            parameters from before the step that a refresh follows.
        every: Optimizer steps from one refresh to the next: by default 75 for SGD and 150 for all
            others.
        warmup: Optimizer steps before the first one counts.
        power: The power of the curvature, see `block_scales`: by default -1 for SGD, whose steps
            are as long as the gradient, and -1/2 for all others.
        bounds: The smallest and the largest scale: by default 1e-3 and 1e3 for SGD, 0.1 and 10 for
            all others.
        by: Which blocks share a scale: "role", "layer", "tensor" or "head", see `block_scales`.
        beta: The weight of the past in the smoothed scales, which start at 1; 0 takes each
            measurement as it is. By default 0.5 for SGD and 0.9 for all others.
        rows: Whether rows of embeddings and heads differ, by how often their tokens stand in the
            text (see `table_rows.py`), instead of sharing the scale of their group. By default only
            for SGD: all other steps have been divided by the size of the row's gradient already.
        num_probes: Samples per batch, for "analytic", "gauss_newton" and "hutchinson".
        seed: The seed of these samples, which differ from step to step.

    Attributes:
        history: Curvature and scale of each group of blocks at each refresh; for `by="head"` of
            each role in each parameter.

    Raises:
        ValueError: If an option is out of range, the optimizer has a parameter that the model
            lacks, is one of blockopt's without blocks, or another with one group or without `lr`.
        TypeError: If the optimizer is not a `torch.optim.Optimizer`, or the model not a module.

    Example:
        >>> from blockopt import BlockAdamW, param_groups
        >>> model, x = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), torch.tensor([[3.0, 4.0]])
        >>> optimizer = BlockAdamW(param_groups(model), lr=0.1)
        >>> values = {"0.weight": 4.0, "0.bias": 1.0, "1.weight": 1.0, "1.bias": 1.0}
        >>> curvature = {name: torch.tensor([value]) for name, value in values.items()}
        >>> block_lr = BlockLR(optimizer, model, curvature=lambda *_: curvature, beta=0.0)
        >>> model(x).sum().backward()
        >>> optimizer.step()
        >>> block_lr.step()
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
        curvature: str | CurvatureFunction = defaults.CURVATURE,
        every: int | None = None,
        warmup: int = 0,
        power: float | None = None,
        bounds: tuple[float, float] | None = None,
        by: Level = "role",
        beta: float | None = None,
        rows: bool | None = None,
        num_probes: int = 1,
        seed: int = 0,
    ) -> None:
        if not callable(curvature):
            check_choice("curvature", curvature, ESTIMATORS)
        usual = defaults.rule_for(unwrapped(optimizer))
        every = usual.every if every is None else every
        beta = usual.beta if beta is None else beta
        check_count("every", every)
        check_count("warmup", warmup, smallest=0)
        if not 0 <= beta < 1:
            raise ValueError(f"Invalid beta={beta}. Must be in [0, 1).")
        check_count("num_probes", num_probes)
        self._model, self._curvature = model, curvature
        self._estimator = None if callable(curvature) else ESTIMATORS[curvature]
        self._needs_update = self._estimator is not None and self._estimator.needs_update
        self._num_probes, self._seed = num_probes, seed
        self._every, self._warmup = every, warmup
        self._options = ScaleOptions(
            usual.power if power is None else power, usual.bounds if bounds is None else bounds, by
        )
        self._options.check()
        self.history = History()
        self._failed = FailedRefreshes()
        self._served = 0  # the last due step that was followed by a refresh
        self._smoothing = Smoothing(beta)
        self._log_scales: dict[str, Tensor] = {}  # as applied
        self._known: dict[Any, Any] = {}  # what the estimator keeps from refresh to refresh
        self._hooks = hooks_for(optimizer, model, self._wants_update)
        block_groups(self._hooks.blocks(), by)  # checks `by`
        if self._estimator is not None and self._estimator.needs_slopes:
            self._hooks.slopes = SlopesAlongUpdates(by)
        if usual.rows if rows is None else rows:
            self._hooks.collect_rows()
        self._hooks.attach(
            save=lambda: to_text(self.state_dict()),
            load=lambda text: self.load_state_dict(from_text(text)),
        )

    @property
    def failures(self) -> int:
        """How many refreshes have failed."""
        return self._failed.count

    @property
    def num_steps(self) -> int:
        """How many steps the optimizer has taken, including those before a checkpoint."""
        self._hooks.forget_refused_steps()
        return self._hooks.num_steps

    @property
    def last_scales(self) -> ScaleTable:
        """The scales of all blocks after the last refresh. Prints as a table by role."""
        blocks = self._hooks.blocks()
        scales = {name: torch.ones(entry.num_blocks) for name, entry in blocks.items()}
        for name, logs in self._log_scales.items():
            if name in blocks:
                scales[name] = logs.exp().float()
        return ScaleTable(scales, blocks)

    def step(self, losses: Losses | None = None) -> None:
        """Refresh the scales if that is due; otherwise do nothing, and do not call the closure.

        Args:
            losses: A closure that returns the mean loss of a batch, or that and its number of
                tokens, or several such closures, which are averaged by tokens. "secant" and
                "newton" call a closure twice, and it must use the same batch both times: draw the
                batch outside. "successive_gradients", "gradient" and "power_law" need none.

        Raises:
            TypeError: If it is a loss itself, not a closure, or returns what is no loss.
            ValueError: If the curvature needs a loss and there is none; or about the model, the
                loss function, or what a function of your own returned.
            RuntimeError: If this was the third failure in a row, or if another BlockLR has taken
                the place of this one.
        """
        if not self._hooks.is_attached:
            raise RuntimeError(
                "Another BlockLR has taken the place of this one on the same optimizer. Call that "
                "one's step."
            )
        self._hooks.restore()
        if isinstance(losses, Tensor):
            raise TypeError(f"Got a loss, not a function that returns it. Call {EXAMPLE}")
        if losses is None and self._estimator is not None and self._estimator.needs_loss:
            raise ValueError(f"curvature={self._curvature!r} needs a loss: {EXAMPLE}")
        if self._last_due(self._hooks.num_steps) <= self._served:
            return  # without waiting for the optimizer to know whether it has refused the step
        due = self._last_due(self.num_steps)
        if due > self._served and self._is_ready():
            self._served = due
            self._refresh(losses)

    def _is_ready(self) -> bool:
        """Whether the steps so far have left what the estimator needs of them."""
        slopes = self._hooks.slopes
        return (slopes is None or slopes.is_enough) and (
            not self._needs_update or self._hooks.has_update
        )

    def _last_due(self, number: int) -> int:
        """The last step up to this one that a refresh is due after, 0 if there is none."""
        beyond = number - self._warmup - 1
        return number - beyond % self._every if beyond >= 0 else 0

    def _wants_update(self, number: int) -> bool:
        return self._needs_update and self._last_due(number) > self._served

    def _refresh(self, losses: Losses | None) -> None:
        blocks = self._hooks.blocks()
        try:
            with together():  # a failure on one rank is a failure on all, and none waits
                self._refuse_other_parameters(blocks)
                values = flat_curvature(self._measure(losses, blocks), blocks)
            values = mean_over_ranks(values, compute_device(next(self._model.parameters())))
            if not bool(torch.isfinite(values).all()):
                raise NonFiniteError("The curvature of some blocks is not finite.")
            curvature = by_name(values, blocks)
            scales, _ = scales_and_guesses(curvature, self._model, blocks, self._options)
        except Exception as error:
            if not may_pass(error):
                raise
            # Its frames hold the graph of the loss: maybe all of the memory.
            traceback.clear_frames(error.__traceback__)
            self._failed.note(error, self.num_steps)
            return
        self._failed.end()
        numel = entries_of_blocks(self._model, blocks)
        self._smoothing.add({name: scale.double().log() for name, scale in scales.items()})
        smoothed = self._smoothing.logs()
        logs = {name: smoothed[name] for name in blocks}
        if self._hooks.rows is not None:
            by, power = self._options.by, self._options.power
            for name, log in self._hooks.rows.logs(blocks, numel, by, power).items():
                logs[name] = logs[name] + log
        logs = centred(logs, numel)
        self._log_scales |= self._hooks.applicable(logs, numel)
        self._hooks.write(self._log_scales)
        self.history.append(
            Refresh.of(self.num_steps, curvature, self._log_scales, blocks, numel, self._options.by)
        )

    def _refuse_other_parameters(self, blocks: Mapping[str, Blocks]) -> None:
        """Raise `ValueError` if ranks train different parameters: they would be mixed up."""
        shapes = {name: tuple(p.shape) for name, p in self._model.named_parameters()}
        if not is_same_everywhere(str([(n, shapes[n], b.num_blocks) for n, b in blocks.items()])):
            raise ValueError(
                f"Ranks train different parameters, this one {len(blocks)}, such as "
                f"{next(iter(blocks))!r}. BlockLR averages over all ranks, so all must train the "
                "same ones, replicated or as DTensors. Stages of a pipeline, and experts that only "
                "one rank has, train without BlockLR."
            )

    def _measure(self, losses: Losses | None, blocks: Mapping[str, Blocks]) -> Mapping[str, Tensor]:
        model = self._model
        if callable(self._curvature):
            if losses is not None and any(is_sharded(p) for p in model.parameters()):
                closures = [losses] if callable(losses) else losses
                losses = [agreed(closure, model) for closure in closures]
            with preserved_state(model):
                return self._curvature(model, losses)
        assert self._estimator is not None
        # From seed and step alone: a resumed run draws the same samples, and so do all ranks, of
        # which each takes those of its own batch.
        seed = random.Random(f"{self._seed} {self.num_steps}").getrandbits(32)
        return self._estimator.measure(
            Request(
                model,
                blocks,
                losses=() if losses is None else losses,
                update=self._hooks.take_update() if self._needs_update else {},
                slopes=self._hooks.slopes.take() if self._hooks.slopes is not None else {},
                scales=self.last_scales.as_dict(),
                by=self._options.by,
                num_probes=self._num_probes,
                generator=torch.Generator().manual_seed(seed),
                known=self._known,
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """Return numbers, strings and tensors, which `torch.load(weights_only=True)` takes.

        The optimizer's `state_dict` holds the same, so there is no need to save it apart.
        """
        logs = {unwrapped_name(name): logs.clone() for name, logs in self._log_scales.items()}
        smoothing = {unwrapped_name(n): e for n, e in self._smoothing.state_dict().items()}
        rows = {} if self._hooks.rows is None else self._hooks.rows.sums
        return {
            "num_steps": self.num_steps,
            "served": self._served,
            "failures": self._failed.count,
            "failures_in_a_row": self._failed.in_a_row,
            "log_scales": logs,
            "smoothing": smoothing,
            "slopes": None if self._hooks.slopes is None else self._hooks.slopes.state_dict(),
            "rows": {unwrapped_name(name): sums.cpu() for name, sums in rows.items()},
            "history": [refresh.to_plain() for refresh in self.history],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a saved state, and give its scales to the optimizer.

        Load the optimizer's own state first.

        Raises:
            ValueError: If the scales are those of another model or of other blocks.
        """
        names = {unwrapped_name(name): name for name, _ in self._model.named_parameters()}
        blocks = self._hooks.blocks()
        loaded = {}
        for saved, logs in state_dict["log_scales"].items():
            if saved not in names:
                raise ValueError(
                    f"The checkpoint has scales for {saved!r}, which is no parameter of the model."
                )
            entry = blocks.get(names[saved])
            if entry is not None and len(logs) != entry.num_blocks:
                raise ValueError(
                    f"The checkpoint has {len(logs)} scales for {saved!r}. Must be "
                    f"{entry.num_blocks}, one per block."
                )
            loaded[names[saved]] = logs.clone()
        self._hooks.num_steps, self._served = state_dict["num_steps"], state_dict["served"]
        self._failed = FailedRefreshes(state_dict["failures"], state_dict["failures_in_a_row"])
        self._log_scales = loaded
        smoothing = state_dict["smoothing"].items()
        self._smoothing.load_state_dict({names[name]: entry for name, entry in smoothing})
        if self._hooks.slopes is not None and state_dict["slopes"] is not None:
            self._hooks.slopes.load_state_dict(state_dict["slopes"])
        if self._hooks.rows is not None:
            rows = state_dict["rows"].items()
            self._hooks.rows.sums = {names[name]: sums.clone() for name, sums in rows}
        self.history = History(Refresh.from_plain(plain) for plain in state_dict["history"])
        if loaded:
            self._hooks.write(loaded)
