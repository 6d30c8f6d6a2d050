"""Linear maps inside a model: which modules are one, however they store or wrap their weight."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor, nn

from blockopt.blocks.own_maps import own_map

# Attributes under which PEFT and `torch.compile` keep the module that they wrap.
WRAPPERS = ("original_module", "base_layer", "_orig_mod")
# DeepSeek's names for the maps of latent attention: down, up and with rotated positions.
LATENT_NAMES = {
    **{"dq": ("d", "q"), "uq": ("u", "q"), "qr": ("q", "r"), "kr": ("k", "r")},
    **{"dkv": ("d", "kv"), "ukv": ("u", "kv"), "uk": ("u", "k"), "uv": ("u", "v")},
}
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Linear(NamedTuple):
    """A linear map: its parameters, its sizes, and the dimensions of its weight.

    Attributes:
        weight: The parameter that holds the weight: the original one if it is parametrized.
        bias: The bias, if there is one.
        out_dim: The dimension of the weight that runs over the outputs.
        in_dim: The one that runs over the inputs.
        out_size: Number of outputs.
        in_size: Number of inputs.
    """

    weight: Tensor
    bias: Tensor | None
    out_dim: int
    in_dim: int
    out_size: int
    in_size: int


@lru_cache(maxsize=4096)
def words(name: str) -> tuple[str, ...]:
    """The words of a name in small letters, numbers left out.

    Example:
        >>> words("kv_a_proj"), words("GPTNeoXAttention"), words("fc1")
        (('kv', 'a', 'proj'), ('gpt', 'neo', 'x', 'attention'), ('fc',))
    """
    found = (word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name))
    return tuple(part for word in found for part in LATENT_NAMES.get(word, (word,)))


def type_words(module: nn.Module) -> frozenset[str]:
    """The words in the name of a module's type, and of the types that it derives from."""
    return _type_words(type(module))  # type: ignore[arg-type]


@lru_cache(maxsize=4096)
def _type_words(kind: type) -> frozenset[str]:
    bases = (base.__name__ for base in kind.__mro__ if base not in (nn.Module, object))
    return frozenset(word for name in bases for word in words(name))


def is_called_attention(module: nn.Module) -> bool:
    """Whether the name of the module's type, or of one that it derives from, ends so."""
    names = (base.__name__ for base in type(module).__mro__)
    return any(re.search(r"Attention(\d?D|\dd)?$", name) for name in names)


def is_named(module: nn.Module, *names: str) -> bool:
    """Whether the module's type has one of the names, or derives from one, as under FSDP2."""
    return any(base.__name__ in names for base in type(module).__mro__)


def unwrapped(module: object) -> object:
    """The module inside the wrappers of PEFT, `torch.compile` and hand-written LoRA."""
    while isinstance(module, nn.Module):
        children = module._modules
        saved = children.get("modules_to_save")
        if "original_module" in children and isinstance(saved, nn.ModuleDict) and len(saved):
            active = next((name for name in _active(module) if name in saved), next(iter(saved)))
            module = saved[active]  # a copy that is trained in place of the original
            continue
        inside = next((children[w] for w in WRAPPERS if children.get(w) is not None), None)
        inside = inside or _beside_factors(module)
        if inside is None:
            break
        module = inside
    return module


def _beside_factors(module: nn.Module) -> nn.Module | None:
    """The one layer that a hand-written LoRA holds beside its factors, or None."""
    held = [*module._parameters, *module._modules]
    said = [name for name in held if "lora" in name.lower()]
    if not said and not ("lora" in type(module).__name__.lower() and {"A", "B"} <= set(held)):
        return None
    layers = [child for name, child in module.named_children() if name not in said]
    layers = [child for child in layers if any(True for _ in child.parameters())]
    return layers[0] if len(layers) == 1 and stored_weight(layers[0]) is not None else None


def _active(module: nn.Module) -> list[str]:
    active = getattr(module, "active_adapters", None) or getattr(module, "active_adapter", None)
    return [active] if isinstance(active, str) else list(active or ())


