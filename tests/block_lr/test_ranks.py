"""BlockLR on two processes: all ranks hold the same scales, decide alike, and none waits."""

import io
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.nn.parallel import DistributedDataParallel

import blockopt
from blockopt.block_lr import BlockLR
from blockopt.block_lr.scales import block_scales
from blockopt.distributed import compute_device
from tests.helpers.block_lr import BUILD
from tests.helpers.optimizers import assert_same_weights, tiny_gpt, token_loss
from tests.helpers.ranks import assert_equal_on_ranks, run_on_two_ranks, shard, whole

STEPS = 3


def take_steps(model, optimizer, block_lr, rank, steps=range(STEPS), broken=()):
    for step in steps:
        optimizer.zero_grad()
        token_loss(model, seed=2 * step + rank).backward()
        optimizer.step()
        factor = math.nan if (step, rank) in broken else 1.0
        block_lr.step(
            lambda step=step, factor=factor: factor * token_loss(model, seed=100 + 2 * step + rank)
        )


def scales_of(block_lr):
    return torch.cat(list(block_lr.last_scales.as_dict().values()))


def equal_scales(rank):
    warnings.simplefilter("ignore")
    for curvature in ("gauss_newton", "analytic", "hutchinson", "newton", "gradient"):
        for kind in ("block", "torch") if curvature == "gauss_newton" else ("block",):
            model = DistributedDataParallel(tiny_gpt())
            optimizer = BUILD[kind](model)
            options = {"every": 2, "by": "tensor", "beta": 0.0}
            block_lr = BlockLR(optimizer, model, curvature=curvature, **options)
            take_steps(model, optimizer, block_lr, rank)
            assert block_lr.failures == 0, curvature
            assert [refresh.step for refresh in block_lr.history] == [1, 3]
            assert_equal_on_ranks(scales_of(block_lr))
            assert scales_of(block_lr).max() > 1.1
            for p in (
                model.parameters()
            ):  # training itself was not disturbed: gradients are still averaged
                assert_equal_on_ranks(p.detach())
                assert_equal_on_ranks(p.grad)
            if kind == "block":
                scales = block_lr.last_scales.as_dict()
                assert all(
                    torch.equal(scale, scales[name])
                    for name, scale in optimizer.block_scales().items()
                )


def averaged(rank):
    """A curvature that each rank knows by itself: the scales are those of the mean."""
    model = DistributedDataParallel(tiny_gpt())
    optimizer = BUILD["block"](model)
    blocks = blockopt.find_blocks(model)
    generator = torch.Generator().manual_seed(0)
    curvatures = [
        {n: torch.rand(b.num_blocks, generator=generator) for n, b in blocks.items()}
        for _ in range(2)
    ]
    curvature = lambda *_: curvatures[rank]  # noqa: E731
    block_lr = BlockLR(optimizer, model, curvature=curvature, by="head", beta=0.0)
    take_steps(model, optimizer, block_lr, rank, range(1))
    expected = block_scales(
        {n: (curvatures[0][n] + curvatures[1][n]) / 2 for n in blocks}, model, by="head"
    )
    for name, scale in block_lr.last_scales.as_dict().items():
        torch.testing.assert_close(scale, expected[name], rtol=1e-5, atol=0)


def one_rank_fails(rank, wrap, curvatures):
    """All ranks keep their scales, and all raise in the end."""
    warnings.simplefilter("ignore")
    for curvature in curvatures:
        model = wrap(tiny_gpt())
        optimizer = BUILD["block"](model)
        block_lr = BlockLR(optimizer, model, curvature=curvature, every=1)
        take_steps(model, optimizer, block_lr, rank, range(4), broken={(1, 0), (3, 1)})
        assert block_lr.failures == 2
        assert [refresh.step for refresh in block_lr.history] == [1, 3]
        assert_equal_on_ranks(scales_of(block_lr))
        broken = {(4, 1), (5, 1)}
        take_steps(model, optimizer, block_lr, rank, range(4, 5), broken)
        with pytest.raises(
            RuntimeError, match="3 refreshes"
        ):  # on rank 0 too, which has failed once only
            take_steps(model, optimizer, block_lr, rank, range(5, 6), broken)


