"""Train or fine-tune a causal language model with the Trainer of transformers, and a learning rate for every block.

    python recipes/train_hf.py                                             a fresh GPT-2 of 0.5M on the standard library
    python recipes/train_hf.py --hf-config path/to/config.json             any architecture of transformers, fresh
    python recipes/train_hf.py --hf-checkpoint path/to/checkpoint --data notes.txt --lr 1e-4     fine-tune
    python recipes/train_hf.py --optimizer adamw --curvature none          torch's AdamW alone
    python recipes/train_hf.py --resume                                    go on after a kill

    accelerate launch --config_file recipes/accelerate/multi_gpu_ddp.yaml recipes/train_hf.py

All that it takes is in `train`: an optimizer over `blockopt.param_groups(model)`, and a
`BlockLRCallback`. Writes the Trainer's checkpoints, the trained model with its tokenizer (`model/`,
for `from_pretrained`), and the block scales as CSV and PNG.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset
from transformers import Trainer, TrainingArguments, set_seed

import blockopt
from blockopt.huggingface import BlockLRCallback
from recipes.common.gpt2 import GPT2, to_huggingface
from recipes.common.optimizers import NAMES, build_optimizer, check_optimizer
from recipes.data.addition import IGNORED
from recipes.data.token_data import TokenData, add_data_arguments, load_from_arguments
from recipes.training.models import (
    add_model_arguments,
    build_model,
    check_model_arguments,
    context_of,
)
from recipes.training.processes import EXPECTED, OtherRankError
from recipes.training.run_folder import only_run_in, settings_of
from recipes.training.trainer_checkpoints import Checksums, check_folder, start_or_go_on

BATCH_SIZE = (
    "sequences a process and micro-batch, not a whole step as in train.py (default: %(default)s)"
)


class Windows(Dataset):  # type: ignore[type-arg]
    """Windows of tokens as transformers wants them: it shifts the labels itself.

    Args:
        tokens: One after another (tokens,), or a row an example.
        context: Tokens in a window.
        ignored: How many labels at the start of each do not count.
    """

    def __init__(self, tokens: Tensor, context: int, ignored: int = 0) -> None:
        self.tokens = (
            tokens
            if tokens.ndim == 2
            else tokens[: len(tokens) // context * context].view(-1, context)
        )
        self.ignored = ignored

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = torch.from_numpy(self.tokens[index].numpy().astype("int64"))
        labels = window.clone()
        labels[: self.ignored] = IGNORED
        return {"input_ids": window, "labels": labels}


def windows(data: TokenData, length: int) -> tuple[Windows, Windows]:
    """To train on, and held out.

    The first token is nobody's target, and the Trainer, which divides by the number of labels that
    count, must not count it.
    """
    training, held_out = (data.part(part, window=length) for part in ("train", "validation"))
    return Windows(training, length, data.ignored + 1), Windows(held_out, length, data.ignored + 1)


def window_length(arguments: argparse.Namespace, data: TokenData) -> int:
    """Tokens that the model sees at once: the context, or a whole example, whose last token is a target only."""
    return context_of(arguments, data) + (data.context is not None)


def make_model(arguments: argparse.Namespace, data: TokenData) -> nn.Module:
    """A model of transformers; our GPT-2 is turned into its GPT-2."""
    model = build_model(arguments, data, window_length(arguments, data))
    return to_huggingface(model) if isinstance(model, GPT2) else model


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The flags; those that are wrong end the program with code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data_arguments(parser)
    add_model_arguments(parser)
    group = parser.add_argument_group("training")
    group.add_argument(
        "--optimizer",
        default="block-adamw",
        metavar="NAME",
        help=f"{', '.join(NAMES)} (default: %(default)s)",
    )
    group.add_argument(
        "--lr", type=float, default=3e-3, help="the highest learning rate (default: %(default)s)"
    )
    group.add_argument(
        "--weight-decay", type=float, default=0.1, help="of matrices (default: %(default)s)"
    )
    group.add_argument(
        "--curvature",
        default="newton",
        choices=(*blockopt.curvature.ESTIMATORS, "none"),
        help="for BlockLR (default: %(default)s)",
    )
    group.add_argument(
        "--curvature-every",
        type=int,
        default=100,
        help="steps between refreshes (default: %(default)s)",
    )
    group.add_argument(
        "--steps", type=int, default=1000, help="optimizer steps (default: %(default)s)"
    )
    group.add_argument("--batch-size", type=int, default=16, help=BATCH_SIZE)
    group.add_argument(
        "--accumulate", type=int, default=1, help="micro-batches a step (default: %(default)s)"
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the model and the order of the data (default: %(default)s)",
    )
    group.add_argument("--bf16", action="store_true", help="mixed precision")
    group.add_argument("--cpu", action="store_true", help="even if there is a GPU")
    group.add_argument(
        "--output",
        type=Path,
        default=Path("results/train_hf"),
        help="folder (default: %(default)s)",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint, or start if there is none",
    )
    group.add_argument(
        "--checkpoint-every", type=int, default=200, help="steps (default: %(default)s)"
    )
    group.add_argument("--eval-every", type=int, default=200, help="steps (default: %(default)s)")
    group.add_argument(
        "--eval-batches", type=int, default=16, help="of held-out data (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    for name in (
        "steps",
        "batch_size",
        "accumulate",
        "checkpoint_every",
        "eval_every",
        "eval_batches",
        "curvature_every",
    ):
        if getattr(arguments, name) < 1:
            parser.error(
                f"Invalid --{name.replace('_', '-')}={getattr(arguments, name)}. Must be >= 1."
            )
    if not arguments.lr > 0 or not arguments.weight_decay >= 0:
        parser.error(
            f"Invalid --lr={arguments.lr}, --weight-decay={arguments.weight_decay}. Must be > 0 and >= 0."
        )
    if arguments.optimizer == "sophia":
        parser.error(
            "The Trainer does not measure the Hessian that sophia needs. Use recipes/train.py."
        )
    if arguments.optimizer == "adam-mini" and not (arguments.hf_config or arguments.hf_checkpoint):
        parser.error(
            "adam-mini reads heads and neurons from rows, and the GPT-2 of transformers has columns. Use recipes/train.py, or "
            "--hf-config with a model of nn.Linear."
        )
    try:
        check_optimizer(arguments.optimizer)
        check_model_arguments(arguments)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    return arguments


def training_arguments(arguments: argparse.Namespace) -> TrainingArguments:
    """The flags as the Trainer wants them. Starts the process group, if there are several processes."""
    return TrainingArguments(
        output_dir=str(arguments.output),
        max_steps=arguments.steps,
        learning_rate=arguments.lr,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        gradient_accumulation_steps=arguments.accumulate,
        lr_scheduler_type="constant_with_warmup"
        if arguments.optimizer == "schedulefree"
        else "cosine",
        warmup_steps=arguments.steps // 10,
        max_grad_norm=1.0,
        logging_steps=max(1, arguments.steps // 20),
        eval_strategy="steps",
        eval_steps=arguments.eval_every,
        save_steps=arguments.checkpoint_every,
        save_total_limit=2,
        seed=arguments.seed,
        bf16=arguments.bf16,
        use_cpu=arguments.cpu or not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
        report_to="none",
    )


def train(arguments: argparse.Namespace, trainer_arguments: TrainingArguments) -> None:
    """Train, evaluate, save the model and the scales."""
    set_seed(arguments.seed)
    data = load_from_arguments(arguments)
    model = make_model(arguments, data)
    training, held_out = windows(data, window_length(arguments, data))
    curvature = None if arguments.curvature == "none" else arguments.curvature
    decay = arguments.weight_decay
    optimizer = build_optimizer(
        arguments.optimizer, model, arguments.lr, weight_decay=decay, curvature=curvature
    )
    block_lr = (
        None
        if curvature is None
        else BlockLRCallback(curvature=curvature, every=arguments.curvature_every)
    )
    trainer = Trainer(
        model,
        trainer_arguments,
        train_dataset=training,
        eval_dataset=Subset(
            held_out, range(min(len(held_out), arguments.eval_batches * arguments.batch_size))
        ),
        optimizers=(optimizer, None),
        callbacks=[Checksums()] if block_lr is None else [Checksums(), block_lr],
    )
    settings = settings_of(arguments, data) | {"processes": trainer_arguments.world_size}
    trainer.train(resume_from_checkpoint=start_or_go_on(arguments.output, settings))
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(arguments.output / "model"))
    if not trainer.is_world_process_zero():
        return
    if data.tokenizer is not None:
        shutil.copy(data.tokenizer, arguments.output / "model" / "tokenizer.json")
    if block_lr is not None and block_lr.block_lr is not None:
        print(block_lr.block_lr.last_scales)
        block_lr.block_lr.history.to_csv(arguments.output / "block_lr.csv")
        if block_lr.block_lr.history:
            block_lr.block_lr.history.plot(arguments.output / "block_lr.png")
    print(f"held out {loss:.4f}; the model is in {arguments.output / 'model'}")


def main(argv: list[str] | None = None) -> None:
    """Train in a folder of one's own; what goes wrong is said without a traceback where it is not a mistake in the code."""
    arguments = parse(argv)
    trainer_arguments = training_arguments(arguments)
    try:
        with only_run_in(
            arguments.output, lambda: check_folder(arguments.output, arguments.resume)
        ):
            train(arguments, trainer_arguments)
    except (*EXPECTED, OtherRankError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
