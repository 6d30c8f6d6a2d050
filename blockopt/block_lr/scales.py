"""From the curvature of the blocks to the multipliers of their learning rates.

One learning rate cannot fit blocks whose curvature differs by orders of magnitude. `block_scales`
makes a multiplier of each block's curvature, for `optimizer.set_block_scales`; `uniform` and
`sharpness_disparity` give multipliers to compare with.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks, find_blocks
from blockopt.blocks.groups import Level, block_groups, by_name, per_block
from blockopt.blocks.split import block_numel

RATIOS = {
    **{"value": 4, "output": 4, "mlp_in": 6, "mlp_gate": 6, "mlp_out": 6},
    **{"query": 8, "key": 8, "embedding": 10, "position": 10},
}  # 1 for the others
_warned: set[str] = (
    set()
)  # Python's own once-a-location forgets whenever some library touches the filters


def block_scales(
    curvature: Mapping[str, Tensor],
    model: nn.Module,
    blocks: Mapping[str, Blocks] | None = None,
    *,
    power: float = -0.5,
    bounds: tuple[float, float] = (0.1, 10.0),
    by: Level = "role",
) -> dict[str, Tensor]:
    """Learning-rate multipliers `scale = clip((c / c_ref) ** power, *bounds)`, where `c` is the curvature of a group of blocks.

    `c_ref` is such that the geometric mean of the clipped scales over all entries of the model is
    1: the learning rate keeps its meaning, and the unit of the curvature does not matter.

    A group's curvature is the sum of its blocks' traces over the sum of their sizes, without blocks
    that are not finite if others are. A group at or below zero counts as the flattest positive one,
    one of NaN or infinity as the sharpest finite one. Both warn, once a process.

    Args:
        curvature: `{parameter name: tensor of num_blocks}`, the mean curvature tr(H_bb) / size of
            each block.
        model: The model, under any wrapper; only the names and sizes of its parameters are read.
        blocks: What `find_blocks(model)` returned when the curvature was measured; found here by
            default.
        power: The exponent: -1/2 by default, 0 for ones, > 0 to favour sharp blocks, which is of
            use as a control.
        bounds: The smallest and the largest scale, on both sides of 1.
        by: What makes a group: "role", all blocks of a role; "layer", those of a role in layers of
            one index (an encoder and a decoder share indices); "tensor", those of a role in one
            parameter; "head", each block of `blocks` alone.

    Returns:
        `{parameter name: float32 tensor of num_blocks}`, on the CPU.

    Raises:
        ValueError: If an option, a name or a length is wrong, or no group has a positive and finite
            curvature.

    Example:
        >>> model = nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32)
        >>> curvature = {name: torch.ones(entry.num_blocks) for name, entry in find_blocks(model).items()}
        >>> curvature["self_attn.in_proj_weight"][:4] = 0.01  # queries and keys
        >>> block_scales(curvature, model)["self_attn.in_proj_weight"]
        tensor([5.8855, 5.8855, 5.8855, 5.8855, 0.5886, 0.5886])
        >>> block_scales(curvature, model, bounds=(0.5, 2.0))["self_attn.in_proj_weight"]
        tensor([2.0000, 2.0000, 2.0000, 2.0000, 0.8128, 0.8128])
    """
    if not math.isfinite(power):
        raise ValueError(f"Invalid power={power}. Must be finite.")
    if not 1e-38 <= bounds[0] <= 1 <= bounds[1] <= 1e38:  # what float32 can hold
        raise ValueError(
            f"Invalid bounds={bounds}. Must be (low, high) with 1e-38 <= low <= 1 <= high <= 1e38."
        )
    blocks, numel = _sized(model, blocks)
    _check_names("curvature", curvature, blocks)
    for name, entry in blocks.items():
        if (shape := tuple(curvature[name].shape)) != (entry.num_blocks,):
            raise ValueError(
                f"Invalid curvature of shape {shape} for {name!r}. Must be {(entry.num_blocks,)}, one a block."
            )
    values = torch.cat([curvature[name].detach().cpu().double() for name in blocks])
    group = torch.cat(list(block_groups(blocks, by)[1].values()))
    pooled = _pool(values, numel, group)
    scales = _scales(_positive(pooled), torch.bincount(group, numel), power, bounds)
    strange = ~torch.isfinite(values) & (pooled[group] != -math.inf)
    _warn(
        "not finite, left out of its group or else counted as the sharpest measured,",
        strange,
        blocks,
    )
    _warn("not positive, counted as the flattest measured,", pooled[group] <= 0, blocks)
    return by_name(scales.float()[group], blocks)


def uniform(model: nn.Module, blocks: Mapping[str, Blocks] | None = None) -> dict[str, Tensor]:
    """A multiplier of 1 for every block: the optimizer as it is without scales.

    Example:
        >>> uniform(nn.LayerNorm(4))
        {'weight': tensor([1.]), 'bias': tensor([1.])}
    """
    return {name: torch.ones(entry.num_blocks) for name, entry in _sized(model, blocks)[0].items()}


def sharpness_disparity(
    model: nn.Module, blocks: Mapping[str, Blocks] | None = None
) -> dict[str, Tensor]:
    """The fixed multipliers that Wang et al. (arXiv 2502.19002) tuned for AdamW, brought to a geometric mean of 1.

    Norms 1; value and output 4; MLP 6; query and key 8; embeddings 10. Here all are divided by
    their geometric mean over the entries of the model, to compare with `uniform` and `block_scales`
    at one learning rate; theirs is the one of a norm. Where they state none, we chose: positions 10
    like embeddings; head (unless tied), biases and all else 1, their base rate. Their code also
    stretches warmup and scales weight decay by the multiplier, and decays all blocks to one final
    rate: we do not.

    Example:
        >>> scales = sharpness_disparity(nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32))
        >>> scales["self_attn.in_proj_weight"] / scales["norm1.weight"]
        tensor([8., 8., 8., 8., 4., 4.])
    """
    blocks, _ = _sized(model, blocks)
    ratios = {
        name: per_block([RATIOS.get(role, 1) for role in entry.roles], entry)
        for name, entry in blocks.items()
    }
    return block_scales(ratios, model, blocks, power=1.0)  # the bounds hold any ratios within 1..10


def _sized(
    model: nn.Module, blocks: Mapping[str, Blocks] | None
) -> tuple[dict[str, Blocks], Tensor]:
    """The blocks in the order of the model's parameters, and the number of entries of each block in a row."""
    shapes = {
        name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad
    }  # of a DTensor: the whole
    if not shapes:
        raise ValueError(f"{type(model).__name__} has no trainable parameter to scale.")
    found = find_blocks(model) if blocks is None else blocks
    _check_names("blocks", found, shapes)
    for name, shape in shapes.items():
        found[name].check(shape)
    numel = torch.cat([block_numel(shape, found[name].split) for name, shape in shapes.items()])
    return {name: found[name] for name in shapes}, numel.double()


