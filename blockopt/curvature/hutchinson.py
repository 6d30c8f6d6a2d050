"""The trace of the Hessian blocks by random probes and exact Hessian-vector products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks, block_groups, block_numel, expand, sum_groups
from blockopt.checks import check_count
from blockopt.measure.closures import (
    Curvature,
    Evaluation,
    Losses,
    averaged_over_ranks,
    block_dots,
    block_zeros,
    default_generator,
    mean_curvature,
    refuse_sharded,
    trainable_parameters,
)
from blockopt.measure.second_derivatives import hessian_products

LARGEST_FACTOR = 1e3  # what a probe is multiplied by, at most, before rounding


def hutchinson(
    model: nn.Module,
    losses: Losses,
    *,
    blocks: Mapping[str, Blocks] | None = None,
    num_probes: int = 1,
    generator: torch.Generator | None = None,
) -> Curvature:
    """Return an unbiased estimate of the mean curvature of each block, `tr(H_bb) / dim_b`.

    One probe orders blocks badly; about 256 are needed. On a small GPT the rank correlation of the
    estimated and the exact curvature of its tensors was 0.15 to 0.42 with 1 probe, 0.36 to 0.64
    with 16 and 0.90 to 0.96 with 256 (see benchmarks/README.md). The reason is that blocks differ
    by orders of magnitude. For a probe `z` of independent random signs, `z_b · (H z)_b` has the
    mean `tr(H_bb)`, but the products with all other blocks add noise, and what sharp blocks such as
    the embedding add to flat ones such as the queries exceeds their own curvature. Noise falls only
    as one over the square root of the number of probes. Estimates may be negative, because of the
    noise or because the loss is not convex.

    To reduce the noise, the signs of each role in a parameter are divided by its root mean square
    gradient, and the result is multiplied by the square of that. This keeps the mean, and flat
    blocks get several times less noise, at the cost of a little more in sharp ones.

    Attention runs on the math kernel, and compiled models run eagerly.

    Args:
        model: Any module with whole parameters (not FSDP2).
        losses: One or more closures that return the mean loss of a batch, alone or with its number
            of tokens, by which the batches are weighted. Any loss function.
        blocks: What `find_blocks(model)` returns; found here by default.
        num_probes: Probes per batch; each is one Hessian-vector product. Those of several batches
            add up.
        generator: Draws the signs; its seed is 0 by default. Ranks that measure together need the
            same seed.

    Returns:
        `{parameter name: mean curvature of each block}`.

    Raises:
        ValueError: If a parameter is sharded.

    Example:
        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 0.0]])
        >>> hutchinson(model, lambda: model(x).square().sum())
        {'weight': tensor([9.])}
    """
    check_count("num_probes", num_probes)
    refuse_sharded(model, "hutchinson")
    generator = default_generator(generator)
    parameters = trainable_parameters(model)

    def measure_traces(evaluation: Evaluation, blocks: Mapping[str, Blocks]) -> Curvature:
        gradients, times = hessian_products(evaluation, parameters)
        factors = probe_factors(averaged_over_ranks(gradients, parameters), blocks)
        traces = block_zeros(parameters, blocks)
        for _ in range(num_probes):
            probes = {
                name: _probe(p, blocks[name], factors[name], generator)
                for name, p in parameters.items()
            }
            for name, product in times(probes).items():
                dots = block_dots(probes[name], product, blocks[name])
                traces[name] += dots / (factors[name].to(dots) ** 2 * num_probes)
        return traces

    return mean_curvature(model, losses, blocks, measure_traces)


def probe_factors(gradients: Mapping[str, Tensor], blocks: Mapping[str, Blocks]) -> Curvature:
    """Return what to multiply the signs of each block by.

    That is the root mean square of the whole gradient over that of the block's role in its
    parameter, within bounds. Blocks share it because a single one may have next to no gradient,
    such as the row of a token that does not occur: its large probe would drown the others in noise.
    Factors are powers of two, which every dtype holds exactly, so that they divide out exactly.
    """
    labels, groups = block_groups(blocks, "tensor")
    dots = {name: block_dots(g, g, blocks[name]) for name, g in gradients.items()}
    numel = {n: block_numel(tuple(g.shape), blocks[n].split) for n, g in gradients.items()}
    squares, sizes = (sum_groups(values, groups, len(labels)) for values in (dots, numel))
    factors = torch.ones_like(squares)
    if float(squares.sum()) > 0:
        means = squares / sizes * (sizes.sum() / squares.sum())
        factors = means.sqrt().clamp(min=1 / LARGEST_FACTOR).log2().round().neg().exp2()
    return {name: factors[groups[name]].to(g.device) for name, g in gradients.items()}


def _probe(
    parameter: Tensor, blocks: Blocks, factors: Tensor, generator: torch.Generator
) -> Tensor:
    signs = torch.randint(
        0, 2, parameter.shape, generator=generator, dtype=torch.int8, device=generator.device
    )
    signs = signs.to(device=parameter.device, dtype=parameter.dtype).mul_(2).sub_(1)
    return signs.mul_(expand(factors.to(parameter.dtype), blocks.split, parameter.ndim))
