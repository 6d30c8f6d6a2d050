"""Checkpoints of `torch.distributed.checkpoint`: other optimizers, other numbers of ranks."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import blockopt
from tests.helpers import parallel_models
from tests.helpers.ranks import run_on_ranks, run_on_two_ranks
from tests.helpers.ranks import whole as gathered

KINDS = {
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "coordinate": lambda model: blockopt.BlockAdamW(blockopt.param_groups(model), lr=1e-2),
    "block": lambda model: blockopt.BlockAdamW(
        blockopt.param_groups(model), lr=1e-2, second_moment="block"
    ),
    "muon": lambda model: blockopt.BlockMuon(blockopt.param_groups(model), lr=1e-2),
}
OPTIMIZERS = ("coordinate", "block", "muon")


def train(parallel, optimizer, steps, block_lr=None):
    for step in steps:
        optimizer.zero_grad()
        parallel.loss(step).backward()
        optimizer.step()
        if block_lr is not None:
            block_lr.step(lambda step=step: parallel.loss(100 + step))


def weights(parallel):
    return {n: gathered(p.detach()).clone() for n, p in parallel.model.named_parameters()}


def assert_close(found, expected, what, tolerance=1e-9):
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda t, name=name: f"{what}, {name}: {t}",
        )


def adamw_of_torch_and_ours(rank):
    """Sharded and full, from torch's AdamW to BlockAdamW and back: training goes on the same."""
    mesh = init_device_mesh("cpu", (2,))
    for source, target in (("torch", "coordinate"), ("coordinate", "torch")):
        for full in (False, True):
            options = StateDictOptions(full_state_dict=full)
            old = parallel_models.fsdp(mesh)
            optimizer = KINDS[source](old.model)
            for group in optimizer.param_groups:  # that of torch has one group
                group["weight_decay"] = 0.01
            train(old, optimizer, range(2))
            saved = deepcopy(get_optimizer_state_dict(old.model, optimizer, options=options))
            new = parallel_models.fsdp(mesh)
            set_model_state_dict(new.model, get_model_state_dict(old.model))
            other = KINDS[target](new.model)
            regrouped = blockopt.regroup_state_dict(saved, other, new.model)
            set_optimizer_state_dict(new.model, other, regrouped, options=options)
            train(old, optimizer, range(2, 4))
            train(new, other, range(2, 4))
            assert_close(weights(new), weights(old), f"{source} to {target}, full={full}")


def second_moments_of_another_kind(rank):
    mesh = init_device_mesh("cpu", (2,))
    for source, target in (("coordinate", "block"), ("block", "coordinate")):
        old, new = parallel_models.fsdp(mesh), parallel_models.fsdp(mesh)
        optimizer, other = KINDS[source](old.model), KINDS[target](new.model)
        train(old, optimizer, range(1))
        for full in (False, True):
            options = StateDictOptions(full_state_dict=full)
            saved = get_optimizer_state_dict(old.model, optimizer, options=options)
            with pytest.raises(ValueError, match=f"checkpoint is of second_moment='{source}'"):
                set_optimizer_state_dict(new.model, other, saved, options=options)


def test_two_ranks_load_what_another_optimizer_saved():
    run_on_two_ranks(adamw_of_torch_and_ours, second_moments_of_another_kind)


def layouts(number):
    """The layouts that so many ranks can load into."""
    if number == 1:
        return {"one": parallel_models.whole}
    line = init_device_mesh("cpu", (number,))
    found = {"FSDP2": partial(parallel_models.fsdp, line)}
    if number == 2:
        found["TP"] = partial(parallel_models.tensor_parallel, line)
    if number == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        found["HSDP"] = partial(parallel_models.fsdp, square)
        found["TP x FSDP2"] = partial(parallel_models.tensor_parallel_and_fsdp, square)
    return found


def prepared(build, name):
    parallel = build()
    optimizer = KINDS[name](parallel.model)
    block_lr = blockopt.BlockLR(optimizer, parallel.model, every=2, by="tensor")
    return parallel, optimizer, block_lr


def state_of(parallel, optimizer):
    return {
        "model": get_model_state_dict(parallel.model),
        "optimizer": get_optimizer_state_dict(parallel.model, optimizer),
    }


def saves(folder, source, rank):
    build = layouts(dist.get_world_size())[source]
    for name in OPTIMIZERS:
        parallel, optimizer, block_lr = prepared(build, name)
        train(parallel, optimizer, range(3), block_lr)
        dcp.save(state_of(parallel, optimizer), checkpoint_id=folder / f"{source}-{name}")
        train(parallel, optimizer, range(3, 6), block_lr)
        expected = weights(parallel)  # gathered by all ranks, written by one
        if rank == 0:
            torch.save(expected, folder / f"{source}-{name}.pt")
    dist.barrier()


def loads(folder, source, rank=0):
    number = dist.get_world_size() if dist.is_initialized() else 1
    for layout, build in layouts(number).items():
        for name in OPTIMIZERS:
            parallel, optimizer, block_lr = prepared(build, name)
            state = state_of(parallel, optimizer)
            dcp.load(state, checkpoint_id=folder / f"{source}-{name}")
            set_model_state_dict(parallel.model, state["model"])
            set_optimizer_state_dict(parallel.model, optimizer, state["optimizer"])
            assert block_lr.num_steps == 3
            train(parallel, optimizer, range(3, 6), block_lr)
            expected = torch.load(folder / f"{source}-{name}.pt")
            tolerance = 1e-14 if layout == source else 1e-6
            found = weights(parallel)
            assert_close(found, expected, f"{source} to {layout}, {name}", tolerance)


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_four_ranks_save_and_any_number_loads(tmp_path):
    """Training goes on as it would have: in the same layout to the last digit but one.

    Not to the last: products of matrices may depend on where in memory they lie.
    """
    sources = ("FSDP2", "HSDP", "TP x FSDP2")
    tasks = [partial(task, tmp_path, source) for source in sources for task in (saves, loads)]
    run_on_ranks(4, *tasks)
    run_on_two_ranks(*[partial(loads, tmp_path, source) for source in sources])
    for source in sources:
        loads(tmp_path, source)
