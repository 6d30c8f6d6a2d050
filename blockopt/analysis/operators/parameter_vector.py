"""The vector of a model's parameters that an operator acts on, and its blocks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks
from blockopt.blocks.split import block_numel, expand
from blockopt.measure.closures import checked_blocks, trainable

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on


class ParameterVector:
    """Parameters of a model, flattened row-major one after another, or one block of one of them.

    Args:
        model: Any module.
        names: The parameters; by default all that are trainable.
        blocks: What `find_blocks(model)` returns; found when asked for by default, since not all
            models can be read.

    Attributes:
        names: The names of the parameters, in the order of `model.named_parameters()`, which is
            that of the vector.
        shape: `(n, n)`, that of an operator on these vectors.
    """

    def __init__(
        self, model: nn.Module, names: Iterable[str] | None, blocks: Mapping[str, Blocks] | None
    ) -> None:
        self._model = model
        self._blocks = None if blocks is None else checked_blocks(model, blocks)
        self._index: int | None = None  # of the block in its parameter
        self._entries: Tensor | None = None  # where that block lies in its parameter, flat
        self._labels: dict[str, tuple[str, int]] | None = None
        self.names = _checked_names(names, trainable(model))
        size = sum(p.numel() for p in self._parameters().values())
        self.shape = (size, size)

    @property
    def dtype(self) -> torch.dtype:
        """That of the parameters; the wider one if they differ."""
        return reduce(torch.promote_types, (p.dtype for p in self._parameters().values()))

    @property
    def device(self) -> torch.device:
        """That of the first parameter."""
        return next(iter(self._parameters().values())).device

    def block(self, name: str, index: int | None = None) -> Self:
        """The diagonal block of one parameter, or of one of its blocks, such as a head. Only that one is differentiated.

        Args:
            name: Of the parameter, or a label of `blocks()`.
            index: Of the block among those of the parameter in `blocks`, from 0; by default the
                whole parameter.

        Raises:
            ValueError: If there is no such parameter or block.
        """
        name, index = self._find(name, index)
        size = self._parameters()[name].numel() if index is None else self._sizes(name)[index]
        return self._part((name,), index, size)

    def blocks(self) -> dict[str, Self]:
        """All diagonal blocks by label, such as `h.0.attn.c_attn.weight query head 1`.

        Rows of embeddings and MLPs are blocks of their own, many, unless `blocks=find_blocks(model,
        per_row=())` was given.
        """
        sizes = {name: self._sizes(name) for name in self.names}
        return {
            label: self._part((name,), i, sizes[name][i])
            for label, (name, i) in self._all_labels().items()
        }

    def _part(self, names: tuple[str, ...], index: int | None, size: int) -> Self:
        part = copy.copy(self)
        part.names, part._index, part.shape = names, index, (size, size)
        return part

    def _sizes(self, name: str) -> list[int]:
        """The number of entries of each block."""
        return block_numel(
            tuple(self._parameters()[name].shape), self._found_blocks()[name].split
        ).tolist()

    def restrict(self, names: Iterable[str]) -> Self:
        """The same on some of the parameters; the others are constants.

        Raises:
            ValueError: If a name is wrong.
        """
        parameters = self._parameters()
        chosen = _checked_names(names, parameters)
        size = sum(parameters[name].numel() for name in chosen)
        return self._part(chosen, self._index, size if self._index is None else self.shape[0])

    def entries(self, name: str, index: int | None = None) -> Tensor:
        """Where a parameter, or one of its blocks, lies in the vector. Arguments as for `block`."""
        name, index = self._find(name, index)
        if self._index is not None:
            return torch.arange(self.shape[0])
        sizes = {n: p.numel() for n, p in self._parameters().items()}
        start = sum(sizes[n] for n in self.names[: self.names.index(name)])
        return start + (
            torch.arange(sizes[name]) if index is None else self._entries_of(name, index)
        )

    def to_dict(self, v: Tensor) -> dict[str, Tensor]:
        """A vector as `{name: tensor of the parameter's shape}`, zero outside of the block if the operator has only one."""
        self._check_vector(v, ndims=(1,))
        pieces = self._unflatten(v.detach().unsqueeze(0))
        return {name: piece.squeeze(0) for name, piece in zip(self.names, pieces)}

    def to_vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `to_dict`; other names and what is outside of the block are left out.

        Raises:
            ValueError: If a parameter is missing or its shape differs.
        """
        for name, p in self._parameters().items():
            if name not in values or values[name].shape != p.shape:
                got = f"has shape {tuple(values[name].shape)}" if name in values else "is missing"
                raise ValueError(
                    f"Invalid values: {name!r} {got}. Must be a tensor of shape {tuple(p.shape)}."
                )
        return self._flatten([values[name].detach().unsqueeze(0) for name in self.names]).squeeze(0)

    def _parameters(self) -> dict[str, Tensor]:
        """Looked up each time: those of a model may be replaced."""
        found = trainable(self._model)
        frozen = next((name for name in self.names if name not in found), None)
        if frozen is not None:
            raise ValueError(f"{frozen!r} is trainable no more. Make a new {type(self).__name__}.")
        return {name: found[name] for name in self.names}

    def _unflatten(self, rows: Tensor) -> list[Tensor]:
        parameters = self._parameters()
        if self._index is not None:
            (p,) = parameters.values()
            rows = rows.new_zeros(len(rows), p.numel()).index_copy(
                1, self._own_entries(rows.device), rows
            )
        pieces = rows.split([p.numel() for p in parameters.values()], 1)
        return [
            piece.reshape(len(rows), *p.shape).to(p)
            for piece, p in zip(pieces, parameters.values())
        ]

    def _flatten(self, pieces: Sequence[Tensor]) -> Tensor:
        dtype, device = self.dtype, self.device
        rows = torch.cat([piece.reshape(len(piece), -1).to(device, dtype) for piece in pieces], 1)
        return rows if self._index is None else rows[:, self._own_entries(device)]

    def _own_entries(self, device: torch.device) -> Tensor:
        if self._entries is None and self._index is not None:
            self._entries = self._entries_of(self.names[0], self._index)
        return self._entries.to(device)  # type: ignore[union-attr]

    def _entries_of(self, name: str, index: int) -> Tensor:
        shape, split = self._parameters()[name].shape, self._found_blocks()[name].split
        if split is None:
            return torch.arange(shape.numel())
        numbers = expand(torch.arange(split.num_blocks), split, len(shape))
        return (numbers == index).expand(shape).flatten().nonzero().flatten()

    def _found_blocks(self) -> Mapping[str, Blocks]:
        if self._blocks is None:  # not before it is asked for: not all models can be read
            self._blocks = checked_blocks(self._model, None)
        return self._blocks

    def _all_labels(self) -> dict[str, tuple[str, int]]:
        if self._labels is None:
            blocks = self._found_blocks()
            self._labels = {
                label: (n, i) for n in blocks for i, label in enumerate(_labels_of(n, blocks[n]))
            }
        return {
            label: (name, index)
            for label, (name, index) in self._labels.items()
            if name in self.names and self._index in (None, index)
        }

    def _find(self, name: str, index: int | None) -> tuple[str, int | None]:
        if index is None and name not in self.names and name in self._all_labels():
            name, index = self._all_labels()[name]
        if name not in self.names:
            raise ValueError(
                f"Invalid name={name!r}. Must be one of the operator's parameters, such as {self.names[0]!r}."
            )
        if index is None:
            return name, self._index
        number = self._found_blocks()[name].num_blocks
        if index not in range(number):
            raise ValueError(
                f"Invalid index={index}. Must be in 0..{number - 1}, the blocks of {name!r}."
            )
        if self._index not in (None, index):
            raise ValueError(
                f"Invalid index={index}. This operator is block {self._index} of {name!r} already."
            )
        return name, index

    def _check_vector(self, v: Any, ndims: tuple[int, ...] = (1, 2)) -> None:
        if not isinstance(v, Tensor):
            raise TypeError(
                f"Invalid v of type {type(v).__name__}. Must be a tensor: torch.as_tensor(v, dtype=operator.dtype)."
            )
        size = self.shape[0]
        if v.ndim not in ndims or len(v) != size:
            shapes = " or ".join(("", f"({size},)", f"({size}, k)")[ndim] for ndim in ndims)
            raise ValueError(f"Invalid v of shape {tuple(v.shape)}. Must be {shapes}.")
        if v.dtype != self.dtype:
            raise TypeError(
                f"Invalid v of {v.dtype}. Must be {self.dtype}, that of the parameters: v.to(operator.dtype)."
            )
        if v.device != self.device:
            raise ValueError(
                f"Invalid v on {v.device}. Must be on {self.device}: v.to(operator.device)."
            )
        if not all_finite(v):
            raise ValueError("Invalid v: it has entries that are NaN or infinite.")


