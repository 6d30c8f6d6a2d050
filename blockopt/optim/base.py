"""What the optimizers share: groups that know their blocks, block scales, checks, checkpoints."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from blockopt.blocks import Blocks
from blockopt.checks import check_choice, check_range
from blockopt.distributed import is_sharded
from blockopt.optim.checkpoints import check_checkpoint, complete_states
from blockopt.optim.entry import Entry, Work, by_device, norms_to_check, placed
from blockopt.optim.finite_gradients import can_read_at_once, flag_on
from blockopt.optim.groups import (
    Shapes,
    blocks_of,
    check_blocks,
    check_learning_rate,
    check_supported,
    names_of,
    refuse_flattened,
    shapes_of,
)
from blockopt.optim.recording import is_recorded
from blockopt.optim.refused_steps import RefusedSteps
from blockopt.optim.scale_runs import ScaleRun, scale_runs

BLOCK_LR = "block_lr"  # where the first group of a checkpoint carries the state of `BlockLR`
WITHOUT_GRADIENT = (
    "No parameter of this {} has a gradient, so step() has changed nothing. Call backward() on its "
    "model, and build the optimizer after wrappers that replace parameters, such as FSDP1."
)
Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class BlockOptimizer(torch.optim.Optimizer, ABC):
    """Base of the optimizers: `p -= lr * scale[block] * direction`; subclasses give the direction.

    The block scales live in the state of each parameter as a float32 tensor, `state[p]["scale"]`,
    which `set_block_scales` changes in place, so that a refresh neither recompiles a compiled step
    nor gets lost in a checkpoint.
    """

    _replicas: Any = None  # the ranks that divide the work on plain parameters; not pickled

    def __init__(self, params: Parameters, defaults: dict[str, Any]) -> None:
        if isinstance(params, nn.Module):
            name = type(self).__name__
            raise TypeError(
                f"{name} takes parameters, not a model: {name}(blockopt.param_groups(model))."
            )
        self._refused = RefusedSteps()
        self._scaled = False
        self._shapes: list[Shapes] = []  # of the parameters of each group, when it was added
        self._runs: dict[Tensor, list[ScaleRun] | None] = {}  # of each scale, as it is now
        super().__init__(params, defaults)

    @abstractmethod
    def _check_group(self, group: dict[str, Any]) -> None:
        """Raise `ValueError` for options of a group that are out of range."""

    @abstractmethod
    def _new_state(
        self, parameter: Tensor, blocks: Blocks, group: dict[str, Any]
    ) -> dict[str, Any]:
        """The state of a parameter before its first step, without `scale`."""

    def _needs_shapes(self, group: dict[str, Any]) -> bool:
        """Whether the update of a group looks at more than single entries, even unscaled."""
        return False

    def _magnitudes(self, work: Work) -> list[list[Tensor]]:
        """Tensors that are finite exactly if this rank's parts of the gradients are.

        None for a group if neither the check nor the update needs them.
        """
        return [norms_to_check(entries, group) for group, entries in work]

    def _whole_magnitudes(self, work: Work, own: list[list[Tensor]]) -> list[list[Tensor]]:
        """What the update needs of the whole gradients, from what ranks have found in their parts.

        Those of all groups at once, so that ranks that share the parameters communicate once, and
        only when all of them are known to have the same gradients.
        """
        return own

    @abstractmethod
    def _update(
        self,
        entries: list[Entry],
        magnitudes: list[Tensor],
        group: dict[str, Any],
        found_inf: Tensor | None,
    ) -> None:
        """Update the parameters and states of a group.

        Nothing may change if `found_inf` is 1, which is not known on the host. None says that the
        gradients are known to be finite, or not checked.
        """

    @property
    def nonfinite_steps(self) -> int:
        """How many steps were refused because a gradient, or its square, was not finite.

        Reading it waits for an accelerator to finish the last step.
        """
        return self._refused.read()

    def refused_until_last_step(self) -> int:
        """The same, waiting for nothing that the accelerator was given to do since that step."""
        self._refused.look()
        return self._refused.count

    def _update_all(self, work: Work, own: list[list[Tensor]], found_inf: Tensor | None) -> None:
        """Update all groups."""
        for (group, entries), magnitudes in zip(work, self._whole_magnitudes(work, own)):
            flag = flag_on(found_inf, entries[0].parameter.device)
            self._update(entries, magnitudes, group, flag)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: Re-evaluates the model and returns the loss, as in `torch.optim`.

        Returns:
            What the closure returns, or None.

        Raises:
            FloatingPointError: If a gradient is not finite and `nonfinite="raise"`. Nothing has
                changed then. On an accelerator, where waiting for the answer would leave it idle,
                the next call raises, or `state_dict`; it has changed nothing either.
        """
        if torch.compiler.is_compiling() and self._adds_over_ranks():
            return self._eager_step(closure)
        return self._step(closure)

    def _adds_over_ranks(self) -> bool:
        """Whether ranks exchange amid the step: no compiler can record that, or gain much."""
        chosen = [group for group in self.param_groups if self._needs_shapes(group)]
        return any(is_sharded(p) for group in chosen for p in group["params"])

    @_disable_dynamo
    def _eager_step(self, closure: Callable[[], Any] | None) -> Any:
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        self._refused.settle()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work: Work = []
        for group in self.param_groups:
            check_learning_rate(group["lr"])
            self._init_group(group)
            work += [(group, entries) for entries in by_device(self._entries(group))]
        if not work and not self.state and not is_recorded():
            warnings.warn(WITHOUT_GRADIENT.format(type(self).__name__), stacklevel=5)
        magnitudes = self._magnitudes(work)
        exchanges = self._replicas is not None or self._adds_over_ranks()
        found_inf, checked = self._refused.check(
            self.param_groups, work, magnitudes, self._replicas, exchanges
        )
        if found_inf is not None and can_read_at_once(found_inf):
            if bool(found_inf):
                self._refused.refuse(checked)
                return loss
            found_inf = None
        self._update_all(placed(work), magnitudes, found_inf)
        if found_inf is not None:
            self._refused.watch(found_inf, checked)
        return loss

    def _init_group(self, group: dict[str, Any], only_with_gradient: bool = True) -> None:
        """Create missing states; because of its name `torch.compile` keeps it out of the graph."""
        missing = [not self.state.get(parameter) for parameter in group["params"]]
        if not any(missing):
            return
        for parameter, blocks, new in zip(group["params"], blocks_of(group), missing):
            if new and (parameter.grad is not None or not only_with_gradient):
                check_supported(parameter)
                if self._needs_shapes(group):
                    self._refuse_flattened(group, type(self).__name__)
                self.state[parameter] = self._new_state_with_scale(parameter, blocks, group)

    def _refuse_flattened(self, group: dict[str, Any], what: str) -> None:
        for known, shapes in zip(self.param_groups, self._shapes):
            if known is group:
                refuse_flattened(group, shapes, what)

    def _entries(self, group: dict[str, Any]) -> list[Entry]:
        entries = []
        looks = not is_recorded() and self._scaled  # in this order: no guard
        for name, parameter, blocks in zip(names_of(group), group["params"], blocks_of(group)):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                raise ValueError(
                    f"The gradient of {name!r} is sparse. Make it dense with "
                    "nn.Embedding(..., sparse=False)."
                )
            state = self.state[parameter]
            runs = self._runs_of(state["scale"], blocks, parameter) if looks else None
            entries.append(Entry(name, parameter, gradient, blocks, state, runs))
        return entries

    def _runs_of(self, scale: Tensor, blocks: Blocks, parameter: Tensor) -> list[ScaleRun] | None:
        """Found once for each setting of the scales, since that waits for the device."""
        if scale not in self._runs:
            self._runs[scale] = scale_runs(scale, blocks, parameter)
        return self._runs[scale]

    def _by_name(self) -> dict[str, tuple[Tensor, Blocks]]:
        """Parameters and their blocks by name, or `ValueError` if names are missing or shared."""
        found: dict[str, tuple[Tensor, Blocks]] = {}
        for group in self.param_groups:
            self._refuse_flattened(group, "A scale per block")
            if "param_names" not in group:
                raise ValueError(
                    "Block scales go by parameter names, and this optimizer has none. Build it "
                    "with param_groups(model)."
                )
            named = zip(group["param_names"], group["params"], blocks_of(group))
            for name, parameter, blocks in named:
                if name in found:
                    raise ValueError(
                        f"Block scales go by parameter names, and two parameters are called "
                        f"{name!r}."
                    )
                found[name] = (parameter, blocks)
        return found

    def block_scales(self) -> dict[str, Tensor]:
        """Return a copy of the scales, `{parameter name: one per block}`; 1 where none were set."""
        scales = {}
        for name, (parameter, blocks) in self._by_name().items():
            state = self.state.get(parameter, {})
            scales[name] = state.get("scale", _ones(blocks, parameter)).clone()
        return scales

    @torch.no_grad()
    def set_block_scales(self, scales: Mapping[str, Tensor]) -> None:
        """Set the multiplier of each block's learning rate. Parameters not named keep theirs.

        Args:
            scales: `{parameter name: one value per block}`, finite and >= 0. Under data
                parallelism all ranks must pass the same.

        Raises:
            KeyError: If a name is not that of a parameter of this optimizer.
            ValueError: If the optimizer has no parameter names, or a tensor has the wrong length or
                holds a negative or non-finite value. Nothing has changed then.
        """
        known = self._by_name()
        given = {n: torch.as_tensor(scale, dtype=torch.float32) for n, scale in scales.items()}
        for name, scale in given.items():
            if name not in known:
                example = next(iter(known))
                raise KeyError(
                    f"No parameter {name!r} in this optimizer (such as {example!r}). "
                    "block_scales() shows the names and how many scales each takes."
                )
            shape = (known[name][1].num_blocks,)
            if tuple(scale.shape) != shape:
                raise ValueError(
                    f"Invalid scale of shape {tuple(scale.shape)} for {name!r}. Must be {shape}, "
                    "one value per block."
                )
            wrong = scale[~(torch.isfinite(scale) & (scale >= 0))]
            if len(wrong):
                value = wrong[0].item()
                raise ValueError(f"Invalid scale for {name!r}: {value}. Must be finite and >= 0.")
        for group in self.param_groups:
            self._init_group(group, only_with_gradient=False)
        for name, scale in given.items():
            self.state[known[name][0]]["scale"].copy_(scale)
        self._note_scaled()

    def _note_scaled(self) -> None:
        """Note whether some scale is not 1, and which rows share one, lest a step has to look."""
        scales = [state["scale"] for state in self.state.values() if "scale" in state]
        self._scaled = any(bool((scale != 1).any()) for scale in scales)
        self._runs = {}
        for group in self.param_groups if self._scaled else ():
            for parameter, blocks in zip(group["params"], blocks_of(group)):
                if "scale" in self.state.get(parameter, {}):
                    self._runs_of(self.state[parameter]["scale"], blocks, parameter)

    def _scaled_step(self) -> bool:
        """Whether the step looks at the scales; a recorded one does, since they may change."""
        return is_recorded() or self._scaled

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in `torch.optim`; `blocks` may be those of `param_groups(model)`.

        For parameters that start to train later, such as those of a layer that was frozen:

            for group in blockopt.param_groups(model, only=layer.parameters()):
                optimizer.add_param_group(group)

        Raises:
            ValueError: If an option is out of range, the blocks do not fit, or the other groups
                have blocks and this one has none. The group is not added then.
        """
        if param_group.get("blocks") is None and any(g["blocks"] for g in self.param_groups):
            raise ValueError(
                "The groups of this optimizer have blocks, and the new one has none. Pass each "
                "group of blockopt.param_groups(model, only=new_parameters) to add_param_group."
            )
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("blocks", None)
        try:
            check_choice("nonfinite", group["nonfinite"], ("raise", "skip", "ignore"))
            check_range("lr", group["lr"])
            check_range("weight_decay", group["weight_decay"])
            self._check_group(group)
            check_blocks(group)
        except ValueError:
            self.param_groups.pop()
            raise
        self._shapes.append(shapes_of(group))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as in `torch.optim`.

        Raises:
            FloatingPointError: If the last step was refused on an accelerator, or a replay of a
                CUDA graph, and nobody knows it yet. The next call returns the state.
        """
        self._refused.settle(replays=True)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, or of the `torch.optim` one that it equals.

        As in `torch.optim`, the options saved with it take the place of those given here. Unlike
        there, states keep the dtype they were saved in: a float32 second moment of bfloat16 weights
        stays what it was.

        Raises:
            ValueError: If a saved state has the wrong shape, or is none that this optimizer knows
                (such as that of `amsgrad`), or if `second_moment` is another.
        """
        blocks = [group["blocks"] for group in self.param_groups]
        loaded: list[dict[str, Any]] = []
        # The first registered last, so it sees what the user's own hooks have made of the
        # checkpoint; the second runs first, so that they see a state that is complete.
        hooks = [
            self.register_load_state_dict_pre_hook(
                lambda _, final: loaded.append(self._check_loaded(final))
            ),
            self.register_load_state_dict_post_hook(
                lambda _: self._complete(loaded[0], blocks), prepend=True
            ),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _check_loaded(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        name = type(self).__name__
        check_checkpoint(state_dict, self.param_groups, self._new_state_with_scale, name)
        return state_dict

    def _complete(self, loaded: dict[str, Any], blocks: list[Any]) -> None:
        """Fill in what the checkpoint lacks, and give states back the dtype they were saved in."""
        for group, known in zip(self.param_groups, blocks):
            for key, default in {**self.defaults, "blocks": known}.items():
                group.setdefault(key, default)
        complete_states(self.state, loaded, self.param_groups, self._new_state_with_scale)
        self._refused = RefusedSteps(self.nonfinite_steps)  # an error belonged to the old state
        self._note_scaled()

    def _new_state_with_scale(
        self, parameter: Tensor, blocks: Blocks, group: dict[str, Any]
    ) -> dict[str, Any]:
        scale = _ones(blocks, parameter)
        return {**self._new_state(parameter, blocks, group), "scale": scale}

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        refused = RefusedSteps(self.nonfinite_steps)
        own = {"_refused": refused, "_scaled": self._scaled, "_shapes": self._shapes, "_runs": {}}
        return {**state, **own}


def _ones(blocks: Blocks, parameter: Tensor) -> Tensor:
    return torch.ones(blocks.num_blocks, dtype=torch.float32, device=parameter.device)
