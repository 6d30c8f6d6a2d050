"""Processes that run tasks together."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

PATIENCE = timedelta(minutes=3)  # a rank that waits in vain fails, and with it the test


def run_on_two_ranks(*tasks):
    """Run every `task(rank)`, one after another, in two processes, which take seconds to start."""
    run_on_ranks(2, *tasks)


def run_on_ranks(number, *tasks):
    """Run every `task(rank)`, one after another, in as many processes.

    This process keeps their store, as torchrun does: a port that was only looked for could be taken
    by another program until they have started.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_start, args=(number, store.port, tasks), nprocs=number, join=True)


def _start(rank, number, port, tasks):
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        RANK=str(rank),
        WORLD_SIZE=str(number),
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        for task in tasks:
            task(rank)
            dist.barrier()
    finally:
        dist.destroy_process_group()
    # A thread of gloo that is still alive when C++ takes down its statics can abort the process.
    os._exit(0)


def shard(model):
    for block in model.h:
        fully_shard(block)
    return fully_shard(model)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal_on_ranks(tensor):
    """All ranks hold the same bits."""
    ranks = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, tensor.contiguous())
    assert all(torch.equal(ranks[0], other) for other in ranks)


def assert_close_by_name(found, expected, what, tolerance=1e-9):
    """Tensors by name agree, relatively and absolutely; a message says what and which did not."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{what}, {name}: {text}",
        )
