"""The trained model for others to load: `model/`, as `from_pretrained` of transformers takes it, with its tokenizer."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor, nn

from recipes.common.checkpoints import CheckpointError
from recipes.common.files import whole_folder
from recipes.common.gpt2 import GPT2, to_huggingface
from recipes.training.processes import together
from recipes.training.training_state import averaged_weights, whole_weights


def export_model(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, tokenizer: Path | None, folder: Path
) -> None:
    """Write the weights that are evaluated: sharded ones gathered on rank 0, schedulefree's averaged. All ranks must call it.

    Args:
        accelerator: That prepared the model.
        model: Our GPT-2, or one of transformers, under any wrapper.
        optimizer: That trained it.
        tokenizer: Its file, if there is one.
        folder: What is in it is replaced.

    Raises:
        CheckpointError: If it could not be written.
    """
    plain = accelerator.unwrap_model(model, keep_torch_compile=False)
    if importlib.util.find_spec("transformers") is None:
        accelerator.print(
            f"The weights are in the checkpoints only: {folder} is written where transformers is installed."
        )
        return
    if isinstance(plain, GPT2) and (plain.config.norm, plain.config.attention) != (
        "pre",
        "softmax",
    ):
        accelerator.print(
            f"transformers has no such GPT-2: the weights are in the checkpoints only, not in {folder}."
        )
        return
    with averaged_weights(optimizer):
        weights = whole_weights(accelerator, model)
        together(
            lambda: (
                _write(plain, weights, tokenizer, folder) if accelerator.is_main_process else None
            )
        )
    accelerator.print(f"The model is in {folder}.")


def _write(
    plain: nn.Module, weights: Mapping[str, Tensor], tokenizer: Path | None, folder: Path
) -> None:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        with whole_folder(folder) as part:
            if isinstance(plain, GPT2):
                whole = GPT2(plain.config)
                whole.load_state_dict(weights)
                to_huggingface(whole).save_pretrained(part)
            else:
                plain.config.use_cache = True  # which was off for training
                plain.save_pretrained(part, state_dict=dict(weights))
            if tokenizer is not None:
                shutil.copy(tokenizer, part / "tokenizer.json")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"The model could not be written to {folder}: {error}. The checkpoints are as they were: make room, and --resume."
        ) from error
