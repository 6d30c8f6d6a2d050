"""Train a causal language model with any optimizer, on one device or many.

    python recipes/train.py                                                  GPT-2 of 0.5M, standard library, BlockAdamW
    python recipes/train.py --optimizer adamw --lr 3e-3 --schedule linear    torch's AdamW
    python recipes/train.py --curvature newton                               a learning rate for every block
    python recipes/train.py --model small --precision bf16 --compile --accumulate 8 --batch-size 64 --data openwebtext
    python recipes/train.py --hf-checkpoint path/to/checkpoint --data notes.txt --lr 1e-4
    python recipes/train.py --output results/train --resume                  go on after a kill: the same losses as without

    accelerate launch --config_file recipes/accelerate/cpu_2proc.yaml recipes/train.py --cpu --batch-size 16
    accelerate launch --config_file recipes/accelerate/multi_gpu_ddp.yaml recipes/train.py --model medium --batch-size 64
    accelerate launch --config_file recipes/accelerate/multi_gpu_fsdp2.yaml recipes/train.py --model medium --batch-size 64
    accelerate launch --config_file recipes/accelerate/multi_node.yaml --machine_rank 0 --main_process_ip NAME recipes/train.py

`--batch-size` is that of a whole step, over all processes and micro-batches, so a run means the same on any number of them.
Writes `log.jsonl` (one line a step, see `recipes/run_log.py`) and `checkpoints/` to the folder of the run.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import broadcast_object_list, set_seed
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import blockopt
from recipes.checkpoints import CheckpointError, Checkpoints, RunIsLockedError, load_checkpoint, run_lock
from recipes.data import Batches, TokenData, load_from_arguments
from recipes.models import build_model, context_of, token_loss
from recipes.nonfinite import describe_nonfinite, nonfinite_blocks
from recipes.optimizers import build_optimizer, take_step, unwrapped
from recipes.run_log import RunLog, describe_run
from recipes.schedules import schedule
from recipes.train_arguments import parse
from recipes.training_state import load_random_state, load_training_state, reshard, training_state

# What may differ between a run and its resumption; all else decides what it computes.
FREE = ("output", "resume", "keep", "checkpoint_every", "eval_every", "eval_batches", "print_every", "track", "cache", "cpu")
WHOLE_WEIGHTS = ("analytic", "hutchinson", "directional")  # curvatures that cannot be measured on shards
Batch = tuple[Tensor, Tensor]


def make_accelerator(arguments: argparse.Namespace) -> Accelerator:
    """Devices, precision and processes, as the flags and `accelerate launch` say."""
    cpu = arguments.cpu or not torch.accelerator.is_available()
    accelerator = Accelerator(
        cpu=cpu,
        mixed_precision=arguments.precision,
        gradient_accumulation_steps=arguments.accumulate,
        dynamo_backend=arguments.compile,
        log_with=arguments.track,
        project_dir=arguments.output,
    )
    if cpu and accelerator.num_processes > 1 and os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        # accelerate shards on GPUs only, for no reason that lies in FSDP2: told that it may, it does the same on CPUs.
        for state in (PartialState(), accelerator.state):
            state.distributed_type = DistributedType.FSDP
        plugin = accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
    if accelerator.is_fsdp2 and arguments.curvature in WHOLE_WEIGHTS:
        raise SystemExit(f"--curvature {arguments.curvature} needs whole weights. Take newton or gauss_newton under FSDP2.")
    return accelerator


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
        inputs, targets = (part.chunk(ranks)[rank].to(self.accelerator.device).chunk(self.accumulate) for part in batch)
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
        """Move the weights, and refresh the block learning rates if that is due."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        take_step(self.optimizer, lambda: token_loss(self.plain, *micro_batches[-1]))
        if self.block_lr is not None:
            self.block_lr.step(lambda: token_loss(self.model, *micro_batches[-1]))
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, batches: Batches, number: int) -> float:
        """Mean loss over the first `number` batches of held-out data."""
        with averaged_weights(self.optimizer):
            self.model.eval()
            total = torch.zeros((), device=self.accelerator.device)
            for index in range(number):
                for inputs, targets in self.micro_batches(batches[index]):
                    total += token_loss(self.model, inputs, targets).float() / (number * self.accumulate)
            self.model.train()
        if self.accelerator.is_fsdp2:
            reshard(self.model)
        return float(self.accelerator.reduce(total, "mean"))

    def save(self, checkpoints: Checkpoints, about: dict[str, Any]) -> None:
        """Write a checkpoint, on rank 0; if that fails, it fails on all."""
        content = about | training_state(self.accelerator, self.model, self.optimizer, self.block_lr)
        failed: list[str | None] = [None]
        if self.accelerator.is_main_process:
            try:
                checkpoints.save(about["step"], content)
            except CheckpointError as error:
                failed = [str(error)]
        if (message := broadcast_object_list(failed)[0]) is not None:
            raise CheckpointError(message)


