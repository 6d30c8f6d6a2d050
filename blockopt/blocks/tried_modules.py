"""Modules of a user's own, tried alone: how they store heads, which no name tells.

One map may hold all queries, then all keys, then all values, or one head after another; a gate may
come before or after what it gates. transformers and timm are known to follow their names. Any other
module is copied with random weights and run on a few random tokens, and what its weights do is seen
as in a pass of the whole model.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from blockopt.blocks.blocks import MATRIX_ROLES
from blockopt.blocks.known_modules import MLP_TYPE_WORDS
from blockopt.blocks.layouts import Layout, Layouts
from blockopt.blocks.linear_maps import read_linear, type_words, words
from blockopt.blocks.watch import layouts_of_pass

FOLLOW_THEIR_NAMES = {"transformers", "timm", "peft"}  # all tested
ENDS = {"embedding", "position", "head", "norm", "bias", "router"}  # which no module shows alone
ATTENTION = {"query", "key", "value", "output", "gate"}
GATED = {"mlp_gate", "mlp_in"}
LARGEST = 2**28  # entries of a module that is tried; more take seconds to draw
TOKENS = (6, 16)
AROUND = 16  # how much larger a module is, at most, that is tried where one inside shows nothing
_OF_EVERY_MODULE = vars(nn.Module()).keys()


class Tried(NamedTuple):
    """What modules show that are tried alone.

    Attributes:
        layouts: The layouts of parameters that they explain.
        shared_roles: The roles of those that have several, of which layouts tell one.
        by_convention: Parameters in which several roles lie, of modules that do not run alone, with
            the types of these.
    """

    layouts: Layouts
    shared_roles: dict[Tensor, set[str]]
    by_convention: dict[Tensor, str]


class _Shown(NamedTuple):
    """What one module shows, by the names of its parameters."""

    layouts: dict[str, Layout]
    shared_roles: dict[str, set[str]]

    def is_certain(self, name: str) -> bool:
        """Whether a module alone can show this: neither an end of the model nor its bias."""
        layout = self.layouts.get(name)
        roles = {*layout.roles} - {"other"} if layout is not None else set()
        weight = self.layouts.get(name.removesuffix("bias") + "weight")
        if roles == {"bias"} and weight is not None:
            roles = {*weight.roles}
        return bool(roles) and roles <= MATRIX_ROLES | {"bias"}


def try_modules(
    modules: Mapping[str, nn.Module], found: Layouts, per_head: bool, per_row: Collection[str]
) -> Tried:
    """Try the modules whose parameters names do not settle.

    Args:
        modules: Those of the model, by name.
        found: The layouts that names give.
        per_head: Whether to cut attention by head.
        per_row: The roles cut into rows.
    """
    tried = Tried({}, {}, {})
    sizes = {name: _number_of_entries(m) for name, m in modules.items() if _is_own(m)}
    if sum(size > 0 for size in sizes.values()) > 1:
        sizes.pop("", None)  # a whole model takes tokens or images
    wanted: dict[str, list[Tensor]] = {}
    for name, parameter in modules[""].named_parameters() if sizes else ():
        if parameter.ndim < 2 or _roles(found, parameter) & ENDS:
            continue
        around = [holder for holder in _holders(name, modules) if sizes.get(holder)]
        for holder in around[:2]:  # the inner one may be a map of two factors, which shows nothing
            if sizes[holder] <= min(LARGEST, AROUND * sizes[around[0]]):
                wanted.setdefault(holder, []).append(parameter)
    for name in sorted(wanted, key=lambda name: -name.count(".")):
        shown = None
        if not all(parameter in tried.layouts for parameter in wanted[name]):
            is_mlp = _is_mlp(modules[name], name.rpartition(".")[2], found)
            shown = _shown_by(modules[name], is_mlp, per_head, frozenset(per_row))
        for local, held in modules[name].named_parameters():
            if shown is not None and shown.is_certain(local):
                tried.layouts.setdefault(held, shown.layouts[local])
                tried.shared_roles[held] = shown.shared_roles.get(local, set())
        for held in wanted[name]:  # type: ignore[assignment]
            # What runs and shows no MLP shows none in a pass either: torch's gated units decide.
            roles = _roles(found, held) & (ATTENTION if shown else ATTENTION | GATED)
            if len(roles) > 1:
                tried.by_convention.setdefault(held, type(modules[name]).__name__)
    for seen in tried.layouts:
        tried.by_convention.pop(seen, None)
    return tried


def _holders(name: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """The paths of the modules around a parameter, the innermost first; none in a library's."""
    parts = name.split(".")
    for end in range(len(parts) - 1, -1, -1):
        path = ".".join(parts[:end])
        module = modules.get(path)
        if isinstance(module, nn.MultiheadAttention) or _packages(module) & FOLLOW_THEIR_NAMES:
            return
        yield path


def _packages(module: nn.Module | None) -> set[str]:
    """The packages that the types of a module are from, without torch."""
    bases = type(module).__mro__ if module is not None else ()
    return {base.__module__.partition(".")[0] for base in bases} - {"torch", "builtins"}


def _is_own(module: nn.Module) -> bool:
    """Whether a module is a user's own, can be called, and is more than a linear map."""
    runs = type(module).forward is not nn.Module.forward
    packages = _packages(module)
    is_own = bool(packages) and not packages & FOLLOW_THEIR_NAMES
    return runs and is_own and read_linear(module) is None


def _number_of_entries(module: nn.Module) -> int:
    """Return how many entries the matrices of a module have."""
    return sum(p.numel() for p in module.parameters() if p.ndim > 1)


def _roles(found: Layouts, parameter: Tensor) -> set[str]:
    layout = found.get(parameter)
    return {*layout.roles} if isinstance(layout, Layout) else set()


