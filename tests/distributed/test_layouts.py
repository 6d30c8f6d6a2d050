"""Training with any layout of the parameters over ranks equals training on one process."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import blockopt
from blockopt.blocks import Blocks, Split, to_plain
from blockopt.distributed.shards import own_range
from tests.helpers import parallel_models
from tests.helpers.optimizers import OPTIMIZERS, random_scales
from tests.helpers.ranks import assert_close_by_name, run_on_ranks, run_on_two_ranks
from tests.helpers.ranks import whole as gathered

STEPS = 3


def trained(parallel, name):
    """The weights after a few steps with a scale for each block."""
    optimizer = OPTIMIZERS[name](blockopt.param_groups(parallel.model))
    optimizer.set_block_scales(random_scales(optimizer))
    for step in range(STEPS):
        optimizer.zero_grad()
        parallel.loss(step).backward()
        placed = {n: getattr(p.grad, "placements", None) for n, p in named(parallel)}
        optimizer.step()
        assert {n: getattr(p.grad, "placements", None) for n, p in named(parallel)} == placed
    return {n.removeprefix("module."): gathered(p.detach()) for n, p in named(parallel)}


def named(parallel):
    return list(parallel.model.named_parameters())


def assert_equals_one_process(build, names=tuple(OPTIMIZERS)):
    for name in names:
        found, expected = trained(build(), name), trained(parallel_models.whole(), name)
        assert_close_by_name(found, expected, f"{build.__name__}, {name}")


def few_collectives(mesh):
    """Block second moments need sums over ranks, for all parameters together."""
    parallel = parallel_models.fsdp(mesh)
    optimizer = OPTIMIZERS["adamw-block"](blockopt.param_groups(parallel.model))
    parallel.loss(0).backward()
    optimizer.step()
    with CommDebugMode() as counter:
        optimizer.step()
    assert 1 <= counter.get_total_counts() <= 4, counter.get_comm_counts()


def on_two_ranks(rank):
    mesh = init_device_mesh("cpu", (2,))

    def fsdp():
        return parallel_models.fsdp(mesh)

    def tensor_parallel():
        return parallel_models.tensor_parallel(mesh)

    def sequence_parallel():
        return parallel_models.sequence_parallel(mesh)

    replicated, two_meshes = parallel_models.replicated, parallel_models.two_meshes
    for build in (replicated, fsdp, tensor_parallel, sequence_parallel, two_meshes):
        assert_equals_one_process(build)
    few_collectives(mesh)


def fewer_rows_than_ranks(name):
    """A router of three experts with a scale each, on four ranks: one of them holds nothing."""
    mesh, found = init_device_mesh("cpu", (4,)), []
    blocks = to_plain(Blocks(("router",), split=Split(0, (3,), (3,))))
    for place in (torch.clone, lambda t: distribute_tensor(t, mesh, [Shard(0)])):
        generator = torch.Generator().manual_seed(0)
        random = partial(torch.randn, (3, 5), generator=generator, dtype=torch.float64)
        router = nn.Parameter(place(random()))
        optimizer = OPTIMIZERS[name]([{"params": [("router", router)], "blocks": [blocks]}])
        optimizer.set_block_scales(random_scales(optimizer))
        for _ in range(STEPS):
            router.grad = place(random())
            optimizer.step()
        found.append(gathered(router.detach()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9, msg=name)


def on_four_ranks(rank):
    for name in OPTIMIZERS:
        fewer_rows_than_ranks(name)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def hsdp():
        return parallel_models.fsdp(mesh)

    def tensor_parallel_and_fsdp():
        return parallel_models.tensor_parallel_and_fsdp(mesh)

    def sequence_parallel_and_fsdp():
        return parallel_models.tensor_parallel_and_fsdp(mesh, sequence=True)

    for build in (hsdp, tensor_parallel_and_fsdp, sequence_parallel_and_fsdp):
        assert_equals_one_process(build)


def chunks(tensor, number):
    """As `torch.chunk`, which leaves out empty ones."""
    return [*tensor.chunk(number), *[tensor[:0]] * number][:number]


def test_fsdp2_cuts_what_tensor_parallelism_has_cut():
    sizes = product(range(1, 14), range(1, 5), range(1, 5))
    for length, data, tensor in sizes:
        for j, some in enumerate(chunks(torch.arange(length), tensor)):
            for i, part in enumerate(chunks(some, data)):
                start, end = own_range(length, [(data, i, tensor), (tensor, j, 1)])
                assert part.tolist() == [*range(start, end)]


def test_two_ranks_in_every_layout_train_as_one():
    run_on_two_ranks(on_two_ranks)


@pytest.mark.distributed
def test_four_ranks_in_every_layout_train_as_one():
    run_on_ranks(4, on_four_ranks)
