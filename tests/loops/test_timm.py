"""timm: its optimizers with our groups and BlockLR, its schedules on ours, its checkpoints."""

import pytest
import torch

import blockopt
from tests.helpers.killed import killed_in_step
from tests.helpers.models import FAMILIES, loss_of, timm_vision_transformer
from tests.helpers.optimizers import assert_same_run

timm_vision_transformer()  # imports timm without torchvision
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.scheduler import CosineLRScheduler  # noqa: E402

STEPS, SAVE_EVERY = 7, 3


def groups(model):
    return blockopt.param_groups(model, weight_decay=0.05)


BUILD = {
    **{
        f"timm-{name}": lambda model, name=name: create_optimizer_v2(
            model,
            opt=name,
            lr=1e-2,
            weight_decay=0.05,
            param_group_fn=lambda m: blockopt.param_groups(m, by="parameter"),
        )
        for name in ("adamw", "lamb", "lion")
    },
    "adamw": lambda model: blockopt.BlockAdamW(groups(model), lr=1e-2),
    "sgd": lambda model: blockopt.BlockSGD(groups(model), lr=1e-1, momentum=0.9),
    "muon": lambda model: blockopt.BlockMuon(groups(model), lr=1e-2),
}


def train(kind, path, *, resume=False):
    model, start = FAMILIES["timm_vit"](), 0
    optimizer = BUILD[kind](model)
    schedule = CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=2, t_in_epochs=False)
    if resume:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["state_dict"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["num_updates"]
        assert start == 3
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.05, 0.0}
    block_lr = blockopt.BlockLR(optimizer, model, every=2)
    schedule.step_update(start)
    for step in range(start, STEPS):
        if step and step % SAVE_EVERY == 0:
            saved = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**saved, "num_updates": step}, path)
        optimizer.zero_grad()
        loss_of("timm_vit", model, seed=step).backward()
        optimizer.step()
        block_lr.step(lambda step=step: loss_of("timm_vit", model, seed=step))
        schedule.step_update(step + 1)
    return model, block_lr


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.filterwarnings("ignore:No block had a positive curvature")
def test_a_killed_loop_resumes_with_the_same_bits(kind, tmp_path):
    whole = train(kind, tmp_path / "whole.pth")
    killed_in_step(6, lambda: train(kind, tmp_path / "killed.pth"))
    assert_same_run(train(kind, tmp_path / "killed.pth", resume=True), whole)
    scales = [float(scale[0]) for scale in whole[1].last_scales.as_dict().values()]
    assert len(set(scales)) > 4
