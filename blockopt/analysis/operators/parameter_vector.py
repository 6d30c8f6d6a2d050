"""The vector of a model's parameters that an operator acts on, and its blocks."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from blockopt.blocks import ROLES, BlockGroup, Blocks, Level, block_groups, block_numel, expand
from blockopt.blocks.find import checked_blocks
from blockopt.measure.closures import trainable_parameters

Member = tuple[str, int | None]  # a parameter, or the block of that number in it


class ParameterVector:
    """Parameters of a model, or blocks of them, each flattened row-major, one after another.

    Args:
        model: Any module.
        names: The parameters; by default all that are trainable.
        blocks: What `find_blocks(model)` returns. By default the blocks are found when they are
            first asked for, since not all models can be read.

    Attributes:
        names: The parameters that the vector touches, in the order of `model.named_parameters()`.
        shape: `(n, n)`, the shape of an operator on these vectors.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str] | None = None,
        blocks: Mapping[str, Blocks] | None = None,
    ) -> None:
        self._model = model
        self._blocks = None if blocks is None else checked_blocks(model, blocks)
        self._shapes = {name: p.shape for name, p in trainable_parameters(model).items()}
        self._block_sizes: dict[str, list[int]] = {}
        self._set([(name, None) for name in _checked_names(names, self._shapes)])

    def _set(self, members: Sequence[Member]) -> None:
        self._members = tuple(members)
        self.names = tuple(dict.fromkeys(name for name, _ in members))
        self._sizes = [self._size(member) for member in members]
        self.shape = (sum(self._sizes), sum(self._sizes))
        self._places: dict[Member, Tensor] = {}  # of blocks in their parameters, once needed

    def _part(self, members: Sequence[Member]) -> ParameterVector:
        part = copy.copy(self)
        part._set(members)
        return part

    def __str__(self) -> str:
        """Return the name of its one parameter or block, or the number of parameters."""
        (name, number), *others = self._members
        if others:
            return f"{len(self.names)} parameters"
        return name if number is None else f"{name}, block {number}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters; the widest one if they differ."""
        return reduce(torch.promote_types, (p.dtype for p in self.parameters().values()))

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(iter(self.parameters().values())).device

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters, looked up each time since those of a model may be replaced."""
        found = trainable_parameters(self._model)
        frozen = next((name for name in self.names if name not in found), None)
        if frozen is not None:
            raise ValueError(f"{frozen!r} is no longer trainable. Make a new operator.")
        return {name: found[name] for name in self.names}

    def block(self, which: str | BlockGroup, index: int | None = None) -> ParameterVector:
        """Return the part that holds one parameter, or one of its blocks.

        Args:
            which: The name of a parameter, or a group of `blocks()` that names one.
            index: The number of the block in the parameter, from 0; by default all of it.

        Raises:
            ValueError: If there is no such parameter or block.
        """
        return self._part(self._find(which, index))

    def blocks(self, by: Level = "head") -> dict[BlockGroup, ParameterVector]:
        """Return the part of each group of blocks.

        Args:
            by: As for `block_groups`. "role" and "layer" pool blocks of several parameters.
        """
        blocks = self._found_blocks()
        groups, numbers = block_groups({name: blocks[name] for name in self.names}, by)
        held = set(self._members)
        members: list[list[Member]] = [[] for _ in groups]
        for name, group_of in numbers.items():
            for index, number in enumerate(group_of.tolist()):
                if (name, None) in held or (name, index) in held:
                    members[number].append((name, index))
        found = {group: some for group, some in zip(groups, members) if some}
        if by in ("role", "layer"):
            found = dict(sorted(found.items(), key=lambda item: _layer_and_role(item[0])))
        return {group: self._part(self._merged(some)) for group, some in found.items()}

    def restrict(self, names: Iterable[str]) -> ParameterVector:
        """Return the part on some of the parameters; the others are constants.

        Raises:
            ValueError: If a name is wrong.
        """
        chosen = _checked_names(names, self.names)
        return self._part([member for member in self._members if member[0] in chosen])

    def entries(
        self, which: str | BlockGroup | ParameterVector, index: int | None = None
    ) -> Tensor:
        """Return where a parameter, a block or a part lies in the vector.

        Args:
            which: As for `block`, or a part that `block`, `blocks` or `restrict` returned.
            index: As for `block`.
        """
        wanted = which._members if isinstance(which, ParameterVector) else self._find(which, index)
        starts = dict(zip(self._members, accumulate(self._sizes, initial=0)))
        pieces = []
        for name, number in wanted:
            if (name, number) in starts:
                inside = torch.arange(self._size((name, number)))
                pieces.append(starts[name, number] + inside)
            else:
                pieces.append(starts[name, None] + self._place((name, number)))
        return torch.cat(pieces)

    def to_dict(self, v: Tensor) -> dict[str, Tensor]:
        """Return a vector as `{name: tensor}`, zero outside of its blocks."""
        self.check(v, ndims=(1,))
        pieces = self.unflatten(v.detach().unsqueeze(0))
        return {name: piece.squeeze(0) for name, piece in zip(self.names, pieces)}

    def to_vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the inverse of `to_dict`; other names and other blocks are left out.

        Raises:
            ValueError: If a parameter is missing or its shape differs.
        """
        for name, p in self.parameters().items():
            if name not in values or values[name].shape != p.shape:
                got = f"has shape {tuple(values[name].shape)}" if name in values else "is missing"
                raise ValueError(
                    f"Invalid values: {name!r} {got}. Must be a tensor of shape {tuple(p.shape)}."
                )
        return self.flatten([values[name].detach().unsqueeze(0) for name in self.names]).squeeze(0)

    def unflatten(self, rows: Tensor) -> list[Tensor]:
        """Return m vectors (m, n) as one tensor (m, *shape) for each parameter."""
        pieces = dict(zip(self._members, rows.split(self._sizes, 1)))
        found = []
        for name, p in self.parameters().items():
            whole = pieces.get((name, None))
            if whole is None:
                whole = rows.new_zeros(len(rows), p.numel())
                for member, piece in pieces.items():
                    if member[0] == name:
                        whole.index_copy_(1, self._place(member).to(rows.device), piece)
            found.append(whole.reshape(len(rows), *p.shape).to(p))
        return found

    def flatten(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return the inverse of `unflatten`, (m, n)."""
        dtype, device = self.dtype, self.device
        flat = {
            name: piece.reshape(len(piece), -1).to(device, dtype)
            for name, piece in zip(self.names, pieces)
        }
        return torch.cat(
            [
                flat[name] if number is None else flat[name][:, self._place((name, number))]
                for name, number in self._members
            ],
            1,
        )

    def check(self, v: Any, ndims: tuple[int, ...] = (1, 2)) -> None:
        """Raise `TypeError` or `ValueError` unless `v` is a vector (n,), or columns (n, k)."""
        if not isinstance(v, Tensor):
            raise TypeError(
                f"Invalid v of type {type(v).__name__}. Must be a tensor: "
                "torch.as_tensor(v, dtype=operator.dtype)."
            )
        size = self.shape[0]
        if v.ndim not in ndims or len(v) != size:
            shapes = " or ".join(("", f"({size},)", f"({size}, k)")[ndim] for ndim in ndims)
            raise ValueError(f"Invalid v of shape {tuple(v.shape)}. Must be {shapes}.")
        if v.dtype != self.dtype:
            raise TypeError(
                f"Invalid v of {v.dtype}. Must be {self.dtype}, that of the parameters: "
                "v.to(operator.dtype)."
            )
        if v.device != self.device:
            raise ValueError(
                f"Invalid v on {v.device}. Must be on {self.device}: v.to(operator.device)."
            )
        if not all_finite(v):
            raise ValueError("Invalid v: it has entries that are NaN or infinite.")

    def _size(self, member: Member) -> int:
        name, number = member
        if number is None:
            return self._shapes[name].numel()
        if name not in self._block_sizes:  # once for all blocks: an embedding has many
            split = self._found_blocks()[name].split
            self._block_sizes[name] = block_numel(tuple(self._shapes[name]), split).tolist()
        return self._block_sizes[name][number]

    def _place(self, member: Member) -> Tensor:
        """Where the block of a member lies in its parameter, flattened."""
        if member not in self._places:
            name, number = member
            shape, split = self._shapes[name], self._found_blocks()[name].split
            assert split is not None  # otherwise the member is the whole parameter
            numbers = expand(torch.arange(split.num_blocks), split, len(shape))
            inside = numbers.eq(number).expand(shape).flatten()  # type: ignore[arg-type]
            self._places[member] = inside.nonzero().flatten()
        return self._places[member]

    def _found_blocks(self) -> Mapping[str, Blocks]:
        if self._blocks is None:
            self._blocks = checked_blocks(self._model, None)
        return self._blocks

    def _merged(self, members: Sequence[Member]) -> list[Member]:
        """The same with a whole parameter in the place of all of its blocks."""
        numbers: dict[str, list[int | None]] = {}
        for name, number in members:
            numbers.setdefault(name, []).append(number)
        merged: list[Member] = []
        for name, some in numbers.items():
            whole = len(some) == self._found_blocks()[name].num_blocks
            merged += [(name, None)] if whole else [(name, number) for number in some]
        return merged

    def _find(self, which: str | BlockGroup, index: int | None) -> Sequence[Member]:
        name = which.parameter if isinstance(which, BlockGroup) else which
        if name not in self.names:
            what = f"group '{which}'" if isinstance(which, BlockGroup) else f"name={which!r}"
            raise ValueError(
                f"Invalid {what}. Must be of one of the operator's parameters, such as "
                f"{self.names[0]!r}; blocks(by) has groups of several parameters."
            )
        held = [member for member in self._members if member[0] == name]
        if isinstance(which, BlockGroup):
            given, roles = f"group '{which}'", self._found_blocks()[name].block_roles
            numbers = [number for number, role in enumerate(roles) if role == which.role]
            if which.head is not None:
                numbers = numbers[which.head : which.head + 1]
        elif index is None:
            return held
        else:
            given, roles = f"index={index}", self._found_blocks()[name].block_roles
            numbers = [index] if index in range(len(roles)) else []
        if not numbers:
            raise ValueError(
                f"Invalid {given}. Must be in 0..{len(roles) - 1}, the blocks of {name!r}."
            )
        wanted = self._merged([(name, number) for number in numbers])
        if (name, None) not in held and not set(wanted) <= set(held):
            own = ", ".join(str(number) for _, number in held)
            raise ValueError(f"Invalid {given}. This operator holds block {own} of {name!r} only.")
        return wanted


def all_finite(x: Tensor) -> bool:
    """Whether no entry is NaN or infinite; by their sum first, which takes a tenth of the time."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def _layer_and_role(group: BlockGroup) -> tuple[int, int]:
    return -1 if group.layer is None else group.layer, ROLES.index(group.role)


def _checked_names(names: Iterable[str] | None, parameters: Collection[str]) -> tuple[str, ...]:
    if not parameters:
        raise ValueError("Invalid model: it has no trainable parameters.")
    if names is None:
        return tuple(parameters)
    chosen = [names] if isinstance(names, str) else list(names)
    wrong = next((name for name in chosen if name not in parameters), None)
    if wrong is not None or not chosen:
        what = "empty" if wrong is None else f"{wrong!r} is none of the trainable parameters"
        raise ValueError(
            f"Invalid names: {what}. Must be among those of model.named_parameters() that require "
            f"a gradient, such as {next(iter(parameters))!r}; a tied parameter has only the first "
            "of its names."
        )
    return tuple(name for name in parameters if name in chosen)
