"""Steps of equal size for the neurons of an MLP, after orthogonalization.

Orthogonalization gives all singular directions of a matrix the same length, but not all rows of a
long one: some neurons take large steps and others hardly any, mostly the same in every step. A
running mean of the squares of each neuron's step evens them out (the idea of NorMuon, Li et al.,
2025):

    r_i ← β₂ r_i + (1 − β₂) mean_j O_ij²        O_ij ← O_ij √(mean r / r_i)

A neuron is a row of the matrices into an MLP and a column of the matrix out of it. The matrices of
attention are square or nearly so, and the rows of a square orthogonal matrix are equally long.
State: one number per neuron and matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockopt.blocks import Blocks, Split
from blockopt.distributed import Reduced, local_part
from blockopt.optim.block_squares import accumulation_dtype, square_sums
from blockopt.optim.input_directions import maps_of

INTO, OUT = {"mlp_in", "mlp_gate"}, {"mlp_out"}
SMALLEST = 0.01  # of the mean square: a neuron whose steps were nearly zero grows by at most 10


def neuron_dims(blocks: Blocks) -> tuple[int, ...] | None:
    """The dimensions of a parameter that tell its neurons apart; None if it has none.

    Example:
        >>> into = Blocks(("mlp_gate", "mlp_in"), split=Split(1, (32, 32), (32, 32), stack=8))
        >>> out = Blocks(("mlp_out",), split=Split(0, (16,), (16,)))
        >>> neuron_dims(into), neuron_dims(out)
        ((0, 1), (1,))
    """
    split, roles = blocks.split, set(blocks.roles)
    if split is None or not (roles <= INTO or roles <= OUT):
        return None
    maps = maps_of(blocks)
    along = maps.out if roles <= INTO else maps.inp
    return (along,) if maps.stack is None else (maps.stack, along)


def new_neuron_state(parameter: Tensor, blocks: Blocks) -> dict[str, Tensor]:
    """The state before the first step, empty for a parameter without neurons."""
    dims = neuron_dims(blocks)
    if dims is None:
        return {}
    number = torch.Size([parameter.shape[dim] for dim in dims]).numel()
    dtype = accumulation_dtype(parameter)
    return {"neuron_squares": torch.zeros(number, dtype=dtype, device=parameter.device)}


def neuron_sums(update: Tensor, parameter: Tensor, blocks: Blocks) -> Reduced:
    """The squares of an update, summed for each neuron over what this rank holds of it.

    Args:
        update: The own part of it.
        parameter: What it is for.
        blocks: Of the parameter.
    """
    dims = neuron_dims(blocks)
    assert dims is not None
    return Reduced(square_sums(update, dims, accumulation_dtype(update)), parameter, dims)


def neuron_factors(squares: Tensor, parameter: Tensor, blocks: Blocks) -> Tensor:
    """What the own part of an update is multiplied by, from the running means of all neurons."""
    dims = neuron_dims(blocks)
    assert dims is not None
    assert blocks.split is not None
    means = _matrix_means(squares, blocks.split, dims[-1])
    floor = (SMALLEST * means).clamp_min(torch.finfo(squares.dtype).tiny)
    factors = (means / torch.maximum(squares, floor)).sqrt()
    shape = [parameter.shape[dim] if dim in dims else 1 for dim in range(parameter.ndim)]
    return local_part(factors.view(shape), parameter)


def _matrix_means(squares: Tensor, split: Split, along: int) -> Tensor:
    """The mean over the neurons of each matrix, at the place of every neuron."""
    if along != split.dim:  # the matrix out of an MLP is not fused with another
        return (
            squares.view(split.stack, -1)
            .mean(dim=1, keepdim=True)
            .expand(-1, len(squares) // split.stack)
            .reshape(-1)
        )
    sections = squares.view(split.stack, split.repeat, -1).split(split.sizes, dim=2)
    means = [section.mean(dim=(1, 2), keepdim=True).expand_as(section) for section in sections]
    return torch.cat(means, dim=2).reshape(-1)
