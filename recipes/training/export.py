"""The trained model for others: `model/`, which `from_pretrained` loads, with its tokenizer."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path

from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor, nn

from recipes.common.checkpoints import CheckpointError
from recipes.common.files import whole_folder
from recipes.common.gpt2 import GPT2, to_huggingface
from recipes.common.training import Training, averaged_weights
from recipes.training.processes import together
from recipes.training.training_state import whole_weights


def export_model(
    accelerator: Accelerator, training: Training, tokenizer: Path | None, folder: Path
) -> None:
    """Write the weights as they are evaluated: gathered, and averaged by schedulefree.

    All ranks must call it.

    Args:
        accelerator: The one that prepared the model.
        training: Our GPT-2, or a model of transformers, under any wrapper, and its optimizer.
        tokenizer: The tokenizer's file, if there is one.
        folder: Where to write; what is there is replaced.

    Raises:
        CheckpointError: If it cannot be written.
    """
    plain, config = training.plain, getattr(training.plain, "config", None)
    if importlib.util.find_spec("transformers") is None:
        accelerator.print(f"Without transformers {folder} is not written: see the checkpoints.")
        return
    if isinstance(plain, GPT2) and (config.norm, config.attention) != ("pre", "softmax"):
        accelerator.print(
            f"transformers has no such GPT-2: the weights are in the checkpoints, not in {folder}."
        )
        return
    with averaged_weights(training.optimizer):
        weights = whole_weights(accelerator, training)
        together(lambda: accelerator.is_main_process and _write(plain, weights, tokenizer, folder))
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
            f"The model could not be written to {folder}: {error}. "
            "The checkpoints are as they were: make room, and --resume."
        ) from error
