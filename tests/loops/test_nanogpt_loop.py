"""A loop in the style of nanoGPT: it writes the lr of every group, and saves one dictionary."""

import math

import pytest
import torch

import blockopt
from tests.helpers.optimizers import TINY, tiny_gpt

STEPS, ACCUMULATION, LR = 8, 2, 1e-2
BUILD = {
    "adamw": lambda model: blockopt.BlockAdamW(
        blockopt.param_groups(model, weight_decay=0.1), lr=LR, betas=(0.9, 0.95)
    ),
    "muon": lambda model: blockopt.BlockMuon(blockopt.param_groups(model), lr=LR),
    "torch": lambda model: torch.optim.AdamW(blockopt.param_groups(model, by="parameter"), lr=LR),
}


def get_batch(step, micro):
    generator = torch.Generator().manual_seed(step * ACCUMULATION + micro)
    tokens = torch.randint(TINY.vocab_size, (4, TINY.context + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def get_lr(step):
    if step < 2:
        return LR * (step + 1) / 2
    return LR * 0.5 * (1 + math.cos(math.pi * (step - 2) / (STEPS - 2)))


def train(kind, path, *, save_at=None, resume=False):
    """Train, and write a checkpoint after `save_at` steps."""
    model, start = tiny_gpt(), 0
    optimizer = BUILD[kind](model)
    if resume:
        checkpoint = torch.load(path, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start = checkpoint["step"]
    block_lr = blockopt.BlockLR(optimizer, model, every=3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(start, STEPS):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        if step == save_at:
            checkpoint = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(checkpoint, path)
        for micro in range(ACCUMULATION):
            X, Y = get_batch(step, micro)
            scaler.scale(model(X, Y) / ACCUMULATION).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        block_lr.step(lambda X=X, Y=Y: model(X, Y))
        optimizer.zero_grad(set_to_none=True)
    return model, block_lr


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.filterwarnings("ignore:No block had a positive curvature")
def test_the_loop_resumes_with_the_same_bits(kind, tmp_path):
    path = tmp_path / "ckpt.pt"
    model, block_lr = train(kind, path, save_at=5)
    resumed, again = train(kind, path, resume=True)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters()))
    assert again.history == block_lr.history
    assert [refresh.step for refresh in block_lr.history] == [1, 4, 7]
    scales = torch.cat(list(block_lr.last_scales.as_dict().values()))
    assert scales.max() > 1.01 > 0.99 > scales.min()
