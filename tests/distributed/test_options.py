"""FSDP2 with offload, with mixed precision and with compiled steps."""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import blockopt
from tests.helpers import parallel_models
from tests.helpers.optimizers import OPTIMIZERS, random_scales
from tests.helpers.ranks import assert_equal_on_ranks, run_on_two_ranks
from tests.helpers.ranks import whole as gathered


def weights(parallel):
    return [gathered(p.detach()) for p in parallel.model.parameters()]


def train(parallel, optimizer, step=None):
    for number in range(2):
        optimizer.zero_grad()
        parallel.loss(number).backward()
        (step or optimizer.step)()


def offload_equals_one_process(rank):
    mesh = init_device_mesh("cpu", (2,))
    for name in ("adamw", "adamw-block", "sgd", "muon"):
        found = []
        for parallel in (
            parallel_models.fsdp(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)),
            parallel_models.whole(),
        ):
            optimizer = OPTIMIZERS[name](blockopt.param_groups(parallel.model))
            optimizer.set_block_scales(random_scales(optimizer))
            train(parallel, optimizer)
            found.append(weights(parallel))
        torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def compiled_step_equals_eager(rank):
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))
    for name in ("adamw", "adamw-block"):
        found = []
        for compiled in (True, False):
            parallel = parallel_models.fsdp(mesh)
            optimizer = OPTIMIZERS[name](blockopt.param_groups(parallel.model))
            optimizer.set_block_scales(random_scales(optimizer))
            step = torch.compile(optimizer.step, backend="aot_eager") if compiled else None
            train(parallel, optimizer, step)
            found.append(weights(parallel))
        torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def mixed_precision_equals_torch(rank):
    """Weights and state in float64, computation in bfloat16."""
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for build in (
        lambda model: blockopt.BlockAdamW(blockopt.param_groups(model, weight_decay=0), lr=1e-2),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0),
    ):
        parallel = parallel_models.fsdp(mesh, mp_policy=policy)
        train(parallel, build(parallel.model))
        found.append(weights(parallel))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-9)


def block_lr_in_mixed_precision(rank):
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({"mp_policy": policy}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        parallel = parallel_models.fsdp(mesh, **options)
        optimizer = blockopt.BlockAdamW(blockopt.param_groups(parallel.model), lr=1e-2)
        block_lr = blockopt.BlockLR(optimizer, parallel.model, every=1, by="tensor")
        train(parallel, optimizer)
        block_lr.step(lambda parallel=parallel: parallel.loss(100))
        assert block_lr.failures == 0
        assert_equal_on_ranks(torch.cat([*block_lr.last_scales.as_dict().values()]))


@pytest.mark.distributed
def test_two_ranks_offload_compile_and_mix_precisions():
    run_on_two_ranks(
        offload_equals_one_process,
        compiled_step_equals_eager,
        mixed_precision_equals_torch,
        block_lr_in_mixed_precision,
    )
