"""How many heads an attention module has, and how large they are."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from blockopt.blocks.known_modules import (
    HEAD_DIM,
    HEADS_LETTERS,
    HEADS_WORDS,
    NOT_HEADS_WORDS,
    NUM_HEADS,
    NUM_KEY_VALUE_HEADS,
)
from blockopt.blocks.linear_maps import Linear, words


class Heads(NamedTuple):
    """The heads of an attention module.

    Attributes:
        number: Of the queries; None if nothing says so.
        size: Outputs of each query head.
        declared_size: The size that the module itself declares, if it does.
        key_value_number: Of the keys, as declared.
        key_value_declared_here: Whether the module itself declares it, rather than its config.
        problem: Why the number is not known, if the declared numbers do not fit the weights.
    """

    number: int | None
    size: int | None
    declared_size: int | None = None
    key_value_number: int | None = None
    key_value_declared_here: bool = False
    problem: str = ""

    def of_keys(self, linear: Linear, *, value: bool) -> int | None:
        """The number of heads of a map of keys or values; None if no number fits."""
        if self.size and linear.out_size % self.size == 0:
            found = linear.out_size // self.size
            if not value or self.number is None or found <= self.number:
                return found
        declared = self.key_value_number or self.number
        if declared and linear.out_size % declared == 0:
            return declared
        return 1 if value and self.number == 1 else None

    def of_half(self, size: int, *, is_query: bool) -> int | None:
        """The number of heads in so many outputs."""
        if is_query:
            return self.number if self.number and size % self.number == 0 else None
        if self.size and size % self.size == 0:
            return size // self.size
        return None


def read_heads(
    module: nn.Module,
    ancestors: tuple[nn.Module, ...],
    query: Linear | None,
    output: Linear | None,
) -> Heads:
    """Read the heads from the module, its config or the modules around it.

    Args:
        module: The attention module.
        ancestors: The modules around it, the innermost first, which are asked if it does not say.
        query: The map of the queries, if they have one of their own.
        output: The output projection, if there is one.
    """
    number = _number_of(module)
    declared = _first(module, HEAD_DIM)
    for ancestor in ancestors[:3]:
        if number is None and declared is None:
            number = _number_of(ancestor)
    groups = _first(module, NUM_KEY_VALUE_HEADS)
    here = any(isinstance(held(module, name), int) for name in NUM_KEY_VALUE_HEADS)
    total = query.out_size if query is not None else output.in_size if output is not None else None
    if number is None and declared and total and total % declared == 0:
        number = total // declared
    if number is None or total is None:
        return Heads(number, declared, declared, groups, here)
    fits = {total}
    if query is not None and (output is None or total == 2 * output.in_size):  # with gates
        fits.add(total // 2)
    sizes = [size for size in _all(module, HEAD_DIM) if number * size in fits]
    own = declared if any(isinstance(vars(module).get(n), int) for n in HEAD_DIM) else None
    if (own and not sizes) or total % number:
        problem = (
            f"{total} outputs are not the {number} heads"
            + (f" of {own}" if own else "")
            + f" that {type(module).__name__} declares"
        )
        return Heads(None, None, declared, groups, here, problem)
    return Heads(number, sizes[0] if sizes else total // number, own and sizes[0], groups, here)


def _first(module: nn.Module, names: tuple[str, ...]) -> int | None:
    return next(iter(_all(module, names)), None)


def _all(module: nn.Module, names: tuple[str, ...]) -> list[int]:
    """The positive integers that the module, or else its `config`, holds under `names`."""
    owners = (module, getattr(module, "config", None))
    values = (held(owner, name) for owner in owners for name in names)
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0]


def _number_of(module: nn.Module) -> int | None:
    """The number of heads that a module, or else its config, declares."""
    for owner in (module, getattr(module, "config", None)):
        for name in NUM_HEADS:
            value = held(owner, name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        for name, value in vars(owner).items() if owner is not None else ():
            said = set(words(name))
            counted = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if counted and HEADS_WORDS & said and not NOT_HEADS_WORDS & said:
                return int(value)
    for name in HEADS_LETTERS:
        value = vars(module).get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def held(owner: object, name: str) -> object:
    """An attribute, or None. Configs whose layers differ refuse to tell some of theirs."""
    try:
        return getattr(owner, name, None)
    except Exception:
        return None
