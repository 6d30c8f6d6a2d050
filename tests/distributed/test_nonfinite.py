"""A gradient that is broken on one rank only: all ranks take the same decision."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

import blockopt
from blockopt.distributed import local
from tests.helpers import parallel_models
from tests.helpers.accelerator import answers_come_late
from tests.helpers.optimizers import OPTIMIZERS, tiny_gpt, token_loss
from tests.helpers.ranks import assert_equal_on_ranks, run_on_two_ranks, whole


def replicas_skip_together(rank):
    """A user's own edit after the reduction breaks the gradient of rank 1."""
    warnings.simplefilter("ignore")
    for name in OPTIMIZERS:
        model = DistributedDataParallel(tiny_gpt())
        optimizer = OPTIMIZERS[name](blockopt.param_groups(model), nonfinite="skip")
        for step in range(3):
            optimizer.zero_grad()
            token_loss(model, seed=2 * step + rank).backward()
            if step == 1 and rank == 1:
                next(model.parameters()).grad[0] = float("nan")
            optimizer.step()
        assert optimizer.nonfinite_steps == 1
        for p in model.parameters():
            assert_equal_on_ranks(p.detach())


def replicas_forget_a_skipped_step_alike(rank):
    """Its gradient is broken on rank 1 and would end a window of slopes, on rank 0 complete it."""
    warnings.simplefilter("ignore")
    for broken in range(5, 9):  # the update at hand, and the three gradients that follow it
        model = DistributedDataParallel(tiny_gpt())
        optimizer = OPTIMIZERS["adamw"](blockopt.param_groups(model), nonfinite="skip")
        block_lr = blockopt.BlockLR(optimizer, model, curvature="successive_gradients", every=1)
        for step in range(1, 16):
            optimizer.zero_grad()
            token_loss(model, seed=2 * step + rank).backward()
            if step == broken and rank == 1:
                next(model.parameters()).grad[0] = float("nan")
            optimizer.step()
            block_lr.step()
        assert block_lr.num_steps == 14
        saved = block_lr.state_dict()["slopes"]
        sums = torch.tensor([[saved["number"]] * 3, *saved["sums"].values()])
        assert saved["number"] > 0
        assert_equal_on_ranks(sums)


def a_rank_without_gradients_takes_part(rank):
    """Rank 1 has nothing to do in this step, and must still hear that rank 0 refuses."""
    warnings.simplefilter("ignore")
    model = tiny_gpt()
    optimizer = blockopt.BlockAdamW(blockopt.param_groups(model), nonfinite="skip")
    if rank == 0:
        token_loss(model).backward()
        next(model.parameters()).grad[0] = float("inf")
    optimizer.step()
    assert optimizer.nonfinite_steps == 1


def shards_on_two_meshes_refuse_together(rank):
    parallel = parallel_models.two_meshes()
    optimizer = blockopt.BlockAdamW(blockopt.param_groups(parallel.model))
    parallel.loss(0).backward()
    if rank == 1:
        parallel.model.layers[0].mlp.up_proj.weight.grad.to_local()[0] = float("nan")
    try:
        optimizer.step()
    except FloatingPointError as error:
        where = "another rank" if rank == 0 else r"layers.0.mlp.up_proj.weight"
        assert where in str(error)  # noqa: PT017
    assert optimizer.nonfinite_steps == 1


def skipping_is_agreed_across_replicas_of_shards(rank):
    """Two tensor-parallel meshes of one rank each, as replicas: no mesh holds both."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))["tensor"]
    parallel = parallel_models.tensor_parallel(mesh)
    optimizer = blockopt.BlockAdamW(blockopt.param_groups(parallel.model), nonfinite="skip")
    parallel.loss(0).backward()
    if rank == 1:
        parallel.model.norm.weight.grad[0] = float("nan")
    optimizer.step()
    assert optimizer.nonfinite_steps == 1
    dist.barrier()
    assert torch.isfinite(parallel.model.norm.weight).all()


def scaled_losses_overflow_together(rank):
    """An overflow on rank 1: torch's scalers skip the step on both, and the next ones are taken."""
    mesh, infinite = init_device_mesh("cpu", (2,)), float("inf")
    names = ("adamw", "adamw-block", "sgd", "muon")
    cases = [*itertools.product(names, (torch.amp.GradScaler,), (False, True))]
    for name, scaler_of, sharded in [*cases, ("adamw", ShardedGradScaler, True)]:
        parallel = parallel_models.fsdp(mesh) if sharded else parallel_models.replicated()
        optimizer = OPTIMIZERS[name](blockopt.param_groups(parallel.model), nonfinite="skip")
        scaler, moved = scaler_of("cpu", init_scale=1024.0), []
        norm = parallel.model.get_submodule("norm" if sharded else "module.norm").weight
        for step in range(3):
            before = whole(norm.detach()).clone()
            optimizer.zero_grad()
            loss = parallel.loss(step)
            if sharded:  # only the rank that holds the broken entry sees it
                scaler.scale(loss).backward()
                if step == 1 and rank == 1:
                    norm.grad.to_local()[0] = infinite
            else:
                scaler.scale(loss * (infinite if step == 1 and rank == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            moved.append(not torch.equal(whole(norm.detach()), before))
        assert moved == [True, False, True], (name, scaler_of, sharded)
        assert scaler.get_scale() == 512.0
        for p in parallel.model.parameters():
            assert_equal_on_ranks(whole(p.detach()))


def block_learning_rates_do_not_see_scaled_losses(rank):
    """With torch's scaler, and an overflow between two refreshes, as without both."""
    mesh = init_device_mesh("cpu", (2,))
    for build, kind in itertools.product((None, mesh), ("adamw", "sgd", "muon")):
        found = []
        for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0)):
            parallel = parallel_models.fsdp(build) if build else parallel_models.replicated()
            optimizer = OPTIMIZERS[kind](blockopt.param_groups(parallel.model), nonfinite="skip")
            block_lr = blockopt.BlockLR(optimizer, parallel.model, every=1)
            for step in (0, 2) if scaler is None else (0, 1, 2):
                optimizer.zero_grad()
                loss = parallel.loss(step) * (float("inf") if step == 1 and rank == 1 else 1)
                if scaler is None:
                    loss.backward()
                    optimizer.step()
                else:
                    scaler.scale(loss).backward()
                    scaler.step(optimizer)
                    scaler.update()
                block_lr.step(lambda: parallel.loss(step))  # noqa: B023
            assert block_lr.num_steps == len(block_lr.history) == 2
            found.append(torch.cat([s.log() for s in optimizer.block_scales().values()]))
            assert_equal_on_ranks(found[-1])
        assert found[0].abs().max() > 1e-3
        torch.testing.assert_close(*found, rtol=0, atol=1e-6, msg=f"{kind}, {build}")


