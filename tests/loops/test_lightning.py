"""Lightning: the callback of the guide, and a checkpoint that nothing has to be added to."""

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import blockopt
from tests.helpers.killed import killed_in_step
from tests.helpers.optimizers import OF_MODEL, TINY, assert_same_run, tiny_gpt

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, about workers and logging
STEPS = 7


class BlockLRCallback(lightning.Callback):
    def on_train_start(self, trainer, module):
        self.block_lr = blockopt.BlockLR(trainer.optimizers[0], module, every=2)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.block_lr.step(lambda: module.loss(batch))


class Model(lightning.LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.gpt, self.kind = tiny_gpt(), kind

    def loss(self, batch):
        return self.gpt(batch[0][:, :-1], batch[0][:, 1:])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = OF_MODEL[self.kind](self)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(kind, path, resume=None):
    # Three batches per epoch: Lightning does not skip those of a part of an epoch when it resumes.
    tokens = torch.randint(19, (12, TINY.context + 1), generator=torch.Generator().manual_seed(0))
    model, block_lr = Model(kind), BlockLRCallback()
    saving = ModelCheckpoint(path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    options = {"accelerator": "cpu", "devices": 1, "logger": False, "gradient_clip_val": 1.0}
    trainer = lightning.Trainer(
        max_steps=STEPS,
        callbacks=[saving, block_lr],  # in any order: Lightning calls those that save last
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    loader = DataLoader(TensorDataset(tokens), batch_size=4, shuffle=False)
    trainer.fit(model, loader, ckpt_path=resume)
    return model, block_lr.block_lr


@pytest.mark.parametrize("kind", OF_MODEL)
def test_a_killed_fit_resumes_with_the_same_bits(kind, tmp_path):
    whole = fit(kind, tmp_path / "whole")
    killed_in_step(6, lambda: fit(kind, tmp_path / "killed"))
    assert [file.name for file in (tmp_path / "killed").iterdir()] == ["step=3.ckpt"]
    assert_same_run(fit(kind, tmp_path / "killed", resume=tmp_path / "killed/step=3.ckpt"), whole)
