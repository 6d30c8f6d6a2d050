"""The trace of the Hessian blocks by random probes and exact Hessian-vector products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from blockopt.blocks import Blocks
from blockopt.blocks.groups import block_groups
from blockopt.blocks.split import block_numel, expand
from blockopt.measure.closures import (
    Curvature,
    Evaluation,
    Losses,
    block_dots,
    check_probes,
    default_generator,
    eager_math,
    mean_over_batches,
    refuse_sharded,
    trainable,
)

# A probe is at most this many times larger, but for rounding, than one scaled by the root mean
# square of the whole gradient.
LARGEST_RATIO = 1e3


def hutchinson(
    model: nn.Module,
    losses: Losses,
    *,
    blocks: Mapping[str, Blocks] | None = None,
    num_probes: int = 1,
    generator: torch.Generator | None = None,
) -> Curvature:
    """Mean curvature of each block of the Hessian, `tr(H_bb) / dim_b`, without bias; it may be negative.

    For a probe `z` of independent random signs, `z_b · (H z)_b` has mean `tr(H_bb)`, but all other
    blocks add noise to it, and blocks differ by orders of magnitude: the embedding would drown the
    queries. So the signs of each role in a parameter are multiplied by one over its root mean
    square gradient, and the result is divided by the square of that. The mean stays what it is, and
    flat blocks such as queries and keys get several times less noise, at the cost of a little more
    in sharp ones.

    Attention runs on the math kernel, the only one with second derivatives, and compiled models run
    eagerly.

    Args:
        model: Any module with whole parameters (not FSDP2).
        losses: A closure that returns the mean loss of a batch, or that and its number of tokens,
            or several of them; they are averaged by tokens. Any loss function.
        blocks: What `find_blocks(model)` returns; found here by default.
        num_probes: Hessian-vector products a batch.
        generator: Draws the signs; by default one with seed 0.

    Returns:
        `{parameter name: mean curvature of each block}`.

    Raises:
        ValueError: If a parameter is sharded.

    Example:
        >>> model, x = nn.Linear(2, 1, bias=False), torch.tensor([[3.0, 0.0]])
        >>> hutchinson(model, lambda: model(x).square().sum())
        {'weight': tensor([9.])}
    """
    check_probes(num_probes)
    refuse_sharded(model, "hutchinson")
    generator = default_generator(generator)
    parameters = trainable(model)
    tensors = list(parameters.values())

    def traces_of(evaluation: Evaluation, blocks: Mapping[str, Blocks]) -> Curvature:
        with eager_math():
            gradients = torch.autograd.grad(
                evaluation(), tensors, create_graph=True, materialize_grads=True
            )
        factors = probe_factors(
            {name: g.detach() for name, g in zip(parameters, gradients)}, blocks
        )
        connected = [(g, name) for g, name in zip(gradients, parameters) if g.requires_grad]
        traces = {
            name: torch.zeros(blocks[name].num_blocks, device=p.device)
            for name, p in parameters.items()
        }
        for probe in range(num_probes):
            probes = {
                name: _probe(p, blocks[name], factors[name], generator)
                for name, p in parameters.items()
            }
            with eager_math():
                products = torch.autograd.grad(
                    [g for g, _ in connected],
                    tensors,
                    [probes[name] for _, name in connected],
                    retain_graph=probe + 1 < num_probes,
                    materialize_grads=True,
                )
            for name, product in zip(parameters, products):
                dots = block_dots(probes[name], product, blocks[name])
                traces[name] = traces[name] + dots / (factors[name].to(dots) ** 2 * num_probes)
        return traces

    return mean_over_batches(model, losses, blocks, traces_of)


def probe_factors(gradients: Mapping[str, Tensor], blocks: Mapping[str, Blocks]) -> Curvature:
    """What the signs of each block are multiplied by: one over the root mean square gradient of its role in its parameter.

    In units of that of the whole gradient, within bounds. Blocks share it because single ones may
    have next to no gradient, such as the row of a token that does not occur: moved the farther for
    it, they would drown the others in noise. Rounded to powers of two, which every dtype holds
    exactly: what the signs are multiplied by is what is divided out.
    """
    labels, groups = block_groups(blocks, "tensor")
    squares, sizes = torch.zeros(2, len(labels), dtype=torch.float64)
    for name, g in gradients.items():
        squares.index_add_(0, groups[name], block_dots(g, g, blocks[name]).to(squares))
        sizes.index_add_(0, groups[name], block_numel(tuple(g.shape), blocks[name].split).to(sizes))
    factors = torch.ones_like(squares)
    if float(squares.sum()) > 0:
        means = squares / sizes * (sizes.sum() / squares.sum())
        factors = means.sqrt().clamp(min=1 / LARGEST_RATIO).log2().round().neg().exp2()
    return {name: factors[groups[name]].to(g.device) for name, g in gradients.items()}


def _probe(
    parameter: Tensor, blocks: Blocks, factors: Tensor, generator: torch.Generator
) -> Tensor:
    signs = torch.randint(
        0, 2, parameter.shape, generator=generator, dtype=torch.int8, device=generator.device
    )
    signs = signs.to(device=parameter.device, dtype=parameter.dtype).mul_(2).sub_(1)
    return signs.mul_(expand(factors.to(parameter.dtype), blocks.split, parameter.ndim))
