"""What the benchmarks share: the model, the optimizers that are compared ("arms"), the options and the output."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from blockopt import BlockAdamW, BlockMuon, BlockSGD, find_blocks, param_groups
from blockopt.blocks import from_plain
from blockopt.optim.muon import is_hidden_matrix
from recipes.common.gpt2 import GPT2, PRESETS, GPT2Config

WIDTH = 100
LR = 1e-4
CONSOLE = Console(width=WIDTH)


@dataclass(frozen=True)
class Problem:
    """A model with random gradients, which all arms share.

    Attributes:
        model: The model.
        config: Its sizes.
        layout: How its matrices are stored.
    """

    model: nn.Module
    config: GPT2Config
    layout: str

    def groups(self, weight_decay: float = 0.1) -> list[dict[str, Any]]:
        """The groups that every optimizer but Adam-mini takes; those of torch ignore the blocks in them."""
        return param_groups(self.model, weight_decay=weight_decay)

    def matrix_groups(self) -> list[dict[str, Any]]:
        """The groups of the matrices that BlockMuon orthogonalizes."""
        return [
            group
            for group in self.groups()
            if all(
                is_hidden_matrix(p, from_plain(b))
                for (_, p), b in zip(group["params"], group["blocks"])
            )
        ]

    def matrices(self) -> list[tuple[str, nn.Parameter]]:
        """The query, key, value, output and MLP matrices one by one, as parameters that share the model's memory."""
        found = []
        for group in self.matrix_groups():
            for (name, parameter), plain in zip(group["params"], group["blocks"]):
                found += take_apart(
                    name, parameter, from_plain(plain).roles, from_plain(plain).split
                )
        return found


def take_apart(
    name: str, parameter: Tensor, roles: tuple[str, ...], split: Any
) -> list[tuple[str, nn.Parameter]]:
    """The sections of a fused matrix as parameters of their own that share its memory and that of its gradient."""
    dim, sizes = (0, (parameter.shape[0],)) if len(roles) == 1 else (split.dim, split.sizes)
    found = []
    for role, values, gradient in zip(
        roles, parameter.detach().split(sizes, dim), parameter.grad.split(sizes, dim)
    ):
        section = nn.Parameter(values)
        section.grad = gradient
        found.append((f"{name}.{role}", section))
    return found


def make_problem(size: str, layout: str) -> Problem:
    """GPT-2 of a size of `recipes.common.gpt2.PRESETS` with gradients of a realistic magnitude."""
    torch.manual_seed(0)
    config = PRESETS[size]
    if layout == "linear":
        model: nn.Module = GPT2(config)
    else:
        import transformers

        sizes = {"n_embd": config.width, "n_layer": config.depth, "n_head": config.heads}
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=config.vocab_size,
                n_positions=config.context,
                bos_token_id=None,
                eos_token_id=None,
                **sizes,
            )
        )
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter).mul_(1e-3)
    return Problem(model, config, layout)


