"""From the curvature of the blocks to the multipliers of their learning rates.

One learning rate cannot fit blocks whose curvature differs by orders of magnitude. `block_scales`
turns each block's curvature into a multiplier, for `optimizer.set_block_scales`; `uniform` and
`sharpness_disparity` are multipliers to compare with.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from blockopt.block_lr import defaults
from blockopt.blocks import (
    Blocks,
    Level,
    block_groups,
    block_numel,
    by_name,
    checked_blocks,
    per_block,
)
from blockopt.errors import NotPositiveError

RATIOS = {
    **{"value": 4, "output": 4, "mlp_in": 6, "mlp_gate": 6, "mlp_out": 6},
    **{"query": 8, "key": 8, "embedding": 10, "position": 10},
}  # 1 for the others
# Curvature below this share of the largest is rounding, such as that of a bias of the keys, which
# softmax does not see. Its sign is chance, and differs with the number of ranks.
NEGLIGIBLE = 1e-12


class ScaleOptions(NamedTuple):
    """How curvature becomes a multiplier, see `block_scales`."""

    power: float = defaults.USUAL.power
    bounds: tuple[float, float] = defaults.USUAL.bounds
    by: Level = "role"

    def check(self) -> None:
        """Raise `ValueError` if an option is out of range."""
        if not math.isfinite(self.power):
            raise ValueError(f"Invalid power={self.power}. Must be finite.")
        low, high = self.bounds
        if not 1e-38 <= low <= 1 <= high <= 1e38:  # what float32 can hold
            raise ValueError(
                f"Invalid bounds={self.bounds}. Must be (low, high) with "
                "1e-38 <= low <= 1 <= high <= 1e38."
            )


def block_scales(
    curvature: Mapping[str, Tensor],
    model: nn.Module,
    blocks: Mapping[str, Blocks] | None = None,
    *,
    power: float = defaults.USUAL.power,
    bounds: tuple[float, float] = defaults.USUAL.bounds,
    by: Level = "role",
) -> dict[str, Tensor]:
    """Return learning-rate multipliers `clip((curvature / reference) ** power, *bounds)` per block.

    The reference is such that the geometric mean of the clipped multipliers over all entries of the
    model is 1: the learning rate keeps its meaning, and the unit of the curvature does not matter.

    Blocks of a group share a multiplier. A group's curvature is the mean over its entries, without
    blocks that are not finite if it has others. A group at or below zero, or above it by rounding
    alone, counts as the flattest positive one, and one that is not finite as the sharpest finite
    one. There is a warning if any value is not finite, or if the curvature of more than half of the
    weights is not positive.

    Args:
        curvature: `{parameter name: one value per block}`, the mean curvature tr(H_bb) / size.
        model: The model, under any wrapper; only names and sizes of its parameters are read.
        blocks: What `find_blocks(model)` returned when the curvature was measured; found here by
            default.
        power: The exponent: -1/2 by default, 0 for ones, > 0 to favour sharp blocks, as a control.
        bounds: The smallest and the largest multiplier, on both sides of 1.
        by: The groups: "role", all blocks of a role; "layer", those of a role in layers of one
            index (an encoder and a decoder share indices); "tensor", those of a role in one
            parameter; "head", each block alone.

    Returns:
        `{parameter name: float32 tensor, one value per block}`, on the CPU.

    Raises:
        ValueError: If an option, a name or a length is wrong, or no group has a positive and finite
            curvature.

    Example:
        >>> model = nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32)
        >>> from blockopt import find_blocks
        >>> curvature = {n: torch.ones(b.num_blocks) for n, b in find_blocks(model).items()}
        >>> curvature["self_attn.in_proj_weight"][:4] = 0.01  # queries and keys
        >>> block_scales(curvature, model)["self_attn.in_proj_weight"]
        tensor([5.8855, 5.8855, 5.8855, 5.8855, 0.5886, 0.5886])
        >>> block_scales(curvature, model, bounds=(0.5, 2.0))["self_attn.in_proj_weight"]
        tensor([2.0000, 2.0000, 2.0000, 2.0000, 0.8128, 0.8128])
    """
    blocks = checked_blocks(model, blocks)
    options = ScaleOptions(power, bounds, by)
    scales, not_positive = scales_and_guesses(curvature, model, blocks, options)
    broken = [name for name in blocks if not bool(torch.isfinite(curvature[name]).all())]
    if broken:
        shown = ", ".join(broken[:3]) + (", …" if len(broken) > 3 else "")
        warnings.warn(
            f"The curvature of some blocks of {len(broken)} parameters ({shown}) is not finite. "
            "They take the multiplier of their group, or of the sharpest group if theirs has no "
            "finite curvature. Look for overflow in what measured it.",
            stacklevel=2,
        )
    elif not_positive > 0.5:
        warnings.warn(
            f"The curvature of {not_positive:.0%} of the weights is not positive. They take the "
            "multiplier of the flattest group, which is a guess. Measure on more data, or with "
            "'gauss_newton', which is never negative.",
            stacklevel=2,
        )
    return scales


def scales_and_guesses(
    curvature: Mapping[str, Tensor],
    model: nn.Module,
    blocks: Mapping[str, Blocks],
    options: ScaleOptions,
) -> tuple[dict[str, Tensor], float]:
    """Return the multipliers, and the share of the weights whose curvature is not positive."""
    options.check()
    values = flat_curvature(curvature, blocks).double()
    numel = torch.cat(list(entries_of_blocks(model, blocks).values()))
    group = torch.cat(list(block_groups(blocks, options.by)[1].values()))
    pooled = _pool(values, numel, group)
    scales = _scales(_positive(pooled), torch.bincount(group, numel), options)
    share = float(numel[(pooled <= 0)[group]].sum() / numel.sum())
    return by_name(scales.float()[group], blocks), share


def flat_curvature(curvature: Mapping[str, Tensor], blocks: Mapping[str, Blocks]) -> Tensor:
    """Return the values of all blocks in a row, in float64 on the CPU.

    Raises:
        ValueError: If a parameter is missing or unknown, or has the wrong number of values.
    """
    if curvature.keys() != blocks.keys():
        missing, extra = sorted(blocks.keys() - curvature), sorted(curvature.keys() - blocks)
        raise ValueError(
            f"Invalid curvature: {missing[:3]} are missing, and {extra[:3]} are not trained. "
            "Must have one entry for each trainable parameter."
        )
    for name, entry in blocks.items():
        shape = tuple(curvature[name].shape)
        if shape != (entry.num_blocks,):
            raise ValueError(
                f"Invalid curvature of shape {shape} for {name!r}. Must be {(entry.num_blocks,)}, "
                "one value per block."
            )
    return torch.cat([curvature[name].detach().to("cpu", torch.float64) for name in blocks])


def entries_of_blocks(model: nn.Module, blocks: Mapping[str, Blocks]) -> dict[str, Tensor]:
    """Return how many entries each block has, `{parameter name: one number per block}`."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return {name: block_numel(shapes[name], b.split).double() for name, b in blocks.items()}


