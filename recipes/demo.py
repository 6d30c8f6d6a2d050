"""A short, honest training run: a small GPT-2 on the source of Python's standard library, one row an optimizer.

    python recipes/demo.py                 a few minutes on two cores
    python recipes/demo.py --steps 600     longer
    python recipes/demo.py --help

Every arm gets the same model, the same batches, the same schedule and the same number of learning rates to choose from on a
tuning seed; the table then gives its loss on held-out files for other seeds. It is a demonstration at half a million
parameters, not evidence about large models.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import multiprocessing
import statistics
import sys
import sysconfig
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import blockopt
from recipes.gpt2 import GPT2, GPT2Config

CONFIG = GPT2Config(vocab_size=256, context=64, width=96, depth=3, heads=3)
ARMS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "torch.optim.AdamW": lambda m, lr: torch.optim.AdamW(decayed(m), lr=lr, betas=(0.9, 0.95)),
    "BlockAdamW": lambda m, lr: blockopt.BlockAdamW(decayed(m), lr=lr, betas=(0.9, 0.95)),
    'BlockAdamW "block"': lambda m, lr: blockopt.BlockAdamW(decayed(m), lr=lr, betas=(0.9, 0.95), second_moment="block"),
    "BlockMuon": lambda m, lr: blockopt.BlockMuon(decayed(m), lr=lr),
}


def decayed(model: nn.Module) -> list[dict]:
    """Parameter groups with weight decay on matrices only, the same for every arm."""
    return blockopt.param_groups(model, weight_decay=0.1)


def standard_library() -> tuple[Tensor, Tensor]:
    """The bytes of the standard library's modules, (training, validation), split by a hash of the file's name."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(p for p in root.rglob("*.py") if not {"site-packages", "test", "tests", "idlelib"} & set(p.parts)):
        name = path.relative_to(root).as_posix()
        parts[hashlib.sha256(name.encode()).digest()[0] < 13].append(path.read_bytes())  # one file in twenty
    train, validation = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, validation


def batch(data: Tensor, size: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the data and their next bytes, (size, context) each."""
    starts = torch.randint(len(data) - context - 1, (size,), generator=generator)
    windows = data[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor, context: int) -> float:
    """Mean loss on fixed windows."""
    generator = torch.Generator().manual_seed(0)
    return statistics.fmean(model(*batch(data, 32, context, generator)).item() for _ in range(8))


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a tenth of the steps, then linear to zero."""
    warmup = max(1, steps // 10)
    return peak * min((step + 1) / warmup, (steps - step) / (steps - warmup))


class Run(NamedTuple):
    """One training run: what it was asked, and what came of it."""

    arm: str
    lr: float
    seed: int
    steps: int
    final: float = math.nan
    losses: tuple[float, ...] = ()


def train(run: Run) -> Run:
    """Train once, on one thread; two such runs side by side use two cores better than one with two threads."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    training, validation = standard_library()
    model = GPT2(CONFIG)
    optimizer = ARMS[run.arm](model, run.lr)
    generator, losses = torch.Generator().manual_seed(run.seed), []
    for step in range(run.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, run.steps, run.lr)
        loss = model(*batch(training, 16, CONFIG.context, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return run._replace(final=evaluate(model, validation, CONFIG.context), losses=tuple(losses))


def main() -> None:
    """Run all arms, print the table, draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each run (default: %(default)s)")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2, 3e-2], help="learning rates to choose from"
    )
    parser.add_argument("--seeds", type=int, default=2, help="test seeds (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder of the plot (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 10 or options.seeds < 1 or options.workers < 1 or min(options.rates) <= 0:
        parser.error("needs --steps >= 10, --seeds >= 1, --workers >= 1 and positive --rates")
    console = Console()
    sizes = [len(part) / 1e6 for part in standard_library()]
    numel = sum(p.numel() for p in GPT2(CONFIG).parameters())
    console.print(f"{numel:,} parameters; {sizes[0]:.1f} MB of source to train on, {sizes[1]:.1f} MB held out")
    context = multiprocessing.get_context("spawn")
    with Progress(console=console) as progress, ProcessPoolExecutor(options.workers, mp_context=context) as pool:

        def all_of(runs: list[Run], what: str) -> list[Run]:
            done = [pool.submit(train, run) for run in runs]
            for _ in progress.track(as_completed(done), total=len(runs), description=what):
                pass
            return [future.result() for future in done]

        tuned = all_of([Run(arm, lr, 0, options.steps) for arm in ARMS for lr in options.rates], "choosing learning rates")
        best = {arm: min((r for r in tuned if r.arm == arm), key=lambda r: r.final).lr for arm in ARMS}
        seeds = range(1, options.seeds + 1)
        tested = all_of([Run(arm, best[arm], seed, options.steps) for arm in ARMS for seed in seeds], "test seeds")
    table = Table("optimizer", "lr", "loss on held-out files", "state, bytes a parameter")
    for arm in ARMS:
        final = [run.final for run in tested if run.arm == arm]
        spread = f" ± {statistics.stdev(final) / len(final) ** 0.5:.3f}" if len(final) > 1 else ""
        at_edge = " (edge)" if best[arm] in (min(options.rates), max(options.rates)) else ""
        table.add_row(arm, f"{best[arm]:g}{at_edge}", f"{statistics.fmean(final):.3f}{spread}", f"{state_bytes(arm):.2f}")
    console.print(table)
    console.print(
        f"{options.steps} steps; mean ± standard error over {options.seeds} test seeds, in nats a byte. 'edge': the best "
        "learning rate stands at the end of the list, so --rates should be extended before drawing conclusions."
    )
    options.output.mkdir(parents=True, exist_ok=True)
    plot({arm: [r.losses for r in tested if r.arm == arm] for arm in ARMS}, options.output / "demo.png")
    console.print(f"Training curves: {options.output / 'demo.png'}")


def state_bytes(arm: str) -> float:
    """Bytes of optimizer state for each parameter."""
    model = GPT2(CONFIG)
    optimizer = ARMS[arm](model, 1e-3)
    model(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long)).backward()
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in tensors) / sum(p.numel() for p in model.parameters())


def plot(curves: dict[str, list[tuple[float, ...]]], path: Path) -> None:
    """Training loss of each arm, averaged over seeds and ten steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for (name, runs), style in zip(curves.items(), ("-", "--", "-", "-"), strict=True):
        mean = [statistics.fmean(losses) for losses in zip(*runs)]
        smooth = [statistics.fmean(mean[max(0, i - 9) : i + 1]) for i in range(len(mean))]
        axes.plot(range(1, len(mean) + 1), smooth, style, label=name)
    axes.set(xlabel="step", ylabel="training loss (nats a byte)", title="Each at its best learning rate")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
