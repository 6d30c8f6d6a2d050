"""The flags of `recipes/train.py`, checked before anything is loaded."""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import NoReturn

from accelerate.tracking import get_available_trackers
from accelerate.utils import DynamoBackend, LoggerType

from blockopt.blocks import parse_override
from blockopt.curvature import ESTIMATORS
from recipes.common.errors import UsageError, UserError
from recipes.common.flags import flag, script_parser
from recipes.common.gpt2 import PRESETS
from recipes.common.optimizers import NAMES, check_optimizer, usual_lr
from recipes.common.schedules import SCHEDULES, schedule
from recipes.data.token_data import add_data_arguments
from recipes.data.tokens import SMALLEST_BPE
from recipes.training.models import add_model_arguments, check_model_arguments

PRECISIONS = ("no", "bf16")
COUNTS = ("steps", "batch_size", "accumulate", "keep", "curvature_every", "print_every", "timeout")
LEAST = dict.fromkeys((*COUNTS, "max_tokens"), 1)
LEAST |= dict.fromkeys(("checkpoint_every", "eval_every", "eval_batches", "warmup"), 0)
LEAST |= dict.fromkeys(("clip", "weight_decay", "final"), 0)


def add_optimizer_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags about the optimizer that all training scripts have."""
    group = parser.add_argument_group("optimizer")
    add = group.add_argument
    add("--optimizer", default="block-adamw", metavar="NAME", help=", ".join(NAMES))
    usual = "the highest learning rate "
    usual += "(default: 0.3 for SGD, 0.15 for BlockSGD, 0.01 for Muon, 0.003 for all others)"
    add("--lr", type=float, help=usual)
    add("--weight-decay", type=float, default=0.1, help="weight decay of the matrices")
    about = "blocks of a parameter or pattern, as for `blockopt describe`; may be repeated"
    add("--override", action="append", default=[], metavar="NAME=ROLE[:SPLIT]", help=about)
    return group


def check_overrides(arguments: argparse.Namespace) -> None:
    """Check the form of `--override`, and that the optimizer looks at blocks.

    Raises:
        ValueError: If not.
    """
    for text in arguments.override:
        parse_override(text)
    if arguments.override and arguments.optimizer == "adam-mini":
        raise UsageError("adam-mini finds blocks of its own. Leave out --override.")


def add_run_arguments(parser: argparse.ArgumentParser, output: str) -> argparse._ArgumentGroup:
    """Add the flags about the run that all training scripts have."""
    group = parser.add_argument_group("run")
    add = group.add_argument
    add("--steps", type=int, default=1000, help="optimizer steps")
    add("--batch-size", type=int, default=16, help="sequences of a batch, counted as said above")
    add("--accumulate", type=int, default=1, help="micro-batches per step")
    add("--seed", type=int, default=0, help="seed of the weights and of the order of the data")
    add("--cpu", action="store_true", help="train on the CPU even if there is a GPU")
    add("--output", type=Path, default=Path(output), help="folder of the run")
    add("--resume", action="store_true", help="continue from the last checkpoint")
    add("--checkpoint-every", type=int, default=200, help="steps between checkpoints")
    add("--eval-every", type=int, default=200, help="steps between evaluations")
    add("--eval-batches", type=int, default=16, help="held-out batches of an evaluation")
    return group


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """Return the parser of all flags, under the description of the script."""
    parser = script_parser(about)
    add_data_arguments(parser)
    add_model_arguments(parser)
    add = add_optimizer_arguments(parser).add_argument
    add("--betas", type=float, nargs=2, help="of Adam's two moments (default: mostly 0.9 0.95)")
    add("--momentum", type=float, help="momentum of SGD or Muon (default: 0.9 or 0.95)")
    add("--clip", type=float, default=1.0, help="largest gradient norm, 0 for no limit")
    usual = "schedule of the learning rate (default: cosine, constant for schedulefree)"
    add("--schedule", choices=SCHEDULES, help=usual)
    add("--warmup", type=int, help="steps of warm-up (default: a tenth of all)")
    add("--final", type=float, default=0.0, help="last learning rate, as a share of --lr")
    add("--decay", type=float, default=0.2, help="share of the steps in which wsd falls")
    add = parser.add_argument_group("block learning rates").add_argument
    add("--curvature", choices=ESTIMATORS, help="attach a BlockLR that measures this curvature")
    about = "steps between refreshes (default: 75 for SGD, 150 for others)"
    add("--curvature-every", type=int, help=about)
    usual = "power of the curvature (default: -1 for SGD, -0.5 for others)"
    add("--curvature-power", type=float, help=usual)
    levels = ("role", "layer", "tensor", "head")
    add("--curvature-by", default="role", choices=levels, help="which blocks share a scale")
    add = add_run_arguments(parser, "results/train").add_argument
    usual = "bf16: compute in bfloat16 (default: as accelerate is configured)"
    add("--precision", choices=PRECISIONS, help=usual)
    compiled = "compile the model, with inductor or this backend"
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help=compiled)
    patience = "how long a process waits for the others before it ends"
    add("--timeout", type=float, default=600, metavar="SECONDS", help=patience)
    add("--keep", type=int, default=2, help="checkpoints to keep")
    add("--print-every", type=int, default=50, help="steps between lines if not on a terminal")
    after = "measure the Hessian of every head after these steps, 0 before the first"
    add("--record-hessian", type=int, nargs="+", metavar="STEP", help=after)
    trackers = [str(tracker.value) for tracker in LoggerType if tracker.value != "all"]
    listed = f"also log to {', '.join(trackers)}"
    add("--track", choices=trackers, metavar="TRACKER", help=listed)
    return parser


def parse(argv: list[str] | None = None, about: str | None = None) -> argparse.Namespace:
    """Return the flags. Wrong ones, or those without effect, end the program with code 2."""
    parser = make_parser(about)
    if os.environ.get("RANK", "0") != "0":
        parser.error = wait_and_leave  # type: ignore[method-assign]
    arguments = parser.parse_args(argv)
    given = given_flags(parser, argv)
    try:
        fill_in(arguments, given)
        check_ranges(arguments)
        check_used(arguments, given)
        shape = {"warmup": arguments.warmup, "decay": arguments.decay}
        schedule(arguments.schedule, 0, arguments.steps, **shape)
        check_optimizer(arguments.optimizer)
        check_overrides(arguments)
        check_model_arguments(arguments)
    except (UserError, ValueError) as error:
        parser.error(str(error))
    return arguments


def wait_and_leave(message: str) -> NoReturn:
    """Leave it to rank 0 to say what is wrong; the launcher ends all ranks with the first."""
    time.sleep(3)
    raise SystemExit(2)


def given_flags(parser: argparse.ArgumentParser, argv: list[str] | None) -> set[str]:
    """Return the names of the flags that are on the command line."""
    absent: list[str] = []  # a list, to which a flag that may be repeated can append
    names = vars(parser.parse_args([]))
    values = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(names, absent))))
    return {name for name in names if values[name] is not absent}


def fill_in(arguments: argparse.Namespace, given: set[str]) -> None:
    """Fill in defaults that depend on other flags or on how `accelerate launch` is configured.

    Raises:
        UsageError: If accelerate is configured for what this script does not do.
    """
    if arguments.schedule is None:
        arguments.schedule = "constant" if arguments.optimizer == "schedulefree" else "cosine"
    if arguments.lr is None:
        arguments.lr = usual_lr(arguments.optimizer)
    if arguments.warmup is None:
        arguments.warmup = arguments.steps // 10
    if arguments.betas is not None:
        arguments.betas = tuple(arguments.betas)
    if "model" in given and "vocab_size" not in given:
        arguments.vocab_size = PRESETS[arguments.model].vocab_size
    if arguments.precision is None:
        arguments.precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if arguments.precision not in PRECISIONS:
        raise UsageError(
            f"accelerate is configured for precision {arguments.precision!r}. Must be one of "
            f"{', '.join(PRECISIONS)}: pass --precision. A scaled loss is not supported."
        )
    backend = (arguments.compile or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")).upper()
    backends = [str(known.value) for known in DynamoBackend]
    if backend not in backends:
        listed = ", ".join(backends).lower()
        raise UsageError(f"Invalid --compile={arguments.compile}. Must be one of {listed}.")
    arguments.compile = None if backend == "NO" else backend.lower()
    configured = int(os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", arguments.accumulate))
    if configured != arguments.accumulate:
        raise UsageError(
            f"Invalid --accumulate={arguments.accumulate}. Must be {configured}, for which "
            "accelerate is configured (ACCELERATE_GRADIENT_ACCUMULATION_STEPS)."
        )


def check_ranges(arguments: argparse.Namespace) -> None:
    """Check the numbers.

    Raises:
        UsageError: If one is out of its range.
    """
    a = arguments
    for name, smallest in LEAST.items():
        value = getattr(a, name)
        _check(a, name, value is None or smallest <= value < math.inf, f">= {smallest} and finite")
    _check(a, "lr", 0 < a.lr < math.inf, "> 0 and finite")
    _check(a, "betas", all(0 <= beta < 1 for beta in a.betas or ()), "in [0, 1)")
    _check(a, "momentum", 0 <= (a.momentum or 0) < 1, "in [0, 1)")
    _check(a, "curvature_power", math.isfinite(a.curvature_power or 0), "finite")
    _check(a, "seed", 0 <= a.seed < 1 << 32, ">= 0 and less than 2^32")
    _check(a, "validation_fraction", 0 < a.validation_fraction <= 0.5, "more than 0, at most 0.5")
    smallest_bpe = f">= {SMALLEST_BPE}, or take --tokenizer bytes"
    _check(a, "vocab_size", a.vocab_size >= SMALLEST_BPE, smallest_bpe)
    recorded = all(0 <= step <= a.steps for step in a.record_hessian or ())
    _check(a, "record_hessian", recorded, f"in [0, {a.steps}], the steps of the run")
    alone = not a.record_hessian or int(os.environ.get("WORLD_SIZE", "1")) == 1
    _check(a, "record_hessian", alone, "left out on several processes")
    by_names = not a.record_hessian or not a.override
    _check(a, "record_hessian", by_names, "left out with --override, which it would not follow")
    decays = a.optimizer == "schedulefree" and a.schedule != "constant"
    _check(a, "schedule", not decays, "constant for schedulefree, which averages instead")
    shares = int(os.environ.get("WORLD_SIZE", "1")) * a.accumulate
    multiple = f"a multiple of {shares}, processes x --accumulate"
    _check(a, "batch_size", a.batch_size % shares == 0, multiple)
    if a.track not in (None, *(tracker.value for tracker in get_available_trackers())):
        raise UsageError(
            f"--track {a.track} needs a package that is not installed: pip install {a.track}"
        )


def _check(arguments: argparse.Namespace, name: str, holds: bool, must: str) -> None:
    if not holds:
        raise UsageError(f"Invalid {flag(name)}={getattr(arguments, name)}. Must be {must}.")


def check_used(arguments: argparse.Namespace, given: set[str]) -> None:
    """Check that every flag has an effect.

    Raises:
        UsageError: If one has none.
    """
    name, generated = arguments.optimizer, arguments.data.partition(":")[0] == "addition"
    by_name = name.startswith("torch_optimizer:")
    of_transformers = arguments.hf_config or arguments.hf_checkpoint
    learned = not generated and arguments.tokenizer is None
    curvature = (arguments.curvature is not None, "--curvature")
    rules = {
        "momentum": (
            by_name or name.endswith(("sgd", "muon")),
            "--optimizer sgd, block-sgd, muon or block-muon",
        ),
        "betas": (not name.endswith("sgd"), "optimizers with moments as Adam's"),
        "decay": (arguments.schedule == "wsd", "--schedule wsd"),
        "final": (arguments.schedule != "constant", "a --schedule that decays"),
        "model": (not of_transformers, "our GPT-2, not for models of transformers"),
        "tokenizer": (not generated, "text; sums have digits"),
        "vocab_size": (learned, "a tokenizer that is trained on the data"),
        **dict.fromkeys(("curvature_every", "curvature_power", "curvature_by"), curvature),
    }
    for option, (used, purpose) in rules.items():
        if option in given and not used:
            raise UsageError(f"{flag(option)} is for {purpose}. Leave it out.")
