"""Train a small GPT-2 with a learning rate for every block, and look at what the blocks got.

    python recipes/block_lr_demo.py                          a minute on two cores
    python recipes/block_lr_demo.py --curvature analytic     another estimator
    python recipes/block_lr_demo.py --help

Writes `block_lr.png`, the curvature and the scale of each role over the steps, and the same numbers
as `block_lr.csv`.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

import blockopt
from recipes.common.errors import one_line_errors
from recipes.common.files import output_folder
from recipes.common.flags import script_parser
from recipes.common.gpt2 import GPT2, GPT2Config
from recipes.common.schedules import schedule
from recipes.data.token_data import load_data

CONFIG = GPT2Config(vocab_size=256, context=64, width=96, depth=3, heads=3)
BATCH_SIZE = 16
EVALUATION = 16  # batches


def main() -> None:
    """Train, print the table of scales, draw their history."""
    parser = script_parser(__doc__)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=3e-3, help="the highest learning rate")
    names = blockopt.curvature.ESTIMATORS
    parser.add_argument("--curvature", default="newton", choices=names, help="what to measure")
    parser.add_argument("--every", type=int, default=10, help="steps between refreshes")
    parser.add_argument("--seed", type=int, default=0, help="seed of model, data and curvature")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder to write to")
    options = parser.parse_args()
    if options.steps < 1 or options.every < 1 or not 0 < options.lr < math.inf:
        parser.error("Must be --steps >= 1, --every >= 1, and --lr > 0 and finite.")

    torch.manual_seed(options.seed)
    with one_line_errors():
        output_folder(options.output)
        data = load_data("stdlib", tokenizer="bytes")
    shape = {"batch_size": BATCH_SIZE, "context": CONFIG.context}
    training = data.batches("train", seed=options.seed, **shape)
    validation = data.batches("validation", seed=0, **shape)
    model = GPT2(CONFIG)
    groups = blockopt.param_groups(model, weight_decay=0.1)
    optimizer = blockopt.BlockAdamW(groups, lr=options.lr, betas=(0.9, 0.95))
    block_lr = blockopt.BlockLR(
        optimizer, model, curvature=options.curvature, every=options.every, seed=options.seed
    )
    warmup = max(1, options.steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule("linear", step, options.steps, warmup=warmup)
    )
    for step in track(range(options.steps), description="training"):
        tokens = training[step]
        model(*tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        block_lr.step(lambda tokens=tokens: model(*tokens))
        optimizer.zero_grad()

    console = Console()
    with torch.no_grad():
        held_out = statistics.fmean(model(*validation[index]).item() for index in range(EVALUATION))
    console.print(f"loss on held-out files after {options.steps} steps: {held_out:.3f}")
    console.print(f"{len(block_lr.history)} refreshes; scales after the last:")
    console.print(str(block_lr.last_scales))
    block_lr.history.plot(options.output / "block_lr.png")
    block_lr.history.to_csv(options.output / "block_lr.csv")
    console.print(f"Wrote {options.output / 'block_lr.png'} and {options.output / 'block_lr.csv'}")


if __name__ == "__main__":
    main()
