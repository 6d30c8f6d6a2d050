"""BlockLR under accelerate: wrapped optimizers, gradient accumulation, checkpoints."""

import pytest
from accelerate import Accelerator

from blockopt.block_lr import BlockLR
from tests.helpers.block_lr import BUILD
from tests.helpers.optimizers import assert_same_weights, tiny_gpt, token_loss

OPTIONS = {"curvature": "secant", "every": 2, "beta": 0.5}


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


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("early", [False, True])
def test_accelerate_resumes_it_with_the_optimizer(kind, early, tmp_path):
    def build():
        accelerator = Accelerator(cpu=True)
        model = tiny_gpt()
        optimizer = BUILD[kind](model)
        made = BlockLR(optimizer, model, **OPTIONS) if early else None
        model, optimizer = accelerator.prepare(model, optimizer)
        return accelerator, model, optimizer, made or BlockLR(optimizer, model, **OPTIONS)

    def steps(which, accelerator, model, optimizer, block_lr):
        for step in which:
            accelerator.backward(token_loss(model, seed=step))
            optimizer.step()
            block_lr.step(lambda step=step: token_loss(model, seed=step))
            optimizer.zero_grad()

    run = build()
    steps(range(3), *run)
    run[0].save_state(tmp_path)
    steps(range(3, 6), *run)
    resumed = build()
    resumed[0].load_state(tmp_path)
    assert resumed[3].num_steps == 3
    steps(range(3, 6), *resumed)
    assert_same_weights(resumed[0].unwrap_model(resumed[1]), run[0].unwrap_model(run[1]))
    assert resumed[3].history == run[3].history
    assert [refresh.step for refresh in run[3].history] == [1, 3, 5]
