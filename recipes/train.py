"""Train a causal language model with any optimizer, on one device or many.

    python recipes/train.py                                     GPT-2 of 0.5M, BlockAdamW
    python recipes/train.py --optimizer block-muon              BlockMuon, with its learning rate
    python recipes/train.py --optimizer adamw --lr 1e-3         torch's AdamW, with another
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
`--record-hessian 0 10 100 1000` also measures the Hessian of every head after these steps.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from torch import nn

import blockopt
from blockopt.blocks import parse_override
from blockopt.distributed import reshard
from recipes.common.checkpoints import Checkpoints
from recipes.common.optimizers import EXAMPLE, build_optimizer
from recipes.common.schedules import schedule
from recipes.common.training import Batch, Training, token_loss
from recipes.data.token_data import Batches, TokenData, load_from_arguments
from recipes.training.arguments import parse
from recipes.training.export import export_model
from recipes.training.hessian_record import hessian_recorder
from recipes.training.models import build_model, context_of
from recipes.training.nonfinite import NonFiniteError, describe_nonfinite, nonfinite_blocks
from recipes.training.processes import (
    by_rank_0,
    check_accelerator,
    ended_alike,
    make_accelerator,
    together,
)
from recipes.training.restarts import is_restarted, job
from recipes.training.run_folder import check_folder, last_state, only_run_in, settings_of
from recipes.training.run_log import RunLog, describe_run
from recipes.training.signals import Preempted, Requests
from recipes.training.training_state import load_training_state, training_state


@dataclass
class Run(Training):
    """A `Training` on all processes of accelerate, with its data, its folder and its progress.

    Attributes:
        accelerator: Knows the processes.
        arguments: The flags.
        batches: What to train on.
        held_out: What to evaluate on, if anything.
        settings: The flags and the key of the data, for log and checkpoints.
        checkpoints: Where they are written.
        done: How many steps have been taken.
        seconds: How long they took.
        evaluated: The last evaluation: after which step, and the loss.
        requests: What signals have asked for.
    """

    accelerator: Accelerator
    arguments: argparse.Namespace
    batches: Batches
    held_out: Batches | None
    settings: dict[str, Any]
    checkpoints: Checkpoints
    done: int = 0
    seconds: float = 0.0
    evaluated: tuple[int, float] | None = None
    requests: Requests = field(default_factory=Requests)

    @property
    def plain(self) -> nn.Module:
        """The model without what DDP and `torch.compile` put around it."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def micro_batches(self, batch: Batch) -> list[Batch]:
        """Return this process's share of a batch, in `--accumulate` pieces, on its device."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        shares = (part.chunk(ranks)[rank].to(self.accelerator.device) for part in batch)
        return list(zip(*(share.chunk(self.arguments.accumulate) for share in shares)))

    def backward(self, micro_batches: list[Batch]) -> float:
        """Compute the gradients of a step, and return its loss over all processes."""
        total = torch.zeros((), device=self.accelerator.device)
        for inputs, targets in micro_batches:
            with self.accelerator.accumulate(self.model):
                loss = token_loss(self.model, inputs, targets)
                self.accelerator.backward(loss)
            total += loss.detach().float() / len(micro_batches)
        shared = torch.stack([total, *map(total.new_tensor, self.requests.take())])
        loss, *asked = self.accelerator.reduce(shared, "mean").tolist()
        self.requests.agree(*asked)
        return float(loss)

    def evaluate(self) -> float:
        """Return the mean loss over the first `--eval-batches` batches of held-out data."""
        batches = (self.held_out[index] for index in range(self.arguments.eval_batches))
        losses = self.losses(piece for batch in batches for piece in self.micro_batches(batch))
        reshard(self.model)
        total = sum(loss.float() / len(losses) for loss in losses)
        return float(self.accelerator.reduce(total, "mean"))

    def save(self) -> None:
        """Write a checkpoint on rank 0; if that fails, all ranks fail."""
        names = ("seconds", "evaluated", "settings")
        state = {"step": self.done} | {name: getattr(self, name) for name in names}
        state |= training_state(self.accelerator, self)
        main = self.accelerator.is_main_process
        together(lambda: main and self.checkpoints.save(self.done, state))

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        load_training_state(self.accelerator, self, state, self.arguments.seed)
        self.done, self.seconds = state["step"], state["seconds"]
        self.evaluated = state["evaluated"]


def train(arguments: argparse.Namespace, accelerator: Accelerator) -> None:
    """Train from the start or from the last checkpoint to the end.

    Raises:
        UserError: If the user can mend what is wrong with flags, data, folder or disk, or if loss
            or gradients are not finite.
    """
    together(lambda: check_accelerator(accelerator, arguments))
    say = functools.partial(accelerator.print, flush=True)  # on rank 0, at once also in a pipe
    if not arguments.resume and by_rank_0(lambda: is_restarted(arguments.output)):
        arguments.resume = True
        last = Checkpoints(arguments.output / "checkpoints").describe_last()
        say(f"The launcher has started this run again: it goes on. The last checkpoint: {last}.")
    with only_run_in(arguments.output, lambda: check_folder(arguments.output, arguments.resume)):
        data, batches, held_out = together(lambda: load_batches(arguments, say))
        say(f"Building {arguments.hf_checkpoint or 'the model'} and the optimizer")
        run = make_run(arguments, accelerator, data, batches, held_out)
        path = arguments.output / "log.jsonl" if accelerator.is_main_process else None
        with RunLog(path, after=run.done) as log, progress(run) as show, run.requests:
            begin(run, data, log, say)
            take_steps(run, log, show)
            loss = None if run.evaluated is None else run.evaluated[1]
            log.write("end", step=arguments.steps, loss=loss)
        export_model(accelerator, run, data.tokenizer, arguments.output / "model")


def take_steps(run: Run, log: RunLog, show: Callable[[str], None]) -> None:
    """Train to the last step, with an evaluation and a checkpoint every so many steps.

    Raises:
        NonFiniteError: If loss, gradients or weights are not finite.
        Preempted: If a signal has asked to stop; the checkpoint is written.
    """
    arguments = run.arguments
    shape = {"warmup": arguments.warmup, "final": arguments.final, "decay": arguments.decay}
    record = hessian_recorder(run)
    record(run.done)
    while run.done < arguments.steps:
        begun = time.perf_counter()
        lr = arguments.lr * schedule(arguments.schedule, run.done, arguments.steps, **shape)
        for group in run.optimizer.param_groups:
            group["lr"] = lr
        micro_batches = run.micro_batches(run.batches[run.done])
        loss = run.backward(micro_batches)
        norm = run.clip(arguments.clip)
        if not math.isfinite(loss) or not math.isfinite(norm):
            stop_nonfinite(run, run.done + 1, loss, log)
        run.step(micro_batches)
        run.done += 1
        taken = time.perf_counter() - begun
        run.seconds += taken
        rate = arguments.batch_size * run.batches.context / taken

        tracked = {"loss": loss, "lr": lr, "gradient_norm": norm}
        speed = {"tokens_per_second": round(rate, 1), "seconds": round(run.seconds, 4)}
        log.write("step", step=run.done, **tracked, **speed)
        history = run.block_lr.history if run.block_lr is not None else []
        if history and history[-1].step == run.done:
            scales = {str(group): scale for group, scale in history[-1].scale.items()}
            log.write("scales", step=run.done, scales=scales)
        if run.held_out is not None and is_due(run, arguments.eval_every):
            tracked["held_out"] = run.evaluate()
            run.evaluated = (run.done, tracked["held_out"])
            log.write("evaluation", step=run.done, loss=tracked["held_out"])
        if is_due(run, arguments.checkpoint_every) or run.requests.save:
            groups = run.optimizer.param_groups
            if nonfinite_blocks(run.plain, groups, gradients=False):  # no run could go on from them
                stop_nonfinite(run, run.done, None, log)
            if run.requests.stop:
                log.write("stopped", step=run.done, signal="SIGTERM")
            log.sync()
            run.save()
        record(run.done)
        run.accelerator.log(tracked, step=run.done)
        show(f"loss {loss:.4f}  lr {lr:.2e}  {rate:,.0f} tokens/s")
        if run.requests.stop:
            raise Preempted


def make_run(
    arguments: argparse.Namespace,
    accelerator: Accelerator,
    data: TokenData,
    batches: Batches,
    held_out: Batches | None,
) -> Run:
    """Build model, optimizer and BlockLR, fresh or as the last checkpoint has them."""
    settings = settings_of(arguments, data)
    checkpoints = Checkpoints(arguments.output / "checkpoints", arguments.keep)
    state = last_state(checkpoints, accelerator, settings) if arguments.resume else None
    set_seed(arguments.seed)
    model = together(lambda: build_model(arguments, data))
    names = ("weight_decay", "betas", "momentum", "curvature")
    options = {name: getattr(arguments, name) for name in names}
    options["overrides"] = dict(map(parse_override, arguments.override))
    options["example"] = batches[0][0][:1, :EXAMPLE]
    optimizer = together(
        lambda: build_optimizer(arguments.optimizer, model, arguments.lr, **options)
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    block_lr = None
    if arguments.curvature is not None:
        block_lr = blockopt.BlockLR(
            optimizer,
            model,
            curvature=arguments.curvature,
            every=arguments.curvature_every,
            power=arguments.curvature_power,
            by=arguments.curvature_by,
            seed=arguments.seed,
        )
    torch.manual_seed(arguments.seed + accelerator.process_index)  # for dropout
    run = Run(
        model,
        optimizer,
        block_lr,
        accelerator=accelerator,
        arguments=arguments,
        batches=batches,
        held_out=held_out,
        settings=settings,
        checkpoints=checkpoints,
    )
    if state is not None:
        run.load(state)
    return run


def load_batches(
    arguments: argparse.Namespace, say: Callable[[str], None]
) -> tuple[TokenData, Batches, Batches | None]:
    """Return the data, the batches to train on, and those held out, if they are asked for.

    Raises:
        UserError: If there are no such data, or a part is too short for one sequence.
    """
    say(f"Reading {arguments.data}")
    data = load_from_arguments(arguments, report=say)
    size = {"batch_size": arguments.batch_size, "context": context_of(arguments, data)}
    batches, held_out = data.batches("train", seed=arguments.seed, **size), None
    if batches.windows < arguments.batch_size:
        taken = arguments.batch_size
        say(f"Sequences to train on: {batches.windows:,}. A step takes {taken:,}, so some repeat.")
    if arguments.eval_batches:
        held_out = data.batches("validation", seed=0, **size)
        taken = arguments.eval_batches * arguments.batch_size
        if held_out.windows < taken:
            found = f"Held-out sequences: {held_out.windows:,}."
            say(f"{found} An evaluation takes {taken:,}, so some repeat.")
    return data, batches, held_out


def begin(run: Run, data: TokenData, log: RunLog, say: Callable[[str], None]) -> None:
    """Say and log what is about to be trained."""
    arguments, accelerator, tokens = run.arguments, run.accelerator, data.train.numel()
    numel = sum(p.numel() for p in run.model.parameters())
    vocabulary = f"a vocabulary of {data.vocab_size:,}"
    say(f"{numel:,} parameters, {vocabulary}, {tokens:,} tokens to train on")
    if run.done == arguments.steps:
        say(
            f"The run in {arguments.output} is finished: {run.done} steps. To train its model on, "
            f"give another --output and --hf-checkpoint {arguments.output / 'model'}."
        )
    if run.done:
        log.write("resumed", step=run.done, job=job(), **describe_run())
    else:
        seeds = dict.fromkeys(("model", "data", "curvature"), arguments.seed)
        counts = {"processes": accelerator.num_processes, "parameters": numel, "tokens": tokens}
        log.write(
            "config", arguments=run.settings, seeds=seeds, **counts, job=job(), **describe_run()
        )
    plain = {k: v for k, v in run.settings.items() if isinstance(v, (int, float, str))}
    accelerator.init_trackers("train", config=plain)
    if run.done < arguments.steps:
        compiled = (
            f", for which {arguments.compile} compiles the model" if arguments.compile else ""
        )
        say(f"Taking step {run.done + 1} of {arguments.steps}{compiled}")


def is_due(run: Run, every: int) -> bool:
    """Whether something that is done every so many steps, and at the end, is due now."""
    return run.done == run.arguments.steps or (every > 0 and run.done % every == 0)


def stop_nonfinite(run: Run, step: int, loss: float | None, log: RunLog) -> None:
    """Say which blocks are not finite, and end the run on all ranks."""
    groups, last = run.optimizer.param_groups, run.checkpoints.describe_last()
    message = describe_nonfinite(run.plain, groups, step, loss, last)
    log.write("nonfinite", step=step, message=message)

    def stop() -> None:
        raise NonFiniteError(message)

    together(stop)


@contextmanager
def progress(run: Run) -> Iterator[Callable[[str], None]]:
    """Show figures of each step: beside a bar on a terminal, elsewhere as a line now and then."""
    first, last, every = run.done + 1, run.arguments.steps, run.arguments.print_every
    console = Console(quiet=not run.accelerator.is_main_process, highlight=False)
    columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn())
    figures = TextColumn("{task.fields[figures]}")
    with Progress(*columns, figures, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=last, completed=run.done, figures="")

        def show(text: str) -> None:
            if run.evaluated is not None:
                step, loss = run.evaluated
                when = "" if step == run.done else f" (step {step})"
                text += f"  held out {loss:.4f}{when}"
            bar.update(task, completed=run.done, figures=text)
            if not console.is_terminal and (run.done % every == 0 or run.done in (first, last)):
                console.print(f"step {run.done}/{last}  {text}", soft_wrap=True)

        yield show


def main(argv: list[str] | None = None) -> None:
    """Train; mistakes that the user can mend are said without a traceback."""
    arguments = parse(argv, __doc__)
    accelerator = make_accelerator(arguments)

    def last_checkpoint() -> str:
        last = Checkpoints(arguments.output / "checkpoints").describe_last()
        return f"The last checkpoint: {last}. The same command with --resume goes on."

    with ended_alike(accelerator, last_checkpoint):
        train(arguments, accelerator)


if __name__ == "__main__":
    main()
