"""The Trainer of transformers: a run that was killed goes on from its last checkpoint."""

import pytest
import torch
import transformers
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from blockopt.huggingface import BlockLRCallback
from tests.helpers.killed import killed_in_step
from tests.helpers.models import SDPA
from tests.helpers.optimizers import OF_MODEL, assert_same_run

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers
SIZES = {"vocab_size": 19, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0}


class Tokens(Dataset):
    """Random sequences, without a meaning."""

    def __init__(self):
        self.tokens = torch.randint(19, (40, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def train(kind, folder, resume=None):
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **TOKENS, **SDPA))
    arguments = TrainingArguments(
        str(folder),
        max_steps=7,
        save_steps=3,
        per_device_train_batch_size=4,
        use_cpu=True,
        seed=0,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
    )
    callback = BlockLRCallback(every=2)
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Tokens(),
        optimizers=(OF_MODEL[kind](model), None),
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model, callback.block_lr


@pytest.mark.parametrize("kind", OF_MODEL)
def test_a_killed_training_resumes_with_the_same_bits(kind, tmp_path):
    whole = train(kind, tmp_path / "whole")
    killed_in_step(6, lambda: train(kind, tmp_path / "killed"))
    assert_same_run(train(kind, tmp_path / "killed", str(tmp_path / "killed/checkpoint-3")), whole)
