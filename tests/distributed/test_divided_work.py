"""BlockMuon divides its work: the same steps, each matrix orthogonalized once, least traffic."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import blockopt
from blockopt.blocks import Blocks, Split, to_plain
from blockopt.optim import divided_work, muon_on_ranks, muon_step
from blockopt.optim.divided_work import choose_owners
from tests.helpers.ranks import assert_equal_on_ranks, run_on_ranks

pytestmark = pytest.mark.distributed

RANKS, STEPS = 4, 3
FUSED = Blocks(("query", "key", "value"), split=Split(0, (10, 10, 10), (2, 2, 2)))
# Sizes that four ranks do not divide, a matrix with fewer rows than ranks, two dtypes.
UNEVEN = {
    "fused": ((30, 10), FUSED, torch.float64),
    "output": ((10, 10), Blocks(("output",), split=Split(1, (10,), (2,))), torch.float64),
    "input first": (
        (10, 30),
        FUSED._replace(split=Split(1, (10, 10, 10), (2, 2, 2))),
        torch.float64,
    ),
    "interleaved": (
        (18, 10),
        FUSED._replace(split=Split(0, (2, 2, 2), (1, 1, 1), repeat=3)),
        torch.float64,
    ),
    "few rows": ((2, 6), Blocks(("mlp_in",)), torch.float64),
    "long": ((7, 34), Blocks(("mlp_out",)), torch.float32),
    "tall": ((34, 7), Blocks(("mlp_in",), split=Split(0, (34,), (34,))), torch.float32),
    "experts": (
        (5, 9, 6),
        Blocks(("mlp_gate", "mlp_in"), split=Split(1, (4, 5), (4, 5), stack=5)),
        torch.float64,
    ),
}


def random(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def muon(parameters, blocks, **options):
    group = {"params": list(parameters.items()), "blocks": [to_plain(b) for b in blocks]}
    optimizer = blockopt.BlockMuon([group], lr=0.1, **options)
    scales = optimizer.block_scales()
    optimizer.set_block_scales(
        {n: random(s.shape, torch.float32, 7).abs() for n, s in scales.items()}
    )
    return optimizer


def take_steps(parameters, blocks, place, **options):
    """Parameters made by `place` after some steps, whole on every rank."""
    parameters = {n: nn.Parameter(place(p)) for n, p in parameters.items()}
    optimizer = muon(parameters, blocks, **options)
    for step in range(STEPS):
        for seed, parameter in enumerate(parameters.values()):
            gradient = place(random(parameter.shape, parameter.dtype, 100 * step + seed))
            parameter.grad = gradient.clone()
        optimizer.step()
    for seed, parameter in enumerate(parameters.values()):  # gradients are only read
        same = place(random(parameter.shape, parameter.dtype, 100 * (STEPS - 1) + seed))
        assert torch.equal(
            *(t.to_local() if isinstance(t, DTensor) else t for t in (parameter.grad, same))
        )
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for n, p in parameters.items()
    }


def start_of(cases):
    return {
        name: random(shape, dtype, seed)
        for seed, (name, (shape, _, dtype)) in enumerate(cases.items())
    }


def placed(mesh, placements):
    return lambda tensor: distribute_tensor(tensor.clone(), mesh, placements)


@contextlib.contextmanager
def changed(module, **values):
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def every_layout_equals_the_undivided_step(rank):
    flat, grid = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
    blocks = [b for _, b, _ in UNEVEN.values()]
    start = start_of(UNEVEN)
    # Matrices one by one, so that bits do not depend on who shares a batch; many buckets.
    with changed(muon_step, CPU_BATCH=1), changed(divided_work, BUCKET=200):
        plain = {"precondition": False}
        expected = take_steps(start, blocks, lambda t: t.clone(), **plain)
        preconditioned = take_steps(start, blocks, lambda t: t.clone())
        layouts = {
            "FSDP2": placed(flat, [Shard(0)]),
            "columns": placed(flat, [Shard(1)]),
            "HSDP": placed(grid, [Replicate(), Shard(0)]),
            "replicas of columns": placed(grid, [Shard(1), Replicate()]),
            "two dimensions": placed(grid, [Shard(0), Shard(1)]),
            "replicated": placed(grid, [Replicate(), Replicate()]),
        }
        for layout, place in layouts.items():
            found = take_steps(start, blocks, place, **plain)
            for name, value in expected.items():
                assert torch.equal(found[name], value), (layout, name)
            found = take_steps(start, blocks, place)  # ranks add up in another order
            for name, value in preconditioned.items():
                assert (value - expected[name]).norm() > 1e-3 * value.norm(), name
                # Of the way that the weights went. The iteration rounds float32 to bfloat16.
                limit = 1e-11 if value.dtype == torch.float64 else 3e-2
                error = float((found[name] - value).norm() / (value - start[name]).norm())
                assert error < limit, (layout, name, error)
        with changed(muon_on_ranks, DIVIDED_FROM=1):
            options = {"replicas": dist.group.WORLD, **plain}
            found = take_steps(start, blocks, lambda t: t.clone(), **options)
        for name, value in expected.items():
            assert torch.equal(found[name], value), ("DDP", name)
            assert_equal_on_ranks(found[name])


class Traffic:
    """Counts the bytes that a rank receives from others in the exchanges."""

    def __enter__(self):
        self.bytes, self.calls = 0, 0
        self.all_to_all, self.all_gather = dist.all_to_all_single, dist.all_gather

        def all_to_all(output, input, received, sent, group, async_op):
            self.calls += 1
            me = dist.get_rank(group)
            self.bytes += sum(n for r, n in enumerate(received) if r != me)
            return self.all_to_all(output, input, received, sent, group=group, async_op=async_op)

        def all_gather(outputs, input, group):
            self.calls += 1
            self.bytes += (len(outputs) - 1) * input.numel() * input.element_size()
            return self.all_gather(outputs, input, group=group)

        dist.all_to_all_single, dist.all_gather = all_to_all, all_gather
        return self

    def __exit__(self, *_):
        dist.all_to_all_single, dist.all_gather = self.all_to_all, self.all_gather


def layers(depth, width):
    heads = Split(0, (width,) * 3, (2,) * 3)
    layer = {
        "qkv": ((3 * width, width), Blocks(("query", "key", "value"), split=heads)),
        "output": ((width, width), Blocks(("output",))),
        "in": ((4 * width, width), Blocks(("mlp_in",))),
        "out": ((width, 4 * width), Blocks(("mlp_out",))),
    }
    return {
        f"{i}.{name}": (shape, blocks, torch.float32)
        for i in range(depth)
        for name, (shape, blocks) in layer.items()
    }


def traffic_and_work_are_the_least(rank):
    """Within 1.1 of the formulas in the docstring of `divided_work`, for plain Muon.

    What preconditioning adds are short vectors, and work that every rank does on its own part.
    """
    cases = layers(depth=4, width=16)
    blocks, start = [b for _, b, _ in cases.values()], start_of(cases)
    total = STEPS * sum(p.numel() for p in start.values())
    plain = {"precondition": False}
    with FlopCounterMode(display=False) as all_of_it:
        take_steps(start, blocks, lambda t: t.clone(), **plain)
    flat, grid = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (2, 2))
    ways = [
        (1, 4, placed(flat, [Shard(0)]), {}),
        (2, 2, placed(grid, [Replicate(), Shard(0)]), {}),
        (4, 1, lambda t: t.clone(), {"replicas": dist.group.WORLD}),
    ]
    for replicas, shards, place, options in ways:
        with (
            changed(muon_on_ranks, DIVIDED_FROM=1),
            Traffic() as traffic,
            FlopCounterMode(display=False) as mine,
        ):
            take_steps(start, blocks, place, **options, **plain)
        ranks = replicas * shards
        entries = 2 * total / ranks * (1 - 1 / shards) + total / shards * (1 - 1 / replicas)
        width = torch.empty((), dtype=muon_on_ranks.iteration_dtype(start["0.in"])).element_size()
        assert width * entries <= traffic.bytes * 1.0001
        assert traffic.bytes <= 1.1 * width * entries
        assert mine.get_total_flops() <= 1.1 * all_of_it.get_total_flops() / ranks


def experts_that_are_sharded_by_expert_stay_where_they_are(rank):
    cases = {"experts": UNEVEN["experts"]}
    mesh = init_device_mesh("cpu", (RANKS,))
    with Traffic() as traffic:
        take_steps(start_of(cases), [cases["experts"][1]], placed(mesh, [Shard(0)]))
    assert traffic.calls == 0


def test_four_ranks_divide_the_work():
    run_on_ranks(
        RANKS,
        every_layout_equals_the_undivided_step,
        traffic_and_work_are_the_least,
        experts_that_are_sharded_by_expert_stay_where_they_are,
    )


def test_owners_of_a_large_model_are_balanced():
    """The matrices of a Llama of 7B over 64 ranks."""
    attention, mlp = (24.0 * 4096**3, 4096**2), (20.7 * 4096**2 * 11008, 4096 * 11008)
    loads = (*(attention,) * 4, *(mlp,) * 3) * 32
    owners = choose_owners(loads, 64)
    for column in (0, 1):
        shares = [0.0] * 64
        for owner, load in zip(owners, loads):
            shares[owner] += load[column]
        assert max(shares) / (sum(shares) / 64) < 1.35
