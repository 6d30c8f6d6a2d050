"""The weights of an attention layer by role and head, however the layer stores them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from blockopt.blocks.attention import attention_layouts
from blockopt.blocks.attention_names import attention_maps
from blockopt.blocks.layouts import Ambiguity, Layout
from blockopt.blocks.linear_maps import Linear
from blockopt.blocks.split import Split

ROLES = ("query", "key", "value", "output")


class AttentionWeights(NamedTuple):
    """What `SelfAttentionHessian` takes, as views of the parameters of a layer.

    Attributes:
        matrices: By role: "query" (H, d, dk), "key" and "value" (G, d, dk or dv) for G heads of
            their own, "output" (H, dv, d_out).
        biases: By role, where there are any: (H, dk), (G, dk), (G, dv) and (d_out,).
    """

    matrices: dict[str, Tensor]
    biases: dict[str, Tensor]


def attention_weights(module: nn.Module) -> AttentionWeights:
    """Read the weights of a layer whose maps are separate, fused, or interleaved by head.

    Roles, heads and the order of fused maps are those of `find_blocks`.

    Raises:
        ValueError: If there is not exactly one map for each role, or its heads cannot be told.
    """
    kind = type(module).__name__
    layouts = attention_layouts(module, (), per_head=True)
    matrices, biases = dict[str, Tensor](), dict[str, Tensor]()
    for linear in _maps(module):
        layout = layouts.get(linear.weight)
        if layout is None:
            continue
        if isinstance(layout, Ambiguity):
            raise ValueError(f"Invalid module {kind}: {layout.reason}. {_OTHER_WAY}")
        for role in layout.roles:
            if role not in ROLES or role in matrices:
                what = "a second map" if role in ROLES else "a map"
                raise ValueError(
                    f"Invalid module {kind}: it has {what} of role {role!r}, which no closed form "
                    "has. Use a HessianOperator of the model."
                )
        if layout.roles == ("output",):
            matrices |= _sections(linear.weight, layout, linear.in_dim)
            biases |= {} if linear.bias is None else {"output": linear.bias}
            continue
        stored = _sections(linear.weight, layout, linear.out_dim)
        matrices |= {role: matrix.mT for role, matrix in stored.items()}
        biases |= {} if linear.bias is None else _sections(linear.bias, layout, 0)
    missing = [role for role in ROLES if role not in matrices]
    if missing:
        raise ValueError(
            f"Invalid module {kind}: it has no map of role {', '.join(missing)}. {_OTHER_WAY}"
        )
    return AttentionWeights(matrices, biases)


_OTHER_WAY = "Give the weights to SelfAttentionHessian."


def _maps(module: nn.Module) -> list[Linear]:
    maps = list(attention_maps(module).values())
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        sizes = module.in_proj_weight.shape
        maps.append(Linear(module.in_proj_weight, module.in_proj_bias, 0, 1, *sizes))
    return maps


def _sections(stored: Tensor, layout: Layout, dim: int) -> dict[str, Tensor]:
    """Return the heads of each role, (number of heads, size of a head, other entries)."""
    split = layout.split or Split(dim, (stored.shape[dim],), (1,))
    patterns = stored.movedim(dim, 0).unflatten(0, (split.repeat, sum(split.sizes)))
    sections = patterns.split(split.sizes, 1)
    return {
        role: section.unflatten(1, (parts, -1)).flatten(0, 1)
        for role, section, parts in zip(layout.roles, sections, split.parts)
    }
