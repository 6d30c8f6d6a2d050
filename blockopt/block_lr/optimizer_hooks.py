"""The optimizer's side of `BlockLR`: it counts steps, keeps the last update and applies the scales.

`hooks_for` chooses between two classes of one interface: `BlockOptimizerHooks` hands the scales to
an optimizer of blockopt, and `GroupOptimizerHooks` multiplies the learning rates of any other one
while its step runs.
"""

from __future__ import annotations

import glob
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from blockopt.block_lr.table_rows import TableRows
from blockopt.block_lr.wrappers import unwrapped
from blockopt.blocks import Blocks, find_blocks, from_plain
from blockopt.curvature import SlopesAlongUpdates
from blockopt.distributed import reshard
from blockopt.optim import BLOCK_LR, BlockOptimizer

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


class OptimizerHooks(ABC, Generic[AnyOptimizer]):
    """Hooks on the steps of an optimizer that trains a model; they work from `attach` on.

    No parameter is held here: `accelerate` and FSDP2 replace them, and wrappers change their names,
    so both are looked up by identity at each use.

    Args:
        optimizer: The optimizer, without wrappers.
        model: The model that it trains.
        wants_update: Whether the update that the step of this number makes will be asked for.

    Attributes:
        num_steps: How many steps the optimizer has taken.
        slopes: What collects slopes along the updates, if anything does.
        rows: What collects squared gradients of the rows of tables, if anything does.

    Raises:
        ValueError: If the optimizer has a parameter that the model lacks, or cannot be scaled.
    """

    def __init__(
        self, optimizer: AnyOptimizer, model: nn.Module, wants_update: Callable[[int], bool]
    ) -> None:
        self._optimizer, self._model, self._wants_update = optimizer, model, wants_update
        self.num_steps = 0
        self.slopes: SlopesAlongUpdates | None = None
        self.rows: TableRows | None = None
        self._before: list[Tensor] | None = None  # the parameters before the last step
        self._in_step = False
        self._check()

    @abstractmethod
    def _check(self) -> None:
        """Raise `ValueError` if the optimizer cannot be scaled."""

    @abstractmethod
    def applicable(
        self, logs: Mapping[str, Tensor], numel: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The logarithms of the scales as this optimizer can apply them.

        Args:
            logs: `{parameter name: logarithm of each block's scale}`.
            numel: `{parameter name: number of entries of each block}`.
        """

    def collect_rows(self) -> None:
        """Collect the squared gradients of the rows of tables, which some optimizers can scale."""
        raise ValueError(
            f"Invalid rows=True with {type(self._optimizer).__name__}, which has one learning rate "
            "for all rows of a table. Take an optimizer of blockopt, or leave rows out."
        )

    @abstractmethod
    def write(self, logs: Mapping[str, Tensor]) -> None:
        """Scale the steps from now on by what `applicable` returned."""

    def restore(self, *_: Any) -> None:
        """Undo what a step that raised may have left behind."""

    def attach(self, save: Callable[[], str], load: Callable[[str], None]) -> None:
        """Put the hooks on the optimizer, in place of those that another `BlockLR` put there.

        From now on the optimizer's `state_dict` carries a text in its first group. Until the next
        step the group keeps the text of the last checkpoint that was loaded, so that it does not
        matter whether that happened before or after the attachment.

        Args:
            save: Returns the text that `state_dict` is to carry.
            load: Takes the text of a checkpoint.
        """
        self._save, self._load = save, load
        replaced = _attached[self._optimizer]() if self._optimizer in _attached else None
        if replaced is not None:
            replaced._detach()
        _attached[self._optimizer] = ref(self)
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
            self._optimizer.register_state_dict_pre_hook(self.restore),
            self._optimizer.register_state_dict_post_hook(self._save_text),
            self._optimizer.register_load_state_dict_post_hook(self._load_text),
        ]
        self._load_text()

    def _detach(self) -> None:
        self.restore()
        for hook in self._hooks:
            hook.remove()

    def _save_text(self, _: Any, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0][BLOCK_LR] = self._save()

    def _load_text(self, *_: Any) -> None:
        # DCP loads only what is there already, so there is an empty text at least.
        text = self._optimizer.param_groups[0].setdefault(BLOCK_LR, "")
        if text:
            self._load(text)

    @property
    def is_attached(self) -> bool:
        """Whether no other `BlockLR` has been attached since."""
        return _attached[self._optimizer]() is self

    def _named_groups(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Each group, and the names that the model has for its parameters."""
        groups = self._optimizer.param_groups
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        if not all(parameter in names for group in groups for parameter in group["params"]):
            reshard(self._model)
            names = {parameter: name for name, parameter in self._model.named_parameters()}
        held = [parameter for group in groups for parameter in group["params"]]
        foreign = [parameter for parameter in held if parameter not in names]
        if foreign or not held:
            other = f"one of shape {tuple(foreign[0].shape)}" if foreign else "none at all"
            raise ValueError(
                f"The parameters of the optimizer are none of the model's (it has {other}). Build "
                "the optimizer on the very model that BlockLR is given. If an engine has flattened "
                "the parameters (DeepSpeed's ZeRO 1 to 3), use FSDP2, which keeps them."
            )
        for group in groups:
            yield group, [names[parameter] for parameter in group["params"]]

    def blocks(self) -> dict[str, Blocks]:
        """The blocks of all trainable parameters: those of the optimizer's groups if it has any."""
        given: dict[str, Blocks] = {}
        for group, names in self._named_groups():
            plain = group.get("blocks") or ()
            given |= {name: from_plain(entry) for name, entry in zip(names, plain)}
        trained = [name for name, p in self._model.named_parameters() if p.requires_grad]
        if not given.keys() >= set(trained):
            known = {glob.escape(name): given[name] for name in trained if name in given}
            given = find_blocks(self._model, overrides=known)
        return {name: given[name] for name in trained}

    @property
    def has_update(self) -> bool:
        """Whether the last step's update was asked for, and the step moved something."""
        return self._before is not None

    def take_update(self) -> dict[str, Tensor]:
        """Return the last step's update of each parameter, and give its memory away."""
        assert self._before is not None
        pairs = [pair for g, names in self._named_groups() for pair in zip(g["params"], names)]
        before, self._before = self._before, None
        return {
            name: old.neg_().add_(p.detach())
            for (p, name), old in zip(pairs, before)
            if p.requires_grad
        }

    @_disable_dynamo  # a compiled step calls it as it is
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.restore()
        self._prepare_step()
        optimizer.param_groups[0][BLOCK_LR] = ""
        self.forget_refused_steps()
        groups = optimizer.param_groups
        self._before = None
        # A schedule that warms up from zero moves nothing at first: there is no direction then.
        if self._wants_update(self.num_steps + 1) and any(float(g["lr"]) != 0 for g in groups):
            self._before = [p.detach().clone() for group in groups for p in group["params"]]
        if self.slopes is not None:
            self.slopes.before_step(self.num_steps + 1, self._trained)
        self._scale_step()
        self._in_step = True

    def _trained(self) -> dict[str, Tensor]:
        pairs = [pair for g, names in self._named_groups() for pair in zip(names, g["params"])]
        return {name: parameter for name, parameter in pairs if parameter.requires_grad}

    def _prepare_step(self) -> None:
        """Do what a step needs before it begins."""

    def _scale_step(self) -> None:
        """Change the optimizer for the length of a step."""

    @_disable_dynamo
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.restore()
        if not self._in_step:  # hooks run twice if the step of a subclass calls that of its base
            return
        self._in_step = False
        # GradScaler leaves it to a fused step to do nothing where it has found an infinity.
        overflow = bool(getattr(optimizer, "found_inf", None))
        if overflow:
            self._before = None
        else:
            self.num_steps += 1
            if self.slopes is not None:
                self.slopes.after_step(self._trained, self.blocks)
            if self.rows is not None:
                self.rows.after_step(self._trained, self.blocks)

    def forget_refused_steps(self) -> None:
        """Take back what was noted of steps that the optimizer turned out to have refused."""


# Weak on both sides: the hooks hold the optimizer, which holds the hooks.
_attached: WeakKeyDictionary[torch.optim.Optimizer, ReferenceType[OptimizerHooks[Any]]] = (
    WeakKeyDictionary()
)


class BlockOptimizerHooks(OptimizerHooks[BlockOptimizer]):
    """Hands the scales to an optimizer of blockopt, which has one per block."""

    _refused = 0  # how many refused steps are taken back

    def forget_refused_steps(self) -> None:
        """Take back what was noted of refused steps, which an accelerator tells after the step.

        This waits for the last step. A step that raised was not counted to begin with.
        """
        refused = self._optimizer.refused_until_last_step()
        if refused != self._refused and not self._in_step:
            self.num_steps -= refused - self._refused
            self._before = None
            if self.slopes is not None:
                self.slopes.take_back()
        self._refused = refused

    def collect_rows(self) -> None:
        """Collect the squared gradients of the rows of tables."""
        self.rows = TableRows()

    def _check(self) -> None:
        name = type(self._optimizer).__name__
        for group, _ in self._named_groups():
            if group["blocks"] is None or "param_names" not in group:
                raise ValueError(
                    f"{name} has no blocks. Build it with "
                    f"{name}(blockopt.param_groups(model), ...)."
                )

    def applicable(
        self, logs: Mapping[str, Tensor], numel: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """All of them."""
        return dict(logs)

    def write(self, logs: Mapping[str, Tensor]) -> None:
        """Set the scales of the optimizer's own blocks."""
        scales = {}
        for group, names in self._named_groups():
            for own, name in zip(group["param_names"], names):
                if name in logs:
                    scales[own] = logs[name].exp()
        self._optimizer.set_block_scales(scales)

    def _prepare_step(self) -> None:
        """Create states now: a step that is compiled with hooks around it cannot do so itself."""
        if self.num_steps == 0:
            for group in self._optimizer.param_groups:
                self._optimizer._init_group(group)


class GroupOptimizerHooks(OptimizerHooks[torch.optim.Optimizer]):
    """Multiplies the `lr` of each group while a step runs, for any optimizer of several groups."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        wants_update: Callable[[int], bool],
    ) -> None:
        super().__init__(optimizer, model, wants_update)
        # Ones multiply too: a step that is compiled while all groups hold one lr tensor would read
        # only that one for ever.
        self._multipliers = [1.0] * len(optimizer.param_groups)
        self._changed: list[tuple[dict[str, Any], Any, Any]] = []  # group, scaled lr, own lr

    def _check(self) -> None:
        groups = [group for group, _ in self._named_groups()]
        name = type(self._optimizer).__name__
        inside = getattr(self._optimizer, "optim", None)
        if isinstance(inside, BlockOptimizer):
            own = type(inside).__name__
            raise ValueError(
                f"{name} hides the blocks of {own}. Divide its state by fully_shard (FSDP2), or "
                f"give BlockLR a {own}(blockopt.param_groups(model), ...) without {name}."
            )
        if len(groups) == 1:
            raise ValueError(
                f"{name} has one group, so all blocks share its learning rate. Build it with "
                f'{name}(blockopt.param_groups(model, by="parameter"), ...), or use an optimizer '
                "of blockopt."
            )
        self._refuse_mixed_roles()
        rates = [group.get("lr") for group in groups]
        if not all(isinstance(rate, (int, float, Tensor)) for rate in rates):
            raise ValueError(
                f"Invalid lr={rates} in the groups of {name}. Must be numbers or tensors, which "
                "can be scaled."
            )

    def _refuse_mixed_roles(self) -> None:
        """A group has one learning rate; norms and biases, which are few, may share one."""
        blocks, kind = self.blocks(), type(self._optimizer).__name__
        for _, names in self._named_groups():
            known = [dict.fromkeys(blocks[name].roles) for name in names if name in blocks]
            roles = {"+".join(of_one) for of_one in known} - {"norm", "bias"}
            if len(roles) > 1:
                raise ValueError(
                    f"A group of {kind} mixes the roles {', '.join(sorted(roles))}, so they would "
                    f"share one learning rate. Build it with "
                    f'{kind}(blockopt.param_groups(model, by="parameter"), ...), or use an '
                    "optimizer of blockopt."
                )

    def applicable(
        self, logs: Mapping[str, Tensor], numel: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """One for each group: the mean over its blocks by number of entries."""
        pooled = dict(logs)
        for _, names in self._named_groups():
            members = [name for name in names if name in logs]
            weight = sum(float(numel[name].sum()) for name in members)
            total = sum(float(torch.dot(numel[name], logs[name])) for name in members)
            mean = total / max(weight, 1.0)
            pooled |= {name: torch.full_like(logs[name], mean) for name in members}
        return pooled

    def write(self, logs: Mapping[str, Tensor]) -> None:
        """Set the multiplier of each group."""
        known = [[name for name in names if name in logs] for _, names in self._named_groups()]
        self._multipliers = [
            math.exp(float(logs[names[0]][0])) if names else 1.0 for names in known
        ]

    def _scale_step(self) -> None:
        for group, multiplier in zip(self._optimizer.param_groups, self._multipliers):
            own, scaled = group["lr"], group["lr"] * multiplier
            self._changed.append((group, scaled, own))
            group["lr"] = scaled

    @_disable_dynamo
    def restore(self, *_: Any) -> None:
        """Put back the learning rates, unless a schedule has set new ones since."""
        for group, scaled, own in self._changed:
            if group["lr"] is scaled:
                group["lr"] = own
        self._changed = []


def hooks_for(
    optimizer: Any, model: nn.Module, wants_update: Callable[[int], bool]
) -> OptimizerHooks[Any]:
    """Return the hooks for an optimizer, wrapped or not; see `OptimizerHooks` for the arguments."""
    inner = unwrapped(optimizer)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Invalid model of type {type(model).__name__}. Must be the torch.nn.Module that the "
            "optimizer trains: BlockLR(optimizer, model)."
        )
    _refuse_fsdp1(model)
    if isinstance(inner, BlockOptimizer):
        return BlockOptimizerHooks(inner, model, wants_update)
    return GroupOptimizerHooks(inner, model, wants_update)


def _refuse_fsdp1(model: nn.Module) -> None:
    """FSDP1 averages gradients in every backward pass, those of a refresh too, or holds shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # its import takes long, and nobody needed it
    if fsdp and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        raise ValueError(
            "BlockLR cannot measure a model under FSDP1 (FullyShardedDataParallel), which averages "
            "gradients over ranks by itself. Use fully_shard (FSDP2), or DDP if nothing is sharded."
        )