def sharded_estimators(rank):
    warnings.simplefilter("ignore")
    for curvature in ("gauss_newton", "secant", "gradient"):
        for kind in ("block", "torch") if curvature == "secant" else ("block",):
            model = shard(tiny_gpt())
            optimizer = BUILD[kind](model)
            options = {"every": 2, "by": "tensor", "beta": 0.0}
            block_lr = BlockLR(optimizer, model, curvature=curvature, **options)
            take_steps(model, optimizer, block_lr, rank)
            assert block_lr.failures == 0
            assert [refresh.step for refresh in block_lr.history] == [1, 3]
            assert_equal_on_ranks(scales_of(block_lr))
            assert all(
                isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in model.parameters()
            )
    with torch.no_grad():
        token_loss(model)  # leaves whole parameters in place of the sharded ones
    assert not all(isinstance(p, DTensor) for p in model.parameters())
    assert_equal_on_ranks(scales_of(block_lr))
    model = shard(tiny_gpt())
    optimizer = BUILD["block"](model)
    block_lr = BlockLR(optimizer, model, curvature="hutchinson", every=1)
    with pytest.raises(ValueError, match="hutchinson needs whole parameters"):
        take_steps(model, optimizer, block_lr, rank)


def sharded_equals_whole(rank):
    """Both ranks with the same data: a sharded model has the scales of a whole one."""
    for curvature in ("gradient", "secant"):
        model, plain = shard(tiny_gpt(dtype=torch.float64)), tiny_gpt(dtype=torch.float64)
        for one in (model, plain):
            optimizer = BUILD["block"](one)
            block_lr = BlockLR(optimizer, one, curvature=curvature, every=1, beta=0.5)
            take_steps(one, optimizer, block_lr, 0)
            if one is model:
                expected = scales_of(block_lr)
        torch.testing.assert_close(scales_of(block_lr), expected, rtol=1e-4, atol=0)
        for p, q in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(whole(p).detach(), q.detach(), rtol=1e-5, atol=1e-7)


def resumed(rank):
    """One checkpoint, of rank 0, serves all ranks: each draws the samples it would have drawn."""
    model = DistributedDataParallel(tiny_gpt())
    optimizer = BUILD["block"](model)
    block_lr = BlockLR(optimizer, model, curvature="gauss_newton", every=1)
    take_steps(model, optimizer, block_lr, rank, range(2))
    saved = [{"model": model.state_dict(), "optimizer": optimizer.state_dict()}]
    dist.broadcast_object_list(saved, src=0)
    file = io.BytesIO()
    torch.save(saved[0], file)
    take_steps(model, optimizer, block_lr, rank, range(2, 4))
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other = DistributedDataParallel(tiny_gpt(seed=1))
    other.load_state_dict(loaded["model"])
    optimizer = BUILD["block"](other)
    optimizer.load_state_dict(loaded["optimizer"])
    again = BlockLR(optimizer, other, curvature="gauss_newton", every=1)
    take_steps(other, optimizer, again, rank, range(2, 4))
    assert torch.equal(scales_of(again), scales_of(block_lr))
    assert_same_weights(model, other)


def replicated(rank):
    equal_scales(rank)
    averaged(rank)
    one_rank_fails(rank, DistributedDataParallel, ["gauss_newton", "secant"])
    resumed(rank)


def sharded(rank):
    sharded_estimators(rank)
    sharded_equals_whole(rank)
    one_rank_fails(rank, shard, ["secant"])


def different_parameters_are_refused(rank):
    """Stages of a pipeline: averages over ranks would mix up their layers, in silence."""
    for curvature in ("newton", "gradient", "power_law"):
        model = tiny_gpt()
        stage = torch.nn.ModuleDict({f"stage{rank}": model})
        optimizer = BUILD["block"](stage)
        block_lr = BlockLR(optimizer, stage, curvature=curvature, every=1)
        token_loss(model).backward()
        optimizer.step()
        with pytest.raises(ValueError, match=rf"different parameters, .*'stage{rank}\..*pipeline"):
            block_lr.step(lambda model=model: token_loss(model))


def offloaded_shards_are_exchanged_from_the_mesh(rank):
    """Ranks with accelerators may have no way to exchange what lies on the CPU."""
    mesh = DeviceMesh("meta", [0, 1], _init_backend=False)
    meta = TensorMeta(torch.Size([4]), (1,), torch.float32)
    offloaded = DTensor(  # as FSDP2 makes it
        torch.ones(2), DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False
    )
    assert offloaded.device.type == "cpu"
    assert compute_device(offloaded).type == "meta"
    assert compute_device(torch.ones(2)).type == "cpu"


def test_two_ranks_scale_alike():
    run_on_two_ranks(
        replicated,
        sharded,
        different_parameters_are_refused,
        offloaded_shards_are_exchanged_from_the_mesh,
    )
