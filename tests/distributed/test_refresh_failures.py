"""A refresh that fails on one rank: all ranks stop or go on together, and none waits."""

import warnings
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel

import blockopt
from blockopt.measure.closures import agreed
from tests.helpers.optimizers import tiny_gpt, token_loss
from tests.helpers.ranks import assert_equal_on_ranks, run_on_two_ranks, shard

WRAPPERS = {"DDP": DistributedDataParallel, "FSDP2": shard}


def after_refreshes(number, wrap, curvature="newton", build=tiny_gpt):
    """A model that has taken one step more than it has seen refreshes: the next one is due."""
    model = wrap(build())
    optimizer = blockopt.BlockAdamW(blockopt.param_groups(model), lr=1e-2)
    block_lr = blockopt.BlockLR(optimizer, model, curvature=curvature, every=1)
    for step in range(number):
        train(model, optimizer, step)
        block_lr.step(lambda: token_loss(model, seed=dist.get_rank()))
    assert len(block_lr.history) == number
    train(model, optimizer, number)
    return model, optimizer, block_lr


def train(model, optimizer, step):
    optimizer.zero_grad()
    token_loss(model, seed=2 * step + dist.get_rank()).backward()
    optimizer.step()


def mistakes_end_all_ranks(rank):
    """Before the forward pass, and after it: the rank's own error, and one that names the rank.

    At the first refresh too, when DDP has its buckets still to rebuild.
    """
    for wrap, early, number in product(WRAPPERS.values(), (True, False), (0, 1)):
        model, _, block_lr = after_refreshes(number, wrap)

        def closure(model=model, early=early):
            if rank == 0 and early:
                raise KeyError("labels")
            loss = token_loss(model)
            if rank == 0:
                raise KeyError("labels")
            return loss

        with pytest.raises(
            KeyError if rank == 0 else RuntimeError,
            match="labels" if rank == 0 else "Rank 0 has failed. KeyError: 'labels'",
        ):
            block_lr.step(closure)


def lack_of_memory_is_survived(rank):
    """On one rank, before or after the forward pass: training goes on everywhere."""
    warnings.simplefilter("ignore")
    curvatures = ("newton", "gauss_newton")
    cases = product(WRAPPERS.values(), curvatures, (True, False), (0, 1))
    for wrap, curvature, early, number in cases:
        model, optimizer, block_lr = after_refreshes(number, wrap, curvature)

        def closure(model=model, early=early):
            loss = None if early else token_loss(model)
            if rank == 1:
                raise MemoryError("no room")
            return token_loss(model) if early else loss

        block_lr.step(closure)
        assert block_lr.failures == 1
        train(model, optimizer, number + 1)
        block_lr.step(lambda model=model: token_loss(model, seed=rank))
        assert [refresh.step for refresh in block_lr.history] == [*range(1, number + 1), number + 2]
        assert_equal_on_ranks(torch.cat([*block_lr.last_scales.as_dict().values()]))


def a_backward_pass_of_a_replica_may_fail(rank):
    warnings.simplefilter("ignore")
    model, _, block_lr = after_refreshes(1, DistributedDataParallel, "gauss_newton")

    def closure():
        loss = token_loss(model)
        if rank == 1:
            loss.register_hook(lambda _: (_ for _ in ()).throw(MemoryError("no room")))
        return loss

    block_lr.step(closure)
    assert block_lr.failures == 1


class WithBuffer(nn.Module):
    """DDP broadcasts buffers at each forward pass of training."""

    def __init__(self):
        super().__init__()
        self.model = tiny_gpt()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, *batch):
        self.seen += 1
        return self.model(*batch)


def no_buffer_is_broadcast(rank):
    """A closure that fails on one rank must not leave the other waiting for its buffers."""
    warnings.simplefilter("ignore")
    model, _, block_lr = after_refreshes(1, DistributedDataParallel, build=WithBuffer)
    seen = model.module.seen.clone()

    def closure():
        if rank == 0:
            raise MemoryError("no room")
        return token_loss(model)

    block_lr.step(closure)
    assert block_lr.failures == 1
    assert torch.equal(model.module.seen, seen)


def closures_that_skip_the_model_are_told(rank):
    warnings.simplefilter("ignore")
    model, _, block_lr = after_refreshes(1, shard)
    block_lr.step(lambda: torch.zeros(()) if rank == 0 else token_loss(model))
    assert block_lr.failures == 1


def different_numbers_of_closures_are_told(rank):
    model, _, block_lr = after_refreshes(1, DistributedDataParallel)
    with pytest.raises(RuntimeError, match="the same number of closures on every rank"):
        block_lr.step([lambda: token_loss(model)] * (rank + 1))


def functions_of_ones_own_agree_too(rank):
    """A curvature of the user's that measures a sharded model."""
    model, optimizer, _ = after_refreshes(1, shard)
    block_lr = blockopt.BlockLR(optimizer, model, curvature=squared_gradient, every=1)
    train(model, optimizer, 1)
    block_lr.step(lambda: token_loss(model, seed=rank))
    assert block_lr.failures == 0
    train(model, optimizer, 2)
    with pytest.warns(UserWarning, match=r"returned nan|Rank 0 has failed"):
        block_lr.step(lambda: token_loss(model) * (float("nan") if rank == 0 else 1.0))


def squared_gradient(model, losses):
    for closure in losses:
        loss = agreed(closure, model)()
        loss.backward()
    return blockopt.curvature.gradient(model)


def test_two_ranks_fail_together():
    run_on_two_ranks(
        mistakes_end_all_ranks,
        lack_of_memory_is_survived,
        a_backward_pass_of_a_replica_may_fail,
        no_buffer_is_broadcast,
        closures_that_skip_the_model_are_told,
        different_numbers_of_closures_are_told,
        functions_of_ones_own_agree_too,
    )


def fails_within_a_pass(rank):
    model, _, block_lr = after_refreshes(1, shard)
    if rank == 1:
        model.h[1].register_forward_pre_hook(_no_room)
    block_lr.step(lambda: token_loss(model))


def _no_room(*_):
    raise MemoryError("no room")


@pytest.mark.distributed
def test_a_rank_lost_within_a_pass_ends_the_run():
    """Nobody can agree there, so the rank ends, and with it the others, at once."""
    with pytest.raises(ProcessRaisedException, match=r"LostRankError: Rank 1 has failed inside"):
        run_on_two_ranks(fails_within_a_pass)
