"""The flags of `recipes/train.py`, looked at before anything is loaded."""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import NoReturn

from accelerate.tracking import get_available_trackers
from accelerate.utils import DynamoBackend, LoggerType

import blockopt
from recipes.common.gpt2 import PRESETS
from recipes.common.optimizers import NAMES, check_optimizer
from recipes.common.schedules import SCHEDULES, schedule
from recipes.data.token_data import add_data_arguments
from recipes.data.tokens import SMALLEST_BPE
from recipes.training.models import add_model_arguments, check_model_arguments

PRECISIONS = ("no", "bf16")


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """All flags, under the description of the script."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data_arguments(parser)
    add_model_arguments(parser)
    group = parser.add_argument_group("optimizer")
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
        "--betas",
        type=float,
        nargs=2,
        help="(default: 0.9 0.95, or what is usual for the optimizer)",
    )
    group.add_argument("--momentum", type=float, help="of SGD or Muon (default: 0.9 or 0.95)")
    group.add_argument(
        "--clip",
        type=float,
        default=1.0,
        help="largest norm of the gradient, 0 for any (default: %(default)s)",
    )
    group.add_argument(
        "--schedule", choices=SCHEDULES, help="(default: cosine, or constant for schedulefree)"
    )
    group.add_argument("--warmup", type=int, help="steps (default: a tenth)")
    group.add_argument(
        "--final",
        type=float,
        default=0.0,
        help="learning rate at the end, relative (default: %(default)s)",
    )
    group.add_argument(
        "--decay",
        type=float,
        default=0.2,
        help="part of the steps that WSD decays in (default: %(default)s)",
    )
    group = parser.add_argument_group("block learning rates")
    group.add_argument(
        "--curvature",
        choices=blockopt.curvature.ESTIMATORS,
        help="attach a BlockLR that measures this",
    )
    group.add_argument(
        "--curvature-every",
        type=int,
        default=100,
        help="steps between refreshes (default: %(default)s)",
    )
    group.add_argument(
        "--curvature-power",
        type=float,
        default=-0.5,
        help="of the curvature (default: %(default)s)",
    )
    group.add_argument(
        "--curvature-by",
        default="role",
        choices=("role", "layer", "tensor", "head"),
        help="blocks that share",
    )
    group = parser.add_argument_group("run")
    group.add_argument(
        "--steps", type=int, default=1000, help="optimizer steps (default: %(default)s)"
    )
    group.add_argument(
        "--batch-size",
        type=int,
        default=16,
        help="sequences a step, over all processes (default: %(default)s)",
    )
    group.add_argument(
        "--accumulate", type=int, default=1, help="micro-batches a step (default: %(default)s)"
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the model and the order of the data (default: %(default)s)",
    )
    group.add_argument(
        "--precision", choices=PRECISIONS, help="(default: as accelerate is configured, else no)"
    )
    group.add_argument(
        "--compile", nargs="?", const="inductor", metavar="BACKEND", help="with torch.compile"
    )
    group.add_argument("--cpu", action="store_true", help="even if there is a GPU")
    group.add_argument(
        "--output",
        type=Path,
        default=Path("results/train"),
        help="folder of the run (default: %(default)s)",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint, or start if there is none",
    )
    group.add_argument(
        "--checkpoint-every",
        type=int,
        default=200,
        help="steps, 0 for at the end only (default: %(default)s)",
    )
    group.add_argument(
        "--keep", type=int, default=2, help="checkpoints to keep (default: %(default)s)"
    )
    group.add_argument(
        "--eval-every",
        type=int,
        default=200,
        help="steps, 0 for at the end only (default: %(default)s)",
    )
    group.add_argument(
        "--eval-batches",
        type=int,
        default=16,
        help="of held-out data, 0 for none (default: %(default)s)",
    )
    group.add_argument(
        "--print-every",
        type=int,
        default=50,
        help="steps, where there is no terminal (default: %(default)s)",
    )
    trackers = [str(tracker.value) for tracker in LoggerType if tracker.value != "all"]
    group.add_argument(
        "--track",
        choices=trackers,
        metavar="TRACKER",
        help=f"also log to one of {', '.join(trackers)}",
    )
    return parser


def parse(argv: list[str] | None = None, about: str | None = None) -> argparse.Namespace:
    """The flags; those that are wrong, or do nothing with the others, end the program with code 2."""
    parser = make_parser(about)
    if os.environ.get("RANK", "0") != "0":
        parser.error = wait_and_leave  # type: ignore[method-assign]
    arguments = parser.parse_args(argv)
    given = given_flags(parser, argv)
    try:
        fill_in(arguments, given)
        check_ranges(arguments)
        check_used(arguments, given)
        schedule(
            arguments.schedule, 0, arguments.steps, warmup=arguments.warmup, decay=arguments.decay
        )
        check_optimizer(arguments.optimizer)
        check_model_arguments(arguments)
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))
    return arguments


def wait_and_leave(message: str) -> NoReturn:
    """Instead of saying what rank 0 says; it needs a moment for it, as the launcher ends all ranks with the first."""
    time.sleep(3)
    raise SystemExit(2)


def given_flags(parser: argparse.ArgumentParser, argv: list[str] | None) -> set[str]:
    """The names of the flags that are on the command line."""
    absent = object()
    names = vars(parser.parse_args([]))
    values = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(names, absent))))
    return {name for name in names if values[name] is not absent}


def fill_in(arguments: argparse.Namespace, given: set[str]) -> None:
    """Defaults that depend on other flags, and what `accelerate launch` sets by variables of the environment.

    Raises:
        ValueError: If accelerate is configured for what this script does not do.
    """
    if arguments.schedule is None:
        arguments.schedule = "constant" if arguments.optimizer == "schedulefree" else "cosine"
    if arguments.warmup is None:
        arguments.warmup = arguments.steps // 10
    if arguments.betas is not None:
        arguments.betas = tuple(arguments.betas)
    if "model" in given and "vocab_size" not in given:
        arguments.vocab_size = PRESETS[arguments.model].vocab_size
    if arguments.precision is None:
        arguments.precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if arguments.precision not in PRECISIONS:
        raise ValueError(
            f"accelerate is configured for precision {arguments.precision!r}. Must be one of {', '.join(PRECISIONS)}: pass "
            "--precision. What scales the loss is neither clipped rightly nor kept in checkpoints."
        )
    backend = (arguments.compile or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")).upper()
    backends = [str(known.value) for known in DynamoBackend]
    if backend not in backends:
        raise ValueError(
            f"Invalid --compile={arguments.compile}. Must be one of {', '.join(backends).lower()}."
        )
    arguments.compile = None if backend == "NO" else backend.lower()
    configured = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", arguments.accumulate))
    if configured != arguments.accumulate:
        raise ValueError(
            f"Invalid --accumulate={arguments.accumulate}. Must be {configured}, for which accelerate is configured "
            "(ACCELERATE_GRADIENT_ACCUMULATION_STEPS), or change that."
        )


def check_ranges(arguments: argparse.Namespace) -> None:
    """Look at the numbers.

    Raises:
        ValueError: If one is out of its range.
    """
    least = {
        "steps": 1,
        "batch_size": 1,
        "accumulate": 1,
        "keep": 1,
        "curvature_every": 1,
        "print_every": 1,
        "max_tokens": 1,
    }
    least |= {
        "checkpoint_every": 0,
        "eval_every": 0,
        "eval_batches": 0,
        "clip": 0,
        "weight_decay": 0,
        "warmup": 0,
        "final": 0,
    }
    for name, smallest in least.items():
        value = getattr(arguments, name)
        if value is not None and not smallest <= value < math.inf:
            raise ValueError(
                f"Invalid --{name.replace('_', '-')}={value}. Must be >= {smallest} and finite."
            )
    if not 0 < arguments.lr < math.inf:
        raise ValueError(f"Invalid --lr={arguments.lr}. Must be > 0 and finite.")
    if any(not 0 <= beta < 1 for beta in [*(arguments.betas or []), arguments.momentum or 0]):
        raise ValueError(
            f"Invalid --betas={arguments.betas}, --momentum={arguments.momentum}. Must be in [0, 1)."
        )
    if not math.isfinite(arguments.curvature_power):
        raise ValueError(f"Invalid --curvature-power={arguments.curvature_power}. Must be finite.")
    if not 0 <= arguments.seed < 1 << 32:
        raise ValueError(f"Invalid --seed={arguments.seed}. Must be >= 0 and less than 2^32.")
    if not 0 < arguments.validation_fraction <= 0.5:
        raise ValueError(
            f"Invalid --validation-fraction={arguments.validation_fraction}. Must be more than 0, at most 0.5."
        )
    if arguments.vocab_size < SMALLEST_BPE:
        raise ValueError(
            f"Invalid --vocab-size={arguments.vocab_size}. Must be >= {SMALLEST_BPE}, or take --tokenizer bytes."
        )
    if arguments.optimizer == "schedulefree" and arguments.schedule != "constant":
        raise ValueError(
            f"Invalid --schedule={arguments.schedule}. Must be constant for schedulefree, which averages instead."
        )
    if arguments.track not in (None, *(tracker.value for tracker in get_available_trackers())):
        raise ValueError(
            f"--track {arguments.track} needs a package that is not installed: pip install {arguments.track}"
        )
    shares = int(os.environ.get("WORLD_SIZE", "1")) * arguments.accumulate
    if arguments.batch_size % shares:
        raise ValueError(
            f"Invalid --batch-size={arguments.batch_size}. Must be a multiple of {shares}, processes x --accumulate."
        )


def check_used(arguments: argparse.Namespace, given: set[str]) -> None:
    """Look for flags that would do nothing.

    Raises:
        ValueError: If there is one.
    """
    name, generated = arguments.optimizer, arguments.data.partition(":")[0] == "addition"
    by_name = name.startswith("torch_optimizer:")
    rules = {
        "momentum": (
            by_name or name.endswith(("sgd", "muon")),
            "--optimizer sgd, block-sgd, muon or block-muon",
        ),
        "betas": (not name.endswith("sgd"), "optimizers with moments as Adam's"),
        "decay": (arguments.schedule == "wsd", "--schedule wsd"),
        "final": (arguments.schedule != "constant", "a --schedule that decays"),
        "model": (
            not (arguments.hf_config or arguments.hf_checkpoint),
            "our GPT-2, not for models of transformers",
        ),
        "tokenizer": (not generated, "text; sums have digits"),
        "vocab_size": (
            not generated and arguments.tokenizer is None,
            "a tokenizer that is trained on the data",
        ),
    }
    for option in ("curvature_every", "curvature_power", "curvature_by"):
        rules[option] = (arguments.curvature is not None, "--curvature")
    for option, (used, purpose) in rules.items():
        if option in given and not used:
            raise ValueError(f"--{option.replace('_', '-')} is for {purpose}. Leave it out.")
