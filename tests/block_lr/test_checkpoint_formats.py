"""Checkpoints that know nothing of BlockLR carry its state: DCP in both of its forms."""

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from blockopt.block_lr import BlockLR
from tests.helpers.block_lr import BUILD
from tests.helpers.optimizers import assert_same_weights, tiny_gpt, token_loss


def build(kind, seed=0):
    model = tiny_gpt(seed)
    optimizer = BUILD[kind](model)
    return model, optimizer, BlockLR(optimizer, model, curvature="secant", every=2, beta=0.5)


def steps(which, model, optimizer, block_lr):
    for step in which:
        optimizer.zero_grad()
        token_loss(model, seed=step).backward()
        optimizer.step()
        block_lr.step(lambda step=step: token_loss(model, seed=step))


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:TypedStorage is deprecated")
def test_a_distributed_checkpoint_resumes_with_the_same_bits(kind, flatten, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    run = build(kind)
    steps(range(3), *run)
    state = {"model": run[0].state_dict(), "optim": get_optimizer_state_dict(*run[:2])}
    state["optim"] = get_optimizer_state_dict(*run[:2], options=options)
    dcp.save(state, checkpoint_id=tmp_path)
    steps(range(3, 6), *run)

    resumed = build(kind, seed=1)
    loaded = {
        "model": resumed[0].state_dict(),
        "optim": get_optimizer_state_dict(*resumed[:2], options=options),
    }
    dcp.load(loaded, checkpoint_id=tmp_path)
    resumed[0].load_state_dict(loaded["model"])
    set_optimizer_state_dict(*resumed[:2], loaded["optim"], options=options)
    assert resumed[2].num_steps == 3
    steps(range(3, 6), *resumed)
    assert_same_weights(resumed[0], run[0])
    assert resumed[2].history == run[2].history