def centred(logs: dict[str, Tensor], numel: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the logarithms of scales less their mean over all entries of the model."""
    total = sum(float(torch.dot(numel[name], logs[name])) for name in logs)
    mean = total / sum(float(numel[name].sum()) for name in logs)
    if abs(mean) < 1e-6:  # no more than rounding: leave the bits
        return logs
    return {name: log - mean for name, log in logs.items()}


def uniform(model: nn.Module, blocks: Mapping[str, Blocks] | None = None) -> dict[str, Tensor]:
    """Return a multiplier of 1 for every block: the optimizer as it is without scales.

    Example:
        >>> uniform(nn.LayerNorm(4))
        {'weight': tensor([1.]), 'bias': tensor([1.])}
    """
    blocks = checked_blocks(model, blocks)
    return {name: torch.ones(entry.num_blocks) for name, entry in blocks.items()}


def sharpness_disparity(
    model: nn.Module, blocks: Mapping[str, Blocks] | None = None
) -> dict[str, Tensor]:
    """Return the fixed multipliers that Wang et al. (arXiv 2502.19002) tuned for AdamW.

    Norms 1; value and output 4; MLP 6; query and key 8; embeddings 10. All are divided by their
    geometric mean over the entries of the model, so that they compare with `uniform` and
    `block_scales` at one learning rate; theirs is that of a norm. Where the paper states none, we
    chose: positions 10 like embeddings; head (unless tied), biases and all else 1. Their code also
    stretches warmup, scales weight decay by the multiplier and decays all blocks to one final rate.
    We do none of these.

    Example:
        >>> model = nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32)
        >>> scales = sharpness_disparity(model)
        >>> scales["self_attn.in_proj_weight"] / scales["norm1.weight"]
        tensor([8., 8., 8., 8., 4., 4.])
    """
    blocks = checked_blocks(model, blocks)
    ratios = {
        name: per_block([RATIOS.get(role, 1) for role in entry.roles], entry)
        for name, entry in blocks.items()
    }
    return block_scales(ratios, model, blocks, power=1.0)  # the bounds hold ratios within 1..10


def _pool(values: Tensor, numel: Tensor, group: Tensor) -> Tensor:
    """The mean of each group by number of entries, over its finite values if it has some.

    All groups are in one unit, a power of two, which is exact: no sum overflows, and the result has
    the same bits whatever power of two the input is scaled by.
    """
    finite = torch.isfinite(values)
    used = finite | (torch.bincount(group, numel * finite)[group] == 0)
    largest = torch.where(finite, values.abs(), 0.0).max().item()
    unit = 2.0 ** (math.frexp(largest)[1] - 1)
    sums = torch.bincount(group, torch.where(used, values / unit * numel, 0.0))
    return sums / torch.bincount(group, torch.where(used, numel, 0.0))


def _positive(pooled: Tensor) -> Tensor:
    """Curvature that has a logarithm: guesses in place of what is not positive and finite."""
    finite = pooled[torch.isfinite(pooled)]
    usable = finite[finite > (NEGLIGIBLE * finite.abs().max() if len(finite) else 0.0)]
    if len(usable) == 0:
        raise NotPositiveError(
            f"None of the {len(pooled)} groups of blocks has a positive and finite curvature. "
            "Measure on more data, or with 'gauss_newton', which is never negative."
        )
    flattest, sharpest = usable.min().item(), usable.max().item()
    return pooled.nan_to_num(nan=sharpest, posinf=sharpest).clamp(min=flattest)


def _scales(curvature: Tensor, weights: Tensor, options: ScaleOptions) -> Tensor:
    """`clip((curvature / reference) ** power, *bounds)` with a weighted geometric mean of 1.

    Its logarithm is monotone in the reference, and 0 between the smallest and the largest
    curvature, because the bounds enclose 1. So bisection cannot fail, and 64 halvings reach the
    resolution of float64.
    """
    power, bounds = options.power, options.bounds
    logs, lowest, highest = curvature.log(), math.log(bounds[0]), math.log(bounds[1])
    low, high = logs.min().item(), logs.max().item()
    for _ in range(64):
        middle = (low + high) / 2
        mean = torch.dot(weights, (power * (logs - middle)).clamp(lowest, highest)).item()
        low, high = (middle, high) if (mean > 0) == (power > 0) else (low, middle)
    return (power * (logs - high)).exp().clamp(*bounds)