def _check_names(what: str, given: Mapping[str, Any], trainable: Mapping[str, Any]) -> None:
    if given.keys() != trainable.keys():
        missing, extra = (
            sorted(trainable.keys() - given.keys()),
            sorted(given.keys() - trainable.keys()),
        )
        raise ValueError(
            f"Invalid {what}: lacks {missing[:3]}, and has {extra[:3]} that are not trained. They must match."
        )


def _pool(values: Tensor, numel: Tensor, group: Tensor) -> Tensor:
    """Mean of each group by number of entries, of its finite values if it has some, in a unit common to all groups."""
    finite = torch.isfinite(values)
    used = finite | (torch.bincount(group, numel * finite)[group] == 0)
    # A power of two is exact: no sum overflows, and the result has the same bits whatever power of
    # two the input is scaled by.
    unit = 2.0 ** (math.frexp(torch.where(finite, values.abs(), 0.0).max().item())[1] - 1)
    sums = torch.bincount(group, torch.where(used, values / unit * numel, 0.0))
    return sums / torch.bincount(group, torch.where(used, numel, 0.0))


def _positive(pooled: Tensor) -> Tensor:
    """Curvature that has a logarithm: flat or negative groups as the flattest one, unknown or infinite as the sharpest one."""
    usable = pooled[torch.isfinite(pooled) & (pooled > 0)]
    if len(usable) == 0:
        cure = "Measure it on more data, or use squared gradients, which cannot be negative."
        raise ValueError(
            f"Invalid curvature: none of the {len(pooled)} groups of blocks has a positive and finite one. {cure}"
        )
    flattest, sharpest = usable.min().item(), usable.max().item()
    return torch.where(pooled <= 0, flattest, pooled.nan_to_num(nan=sharpest, posinf=sharpest))


def _scales(
    curvature: Tensor, weights: Tensor, power: float, bounds: tuple[float, float]
) -> Tensor:
    """`clip((curvature / reference) ** power, *bounds)` of weighted geometric mean 1.

    Its logarithm is monotone in the reference, and 0 between the smallest and the largest
    curvature, because the bounds enclose 1. So bisection cannot fail, and 64 halvings reach the
    resolution of float64.
    """
    logs, lowest, highest = curvature.log(), math.log(bounds[0]), math.log(bounds[1])
    low, high = logs.min().item(), logs.max().item()
    for _ in range(64):
        middle = (low + high) / 2
        mean = torch.dot(weights, (power * (logs - middle)).clamp(lowest, highest)).item()
        low, high = (middle, high) if (mean > 0) == (power > 0) else (low, middle)
    return (power * (logs - high)).exp().clamp(*bounds)


def _warn(what: str, bad: Tensor, blocks: Mapping[str, Blocks]) -> None:
    if what in _warned or not bad.any():
        return
    names = [name for name, some in by_name(bad, blocks).items() if some.any()]
    where = f"{len(names)} of {len(blocks)} parameters ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
    warnings.warn(f"Curvature {what} in {where}. Later ones give no warning.", stacklevel=3)
    _warned.add(
        what
    )  # after the warning, so that a filter that makes it an error does so each time
