"""Train or fine-tune a causal language model with transformers' Trainer and a `BlockLRCallback`.

    python recipes/train_hf.py                                    a fresh GPT-2 of 0.5M
    python recipes/train_hf.py --hf-config path/to/config.json    any architecture of transformers
    python recipes/train_hf.py --hf-checkpoint path/to/checkpoint --data notes.txt --lr 1e-4
    python recipes/train_hf.py --optimizer adamw --curvature none
    python recipes/train_hf.py --resume                           continue after a kill

    accelerate launch --config_file recipes/accelerate/multi_gpu_ddp.yaml recipes/train_hf.py

All that it takes is in `train`: an optimizer over `blockopt.param_groups(model)`, and a
`BlockLRCallback`. Writes the Trainer's checkpoints, the trained model with its tokenizer (`model/`,
for `from_pretrained`), and the block scales as CSV and PNG. `--batch-size` counts sequences per
process and micro-batch, as the Trainer does.
"""

from __future__ import annotations

import argparse
import shutil

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset
from transformers import Trainer, TrainingArguments, set_seed

from blockopt.blocks import parse_override
from blockopt.curvature import ESTIMATORS
from blockopt.huggingface import BlockLRCallback
from recipes.common.errors import UserError, one_line_errors
from recipes.common.flags import flag, script_parser
from recipes.common.gpt2 import GPT2, to_huggingface
from recipes.common.optimizers import EXAMPLE, build_optimizer, check_optimizer, usual_lr
from recipes.data.addition import IGNORED
from recipes.data.token_data import TokenData, add_data_arguments, load_from_arguments
from recipes.training.arguments import add_optimizer_arguments, add_run_arguments, check_overrides
from recipes.training.models import (
    add_model_arguments,
    build_model,
    check_model_arguments,
    context_of,
)
from recipes.training.run_folder import only_run_in, settings_of
from recipes.training.trainer_checkpoints import Checksums, check_folder, start_or_go_on

COUNTS = ("steps", "batch_size", "accumulate", "checkpoint_every", "eval_every", "eval_batches")


class Windows(Dataset):  # type: ignore[type-arg]
    """Windows of tokens for transformers, which shifts the labels itself.

    Args:
        tokens: One after another (tokens,), or one row per example.
        context: Tokens in a window.
        ignored: How many labels at the start of each do not count.
    """

    def __init__(self, tokens: Tensor, context: int, ignored: int = 0) -> None:
        whole = tokens[: len(tokens) // context * context]
        self.tokens = tokens if tokens.ndim == 2 else whole.view(-1, context)
        self.ignored = ignored

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = torch.from_numpy(self.tokens[index].numpy().astype("int64"))
        labels = window.clone()
        labels[: self.ignored] = IGNORED
        return {"input_ids": window, "labels": labels}


def windows(data: TokenData, length: int) -> tuple[Windows, Windows]:
    """Return the windows to train on, and those held out.

    The first token is nobody's target, so the Trainer, which divides by the number of labels that
    count, must not count it.
    """
    training, held_out = (data.part(part, window=length) for part in ("train", "validation"))
    return Windows(training, length, data.ignored + 1), Windows(held_out, length, data.ignored + 1)


def window_length(arguments: argparse.Namespace, data: TokenData) -> int:
    """Return the tokens that the model sees at once: the context, or a whole example."""
    return context_of(arguments, data) + (data.context is not None)


def make_model(arguments: argparse.Namespace, data: TokenData) -> nn.Module:
    """Build a model of transformers; our GPT-2 is turned into its GPT-2."""
    model = build_model(arguments, data, window_length(arguments, data))
    return to_huggingface(model) if isinstance(model, GPT2) else model


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the flags. Wrong ones end the program with code 2."""
    parser = script_parser(__doc__)
    add_data_arguments(parser)
    add_model_arguments(parser)
    group = add_optimizer_arguments(parser)
    names = (*ESTIMATORS, "none")
    group.add_argument("--curvature", default="newton", choices=names, help="BlockLR measures it")
    about = "steps between refreshes (default: 75 for SGD, 150 for others)"
    group.add_argument("--curvature-every", type=int, help=about)
    group = add_run_arguments(parser, "results/train_hf")
    group.add_argument("--bf16", action="store_true", help="compute in bfloat16")
    arguments = parser.parse_args(argv)
    for name in (*COUNTS, "curvature_every"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"Invalid {flag(name)}={value}. Must be >= 1.")
    if arguments.lr is None:
        arguments.lr = usual_lr(arguments.optimizer)
    lr, decay = arguments.lr, arguments.weight_decay
    if not lr > 0 or not decay >= 0:
        parser.error(f"Invalid --lr={lr}, --weight-decay={decay}. Must be > 0 and >= 0.")
    if arguments.optimizer == "sophia":
        parser.error("The Trainer does not measure sophia's Hessian. Use recipes/train.py.")
    if arguments.optimizer == "adam-mini" and not (arguments.hf_config or arguments.hf_checkpoint):
        parser.error(
            "adam-mini reads heads and neurons from rows, and the GPT-2 of transformers has "
            "columns. Use recipes/train.py, or --hf-config with a model of nn.Linear."
        )
    try:
        check_optimizer(arguments.optimizer)
        check_overrides(arguments)
        check_model_arguments(arguments)
    except (UserError, ValueError) as error:
        parser.error(str(error))
    return arguments


def training_arguments(arguments: argparse.Namespace) -> TrainingArguments:
    """Return the flags as the Trainer wants them. Starts the process group, if there is one."""
    averages = arguments.optimizer == "schedulefree"
    return TrainingArguments(
        output_dir=str(arguments.output),
        max_steps=arguments.steps,
        learning_rate=arguments.lr,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        gradient_accumulation_steps=arguments.accumulate,
        lr_scheduler_type="constant_with_warmup" if averages else "cosine",
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
    options = {"weight_decay": arguments.weight_decay, "curvature": curvature}
    options["overrides"] = dict(map(parse_override, arguments.override))
    options["example"] = training[0]["input_ids"][None, :EXAMPLE]
    optimizer = build_optimizer(arguments.optimizer, model, arguments.lr, **options)
    callbacks, block_lr = [Checksums()], None
    if curvature is not None:
        block_lr = BlockLRCallback(curvature=curvature, every=arguments.curvature_every)
        callbacks.append(block_lr)
    evaluated = min(len(held_out), arguments.eval_batches * arguments.batch_size)
    trainer = Trainer(
        model,
        trainer_arguments,
        train_dataset=training,
        eval_dataset=Subset(held_out, range(evaluated)),
        optimizers=(optimizer, None),
        callbacks=callbacks,
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
    """Train; mistakes that the user can mend are said without a traceback."""
    arguments = parse(argv)
    trainer_arguments = training_arguments(arguments)
    folder, resume = arguments.output, arguments.resume
    with one_line_errors(), only_run_in(folder, lambda: check_folder(folder, resume)):
        train(arguments, trainer_arguments)


if __name__ == "__main__":
    main()
