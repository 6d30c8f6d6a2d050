"""Train a causal language model with any optimizer, on one device or many.

    python recipes/train.py                                     GPT-2 of 0.5M, BlockAdamW
    python recipes/train.py --optimizer adamw --lr 3e-3         torch's AdamW
    python recipes/train.py --curvature newton                  a learning rate for every block
    python recipes/train.py --model small --tokenizer gpt2 --data corpus/ --precision bf16 --compile
    python recipes/train.py --hf-checkpoint path/to/checkpoint --data notes.txt --lr 1e-4
    python recipes/train.py --output results/train --resume     continue after a kill

    accelerate launch --config_file recipes/accelerate/cpu_2proc.yaml recipes/train.py --cpu
    accelerate launch --config_file recipes/accelerate/multi_gpu_ddp.yaml recipes/train.py
    accelerate launch --config_file recipes/accelerate/multi_gpu_fsdp2.yaml recipes/train.py

`--batch-size` counts the sequences of a whole step, over all processes and micro-batches, so a run
means the same on any number of them. The folder of the run gets `log.jsonl` (one line per step, see
`recipes/training/run_log.py`), `checkpoints/`, and at the end `model/`, which `from_pretrained` of
transformers loads. A run that was killed continues with `--resume`, with the same losses.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import blockopt
from blockopt.distributed import reshard
from recipes.common.checkpoints import Checkpoints
from recipes.common.optimizers import build_optimizer, take_step
from recipes.common.schedules import schedule
from recipes.data.token_data import Batches, TokenData, load_data
from recipes.training.arguments import parse
from recipes.training.export import export_model
from recipes.training.models import build_model, context_of, token_loss
from recipes.training.nonfinite import describe_nonfinite, nonfinite_blocks
from recipes.training.processes import (
    EXPECTED,
    OtherRankError,
    check_accelerator,
    leave,
    make_accelerator,
    together,
)
from recipes.training.run_folder import check_folder, last_state, only_run_in, settings_of
from recipes.training.run_log import RunLog, describe_run
from recipes.training.training_state import (
    averaged_weights,
    load_random_state,
    load_training_state,
    training_state,
)

Batch = tuple[Tensor, Tensor]
Evaluated = tuple[int, float] | None  # after which step, and the held-out loss
DATA = (
    "vocab_size",
    "tokenizer",
    "cache",
    "validation_fraction",
    "max_tokens",
    "text_column",
    "streaming",
)


@dataclass
class Run:
    """What trains: the parts that a step, an evaluation and a checkpoint need."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    block_lr: blockopt.BlockLR | None
    accumulate: int

    @property
    def plain(self) -> nn.Module:
        """The model without what DDP and `torch.compile` put around it."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """The part of a batch that this process takes, in `accumulate` pieces of one size, on its device."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        inputs, targets = (
            part.chunk(ranks)[rank].to(self.accelerator.device).chunk(self.accumulate)
            for part in batch
        )
        return list(zip(inputs, targets))

    def backward(self, micro_batches: list[Batch]) -> float:
        """The gradients of a step, and its loss over all processes."""
        total = torch.zeros((), device=self.accelerator.device)
        for inputs, targets in micro_batches:
            with self.accelerator.accumulate(self.model):
                loss = token_loss(self.model, inputs, targets)
                self.accelerator.backward(loss)
            total += loss.detach().float() / len(micro_batches)
        return float(self.accelerator.reduce(total, "mean"))

    def clip(self, largest: float) -> float:
        """The norm of all gradients, which are scaled down to `largest` if that is less; not so if they are not finite."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if 0 < largest < math.inf and bool(torch.isfinite(norm)):
            nn.utils.clip_grads_with_norm_(parameters, largest, norm)
        return float(norm)

    def step(self, micro_batches: list[Batch], lr: float) -> None:
        """Move the weights, and refresh the block learning rates if that is due, on the whole batch.

        Sophia looks at the last micro-batch alone.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        take_step(self.optimizer, lambda: token_loss(self.plain, *micro_batches[-1]))
        if self.block_lr is not None:
            self.block_lr.step(
                [partial(token_loss, self.model, *micro_batch) for micro_batch in micro_batches]
            )
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, batches: Batches, number: int) -> float:
        """Mean loss over the first `number` batches of held-out data."""
        with averaged_weights(self.optimizer):
            self.model.eval()
            total = torch.zeros((), device=self.accelerator.device)
            for index in range(number):
                for inputs, targets in self.micro_batches(batches[index]):
                    total += token_loss(self.model, inputs, targets).float() / (
                        number * self.accumulate
                    )
            self.model.train()
        reshard(self.model)
        return float(self.accelerator.reduce(total, "mean"))

    def save(self, checkpoints: Checkpoints, about: dict[str, Any]) -> None:
        """Write a checkpoint, on rank 0; if that fails, it fails on all."""
        content = about | training_state(
            self.accelerator, self.model, self.optimizer, self.block_lr
        )
        together(
            lambda: (
                checkpoints.save(about["step"], content)
                if self.accelerator.is_main_process
                else None
            )
        )


