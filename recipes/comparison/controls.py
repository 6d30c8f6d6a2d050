"""Controls for learning rates by block: the same multipliers given to the wrong blocks.

If shuffled scales train as well as measured ones, the measurement was not what helped; inverted
ones should do harm. Both keep the spread of the scales and their geometric mean over all weights,
so that `lr` means the same in every arm.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import blockopt
from blockopt.blocks import Blocks
from blockopt.blocks.groups import block_groups
from blockopt.blocks.split import block_numel
from blockopt.checks import check_choice

SHUFFLE_SEED = 0  # for all runs: the learning rate is tuned for the very places that are tested


def role_cycle(roles: list[str], seed: int) -> dict[str, str]:
    """Assign each role to another one at random, in a single cycle, so that none keeps its own.

    Example:
        >>> role_cycle(["query", "key"], seed=0)
        {'query': 'key', 'key': 'query'}
    """
    order = list(roles)
    random.Random(seed).shuffle(order)
    following = dict(zip(order, order[1:] + order[:1]))
    return {role: following[role] for role in roles}


def shuffle_roles(
    values: Mapping[str, Tensor],
    model: nn.Module,
    seed: int,
    blocks: Mapping[str, Blocks] | None = None,
) -> dict[str, Tensor]:
    """Give every block of a role the mean value of another role.

    Args:
        values: `{parameter name: tensor of num_blocks}`, curvature or scales.
        model: The model.
        seed: Decides the cycle of roles.
        blocks: What `find_blocks(model)` returns; found here by default.
    """
    blocks = blockopt.find_blocks(model) if blocks is None else blocks
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found, groups = block_groups(blocks, "role")
    labels = [str(group) for group in found]
    group = torch.cat([groups[name] for name in blocks])
    weight = torch.cat(
        [block_numel(shapes[name], entry.split).double() for name, entry in blocks.items()]
    )
    value = torch.cat([values[name].detach().cpu().double() for name in blocks])
    means = torch.bincount(group, value * weight) / torch.bincount(group, weight)
    cycle = role_cycle(labels, seed)
    source = torch.tensor([labels.index(cycle[label]) for label in labels])
    return {name: means[source[groups[name]]].to(values[name].dtype) for name in blocks}


def controlled(
    scales: Mapping[str, Tensor], model: nn.Module, control: str, seed: int
) -> dict[str, Tensor]:
    """Return scales shuffled among roles or inverted, with a geometric mean of 1 over all weights.

    Raises:
        ValueError: If `control` is neither "shuffled" nor "inverted".
    """
    check_choice("control", control, ("shuffled", "inverted"))
    values = shuffle_roles(scales, model, seed) if control == "shuffled" else scales
    power = 1.0 if control == "shuffled" else -1.0
    return blockopt.block_scales(values, model, power=power, bounds=(1e-3, 1e3))


class ShuffledBlockLR(blockopt.BlockLR):
    """A `BlockLR` that gives each role the curvature of another one, the same in all runs."""

    def _measure(self, losses: Any, blocks: Mapping[str, Blocks]) -> Mapping[str, Tensor]:
        return shuffle_roles(super()._measure(losses, blocks), self._model, SHUFFLE_SEED, blocks)