@contextmanager
def averaged_weights(optimizer: Any) -> Iterator[None]:
    """With an optimizer of schedulefree, put the average of the weights in their place for a while."""
    inner = unwrapped(optimizer)
    switches = callable(getattr(inner, "eval", None)) and callable(getattr(inner, "train", None))
    if switches:
        inner.eval()
    yield
    if switches:
        inner.train()


def make_run(arguments: argparse.Namespace, accelerator: Accelerator, data: TokenData, state: dict[str, Any] | None) -> Run:
    """Model, optimizer and BlockLR, fresh or as a checkpoint has them."""
    set_seed(arguments.seed)
    model = build_model(arguments, data)
    optimizer = build_optimizer(
        arguments.optimizer,
        model,
        arguments.lr,
        weight_decay=arguments.weight_decay,
        betas=None if arguments.betas is None else tuple(arguments.betas),
        momentum=arguments.momentum,
        curvature=arguments.curvature,
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    if state is not None:
        load_training_state(accelerator, model, optimizer, state)
    block_lr = None
    if arguments.curvature is not None:
        options = {"every": arguments.curvature_every, "power": arguments.curvature_power, "by": arguments.curvature_by}
        block_lr = blockopt.BlockLR(optimizer, model, curvature=arguments.curvature, seed=arguments.seed, **options)
        if state is not None:
            block_lr.load_state_dict(state["block_lr"])
    if state is None:
        torch.manual_seed(arguments.seed + accelerator.process_index)  # of dropout
    else:
        load_random_state(state["random"], accelerator.process_index, arguments.seed)
    return Run(accelerator, model, optimizer, block_lr, arguments.accumulate)


def settings_of(arguments: argparse.Namespace, data: TokenData) -> dict[str, Any]:
    """What decides the outcome of a run, as plain data."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    return {name: value for name, value in plain.items() if name not in FREE} | {"data_key": data.key}


def last_state(checkpoints: Checkpoints, accelerator: Accelerator, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The last good checkpoint, chosen by rank 0 and read by all, or None.

    Raises:
        CheckpointError: If there is one that cannot be gone on from.
    """
    chosen: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            found = checkpoints.load_latest()
            chosen = [None if found is None else found[0]]
        except CheckpointError as error:
            chosen = [str(error)]
    (step,) = broadcast_object_list(chosen)
    if step is None:
        return None
    if isinstance(step, str):
        raise CheckpointError(step)
    state = found[1] if accelerator.is_main_process else load_checkpoint(checkpoints.path(step))
    saved = state["settings"]
    changed = [name for name in settings if saved.get(name, settings[name]) != settings[name]]
    if changed:
        was = ", ".join(f"{name} {saved[name]!r}, now {settings[name]!r}" for name in changed)
        raise CheckpointError(f"The run in {checkpoints.folder.parent} had {was}. Give the same, or another --output.")
    return state


@contextmanager
def only_run_in(folder: Path, accelerator: Accelerator, resume: bool) -> Iterator[None]:
    """Rank 0 holds the lock of the folder; all ranks end if it cannot."""
    with ExitStack() as stack:
        error: str | None = None
        if accelerator.is_main_process:
            try:
                stack.enter_context(run_lock(folder))
                if not resume and (folder / "log.jsonl").exists():
                    error = f"There is a run in {folder}. Go on with it (--resume), or choose another --output."
            except RunIsLockedError as locked:
                error = str(locked)
        (error,) = broadcast_object_list([error])
        if error is not None:
            raise CheckpointError(error)
        yield


def train(arguments: argparse.Namespace, accelerator: Accelerator) -> None:
    """Train from start or from the last checkpoint to the end.

    Raises:
        CheckpointError: If the folder is taken, or a checkpoint cannot be read or written.
        FloatingPointError: If loss or gradients are not finite; the message says where, and what is left.
    """
    with only_run_in(arguments.output, accelerator, arguments.resume):
        with accelerator.main_process_first():
            data = load_from_arguments(arguments)
        settings = settings_of(arguments, data)
        checkpoints = Checkpoints(arguments.output / "checkpoints", arguments.keep)
        state = last_state(checkpoints, accelerator, settings)
        run = make_run(arguments, accelerator, data, state)
        start = 0 if state is None else state["step"]
        if start == arguments.steps:
            accelerator.print(f"The run in {arguments.output} is finished: {start} steps.")
        known = (0.0, math.nan) if state is None else (state["seconds"], state["evaluated"])
        path = arguments.output / "log.jsonl" if accelerator.is_main_process else None
        with RunLog(path, after=start) as log, progress(arguments, accelerator, start) as show:
            if state is None:
                numel = sum(p.numel() for p in run.model.parameters())
                seeds = {"model": arguments.seed, "data": arguments.seed, "curvature": arguments.seed}
                counts = {"processes": accelerator.num_processes, "parameters": numel, "tokens": data.train.numel()}
                log.write("config", arguments=settings, seeds=seeds, **counts, **describe_run())
            else:
                log.write("resumed", step=start, **describe_run())
            accelerator.init_trackers("train", config={k: v for k, v in settings.items() if isinstance(v, (int, float, str))})
            state = None  # its memory is needed
            steps = range(start, arguments.steps)
            loss = take_steps(run, steps, known, arguments, settings, data, checkpoints, log, show)
            log.write("end", step=arguments.steps, loss=None if math.isnan(loss) else loss)
        accelerator.wait_for_everyone()


def take_steps(
    run: Run,
    steps: range,
    known: tuple[float, float],
    arguments: argparse.Namespace,
    settings: dict[str, Any],
    data: TokenData,
    checkpoints: Checkpoints,
    log: RunLog,
    show: Callable[[int, float, float, float, float], None],
) -> float:
    """The loop: a step, a line of the log, now and then an evaluation and a checkpoint. Returns the last held-out loss.

    `known` has the seconds that were trained and the held-out loss so far.
    """
    seconds, evaluated = known
    context = context_of(arguments, data)
    batches = data.batches("train", batch_size=arguments.batch_size, context=context, seed=arguments.seed)
    held_out = data.batches("validation", batch_size=arguments.batch_size, context=context, seed=0)
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
        seconds, rate = seconds + taken, arguments.batch_size * context / taken
        figures = {"gradient_norm": norm, "tokens_per_second": round(rate, 1), "seconds": round(seconds, 4)}
        log.write("step", step=done, loss=loss, lr=lr, **figures)
        if run.block_lr is not None and run.block_lr.history and run.block_lr.history[-1].step == done:
            log.write("scales", step=done, scales=run.block_lr.history[-1].scale)
        if arguments.eval_batches and is_due(done, arguments.eval_every, arguments.steps):
            evaluated = run.evaluate(held_out, arguments.eval_batches)
            log.write("evaluation", step=done, loss=evaluated)
        if is_due(done, arguments.checkpoint_every, arguments.steps):
            if nonfinite_blocks(run.plain, gradients=False):  # never keep what cannot be gone on from
                stop_nonfinite(run, done, None, checkpoints, log)
            log.sync()
            run.save(checkpoints, {"step": done, "seconds": seconds, "evaluated": evaluated, "settings": settings})
        tracked = {"loss": loss, "lr": lr, "gradient_norm": norm} | ({} if math.isnan(evaluated) else {"held_out": evaluated})
        run.accelerator.log(tracked, step=done)
        show(done, loss, lr, rate, evaluated)
    return evaluated


def is_due(done: int, every: int, steps: int) -> bool:
    """Whether something that is done every so many steps, and at the end, is done now."""
    return done == steps or (every > 0 and done % every == 0)


def stop_nonfinite(run: Run, step: int, loss: float | None, checkpoints: Checkpoints, log: RunLog) -> None:
    """Say which blocks are not finite and what can be gone on from."""
    steps = checkpoints.steps()
    last = f"{checkpoints.path(steps[-1])}, of step {steps[-1]}" if steps else "none was written yet"
    message = describe_nonfinite(run.plain, step, loss, last)
    log.write("nonfinite", step=step, message=message)
    raise FloatingPointError(message)


@contextmanager
def progress(
    arguments: argparse.Namespace, accelerator: Accelerator, start: int
) -> Iterator[Callable[[int, float, float, float, float], None]]:
    """A bar with loss, learning rate and tokens a second on a terminal, now and then a line elsewhere."""
    console = Console(quiet=not accelerator.is_main_process, highlight=False)
    columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn(), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=arguments.steps, completed=start, figures="")

        def show(step: int, loss: float, lr: float, rate: float, evaluated: float) -> None:
            figures = f"loss {loss:.4f}  lr {lr:.2e}  {rate:,.0f} tokens/s"
            figures += "" if math.isnan(evaluated) else f"  held out {evaluated:.4f}"
            bar.update(task, completed=step, figures=figures)
            if not console.is_terminal and (step % arguments.print_every == 0 or step in (start + 1, arguments.steps)):
                console.print(f"step {step}/{arguments.steps}  {figures}", soft_wrap=True)

        yield show


def main(argv: list[str] | None = None) -> None:
    """Train; what goes wrong is said without a traceback where it is not a mistake in the code."""
    arguments = parse(argv, __doc__)
    accelerator = make_accelerator(arguments)
    try:
        train(arguments, accelerator)
    except (CheckpointError, FloatingPointError, ValueError, OSError) as error:
        if accelerator.is_main_process:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(3)  # or the launcher would end rank 0 before it has said why
            print(f"error on rank {accelerator.process_index}: {error}", file=sys.stderr, flush=True)
        leave(accelerator, 1)
        raise SystemExit(1) from error
    accelerator.end_training()
    leave(accelerator, 0)


def leave(accelerator: Accelerator, code: int) -> None:
    """End several processes on CPUs at once: a thread of gloo that outlives the statics of C++ can abort what is done."""
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