def adam_mini(problem: Problem) -> Optimizer:
    """Adam-mini as its README says. It finds its blocks by name, and `c_attn` and `attn.c_proj` are not names it knows.

    Its own GPT-2 example therefore keeps query, key, value and output as `wq`, `wk`, `wv`, `wo`. So
    does this, for `nn.Linear`. Under `Conv1D` the query is not contiguous, which Adam-mini refuses,
    so there it gets the names of the model and treats `c_attn` as one block.
    """
    from adam_mini import Adam_mini

    named = dict(problem.model.named_parameters())
    if problem.layout == "linear":
        known = {"query": "wq", "key": "wk", "value": "wv", "output": "wo"}
        for name, blocks in find_blocks(problem.model).items():
            if name.endswith(("attn.c_attn.weight", "attn.c_proj.weight")):
                for part, parameter in take_apart(
                    name, named.pop(name), blocks.roles, blocks.split
                ):
                    module = name.removesuffix(".weight").rpartition(".")[0]
                    named[f"{module}.{known[part.rpartition('.')[2]]}.weight"] = parameter
    sizes = {"dim": problem.config.width, "n_heads": problem.config.heads}
    return Adam_mini(
        named.items(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, verbose=False, **sizes
    )


def with_random_scales(optimizer: BlockAdamW | BlockSGD) -> Optimizer:
    """Set every block scale to a random number in [0.5, 2]."""
    optimizer.set_block_scales(
        {
            name: 0.5 + 1.5 * torch.rand_like(scale)
            for name, scale in optimizer.block_scales().items()
        }
    )
    return optimizer


@dataclass(frozen=True)
class Arm:
    """One optimizer of the comparison.

    Attributes:
        name: Its name in the tables.
        build: Makes it for a problem.
        suite: Which arms it is timed with. Those of "muon" get the hidden matrices alone, and fewer
            rounds.
        targets: `{name of a reference arm: largest ratio of step times that we aim at}`.
        ours: Whether it is of blockopt.
        state_target: The most bytes of state a parameter that we aim at.
    """

    name: str
    build: Callable[[Problem], Optimizer]
    suite: Literal["main", "muon", "memory only"] = "main"
    targets: tuple[tuple[str, float], ...] = ()
    ours: bool = False
    state_target: float | None = None


FOREACH, FUSED, MINI, SGD, MUON = (
    "AdamW foreach",
    "AdamW fused",
    "Adam-mini",
    "SGD foreach",
    "torch Muon",
)
COORDINATE_TARGETS = ((FOREACH, 1.0), (FUSED, 1.3), (MINI, 0.3))
BLOCK_TARGETS = ((FUSED, 1.0), (MINI, 0.3))
SGD_TARGETS = ((SGD, 1.1), (MINI, 0.3))

ADAMW = {"lr": LR, "betas": (0.9, 0.95)}
SGD_OPTIONS = {"lr": LR, "momentum": 0.9}
ARMS = (
    Arm(FOREACH, lambda p: torch.optim.AdamW(p.groups(), **ADAMW, foreach=True)),
    Arm(FUSED, lambda p: torch.optim.AdamW(p.groups(), **ADAMW, fused=True)),
    Arm(SGD, lambda p: torch.optim.SGD(p.groups(weight_decay=0.0), **SGD_OPTIONS, foreach=True)),
    Arm(MINI, adam_mini),
    Arm("BlockAdamW", lambda p: BlockAdamW(p.groups(), **ADAMW), "main", COORDINATE_TARGETS, True),
    Arm(
        "BlockAdamW, scaled",
        lambda p: with_random_scales(BlockAdamW(p.groups(), **ADAMW)),
        "main",
        COORDINATE_TARGETS,
        True,
    ),
    Arm(
        "BlockAdamW, scaled, compiled",
        lambda p: with_random_scales(BlockAdamW(p.groups(), **ADAMW, compiled=True)),
        "main",
        COORDINATE_TARGETS,
        True,
    ),
    Arm(
        "BlockAdamW block",
        lambda p: BlockAdamW(p.groups(), **ADAMW, second_moment="block"),
        "main",
        BLOCK_TARGETS,
        True,
        4.1,
    ),
    Arm(
        "BlockAdamW block, compiled",
        lambda p: BlockAdamW(p.groups(), **ADAMW, second_moment="block", compiled=True),
        "main",
        BLOCK_TARGETS,
        True,
        4.1,
    ),
    Arm(
        "BlockAdamW block, bfloat16",
        lambda p: BlockAdamW(
            p.groups(), **ADAMW, second_moment="block", momentum_dtype=torch.bfloat16
        ),
        "main",
        BLOCK_TARGETS,
        True,
        2.1,
    ),
    Arm(
        "BlockSGD",
        lambda p: BlockSGD(p.groups(weight_decay=0.0), **SGD_OPTIONS),
        "main",
        SGD_TARGETS,
        True,
    ),
    Arm(
        "BlockSGD, scaled",
        lambda p: with_random_scales(BlockSGD(p.groups(weight_decay=0.0), **SGD_OPTIONS)),
        "main",
        SGD_TARGETS,
        True,
    ),
    Arm(
        MUON,
        lambda p: torch.optim.Muon(p.matrices(), lr=LR, adjust_lr_fn="match_rms_adamw"),
        "muon",
    ),
    Arm("BlockMuon", lambda p: BlockMuon(p.matrix_groups(), lr=LR), "muon", ((MUON, 0.3),), True),
    Arm(
        "BlockMuon split_heads",
        lambda p: BlockMuon(p.matrix_groups(), lr=LR, split_heads=True),
        "muon",
        ((MUON, 0.3),),
        True,
    ),
    Arm(
        "BlockMuon, all parameters", lambda p: BlockMuon(p.groups(), lr=LR), "memory only", (), True
    ),
)


def make_parser(description: str, name: str) -> argparse.ArgumentParser:
    """A parser with the options that both benchmarks have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--size", choices=tuple(PRESETS), default="small", help="preset of recipes/gpt2.py"
    )
    parser.add_argument(
        "--layout",
        choices=("linear", "conv1d"),
        default="linear",
        help="nn.Linear, or transformers' GPT-2 with Conv1D",
    )
    parser.add_argument("--threads", type=positive, default=2, help="threads of torch")
    parser.add_argument(
        "--no-muon", action="store_true", help="leave out Muon, which is slow on a CPU"
    )
    parser.add_argument(
        "--quick", action="store_true", help="the 1M preset, in seconds, to see that it works"
    )
    add_outputs(parser, name)
    return parser


def add_outputs(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options for the files that a benchmark of this name writes."""
    parser.add_argument(
        "--output", type=Path, default=Path(f"results/{name}.json"), help="JSON file to write"
    )
    parser.add_argument(
        "--plot", type=Path, default=Path(f"results/{name}.png"), help="chart to write, .png"
    )


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line and stop at once on what would fail later."""
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size = "1M"
    check(
        parser,
        arguments,
        ["adam_mini", "matplotlib"] + ["transformers"] * (arguments.layout == "conv1d"),
    )
    return arguments


def check(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, needed: list[str]
) -> None:
    """Stop if a file cannot be written or a module is missing, and set the number of threads."""
    if arguments.output.suffix != ".json":
        parser.error(f"Invalid --output {arguments.output}. Must end in .json.")
    if arguments.plot.suffix != ".png":
        parser.error(f"Invalid --plot {arguments.plot}. Must end in .png.")
    for module in needed:
        try:
            __import__(module)
        except ImportError as error:
            parser.error(
                f"{error}. Install what the benchmarks need: pip install -e '.[bench,hf]'."
            )
    for path in (arguments.output, arguments.plot):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"Cannot write {path}: {error}.")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            parser.error(f"Cannot write {path}.")
    torch.set_num_threads(arguments.threads)


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"invalid value {number}, must be at least 1")
    return number


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar; call what it gives with the name of the arm after each unit of work."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=CONSOLE, transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.update(
            task, advance=1, description=f"{description}: {done:<31}"
        )


def seconds_of_waiting() -> float | None:
    """Seconds since the machine started in which some process waited for a core; None where Linux does not count them."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().split("total=")[1].split()[0]) / 1e6
    except (OSError, IndexError):
        return None


@contextmanager
def machine_of_run() -> Iterator[dict[str, Any]]:
    """What the numbers depend on, with `waiting`: the share of the run in which some process waited for a core."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    machine = {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "waiting": None,
    }
    begin, waited = time.monotonic(), seconds_of_waiting()
    yield machine
    if waited is not None:
        machine["waiting"] = (seconds_of_waiting() - waited) / (time.monotonic() - begin)


def describe_problem(problem: Problem) -> dict[str, Any]:
    """The sizes of the problem."""
    parameters = list(problem.model.parameters())
    return {
        "layout": problem.layout,
        "parameters": sum(p.numel() for p in parameters),
        "tensors": len(parameters),
        "matrices_of_muon": sum(p.numel() for _, p in problem.matrices()),
    }


def show(title: str, columns: list[str], rows: list[list[str]], machine: dict[str, Any]) -> None:
    """Print a table whose first column is text and whose others are numbers, with the machine under it."""
    caption = (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}, "
        f"{machine['date'][:10]}, {'?' if machine['waiting'] is None else round(100 * machine['waiting'])} % waiting"
    )
    table = Table(title=title, caption=caption, width=WIDTH)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    CONSOLE.print(table)


def verdict(value: float, target: float | None) -> str:
    """Whether a target is met, for a table."""
    return "" if target is None else "[green]yes" if value <= target else "[red]no"


def save(path: Path, results: dict[str, Any]) -> None:
    """Write the results as JSON."""
    path.write_text(json.dumps(results, indent=2) + "\n")
    CONSOLE.print(f"Wrote {path}")


def plot_bars(
    path: Path, panels: list[tuple[str, list[Arm], list[float]]], machine: dict[str, Any]
) -> None:
    """Draw one panel of horizontal bars for each (label of the axis, arms, values), ours in another colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = [len(arms) for _, arms, _ in panels]
    figure, axes = plt.subplots(
        len(panels),
        figsize=(9, 1.5 + 0.4 * sum(heights)),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, (label, arms, values) in zip(axes[:, 0], panels):
        colours = ["tab:blue" if arm.ours else "tab:gray" for arm in arms]
        bars = axis.barh([arm.name for arm in arms], values, color=colours)
        axis.bar_label(bars, fmt="%.3g", padding=3)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']} (blue: blockopt)",
        fontsize=9,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
    CONSOLE.print(f"Wrote {path}")
