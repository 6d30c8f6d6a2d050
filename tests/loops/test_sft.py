"""TRL's SFTTrainer fine-tunes LoRA adapters with blocks, and resumes."""

import peft
import pytest
import torch
import transformers
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import blockopt
from blockopt.huggingface import BlockLRCallback, trainer_optimizer
from tests.helpers.killed import killed_in_step
from tests.helpers.models import LLAMA_SIZES, SDPA
from tests.helpers.optimizers import assert_same_run

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's and its parents' own


def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", *"abcdefgh"])}
    plain = Tokenizer(WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **names)


def lora_llama():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_SIZES, **SDPA))
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets))


# Plain SGD would not move factors that start at zero beside others of 1e-2.
BUILD = {
    "adamw": trainer_optimizer,
    "muon": lambda model, args: trainer_optimizer(model, args, blockopt.BlockMuon),
    "sgd": lambda model, args: blockopt.BlockSGD(
        blockopt.param_groups(model), lr=0.3, momentum=0.9
    ),
}


def fit(kind, path, resume=None):
    texts = [" ".join("abcdefgh"[(i + j * j) % 8] for j in range(8)) for i in range(24)]
    args = SFTConfig(
        str(path),
        max_steps=7,
        save_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        logging_strategy="no",
        max_length=16,
        seed=0,
    )
    model, block_lr = lora_llama(), BlockLRCallback(every=2)
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer(),
        optimizers=(BUILD[kind](model, args), None),
        callbacks=[block_lr],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model, block_lr.block_lr


@pytest.mark.parametrize("kind", BUILD)
def test_a_killed_fine_tuning_of_lora_resumes_with_the_same_bits(kind, tmp_path):
    model, block_lr = fit(kind, tmp_path / "whole")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained
    assert all("lora" in name for name in trained)
    assert block_lr.last_scales.as_dict().keys() == trained
    assert any(bool(p.abs().max() > 0) for name, p in model.named_parameters() if "lora_B" in name)
    killed_in_step(6, lambda: fit(kind, tmp_path / "killed"))
    resumed = fit(kind, tmp_path / "killed", resume=str(tmp_path / "killed" / "checkpoint-3"))
    assert_same_run(resumed, (model, block_lr))
