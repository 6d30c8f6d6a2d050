"""Sharded and replicated training on two processes equals training on one."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import blockopt
from blockopt.distributed import local
from tests.helpers.accelerator import answers_come_late
from tests.helpers.optimizers import (
    OPTIMIZERS,
    random_gradients,
    random_scales,
    set_gradients,
    tiny_gpt,
    token_loss,
    train,
)
from tests.helpers.ranks import run_on_two_ranks, shard, whole

STEPS = 4


def scaled_optimizer(name, model):
    optimizer = OPTIMIZERS[name](blockopt.param_groups(model))
    optimizer.set_block_scales(random_scales(optimizer))
    return optimizer


def sharded_gradients(model, gradients):
    for name, parameter in model.named_parameters():
        full = DTensor.from_local(gradients[name], parameter.device_mesh)
        parameter.grad = full.redistribute(placements=parameter.placements)


def sharded_equals_whole(rank):
    for name in OPTIMIZERS:
        one_sharded_equals_whole(name)


def one_sharded_equals_whole(name):
    """With the same gradients the steps are the same; two ranks share 19 rows of the embedding."""
    model, plain = shard(tiny_gpt(dtype=torch.float64)), tiny_gpt(dtype=torch.float64)
    a, b = scaled_optimizer(name, model), scaled_optimizer(name, plain)
    for step in range(STEPS):
        gradients = random_gradients(plain, step)
        sharded_gradients(model, gradients)
        set_gradients(plain, gradients)
        a.step()
        b.step()
    tolerance = 1e-10
    for (n, x), y in zip(model.named_parameters(), plain.parameters()):
        assert isinstance(x, DTensor)
        torch.testing.assert_close(
            whole(x).detach(),
            y.detach(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda t, n=n: f"{name}, {n}: {t}",
        )


def tables_stored_input_first_equal_whole(rank):
    """A head with a column for each token, cut along features and along tokens."""
    mesh = init_device_mesh("cpu", (2,))
    split = blockopt.Split(1, (19,), (19,))
    blocks = {"unembed": blockopt.Blocks(("head",), None, split)}
    start = torch.randn(6, 19, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, dim in itertools.product(("muon", "adamw-block"), (0, 1)):
        models = [torch.nn.Module(), torch.nn.Module()]
        models[0].unembed = torch.nn.Parameter(start.clone())
        models[1].unembed = torch.nn.Parameter(distribute_tensor(start, mesh, [Shard(dim)]))
        optimizers = [OPTIMIZERS[name](blockopt.param_groups(m, blocks)) for m in models]
        for step in range(STEPS):
            gradients = random_gradients(models[0], step)
            set_gradients(models[0], gradients)
            sharded_gradients(models[1], gradients)
            for optimizer in optimizers:
                optimizer.step()
        assert "column_sketch" in optimizers[1].state[models[1].unembed]
        torch.testing.assert_close(
            whole(models[1].unembed).detach(), models[0].unembed.detach(), rtol=1e-10, atol=1e-10
        )


def sharded_checkpoint_resumes_exactly(rank):
    model = shard(tiny_gpt())
    optimizer = scaled_optimizer("adamw-block", model)
    train(model, optimizer, range(STEPS))
    saved_model = {n: whole(p).detach().clone() for n, p in model.named_parameters()}
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    expected = train(model, optimizer, range(STEPS, 2 * STEPS))

    other = shard(tiny_gpt(seed=1))
    with torch.no_grad():
        for n, p in other.named_parameters():
            p.copy_(
                DTensor.from_local(saved_model[n], p.device_mesh).redistribute(
                    placements=p.placements
                )
            )
    resumed = OPTIMIZERS["adamw-block"](blockopt.param_groups(other))
    set_optimizer_state_dict(other, resumed, saved)
    assert train(other, resumed, range(STEPS, 2 * STEPS)) == expected


def all_refuse_a_nonfinite_gradient(rank):
    for name, late in itertools.product(OPTIMIZERS, (False, True)):
        with answers_come_late() if late else contextlib.nullcontext():
            all_refuse_with(name, late)


def all_refuse_with(name, late):
    """Only one rank holds the broken entry; no weight and no state changes on either."""
    model = shard(tiny_gpt())
    optimizer = scaled_optimizer(name, model)
    for step in range(2):
        gradients = random_gradients(tiny_gpt(), step)
        if step == 1:
            before = everything(model, optimizer)
            gradients["wte.weight"][-1, -1] = float("inf")
        sharded_gradients(model, gradients)
        if step == 0 or late:
            optimizer.step()
    with pytest.raises(FloatingPointError, match="No weight"):
        optimizer.state_dict() if late else optimizer.step()
    after = everything(model, optimizer)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True)), (name, late)


def everything(model, optimizer):
    """Copies of what this rank holds of the parameters and their states."""
    states = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [local(tensor).detach().clone() for tensor in (*model.parameters(), *states)]


def replicated_equals_accumulated(rank):
    for name in ("adamw-block", "muon", "sgd"):
        one_replicated(rank, name)


def one_replicated(rank, name):
    model = DistributedDataParallel(tiny_gpt())
    optimizer = scaled_optimizer(name, model)
    plain = tiny_gpt()
    reference = OPTIMIZERS[name](blockopt.param_groups(plain))
    reference.set_block_scales(
        {n.removeprefix("module."): s for n, s in optimizer.block_scales().items()}
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        token_loss(model, seed=2 * step + rank).backward()
        optimizer.step()
        reference.zero_grad()
        for half in range(2):
            (token_loss(plain, seed=2 * step + half) / 2).backward()
        reference.step()
    for x, y in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
        ranks = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(ranks, x.detach())
        assert torch.equal(ranks[0], ranks[1])


def test_two_ranks_train_as_one():
    run_on_two_ranks(
        sharded_equals_whole,
        tables_stored_input_first_equal_whole,
        sharded_checkpoint_resumes_exactly,
        all_refuse_a_nonfinite_gradient,
        replicated_equals_accumulated,
    )
