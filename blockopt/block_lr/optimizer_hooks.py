"""The optimizer's side of `BlockLR`: its steps are counted, its groups get names and blocks, its learning rates are scaled."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks, find_blocks, from_plain
from blockopt.distributed import reshard
from blockopt.optim import BlockOptimizer

# Weak on both sides: what is attached holds the optimizer, which holds the hooks of what is
# attached.
_attached: WeakKeyDictionary[torch.optim.Optimizer, ReferenceType[AttachedOptimizer]] = (
    WeakKeyDictionary()
)


class AttachedOptimizer:
    """An optimizer, and the model that it trains. Its steps are counted and scaled from `attach` on.

    No parameter is held here: `accelerate` and FSDP2 replace them, and wrappers change their names,
    so both are looked up by identity at each use.

    Args:
        optimizer: Any, wrapped or not.
        model: Any module.
        wants_update: Whether the update that the step of this number makes will be asked for.

    Attributes:
        num_steps: How many steps the optimizer has taken.

    Raises:
        ValueError: If the optimizer has a parameter that the model lacks, is one of blockopt's
            without blocks, or another with one group or without `lr`.
        TypeError: If it is not a `torch.optim.Optimizer`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        wants_update: Callable[[int], bool],
    ) -> None:
        self._optimizer, self._model, self._wants_update = (
            _unwrapped(optimizer),
            model,
            wants_update,
        )
        self.num_steps = 0
        self._refused = 0  # how many steps the optimizer had refused before the present one
        self._before: list[Tensor] | None = None  # the parameters before the last step
        self._in_step = False
        self._changed: list[
            tuple[dict[str, Any], Any, Any]
        ] = []  # group, its lr times the multiplier, its own lr
        self._check()
        # Ones multiply too: a step that is compiled when all groups hold one lr tensor would
        # forever read only that one.
        self._multipliers = (
            []
            if isinstance(self._optimizer, BlockOptimizer)
            else [1.0] * len(self._optimizer.param_groups)
        )

    def attach(self) -> None:
        """Put the hooks on the optimizer, in place of those of what was attached to it before."""
        replaced = _attached[self._optimizer]() if self._optimizer in _attached else None
        if replaced is not None:
            replaced._detach()
        _attached[self._optimizer] = ref(self)
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
            self._optimizer.register_state_dict_pre_hook(self.restore),
        ]

    def _detach(self) -> None:
        self.restore()
        for hook in self._hooks:
            hook.remove()

    @property
    def is_attached(self) -> bool:
        """Whether nothing else has been attached since."""
        return _attached[self._optimizer]() is self

    def _check(self) -> None:
        groups = [group for group, _ in self._named_groups()]
        name = type(self._optimizer).__name__
        if isinstance(self._optimizer, BlockOptimizer):
            if any(group["blocks"] is None or "param_names" not in group for group in groups):
                raise ValueError(
                    f"{name} has no blocks. Build it with {name}(blockopt.param_groups(model), ...)."
                )
            return
        if len(groups) == 1:
            raise ValueError(
                f"{name} has one group, so all blocks share its learning rate. Build it with "
                f'{name}(blockopt.param_groups(model, by="parameter"), ...), or use an optimizer of blockopt.'
            )
        rates = [group.get("lr") for group in groups]
        if not all(isinstance(rate, (int, float, Tensor)) for rate in rates):
            raise ValueError(
                f"Invalid lr={rates} in the groups of {name}. Must be numbers or tensors, which can be scaled."
            )

    def _named_groups(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Each group, and the names that the model has for its parameters."""
        parameters = [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        if not all(parameter in names for parameter in parameters):
            reshard(self._model)
            names = {parameter: name for name, parameter in self._model.named_parameters()}
        for parameter in parameters:
            if parameter not in names:
                shape = tuple(parameter.shape)
                raise ValueError(
                    f"The optimizer has a parameter of shape {shape} that is none of the model's."
                )
        for group in self._optimizer.param_groups:
            yield group, [names[parameter] for parameter in group["params"]]

    def blocks(self) -> dict[str, Blocks]:
        """The blocks of all parameters that the model trains now: as the optimizer's groups have them, if they do."""
        given: dict[str, Blocks] = {}
        for group, names in self._named_groups():
            given |= {
                name: from_plain(plain) for name, plain in zip(names, group.get("blocks") or ())
            }
        trained = [
            name for name, parameter in self._model.named_parameters() if parameter.requires_grad
        ]
        if not given.keys() >= set(trained):
            given = find_blocks(
                self._model,
                overrides={glob.escape(name): given[name] for name in trained if name in given},
            )
        return {name: given[name] for name in trained}

    def pool(self, logs: Mapping[str, Tensor], numel: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The logarithms of the scales as the optimizer can apply them: one for each of its groups, unless it is blockopt's."""
        pooled = dict(logs)
        if isinstance(self._optimizer, BlockOptimizer):
            return pooled
        for _, names in self._named_groups():
            members = [name for name in names if name in logs]
            weight = sum(float(numel[name].sum()) for name in members)
            mean = sum(float(torch.dot(numel[name], logs[name])) for name in members) / max(
                weight, 1.0
            )
            pooled |= {name: torch.full_like(logs[name], mean) for name in members}
        return pooled

    def write(self, logs: Mapping[str, Tensor]) -> None:
        """Make these, which `pool` gave, the logarithms of the optimizer's scales."""
        if isinstance(self._optimizer, BlockOptimizer):
            pairs = [
                pair
                for group, names in self._named_groups()
                for pair in zip(group["param_names"], names)
            ]
            self._optimizer.set_block_scales(
                {own: logs[name].exp() for own, name in pairs if name in logs}
            )
        else:
            known = [[name for name in names if name in logs] for _, names in self._named_groups()]
            self._multipliers = [
                math.exp(float(logs[names[0]][0])) if names else 1.0 for names in known
            ]

    @property
    def has_update(self) -> bool:
        """Whether the last step's update was asked for, and the step moved something."""
        return self._before is not None

    def take_update(self) -> dict[str, Tensor]:
        """The last step's update of each parameter, by the model's names; its memory is given away."""
        assert self._before is not None
        pairs = [
            pair for group, names in self._named_groups() for pair in zip(group["params"], names)
        ]
        before, self._before = self._before, None
        return {
            name: old.neg_().add_(p.detach())
            for (p, name), old in zip(pairs, before)
            if p.requires_grad
        }

    @torch.compiler.disable  # a compiled step calls it as it is
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.restore()
        if isinstance(optimizer, BlockOptimizer) and self.num_steps == 0:
            for group in optimizer.param_groups:
                optimizer._init_group(
                    group
                )  # a step that is compiled with hooks around it cannot create states itself
        self._refused = getattr(optimizer, "nonfinite_steps", 0)
        # A schedule that warms up from zero moves nothing at first: there is no direction to
        # measure along.
        moves = self._wants_update(self.num_steps + 1) and any(
            float(group["lr"]) != 0 for group in optimizer.param_groups
        )
        self._before = (
            [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
            if moves
            else None
        )
        for group, multiplier in zip(optimizer.param_groups, self._multipliers):
            own, scaled = group["lr"], group["lr"] * multiplier
            self._changed.append((group, scaled, own))
            group["lr"] = scaled
        self._in_step = True

    @torch.compiler.disable
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.restore()
        if (
            not self._in_step
        ):  # the hooks run twice if the step of a subclass calls that of its base
            return
        self._in_step = False
        # GradScaler leaves it to a fused step to look whether it has found an infinity, and to do
        # nothing then.
        overflow = bool(getattr(optimizer, "found_inf", None))
        if overflow or getattr(optimizer, "nonfinite_steps", 0) != self._refused:
            self._before = None
        else:
            self.num_steps += 1

    @torch.compiler.disable
    def restore(self, *_: Any) -> None:
        """Put back the learning rates, also those that a step which raised left behind, unless a schedule has set new ones."""
        for group, scaled, own in self._changed:
            if group["lr"] is scaled:
                group["lr"] = own
        self._changed = []


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of what `accelerate` and others put around it."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(
        optimizer, "_optimizer_step_post_hooks"
    ):
        raise TypeError(
            f"Invalid optimizer of type {type(optimizer).__name__}. Must be a torch.optim.Optimizer, for its hooks."
        )
    return optimizer
