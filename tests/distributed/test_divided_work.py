"""BlockMuon divides its work: the same steps, each matrix orthogonalized once, least traffic."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.flop_counter import FlopCounterMode

import blockopt
from blockopt.blocks import Blocks, Split, to_plain
from blockopt.optim import divided_work, muon_on_ranks, muon_step, newton_schulz
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


def twice_cut(mesh):
    """As FSDP2 cuts what tensor parallelism has cut already along the same dimension."""
    data = mesh.get_local_rank(0)

    def place(tensor):
        part = distribute_tensor(tensor.clone(), mesh["tensor"], [Shard(0)]).to_local()
        size = -(-len(part) // mesh.size(0))
        own = part[data * size : (data + 1) * size]
        return DTensor.from_local(
            own.clone(),
            mesh,
            [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)],
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    return place


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
    flat = init_device_mesh("cpu", (RANKS,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    blocks = [b for _, b, _ in UNEVEN.values()]
    start = start_of(UNEVEN)
    # Matrices one by one, so that bits do not depend on who shares a batch; many buckets. bfloat16
    # would round what ranks add up in another order, which the iteration amplifies.
    with (
        changed(muon_step, CPU_BATCH=1),
        changed(divided_work, BUCKET=200),
        changed(newton_schulz, CPU_DTYPE=torch.float32),
    ):
        plain = {"precondition": False}
        expected = take_steps(start, blocks, lambda t: t.clone(), **plain)
        preconditioned = take_steps(start, blocks, lambda t: t.clone())
        layouts = {
            "FSDP2": placed(flat, [Shard(0)]),
            "columns": placed(flat, [Shard(1)]),
            "HSDP": placed(grid, [Replicate(), Shard(0)]),
            "replicas of columns": placed(grid, [Shard(1), Replicate()]),
            "two dimensions": placed(grid, [Shard(0), Shard(1)]),
            "twice along one": placed(grid, [Shard(0), Shard(0)]),
            "tensor parallel and FSDP2": twice_cut(grid),
            "replicated": placed(grid, [Replicate(), Replicate()]),
        }
        for layout, place in layouts.items():
            found = take_steps(start, blocks, place, **plain)
            for name, value in expected.items():
                assert torch.equal(found[name], value), (layout, name)
            found = take_steps(start, blocks, place)  # ranks add up in another order
            for name, value in preconditioned.items():
                assert (value - expected[name]).norm() > 1e-3 * value.norm(), name
                # Of the way that the weights went.
                limit = 1e-11 if value.dtype == torch.float64 else 1e-3
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

        def all_gather(outputs, input, group, async_op):
            self.calls += 1
            self.bytes += (len(outputs) - 1) * input.numel() * input.element_size()
            return self.all_gather(outputs, input, group=group, async_op=async_op)

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
    flat = init_device_mesh("cpu", (RANKS,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    ways = [
        (1, 4, placed(flat, [Shard(0)]), {}),
        (1, 4, placed(grid, [Shard(0), Shard(1)]), {}),
        (1, 4, twice_cut(grid), {}),
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


class Watched:
    """An exchange, and whether somebody has waited for it."""

    def __init__(self, handle):
        self.handle, self.waited = handle, False

    def wait(self):
        self.waited = True
        self.handle.wait()


def exchanges_run_while_owners_work(rank):
    """While a bucket is worked on, the parts of the next arrive, and nobody waits for them."""
    number, size, begun, finished = 24, 10, [], {}
    regions = tuple(((shard, shard + 1), (0, size)) for shard in range(RANKS))
    wholes = [divided_work.Whole((RANKS, size), regions, 1.0)] * number
    all_to_all = dist.all_to_all_single

    def watched(*arguments, **options):
        begun.append(Watched(all_to_all(*arguments, **options)))
        return begun[-1]

    def work(found):
        deadline = time.monotonic() + 60
        assert not begun[-1].waited
        while not begun[-1].handle.is_completed():
            assert time.monotonic() < deadline
        return [2 * whole for _, whole in found]

    job = divided_work.Job(lambda i: torch.full((1, size), i + rank), work, finished.__setitem__)
    with changed(divided_work, BUCKET=RANKS * size), changed(dist, all_to_all_single=watched):
        team = divided_work.Team(shards=dist.group.WORLD)
        divided_work.divide(wholes, team, job, torch.empty(0, dtype=torch.int64))
    assert len(begun) == 2 * number / RANKS
    for index in range(number):
        assert torch.equal(finished[index], torch.full((1, size), 2 * (index + rank)))


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
        exchanges_run_while_owners_work,
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