def read_linear(module: object) -> Linear | None:
    """Read a module as a linear map, through wrappers; None if it is none.

    `nn.Linear`, `Conv1D`, convolutions over single points, quantized layers, parametrized weights,
    classes of a user's own, and modules that hold nothing but one of these.
    """
    module = unwrapped(module)
    if not isinstance(module, nn.Module) or isinstance(module, nn.Embedding):
        return None
    if (own := own_map(module)) is not None:
        held = module._parameters
        own_weight, own_bias = held[own.weight], None if own.bias is None else held[own.bias]
        assert own_weight is not None
        dims = own.out_dim, 1 - own.out_dim
        return Linear(own_weight, own_bias, *dims, *(own_weight.shape[dim] for dim in dims))
    weight = stored_weight(module)
    if weight is None:
        holders = [child for child in module.children() if any(True for _ in child.parameters())]
        alone = len(holders) == 1 and not any(True for _ in module.parameters(recurse=False))
        return read_linear(holders[0]) if alone else None
    if {"norm", "embedding", "embeddings"} & type_words(module):
        return None
    sizes = _declared_sizes(module)
    if sizes is None and (weight.ndim < 2 or any(size != 1 for size in weight.shape[2:])):
        return None
    groups = getattr(module, "groups", 1)
    depthwise = groups != 1 and weight.shape[1] == 1
    if depthwise or getattr(module, "transposed", False):
        return None
    input_first = is_named(module, "Conv1D") and hasattr(module, "nf")
    out_dim, in_dim = (1, 0) if input_first else (0, 1)
    out_size, in_size = sizes or (weight.shape[out_dim], groups * weight.shape[in_dim])
    bias = module._parameters.get("bias")
    return Linear(weight, bias, out_dim, in_dim, out_size, in_size)


def stored_weight(module: nn.Module) -> Tensor | None:
    """The parameter that holds the weight of a module.

    A parametrized weight (`torch.nn.utils.parametrize`, `weight_norm`, `spectral_norm`) is never
    computed here, since that may change buffers: the largest of the tensors that make it up stands
    for it. A quantized weight may be a buffer.
    """
    parametrized = module._modules.get("parametrizations")
    if isinstance(parametrized, nn.ModuleDict) and "weight" in parametrized:
        originals = list(parametrized["weight"].parameters(recurse=False))
        return max(originals, key=lambda p: p.numel(), default=None)
    for name in ("weight", "weight_v", "weight_orig"):
        if module._parameters.get(name) is not None:
            return module._parameters[name]
    if _declared_sizes(module) is not None:
        return next(module.buffers(recurse=False), None)
    return None


def _declared_sizes(module: nn.Module) -> tuple[int, int] | None:
    sizes = (getattr(module, "out_features", None), getattr(module, "in_features", None))
    return sizes if all(isinstance(size, int) for size in sizes) else None  # type: ignore[return-value]


def direct_maps(module: nn.Module) -> dict[str, Linear]:
    """The linear maps that a module holds as its own attributes, by name."""
    found = {name: read_linear(child) for name, child in module.named_children()}
    return {name: linear for name, linear in found.items() if linear is not None}


def only_map(module: nn.Module) -> Linear | None:
    """The one linear map in a module that holds no other matrix, wherever it is inside."""
    if (linear := read_linear(module)) is not None:
        return linear
    weights = {id(p) for p in module.parameters() if sum(size > 1 for size in p.shape) > 1}
    found = [linear for m in module.modules() if (linear := read_linear(m)) is not None]
    alone = len({id(linear.weight) for linear in found}) == 1
    return found[0] if alone and weights <= {id(found[0].weight)} else None


def outer_maps(module: nn.Module) -> dict[str, Linear]:
    """The direct maps of a module, and those of its children that hold one, or gate and input."""
    found: dict[str, Linear] = {}
    for name, child in module.named_children():
        if isinstance(child, nn.Embedding):
            continue
        if (linear := only_map(child)) is not None:
            found[name] = linear
        elif {"output", "intermediate"} & set(words(name)):
            own = direct_maps(child)  # beside adapters or a bottleneck
            if len(own) == 1:
                found[name] = next(iter(own.values()))
        elif "gated" in type_words(child):
            found |= {f"{name}.{inner}": linear for inner, linear in direct_maps(child).items()}
    return found
