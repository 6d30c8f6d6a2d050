"""BlockLR under accelerate: wrapped optimizers, gradient accumulation, checkpoints."""

import pytest
import torch
from accelerate import Accelerator

import blockopt
from blockopt.block_lr import BlockLR
from tests.helpers.optimizers import assert_same_weights, tiny_gpt, token_loss

BUILD = {
    "block": lambda model: blockopt.BlockAdamW(blockopt.param_groups(model), lr=1e-2),
    "torch": lambda model: torch.optim.AdamW(blockopt.param_groups(model, by="parameter"), lr=1e-2),
}


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("prepared_first", [False, True])
def test_accumulation_of_accelerate_counts_optimizer_steps(kind, prepared_first):
    """The loop calls everything for each micro-batch; accelerate steps once in two."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = tiny_gpt()
    optimizer = BUILD[kind](model)
    options = {"curvature": "gradient", "every": 2}
    block_lr = None if prepared_first else BlockLR(optimizer, model, **options)
    model, optimizer = accelerator.prepare(model, optimizer)
    block_lr = block_lr or BlockLR(optimizer, model, **options)
    reference = tiny_gpt()
    by_hand = BUILD[kind](reference)
    expected = BlockLR(by_hand, reference, **options)
    for micro in range(8):
        with accelerator.accumulate(model):
            accelerator.backward(token_loss(model, seed=micro))
            optimizer.step()
            block_lr.step()
            optimizer.zero_grad()
        (token_loss(reference, seed=micro) / 2).backward()
        if micro % 2:
            by_hand.step()
            expected.step()
            by_hand.zero_grad()
    assert block_lr.num_steps == 4
    assert block_lr.history == expected.history
    assert [refresh.step for refresh in block_lr.history] == [1, 3]
    assert_same_weights(reference, accelerator.unwrap_model(model))


def test_accelerate_saves_and_loads_the_state(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = tiny_gpt()
    model, optimizer = accelerator.prepare(model, BUILD["torch"](model))
    block_lr = BlockLR(optimizer, model, curvature="gradient", every=1)
    accelerator.register_for_checkpointing(block_lr)

    def steps(which):
        for step in which:
            accelerator.backward(token_loss(model, seed=step))
            optimizer.step()
            block_lr.step()
            optimizer.zero_grad()

    steps(range(2))
    accelerator.save_state(tmp_path)
    steps(range(2, 4))
    expected = [p.detach().clone() for p in model.parameters()], block_lr.state_dict()["history"]
    accelerator.load_state(tmp_path)
    assert block_lr.num_steps == 2
    steps(range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected[0]))
    assert block_lr.state_dict()["history"] == expected[1]
