"""Linear maps of which each token makes one feature: of attention among channels, or over tokens.

Attention among channels (XCiT) multiplies queries and keys along their tokens, which are its
features. A map that mixes tokens after another one (Linformer) makes no heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockopt.blocks.watch.linear_maps import LinearMap
from blockopt.blocks.watch.probes import Side, largest, pull, push

_DRAWS = 4  # of random signs, so that no feature is missed by chance


def is_one_feature(linear: LinearMap, tensor: Tensor, axis: int) -> bool:
    """Whether what a map makes of one token is one feature of a tensor, and of another, another.

    Args:
        linear: A linear map.
        tensor: What is made of it.
        axis: The axis of its features.
    """
    units = Side(linear.output.tensor, tuple(axis for axis, _ in linear.out_axes))
    sizes = units.size(pull(tensor, units.tensor, Side(tensor, ()).signs()), units.others)
    token = largest(sizes)
    if token is None or tensor.shape[axis] < 2:
        return False

    def features_of(token: tuple[int, ...]) -> Tensor:
        where: list[int | slice] = [slice(None)] * units.tensor.ndim
        for other, place in zip(units.others, token):
            where[other] = place
        only = torch.zeros_like(units.tensor)
        only[tuple(where)] = 1
        moved = (push(units.tensor, tensor, only * units.signs(draw)) for draw in range(_DRAWS))
        squares = sum(Side(tensor, ()).size(m, (axis,)).square() for m in moved)
        assert isinstance(squares, Tensor)
        return squares.div_(squares.norm().clamp(min=1e-300))

    first = features_of(token)
    if first.sum() ** 2 > len(first) / 2:  # as many as share the sum of squares
        return False
    for place, length in enumerate(sizes.shape):
        other = (*token[:place], (token[place] + 1) % length, *token[place + 1 :])
        if bool(sizes[other] > 0) and torch.dot(first, features_of(other)) < 0.5:
            return True
    return False
