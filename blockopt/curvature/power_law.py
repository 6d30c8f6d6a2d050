"""The papers' scaling law: curvature from weight norms and the input's size, without any data.

Softmax attention makes the curvature of queries and keys grow as the sixth power of its input X and
with the squares of the other weights, that of values only as X² (Ormaniec, Dangel and Singh, ICLR
2025; bounds for the MLP in Petrov et al., arXiv 2510.16927). The law is one of magnitudes: it knows
neither the data nor the attention pattern.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks, block_numel, checked_blocks, read_linear
from blockopt.measure.closures import Curvature, block_dots, trainable_parameters

# The papers' powers of the input's root mean square, for attention and MLP without norms inside.
EXPONENTS = {
    "query": 6.0,
    "key": 6.0,
    "value": 2.0,
    "output": 2.0,
    "mlp_in": 2.0,
    "mlp_gate": 2.0,
    "mlp_out": 2.0,
}


class _RoleWeights(NamedTuple):
    """The blocks of one role in one parameter."""

    name: str  # of the parameter
    mask: Tensor  # which of its blocks have the role
    gains: Tensor  # w of each block; the rows of an MLP share one
    width: float  # of all heads, or the number of hidden units


Layer = dict[str, _RoleWeights]


@torch.no_grad()
def power_law(
    model: nn.Module,
    *,
    blocks: Mapping[str, Blocks] | None = None,
    input_scale: float | None = None,
    exponents: Mapping[str, float] | None = None,
) -> Curvature:
    """Return the mean curvature of each block by the scaling law, up to one common constant.

    With s the root mean square of a layer's input, and the gain `w = |W|² / d` of the weights of a
    head of width d, the law is

        query: s⁶ w_K w_V w_O      key: s⁶ w_Q w_V w_O      value: s² w_O      output: s² w_V

    For an MLP, with d the number of hidden units, it is `mlp_in: s² w_out` and `mlp_out: s² w_in`,
    and a gate multiplies these by `s² w`. The papers' W_V is the product of value and output, whose
    squared norm is `|W_V|² |W_O|² / d` for weights in general position. Grouped queries share the
    gains of their key and value, which get the sum over the queries. The papers give no law for
    other roles: their blocks get the geometric mean of all others, weighted by entries, so that
    their multiplier comes out near 1.

    Args:
        model: A transformer.
        blocks: What `find_blocks(model)` returns; found here by default.
        input_scale: s for all layers. By default it is the root mean square of the weights of the
            layer's norms, or of the embedding for a layer without norms.
        exponents: Powers of s by role that replace those of `EXPONENTS`, such as ones measured for
            a model with pre-norm.

    Returns:
        `{parameter name: relative curvature of each block}`.

    Raises:
        ValueError: If the model has neither attention nor an MLP, or if `exponents` names a role
            without a law.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> layer = nn.TransformerEncoderLayer(d_model=16, nhead=1, dim_feedforward=32)
        >>> small = power_law(layer, input_scale=1.0)["self_attn.in_proj_weight"]
        >>> power_law(layer, input_scale=2.0)["self_attn.in_proj_weight"] / small  # Q, K and V
        tensor([64., 64.,  4.])
    """
    unknown = sorted((exponents or {}).keys() - EXPONENTS.keys())
    if unknown:
        raise ValueError(f"Invalid exponents for {unknown}. Must be for {', '.join(EXPONENTS)}.")
    powers = {**EXPONENTS, **(exponents or {})}
    blocks = checked_blocks(model, blocks)
    parameters = trainable_parameters(model)
    curvature: Curvature = {
        name: torch.full((b.num_blocks,), math.nan, dtype=torch.float64)
        for name, b in blocks.items()
    }
    for layer in _sublayers(model, parameters, blocks):
        first = next(iter(layer.values())).name
        s = _input_scale(first, parameters, blocks) if input_scale is None else input_scale
        gains = _attention_gains(layer) if "query" in layer else _mlp_gains(layer, s)
        for role, gain in gains.items():
            curvature[layer[role].name][layer[role].mask] = s ** powers[role] * gain
    return _fill_rest(curvature, parameters, blocks)


def _sublayers(
    model: nn.Module, parameters: Mapping[str, Tensor], blocks: Mapping[str, Blocks]
) -> list[Layer]:
    """Find the weights that belong together, for each query and each MLP input.

    They are those of the smallest module around it that holds all its partners, or else of the
    largest module that holds no other query or MLP input.
    """
    # The law is one of whole weights, which the factors of an adapter are not.
    whole = (name for name in blocks if parameters[name].ndim > 1 and "lora_" not in name)
    matrices = {name: blocks[name] for name in whole}
    roles = {name: set(b.roles) & EXPONENTS.keys() for name, b in matrices.items()}
    layers = []
    for start, partners in (("query", {"key", "value", "output"}), ("mlp_in", {"mlp_out"})):
        for name in (n for n, found in roles.items() if start in found):
            members = [name]
            parts = name.split(".")
            for length in range(len(parts) - 1, -1, -1):
                prefix = ".".join([*parts[:length], ""]) if length else ""
                inside = [n for n in roles if n.startswith(prefix)]
                if sum(start in roles[n] for n in inside) > 1:
                    break
                members = inside
                if partners <= set().union(*(roles[n] for n in members)):
                    break
            wanted = {start, *partners} | ({"mlp_gate"} if start == "mlp_in" else set())
            found = [(n, r) for n in members for r in blocks[n].roles if r in wanted]
            layers.append({r: _weights(model, n, r, parameters[n], blocks[n]) for n, r in found})
    if not layers:
        raise ValueError(
            "Found neither attention nor an MLP, and the scaling law is for these. See "
            "print(blockopt.describe(model)) for the roles that were found."
        )
    return layers


def _weights(
    model: nn.Module, name: str, role: str, parameter: Tensor, blocks: Blocks
) -> _RoleWeights:
    mask = torch.tensor([r == role for r in blocks.block_roles])
    squares = block_dots(parameter, parameter, blocks).double().cpu()[mask]
    shape, split = tuple(parameter.shape), blocks.split
    sizes = block_numel(shape, split)[mask].double()
    if role.startswith("mlp"):  # all rows share the gain; there are more hidden units than inputs
        width = float(sizes.sum()) / min(shape[-2:])
        return _RoleWeights(name, mask, (squares.sum() / width).expand(len(squares)), width)
    linear = read_linear(model.get_submodule(name.rpartition(".")[0]))
    out_dim = 0 if linear is None else linear.out_dim
    heads_dim = split.dim if split is not None else 1 - out_dim if role == "output" else out_dim
    widths = sizes * shape[heads_dim] / parameter.numel()
    return _RoleWeights(name, mask, squares / widths, float(widths.sum()))


def _attention_gains(layer: Layer) -> dict[str, Tensor]:
    """Return what multiplies the power of s, for each role one value per head."""
    one = torch.ones(1, dtype=torch.float64)
    gains = {
        role: layer[role].gains if role in layer else one
        for role in ("query", "key", "value", "output")
    }
    heads = max(len(gain) for gain in gains.values())
    query, key, value, output = (_spread(gain, heads) for gain in gains.values())

    def by_head(values: Tensor, role: str) -> Tensor:
        user = "output" if role == "value" and "output" in layer else "query"
        sharing = layer[user].width / layer[role].width if role in ("key", "value") else 1.0
        number = len(gains[role])
        if heads % number:
            return sharing * values.mean().expand(number)
        return sharing * values.view(number, -1).mean(1)

    laws = {
        "query": key * value * output,
        "key": query * value * output,
        "value": output,
        "output": value,
    }
    return {role: by_head(values, role) for role, values in laws.items() if role in layer}


def _spread(gain: Tensor, heads: int) -> Tensor:
    """One gain per head; their mean if the heads of a role are no groups of the others."""
    if heads % len(gain):
        return gain.mean().expand(heads)
    return gain.repeat_interleave(heads // len(gain))


def _mlp_gains(layer: Layer, s: float) -> dict[str, Tensor]:
    one = torch.ones(1, dtype=torch.float64)
    into, gate, out = (
        layer[role].gains[:1] if role in layer else one
        for role in ("mlp_in", "mlp_gate", "mlp_out")
    )
    if "mlp_gate" in layer:
        laws = {
            "mlp_in": s**2 * gate * out,
            "mlp_gate": s**2 * into * out,
            "mlp_out": s**2 * into * gate,
        }
    else:
        laws = {"mlp_in": out, "mlp_out": into}
    return {role: values for role, values in laws.items() if role in layer}


def _input_scale(
    name: str, parameters: Mapping[str, Tensor], blocks: Mapping[str, Blocks]
) -> float:
    """Return the root mean square of the layer's norm weights, or of the embedding, or 1."""
    layer = blocks[name].layer
    norms = [n for n, b in blocks.items() if b.roles == ("norm",) and b.layer == layer]
    norms = [n for n in norms if n.endswith("weight")]
    found = norms or [n for n, b in blocks.items() if b.roles == ("embedding",)]
    squares = sum(float(block_dots(parameters[n], parameters[n], blocks[n]).sum()) for n in found)
    return math.sqrt(squares / sum(parameters[n].numel() for n in found)) if found else 1.0


def _fill_rest(
    curvature: Curvature, parameters: Mapping[str, Tensor], blocks: Mapping[str, Blocks]
) -> Curvature:
    """Give the blocks without a law the geometric mean of the others, or 1."""
    values = torch.cat(list(curvature.values()))
    sizes = torch.cat([block_numel(tuple(parameters[n].shape), b.split) for n, b in blocks.items()])
    known = values > 0
    mean = values.new_ones(())
    if bool(known.any()):
        mean = ((values[known].log() * sizes[known]).sum() / sizes[known].sum()).exp()
    return {name: c.where(~c.isnan(), mean).float() for name, c in curvature.items()}