def missing_gradients_are_refused_together(rank):
    """One that rank 1 has taken away: both say so, change nothing, and can go on with zeros."""
    mesh = init_device_mesh("cpu", (2,))
    fsdp, sequence = parallel_models.fsdp, parallel_models.sequence_parallel
    cases = [
        *itertools.product((fsdp, sequence), ("adamw", "adamw-whitened", "sgd", "muon-block")),
        (parallel_models.tensor_parallel, "adamw"),
        (lambda _: parallel_models.two_meshes(), "muon"),
    ]
    for build, kind in cases:
        parallel = build(mesh)
        optimizer = OPTIMIZERS[kind](blockopt.param_groups(parallel.model))
        # Gradients of norms are still to be added up under sequence parallelism.
        name = "layers.0.norm1.weight" if build is sequence else "layers.1.mlp.up_proj.weight"
        weight = parallel.model.get_parameter(name)
        for step in range(2):
            optimizer.zero_grad()
            parallel.loss(step).backward()
            if step == 0:
                optimizer.step()
        before = [local(p.detach()).clone() for p in parallel.model.parameters()]
        if rank == 1:
            weight.grad = None
        lacks = "0 of 30" if rank == 0 else f"1 of 30: {name}"
        with pytest.raises(ValueError, match=rf"missing \(None\) on some .* lacks {lacks}. Assign"):
            optimizer.step()
        for p, old in zip(parallel.model.parameters(), before):
            assert torch.equal(local(p.detach()), old)
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        assert not torch.equal(local(p.detach()), old)  # the last of them


def ranks_that_divide_the_work_stop_together(rank):
    """BlockMuon under DDP: neither waits for results of the other, which takes no step."""
    for missing in (False, True):
        model = DistributedDataParallel(tiny_gpt())
        groups = blockopt.param_groups(model)
        optimizer = blockopt.BlockMuon(groups, replicas=dist.group.WORLD)
        token_loss(model, seed=rank).backward()
        weight = model.module.h[0].mlp.c_fc.weight
        if rank == 1 and missing:
            weight.grad = None
        elif rank == 1:
            weight.grad[0] = float("nan")
        error, match = (ValueError, "missing") if missing else (FloatingPointError, "Non-finite")
        with pytest.raises(error, match=match):
            optimizer.step()


def accelerators_hear_of_missing_gradients_too(rank):
    """Their kernels get the flag, and no host waits for it before they begin."""
    mesh = init_device_mesh("cpu", (2,))
    parallel = parallel_models.fsdp(mesh)
    optimizer = blockopt.BlockAdamW(blockopt.param_groups(parallel.model))
    parallel.loss(0).backward()
    norm = parallel.model.norm.weight
    before = local(norm.detach()).clone()
    if rank == 1:
        parallel.model.layers[0].mlp.up_proj.weight.grad = None
    with answers_come_late():
        optimizer.step()
        with pytest.raises(FloatingPointError, match=r"missing \(None\) on some ranks only"):
            optimizer.state_dict()
    assert torch.equal(local(norm.detach()), before)


def test_two_ranks_decide_alike():
    run_on_two_ranks(
        missing_gradients_are_refused_together,
        ranks_that_divide_the_work_stop_together,
        accelerators_hear_of_missing_gradients_too,
        scaled_losses_overflow_together,
        block_learning_rates_do_not_see_scaled_losses,
        replicas_skip_together,
        replicas_forget_a_skipped_step_alike,
        a_rank_without_gradients_takes_part,
        shards_on_two_meshes_refuse_together,
        skipping_is_agreed_across_replicas_of_shards,
    )
