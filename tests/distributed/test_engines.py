"""Engines that flatten or divide parameters: what works equals torch, the rest is refused."""

import os
import site
import sys
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

import blockopt
from tests.helpers.optimizers import (
    OPTIMIZERS,
    assert_same_weights,
    random_gradients,
    random_scales,
    set_gradients,
    tiny_gpt,
    token_loss,
)
from tests.helpers.ranks import run_on_two_ranks

# Where the Makefile installs it, apart from the rest, which behaves differently where it finds it.
DEEPSPEED = Path(sys.prefix) / "deepspeed"
NEEDS_SHAPES = ["adamw-block", "adamw-whitened", "muon", "muon-block"]
WORKS_FLAT = ["adamw", "sgd", "sgd-plain"]


def flatten(optimizer):
    """Do what DeepSpeed's ZeRO does: one flat float32 piece in place of a group's parameters."""
    for group in optimizer.param_groups:
        pieces = [p.detach().flatten() for p in group["params"]]
        group["params"] = [nn.Parameter(torch.cat(pieces).float())]


@pytest.mark.parametrize("name", WORKS_FLAT)
def test_what_treats_entries_alike_works_on_flat_pieces(name):
    model, flat = tiny_gpt(), tiny_gpt()
    a = OPTIMIZERS[name](blockopt.param_groups(model))
    b = OPTIMIZERS[name](blockopt.param_groups(flat))
    flatten(b)
    for step in range(3):
        set_gradients(model, random_gradients(model, step))
        for group, piece in zip(a.param_groups, b.param_groups):
            gradients = [p.grad.flatten() for p in group["params"]]
            piece["params"][0].grad = torch.cat(gradients)
        a.step()
        b.step()
    for group, piece in zip(a.param_groups, b.param_groups):
        expected = torch.cat([p.detach().flatten() for p in group["params"]])
        torch.testing.assert_close(piece["params"][0].detach(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NEEDS_SHAPES)
def test_what_needs_shapes_refuses_flat_pieces(name):
    optimizer = OPTIMIZERS[name](blockopt.param_groups(tiny_gpt()))
    flatten(optimizer)
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    with pytest.raises(ValueError, match=r"something has replaced them .*use FSDP2"):
        optimizer.step()


@pytest.mark.parametrize("name", WORKS_FLAT)
def test_block_scales_refuse_flat_pieces(name):
    model = tiny_gpt()
    optimizer = OPTIMIZERS[name](blockopt.param_groups(model))
    scales = random_scales(optimizer)
    flatten(optimizer)
    with pytest.raises(ValueError, match=r"A scale per block .*use FSDP2"):
        optimizer.set_block_scales(scales)
    with pytest.raises(ValueError, match=r"none of the model's.*DeepSpeed.*FSDP2"):
        blockopt.BlockLR(optimizer, model)


def test_partitioned_parameters_of_deepspeed_are_refused():
    model = tiny_gpt()
    for p in model.parameters():  # what ZeRO 3 leaves of them
        p.ds_shape, p.data = p.shape, torch.empty(0)
    with pytest.raises(ValueError, match=r"ZeRO 3 .*before deepspeed\.initialize"):
        blockopt.param_groups(model)


def import_deepspeed(rank):
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    warnings.simplefilter("ignore")
    site.addsitedir(str(DEEPSPEED))
    import deepspeed

    # All exchanges go through gloo: DeepSpeed would compile its own, which takes a minute.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    return deepspeed


def deepspeed_engine(model, optimizer, stage):
    import deepspeed

    config = {
        "train_batch_size": 6,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def deepspeed_equals_ddp_or_refuses(rank):
    deepspeed = import_deepspeed(rank)
    for stage in range(4):
        for name in ("adamw", "sgd", "adamw-block", "muon"):
            model, plain = tiny_gpt(), DistributedDataParallel(tiny_gpt())
            engine = deepspeed_engine(model, OPTIMIZERS[name](blockopt.param_groups(model)), stage)
            if stage > 0 and name in NEEDS_SHAPES:
                engine.backward(token_loss(engine, seed=rank))
                with pytest.raises(ValueError, match="something has replaced them"):
                    engine.step()
                continue
            reference = OPTIMIZERS[name](blockopt.param_groups(plain))
            for step in range(2):
                engine.backward(token_loss(engine, seed=2 * step + rank))
                engine.step()
                reference.zero_grad()
                token_loss(plain, seed=2 * step + rank).backward()
                reference.step()
            with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
                assert_same_weights(model, plain.module, rtol=1e-4, atol=1e-4)


def deepspeed_takes_block_learning_rates_at_stage_0(rank):
    """They equal those under DDP; the other stages flatten the parameters, and are refused."""
    import_deepspeed(rank)
    for stage in (0, 1, 3):
        model, plain = tiny_gpt(), DistributedDataParallel(tiny_gpt())
        (a, of_engine), (b, of_ddp) = with_block_lr(model), with_block_lr(plain)
        engine = deepspeed_engine(model, a, stage)
        for step in range(3):
            engine.backward(token_loss(engine, seed=2 * step + rank))
            engine.step()
            fresh = 100 + 2 * step + rank
            if stage > 0:
                with pytest.raises(ValueError, match=r"none of the model's.*DeepSpeed.*FSDP2"):
                    of_engine.step(partial(token_loss, model, fresh))
                break
            of_engine.step(partial(token_loss, model, fresh))
            b.zero_grad()
            token_loss(plain, seed=2 * step + rank).backward()
            b.step()
            of_ddp.step(partial(token_loss, plain, fresh))
        else:
            assert_same_weights(model, plain.module, rtol=1e-4, atol=1e-4)
            found, expected = (x.last_scales.as_dict().values() for x in (of_engine, of_ddp))
            torch.testing.assert_close(torch.cat([*found]), torch.cat([*expected]))
            assert len(of_engine.history) == len(of_ddp.history) > 0


def with_block_lr(model):
    optimizer = OPTIMIZERS["adamw"](blockopt.param_groups(model))
    return optimizer, blockopt.BlockLR(optimizer, model, every=1)


@pytest.mark.distributed
@pytest.mark.skipif(
    not (find_spec("deepspeed") or DEEPSPEED.is_dir()), reason="DeepSpeed is not installed"
)
def test_two_ranks_in_deepspeed():
    run_on_two_ranks(
        deepspeed_equals_ddp_or_refuses, deepspeed_takes_block_learning_rates_at_stage_0
    )


def fsdp1_equals_torch_or_refuses(rank):
    for original in (False, True):

        def wrapped(original=original):
            return FullyShardedDataParallel(
                tiny_gpt(dtype=torch.float64),
                use_orig_params=original,
                device_id=torch.device("cpu"),
            )

        with pytest.raises(ValueError, match=r"FSDP1 .*fully_shard"):
            blockopt.param_groups(wrapped())
        model = tiny_gpt(dtype=torch.float64)
        groups = blockopt.param_groups(model)
        early = blockopt.BlockAdamW(groups, lr=1e-2)  # before its parameters are replaced
        FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
        if original:
            for cls in (blockopt.BlockAdamW, blockopt.BlockSGD, blockopt.BlockMuon):
                with pytest.raises(ValueError, match=r"If FSDP1 .* use FSDP2"):
                    cls(groups, lr=1e-2)
        else:
            with pytest.warns(UserWarning, match=r"replace parameters, such as FSDP1"):
                early.step()
        for ours, theirs, options in (
            (blockopt.BlockAdamW, torch.optim.AdamW, {"lr": 1e-2}),
            (blockopt.BlockSGD, torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
        ):
            model, plain = wrapped(), wrapped()
            for one, cls in ((model, ours), (plain, theirs)):
                train(one, cls(one.parameters(), **options), rank)
            assert_same_weights(model, plain, rtol=1e-9, atol=1e-9)


def train(model, optimizer, rank):
    for step in range(3):
        optimizer.zero_grad()
        token_loss(model, seed=2 * step + rank).backward()
        optimizer.step()


def fsdp1_without_shards_keeps_shapes(rank):
    for name in ("adamw", "adamw-block", "adamw-whitened", "muon", "sgd"):
        model = FullyShardedDataParallel(
            tiny_gpt(dtype=torch.float64),
            use_orig_params=True,
            sharding_strategy=ShardingStrategy.NO_SHARD,
            device_id=torch.device("cpu"),
        )
        plain = DistributedDataParallel(tiny_gpt(dtype=torch.float64))
        for one in (model, plain):
            optimizer = OPTIMIZERS[name](blockopt.param_groups(one))
            optimizer.set_block_scales(random_scales(optimizer))
            train(one, optimizer, rank)
        assert_same_weights(model, plain, rtol=1e-9, atol=1e-9)
        optimizer = OPTIMIZERS[name](blockopt.param_groups(model))
        with pytest.raises(ValueError, match=r"under FSDP1 .*fully_shard"):
            blockopt.BlockLR(optimizer, model)


def unnamed_groups(model):
    """As the documentation has it: torch's ZeroRedundancyOptimizer takes no names."""
    groups = blockopt.param_groups(model, by="parameter")
    return [{**group, "params": [p for _, p in group["params"]]} for group in groups]


def zero_redundancy_equals_whole(rank):
    # Imported here: torch warns about its own use of torch.jit, which fails a test.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for cls, options in (
        (blockopt.BlockAdamW, {}),
        (blockopt.BlockAdamW, {"second_moment": "block"}),
        (blockopt.BlockAdamW, {"second_moment": "whitened"}),
        (blockopt.BlockMuon, {}),
        (blockopt.BlockSGD, {"momentum": 0.9}),
    ):
        model, plain = (DistributedDataParallel(tiny_gpt(dtype=torch.float64)) for _ in range(2))
        a = ZeroRedundancyOptimizer(unnamed_groups(model), cls, lr=1e-2, **options)
        b = cls(blockopt.param_groups(plain, by="parameter"), lr=1e-2, **options)
        train(model, a, rank)
        train(plain, b, rank)
        assert_same_weights(model, plain, rtol=1e-9, atol=1e-9)
        held = sum(p.numel() for p in a.optim.state)
        assert held < sum(p.numel() for p in model.parameters())  # the state is divided
        with pytest.raises(ValueError, match=f"hides the blocks of {cls.__name__}.*FSDP2"):
            blockopt.BlockLR(a, model)
    zero_redundancy_with_block_learning_rates(rank, ZeroRedundancyOptimizer)
    groups = [{**g, "params": [p for _, p in g["params"]]} for g in blockopt.param_groups(model)]
    try:
        ZeroRedundancyOptimizer(groups, blockopt.BlockAdamW, lr=1e-2)
    except ValueError as error:
        assert 'by="parameter"' in str(error)  # noqa: PT017
    dist.barrier()


def zero_redundancy_with_block_learning_rates(rank, divided):
    """Those of an optimizer of torch, whose groups are whole tensors, are as without it."""
    runs = []
    for is_divided in (False, True):
        model = DistributedDataParallel(tiny_gpt(dtype=torch.float64))
        if is_divided:
            optimizer = divided(unnamed_groups(model), torch.optim.AdamW, lr=1e-2)
        else:
            groups = blockopt.param_groups(model, by="parameter")
            optimizer = torch.optim.AdamW(groups, lr=1e-2)
        block_lr = blockopt.BlockLR(optimizer, model, curvature="gauss_newton", every=1)
        for step in range(3):
            train(model, optimizer, rank)
            block_lr.step(partial(token_loss, model, 100 + 2 * step + rank))
        assert len(block_lr.history) > 1
        runs.append(model)
    assert_same_weights(*runs, rtol=1e-9, atol=1e-9)


def test_two_ranks_in_engines_of_torch():
    run_on_two_ranks(
        fsdp1_equals_torch_or_refuses,
        fsdp1_without_shards_keeps_shapes,
        zero_redundancy_equals_whole,
    )