def _is_mlp(module: nn.Module, attribute: str, found: Layouts) -> bool:
    """Whether names say that a module is an MLP, or holds a part of one."""
    called_so = bool(MLP_TYPE_WORDS & (type_words(module) | {*words(attribute)}))
    return called_so or any({"mlp_out", *GATED} & _roles(found, p) for p in module.parameters())


_known: WeakKeyDictionary[type, dict[Any, _Shown | None]] = WeakKeyDictionary()


def _shown_by(
    module: nn.Module, is_mlp: bool, per_head: bool, per_row: frozenset[str]
) -> _Shown | None:
    """What a module shows when it runs alone, None if it does not run.

    Modules of one kind, with the same sizes and numbers, are tried once.

    Args:
        module: Any module.
        is_mlp: Whether its result is added to what it is given, by the model around it.
        per_head: Whether to cut attention by head.
        per_row: The roles cut into rows.
    """
    kinds = _known.setdefault(type(module), {})
    key = (is_mlp, per_head, per_row, *map(_fingerprint, module.modules()))
    if key not in kinds:
        kinds[key] = _try(module, is_mlp, per_head, per_row)
    return kinds[key]


def _fingerprint(module: nn.Module) -> tuple[Any, ...]:
    """The type of a module, the shapes of what it holds, and all that it was configured with."""
    held = (*module._parameters.items(), *module._buffers.items())
    shapes = tuple((name, tuple(t.shape)) for name, t in held if t is not None)
    own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    return type(module), shapes, tuple(module._modules), _plain(own)


def _plain(value: Any, depth: int = 2) -> Any:
    """Numbers, words and functions as they are, also those that a config or a list holds."""
    if isinstance(value, (int, float, str, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_plain(entry, depth - 1) for entry in value[:64])
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    attributes = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    if depth == 0 or attributes is None:
        return type(value).__qualname__
    return tuple((str(name), _plain(entry, depth - 1)) for name, entry in attributes.items())


class _Alone(nn.Module):
    """A module whose result is added to what it is given, if it is an MLP of a residual stream."""

    def __init__(self, inside: nn.Module, is_mlp: bool) -> None:
        super().__init__()
        self.inside, self._is_mlp = inside, is_mlp

    def forward(self, x: Tensor, *others: Any) -> Any:
        result = self.inside(x, *others)
        fits = isinstance(result, Tensor) and result.shape == x.shape
        return x + result if fits and self._is_mlp else result


class _NoOtherProcess(TorchDispatchMode):
    """Refuses to speak with other processes, which may not be trying the same."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("A module that is tried must not speak with other processes.")
        return func(*args, **(kwargs or {}))


def _try(module: nn.Module, is_mlp: bool, per_head: bool, per_row: frozenset[str]) -> _Shown | None:
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.random.fork_rng([]))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(_NoOtherProcess())
        try:
            inside = _copied(module)
            names: dict[Any, str] = {p: name for name, p in inside.named_parameters()}
        except Exception:
            return None  # it cannot be copied
        for example in _examples(inside):
            try:
                alone = _Alone(inside, is_mlp)
                seen = layouts_of_pass(alone, example, per_head=per_head, per_row=per_row)
            except Exception:
                continue  # it takes something else
            layouts = {names[p]: x for p, x in seen.layouts.items() if isinstance(x, Layout)}
            return _Shown(layouts, {names[p]: roles for p, roles in seen.shared_roles.items()})
    return None


def _copied(module: nn.Module) -> nn.Module:
    """A copy with random weights on the CPU, whole where they are sharded, and without hooks."""
    generator = torch.Generator().manual_seed(0)
    known: dict[int, Tensor] = {}
    for parameter in module.parameters():
        shape = tuple(parameter.shape)
        values = torch.randn(shape, generator=generator, device="cpu")
        values = values / math.sqrt(shape[-1]) if len(shape) > 1 else 0.5 + 0.1 * values
        known[id(parameter)] = nn.Parameter(values.to(torch.get_default_dtype()))
    for buffer in module.buffers():
        dtype = torch.get_default_dtype() if buffer.is_floating_point() else buffer.dtype
        known[id(buffer)] = buffer.detach().clone().to("cpu", dtype)
    result = copy.deepcopy(module, known).eval()  # type: ignore[arg-type]
    for part in result.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    return result


def _examples(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    """What a module may take: tokens or pixels, and nothing or the same for further arguments."""
    arguments = inspect.signature(module.forward).parameters.values()
    needed = [a for a in arguments if a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD]
    maps = [linear for part in module.modules() if (linear := read_linear(part)) is not None]
    sizes = [m.in_size for m in maps] or [n for p in module.parameters() for n in p.shape]
    widths = list(dict.fromkeys(sizes))[:3]
    kinds = [2, *{m.weight.ndim for m in maps if m.weight.ndim > 2}]  # dimensions of weights
    others = len(needed) - 1
    for width, tokens, dims in product(widths, TOKENS, kinds):
        x = _noise(width, tokens, dims)
        yield (x, *[None] * others)
        for other in widths if others else ():  # a memory to attend to, or a vector that says how
            memory = _noise(other, tokens, dims)
            yield (x, *[memory] * others)
            yield (x, *[memory[:, 0]] * others)


def _noise(width: int, tokens: int, dims: int) -> Tensor:
    """Random features of two sequences, as a map whose weight has so many dimensions takes them."""
    side = math.isqrt(tokens)
    shape = {3: (2, width, tokens), 4: (2, width, side, side)}.get(dims, (2, tokens, width))
    generator = torch.Generator().manual_seed(width)
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_dtype())
