"""timm: its optimizers with our groups and BlockLR, its schedules on ours, its checkpoints."""

import io

import pytest
import torch

import blockopt
from tests.helpers.models import FAMILIES, loss_of, timm_vision_transformer

timm_vision_transformer()  # imports timm without torchvision
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.scheduler import CosineLRScheduler  # noqa: E402

STEPS = 6
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
    "ours": lambda model: blockopt.BlockAdamW(
        blockopt.param_groups(model, weight_decay=0.05), lr=1e-2
    ),
}


def train(kind, path=None, start=0, stop=STEPS):
    model = FAMILIES["timm_vit"]()
    optimizer = BUILD[kind](model)
    schedule = CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=2, t_in_epochs=False)
    if path is not None:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["state_dict"])
        optimizer.load_state_dict(saved["optimizer"])
    block_lr = blockopt.BlockLR(optimizer, model, every=2)
    schedule.step_update(start)
    for step in range(start, stop):
        optimizer.zero_grad()
        loss_of("timm_vit", model, seed=step).backward()
        optimizer.step()
        block_lr.step(lambda step=step: loss_of("timm_vit", model, seed=step))
        schedule.step_update(step + 1)
    return model, optimizer, block_lr


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.filterwarnings("ignore:No block had a positive curvature")
def test_its_loop_resumes_with_the_same_bits(kind):
    model, optimizer, block_lr = train(kind)
    decays = {group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {0.05, 0.0}
    half, stopped, _ = train(kind, stop=3)
    file = io.BytesIO()
    torch.save({"state_dict": half.state_dict(), "optimizer": stopped.state_dict()}, file)
    file.seek(0)
    resumed, _, again = train(kind, file, start=3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters()))
    assert again.history == block_lr.history
    assert len(block_lr.history) + block_lr.failures == 3
    scales = [float(scale[0]) for scale in block_lr.last_scales.as_dict().values()]
    assert len(set(scales)) > 4