def all_finite(x: Tensor) -> bool:
    """Whether no entry is NaN or infinite; by their sum first, which takes a tenth of the time."""
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def _checked_names(
    names: Iterable[str] | None, parameters: Mapping[str, Tensor]
) -> tuple[str, ...]:
    if not parameters:
        raise ValueError("Invalid model: it has no trainable parameters.")
    if names is None:
        return tuple(parameters)
    chosen = [names] if isinstance(names, str) else list(names)
    wrong = next((name for name in chosen if name not in parameters), None)
    if wrong is not None or not chosen:
        what = "empty" if wrong is None else f"{wrong!r} is none of the trainable parameters"
        raise ValueError(
            f"Invalid names: {what}. Must be among those of model.named_parameters() that require a gradient, such as "
            f"{next(iter(parameters))!r}; a tied parameter has the first of its names only."
        )
    return tuple(name for name in parameters if name in chosen)


def _labels_of(name: str, blocks: Blocks) -> list[str]:
    """`name role`, with a number where a role has several blocks: of heads, of rows or columns, or of blocks."""
    roles, seen = blocks.block_roles, Counter[str]()
    number, labels = Counter(roles), []
    for role in roles:
        unit = "head" if role in ("query", "key", "value", "output") else "block"
        if (
            unit == "block"
            and blocks.split is not None
            and blocks.split.num_blocks == blocks.split.length
        ):
            unit = "column" if blocks.split.dim else "row"
        labels.append(
            f"{name} {role} {unit} {seen[role]}" if number[role] > 1 else f"{name} {role}"
        )
        seen[role] += 1
    return labels
