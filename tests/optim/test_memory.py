"""Bytes of optimizer state."""

import torch

import blockopt
from recipes.common.gpt2 import GPT2, GPT2Config
from tests.helpers.optimizers import random_gradients, set_gradients


def state_bytes_per_parameter(optimizer):
    state = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    return state / sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def test_block_moment_halves_the_state():
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocab_size=20_000, context=64, width=256, depth=1, heads=4))
    set_gradients(model, random_gradients(model, 0))
    optimizer = blockopt.BlockAdamW(blockopt.param_groups(model), second_moment="block")
    optimizer.step()
    assert state_bytes_per_parameter(optimizer) <= 4.1