def load_batches(
    arguments: argparse.Namespace, say: Callable[[str], None]
) -> tuple[TokenData, Batches, Batches | None]:
    """The data, their batches to train on, and those held out, if these are asked for.

    Raises:
        ValueError: If a part is too short for one sequence, or an option is wrong.
        OSError: If there are no such data, or the hub cannot be reached.
    """
    data = load_data(arguments.data, **{name: getattr(arguments, name) for name in DATA})
    context = context_of(arguments, data)
    size = {"batch_size": arguments.batch_size, "context": context}
    batches, held_out = data.batches("train", seed=arguments.seed, **size), None
    if batches.windows < arguments.batch_size:
        say(
            f"There are {batches.windows:,} sequences to train on, and a step takes {arguments.batch_size:,}: some again."
        )
    if arguments.eval_batches:
        held_out = data.batches("validation", seed=0, **size)
        evaluated = arguments.eval_batches * arguments.batch_size
        if held_out.windows < evaluated:
            say(
                f"There are {held_out.windows:,} held-out sequences, and an evaluation takes {evaluated:,}: some again."
            )
    return data, batches, held_out


def make_run(
    arguments: argparse.Namespace,
    accelerator: Accelerator,
    data: TokenData,
    state: dict[str, Any] | None,
) -> Run:
    """Model, optimizer and BlockLR, fresh or as a checkpoint has them."""
    set_seed(arguments.seed)
    model = together(lambda: build_model(arguments, data))
    options = {
        name: getattr(arguments, name)
        for name in ("weight_decay", "betas", "momentum", "curvature")
    }
    optimizer = together(
        lambda: build_optimizer(arguments.optimizer, model, arguments.lr, **options)
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    if state is not None:
        load_training_state(accelerator, model, optimizer, state)
    block_lr = None
    if arguments.curvature is not None:
        options = {
            "every": arguments.curvature_every,
            "power": arguments.curvature_power,
            "by": arguments.curvature_by,
        }
        block_lr = blockopt.BlockLR(
            optimizer, model, curvature=arguments.curvature, seed=arguments.seed, **options
        )
        if state is not None:
            block_lr.load_state_dict(state["block_lr"])
    if state is None:
        torch.manual_seed(arguments.seed + accelerator.process_index)  # of dropout
    else:
        load_random_state(state["random"], accelerator.process_index, arguments.seed)
    return Run(accelerator, model, optimizer, block_lr, arguments.accumulate)


def train(arguments: argparse.Namespace, accelerator: Accelerator) -> None:
    """Train from start or from the last checkpoint to the end.

    Raises:
        CheckpointError: If the folder is taken, or a checkpoint cannot be read or written.
        FloatingPointError: If loss or gradients are not finite; the message says where, and what is
            left.
    """
    together(lambda: check_accelerator(accelerator, arguments))
    with only_run_in(arguments.output, lambda: check_folder(arguments.output, arguments.resume)):
        data, batches, held_out = together(lambda: load_batches(arguments, accelerator.print))
        settings = settings_of(arguments, data)
        checkpoints = Checkpoints(arguments.output / "checkpoints", arguments.keep)
        state = last_state(checkpoints, accelerator, settings) if arguments.resume else None
        run = make_run(arguments, accelerator, data, state)
        start = 0 if state is None else state["step"]
        numel = sum(p.numel() for p in run.model.parameters())
        accelerator.print(
            f"{numel:,} parameters, a vocabulary of {data.vocab_size:,}, {data.train.numel():,} tokens to train on"
        )
        if start == arguments.steps:
            accelerator.print(
                f"The run in {arguments.output} is finished: {start} steps. To train its model on, give another"
            )
            accelerator.print(f"--output and --hf-checkpoint {arguments.output / 'model'}.")
        known = (0.0, None) if state is None else (state["seconds"], state["evaluated"])
        path = arguments.output / "log.jsonl" if accelerator.is_main_process else None
        with RunLog(path, after=start) as log, progress(arguments, accelerator, start) as show:
            if state is None:
                seeds = {
                    "model": arguments.seed,
                    "data": arguments.seed,
                    "curvature": arguments.seed,
                }
                counts = {
                    "processes": accelerator.num_processes,
                    "parameters": numel,
                    "tokens": data.train.numel(),
                }
                log.write("config", arguments=settings, seeds=seeds, **counts, **describe_run())
            else:
                log.write("resumed", step=start, **describe_run())
            accelerator.init_trackers(
                "train",
                config={k: v for k, v in settings.items() if isinstance(v, (int, float, str))},
            )
            state = None  # its memory is needed
            steps = range(start, arguments.steps)
            last = take_steps(
                run, steps, known, arguments, settings, batches, held_out, checkpoints, log, show
            )
            log.write("end", step=arguments.steps, loss=None if last is None else last[1])
        export_model(
            accelerator, run.model, run.optimizer, data.tokenizer, arguments.output / "model"
        )


def take_steps(
    run: Run,
    steps: range,
    known: tuple[float, Evaluated],
    arguments: argparse.Namespace,
    settings: dict[str, Any],
    batches: Batches,
    held_out: Batches | None,
    checkpoints: Checkpoints,
    log: RunLog,
    show: Callable[[int, float, float, float, Evaluated], None],
) -> Evaluated:
    """The loop: a step, a line of the log, now and then an evaluation and a checkpoint. Returns the last evaluation.

    `known` has the seconds that were trained and the last evaluation so far.
    """
    seconds, evaluated = known
    shape = {"warmup": arguments.warmup, "final": arguments.final, "decay": arguments.decay}
    for step in steps:
        done = step + 1
        begun = time.perf_counter()
        lr = arguments.lr * schedule(arguments.schedule, step, arguments.steps, **shape)
        micro_batches = run.micro_batches(batches[step])
        loss = run.backward(micro_batches)
        norm = run.clip(arguments.clip)
        if not math.isfinite(loss) or not math.isfinite(norm):
            stop_nonfinite(run, done, loss, checkpoints, log)
        run.step(micro_batches, lr)
        taken = time.perf_counter() - begun
        seconds, rate = seconds + taken, arguments.batch_size * batches.context / taken
        figures = {
            "gradient_norm": norm,
            "tokens_per_second": round(rate, 1),
            "seconds": round(seconds, 4),
        }
        log.write("step", step=done, loss=loss, lr=lr, **figures)
        if (
            run.block_lr is not None
            and run.block_lr.history
            and run.block_lr.history[-1].step == done
        ):
            log.write("scales", step=done, scales=run.block_lr.history[-1].scale)
        tracked = {"loss": loss, "lr": lr, "gradient_norm": norm}
        if held_out is not None and is_due(done, arguments.eval_every, arguments.steps):
            tracked["held_out"] = run.evaluate(held_out, arguments.eval_batches)
            evaluated = (done, tracked["held_out"])
            log.write("evaluation", step=done, loss=tracked["held_out"])
        if is_due(done, arguments.checkpoint_every, arguments.steps):
            if nonfinite_blocks(
                run.plain, gradients=False
            ):  # never keep what cannot be gone on from
                stop_nonfinite(run, done, None, checkpoints, log)
            log.sync()
            run.save(
                checkpoints,
                {"step": done, "seconds": seconds, "evaluated": evaluated, "settings": settings},
            )
        run.accelerator.log(tracked, step=done)
        show(done, loss, lr, rate, evaluated)
    return evaluated


def is_due(done: int, every: int, steps: int) -> bool:
    """Whether something that is done every so many steps, and at the end, is done now."""
    return done == steps or (every > 0 and done % every == 0)


def stop_nonfinite(
    run: Run, step: int, loss: float | None, checkpoints: Checkpoints, log: RunLog
) -> None:
    """Say which blocks are not finite and what can be gone on from."""
    message = describe_nonfinite(run.plain, step, loss, checkpoints.describe_last())
    log.write("nonfinite", step=step, message=message)
    raise FloatingPointError(message)


@contextmanager
def progress(
    arguments: argparse.Namespace, accelerator: Accelerator, start: int
) -> Iterator[Callable[[int, float, float, float, Evaluated], None]]:
    """A bar with loss, learning rate and tokens a second on a terminal, now and then a line elsewhere."""
    console = Console(quiet=not accelerator.is_main_process, highlight=False)
    columns = (
        *Progress.get_default_columns()[:-1],
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=arguments.steps, completed=start, figures="")

        def show(step: int, loss: float, lr: float, rate: float, evaluated: Evaluated) -> None:
            figures = f"loss {loss:.4f}  lr {lr:.2e}  {rate:,.0f} tokens/s"
            if evaluated is not None:
                figures += f"  held out {evaluated[1]:.4f}" + (
                    "" if evaluated[0] == step else f" (step {evaluated[0]})"
                )
            bar.update(task, completed=step, figures=figures)
            if not console.is_terminal and (
                step % arguments.print_every == 0 or step in (start + 1, arguments.steps)
            ):
                console.print(f"step {step}/{arguments.steps}  {figures}", soft_wrap=True)

        yield show


def main(argv: list[str] | None = None) -> None:
    """Train; what goes wrong is said without a traceback where it is not a mistake in the code."""
    arguments = parse(argv, __doc__)
    accelerator = make_accelerator(arguments)
    try:
        train(arguments, accelerator)
    except KeyboardInterrupt:
        if accelerator.is_main_process:
            last = Checkpoints(arguments.output / "checkpoints").describe_last()
            print(
                f"stopped. The last checkpoint: {last}. The same command with --resume goes on.",
                file=sys.stderr,
                flush=True,
            )
        leave(accelerator, 130)
        raise SystemExit(130) from None
    except (*EXPECTED, OtherRankError) as error:
        if accelerator.is_main_process:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(3)  # or the launcher would end rank 0 before it has said why
            if not isinstance(
                error, (OtherRankError, FloatingPointError)
            ):  # these another rank has said
                print(
                    f"error on rank {accelerator.process_index}: {error}",
                    file=sys.stderr,
                    flush=True,
                )
        leave(accelerator, 1)
        raise SystemExit(1) from error
    accelerator.end_training()
    leave(accelerator, 0)


if __name__ == "__main__":
    main()
