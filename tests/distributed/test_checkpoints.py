"""Checkpoints of `torch.distributed.checkpoint`: other optimizers, other numbers of ranks."""

import warnings
from copy import deepcopy
from functools import cache, partial

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
from tests.helpers.ranks import assert_close_by_name, run_on_ranks, run_on_two_ranks
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
            assert_close_by_name(weights(new), weights(old), f"{source} to {target}, full={full}")


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


def plain_and_sharded_states_are_told_apart(rank):
    """Without the functions of DCP: refused on loading, before a step could mix the two."""
    mesh = init_device_mesh("cpu", (2,))
    for name in OPTIMIZERS:
        whole, sharded = parallel_models.whole(), parallel_models.fsdp(mesh)
        pair = [(parallel, KINDS[name](parallel.model)) for parallel in (whole, sharded)]
        for parallel, optimizer in pair:
            train(parallel, optimizer, range(1))
        (_, one), (_, other) = pair
        with pytest.raises(ValueError, match=r"is plain, and .* a DTensor.*set_optimizer_state"):
            other.load_state_dict(one.state_dict())
        with pytest.raises(ValueError, match=r"is a DTensor, and .* plain.*set_optimizer_state"):
            one.load_state_dict(other.state_dict())


def test_two_ranks_load_what_another_optimizer_saved():
    run_on_two_ranks(
        adamw_of_torch_and_ours,
        second_moments_of_another_kind,
        plain_and_sharded_states_are_told_apart,
    )


@cache  # each mesh has groups of its own, whose threads never rest
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


# The estimator of each: two that look at closures, and one that keeps sums over many steps.
CURVATURES = {"coordinate": "newton", "block": "gauss_newton", "muon": "successive_gradients"}
BEFORE, AFTER = 14, 20  # steps until the checkpoint, and from it on


def prepared(build, name):
    parallel = build()
    optimizer = KINDS[name](parallel.model)
    block_lr = blockopt.BlockLR(
        optimizer, parallel.model, curvature=CURVATURES[name], every=3, by="tensor"
    )
    return parallel, optimizer, block_lr


def state_of(parallel, optimizer):
    return {
        "model": get_model_state_dict(parallel.model),
        "optimizer": get_optimizer_state_dict(parallel.model, optimizer),
    }


def saves(folder, source, rank):
    warnings.simplefilter("ignore")  # curvature that is nowhere positive
    build = layouts(dist.get_world_size())[source]
    for name in OPTIMIZERS:
        parallel, optimizer, block_lr = prepared(build, name)
        train(parallel, optimizer, range(BEFORE), block_lr)
        dcp.save(state_of(parallel, optimizer), checkpoint_id=folder / f"{source}-{name}")
        train(parallel, optimizer, range(BEFORE, BEFORE + AFTER), block_lr)
        assert block_lr.history[-1].step > BEFORE  # scales were measured after the checkpoint
        expected = weights(parallel)  # gathered by all ranks, written by one
        if rank == 0:
            torch.save(expected, folder / f"{source}-{name}.pt")
    dist.barrier()


def loads(folder, source, rank=0):
    warnings.simplefilter("ignore")
    number = dist.get_world_size() if dist.is_initialized() else 1
    for index, (layout, build) in enumerate(layouts(number).items()):
        same = layout == source and number == 4
        # All of them where bits must agree; on other layouts of four ranks, which are slow, one.
        names = OPTIMIZERS if same or number < 4 else (OPTIMIZERS[index],)
        for name in names:
            parallel, optimizer, block_lr = prepared(build, name)
            state = state_of(parallel, optimizer)
            dcp.load(state, checkpoint_id=folder / f"{source}-{name}")
            set_model_state_dict(parallel.model, state["model"])
            set_optimizer_state_dict(parallel.model, optimizer, state["optimizer"])
            assert block_lr.num_steps == BEFORE
            train(parallel, optimizer, range(BEFORE, BEFORE + AFTER), block_lr)
            expected = torch.load(folder / f"{source}-{name}.pt")
            tolerance = 0.0 if same else 1e-6
            found = weights(parallel)
            assert_close_by_name(found, expected, f"{source} to {layout}, {name}", tolerance)


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore")
def test_four_ranks_save_and_any_number_loads(tmp_path, monkeypatch):
    """Training goes on as it would have for 20 steps: in the same layout to the last bit."""
    # By default MKL's products depend on where in memory the matrices lie.
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    sources = ("FSDP2", "HSDP", "TP x FSDP2")
    tasks = [partial(task, tmp_path, source) for source in sources for task in (saves, loads)]
    run_on_ranks(4, *tasks)
    run_on_two_ranks(*[partial(loads, tmp_path, source) for source in sources])
    for source in sources:
        loads(tmp_path, source)
