"""The model that a run starts from: fresh weights, or a checkpoint to fine-tune."""

from __future__ import annotations

import torch
from torch import nn

from recipes.common.errors import import_package
from recipes.common.gpt2 import GPT2
from recipes.comparison.run_config import RunConfig

ADAPTED = ["c_attn", "c_proj", "c_fc"]  # the linear maps inside the layers of our GPT-2


def starting_model(config: RunConfig) -> nn.Module:
    """Return the model of a run; its seed draws fresh weights, and those of LoRA.

    Raises:
        MissingPackageError: If the run adds LoRA's matrices and peft is not installed.
    """
    torch.manual_seed(config.seed)
    model = GPT2(config.model)  # drawn on the CPU: the same weights everywhere
    if config.start is not None:
        model.load_state_dict(torch.load(config.start.file, weights_only=True))
        if config.start.rank:
            _add_lora(model, config.start.rank)
    return model.to(config.device)


def _add_lora(model: nn.Module, rank: int) -> None:
    """Freeze the model, and add trainable matrices of a small rank to its linear maps."""
    peft = import_package("peft", "Fine-tuning with LoRA")
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=ADAPTED)
    peft.inject_adapter_in_model(config, model)
