"""Two processes, replicated (DDP) or sharded (FSDP2), give the losses of one and resume exactly."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from recipes import train
from recipes.common.checkpoints import CheckpointError, Checkpoints
from recipes.training.arguments import parse
from recipes.training.processes import OtherRankError
from tests.helpers import ROOT
from tests.helpers.faulty_ranks import KINDS
from tests.helpers.ranks import run_on_two_ranks
from tests.helpers.training import OURS, flags, losses_of, read_log, run

pytestmark = pytest.mark.distributed
CONFIGS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))

STEPS = 4
BLOCK_LR = ("--curvature", "newton", "--curvature-every", "2")


class Stopped(Exception):
    pass


def options(folder, name, cache, *more):
    every = f"--optimizer {name} --steps {STEPS} --checkpoint-every 2 --accumulate 2"
    return flags(folder / name, cache, every, *more)


def stopped_before(step, arguments):
    """Stop all ranks alike in the middle of a run."""
    with pytest.MonkeyPatch.context() as patch:
        whole = train.schedule

        def until(name, number, *rest, **more):
            if number == step:
                raise Stopped
            return whole(name, number, *rest, **more)

        patch.setattr(train, "schedule", until)
        with pytest.raises(Stopped):
            run(arguments, partial=False)


def of_both_kinds(rank, folder, cache):
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    for kind in KINDS:
        os.environ.update(KINDS[kind])
        for name in OURS:
            run(options(folder / kind, name, cache), partial=False)
        for name in ("block-adamw-block", "block-muon"):
            run(options(folder / f"{kind}-scales", name, cache, *BLOCK_LR), partial=False)
        for name, more in (
            ("block-adamw", ()),
            ("block-adamw-block", BLOCK_LR),
            ("block-muon", BLOCK_LR),
            ("block-sgd", ()),
        ):
            again = options(folder / f"{kind}-resumed", name, cache, *more)
            stopped_before(3, again)
            run([*again, "--resume"], partial=False)
        ends_alike(rank, folder / kind, cache, kind)
        if kind == "ddp":
            run(many_steps(folder / "killed", cache, "--resume"), partial=False)
            run(many_steps(folder / "not-killed", cache), partial=False)


def many_steps(output, cache, *more):
    return flags(output, cache, "--steps", 40, "--checkpoint-every", 5, *BLOCK_LR, *more)


def kill_the_first_of_two(folder, cache):
    """Start two processes as the README says, and kill rank 0 in the middle of the run."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", CONFIGS[0]]
    command += [
        "--main_process_port",
        "0",
        ROOT / "recipes" / "train.py",
        *many_steps(folder / "killed", cache),
    ]
    log, holder = folder / "killed" / "log.jsonl", folder / "killed" / "run.holder"
    with (folder / "output.txt").open("wb") as output:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            list(map(str, command)), env=environment, stdout=output, stderr=output
        )
        deadline = time.monotonic() + 200
        while not (log.exists() and len(log.read_bytes().splitlines()) >= 20):
            assert process.poll() is None, (folder / "output.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(json.loads(holder.read_text())["pid"], signal.SIGKILL)
        assert process.wait(timeout=100) != 0
    assert 20 <= len(log.read_bytes().splitlines()) < 40


def ends_alike(rank, folder, cache, kind):
    """What stops rank 0 stops both; what is broken on one is told on both."""

    def raises(error, match):
        """The first rank that fails says why, the other that the first has."""
        return pytest.raises(error if rank == 0 else OtherRankError, match=match)

    with raises(CheckpointError, match="There is a run"):
        run(options(folder, "block-sgd", cache), partial=False)
    with raises(CheckpointError, match=r"had lr 0\.01, now 0\.5"):
        run([*options(folder, "block-sgd", cache, "--resume"), "--lr", "0.5"], partial=False)
    with raises(FileNotFoundError, match=r"missing\.txt"):
        run(options(folder / "missing", "block-sgd", cache, "--data", "missing.txt"), partial=False)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(train, "build_model", lambda *_: int("one"))
        with pytest.raises(OtherRankError if rank == 0 else ValueError, match="invalid literal"):
            run(options(folder / "one", "block-sgd", cache), partial=False)
    if kind == "fsdp2":
        for more in (
            ("--optimizer", "soap"),
            ("--optimizer", "torch_optimizer:Shampoo"),
            ("--curvature", "hutchinson"),
        ):
            with raises(ValueError, match=f"{more[1]} needs whole weights"):
                run(options(folder / "shards", "block-adamw", cache, *more), partial=False)
        assert not (folder / "shards").exists()
    with pytest.MonkeyPatch.context() as patch:
        backward = train.Run.backward

        def spoiled(self, micro_batches):
            loss = backward(self, micro_batches)
            gradient = dict(self.accelerator.unwrap_model(self.model).named_parameters())[
                "h.0.mlp.c_fc.bias"
            ].grad
            assert isinstance(gradient, DTensor) == (kind == "fsdp2")
            if isinstance(gradient, DTensor):
                if rank == 1:
                    gradient.to_local()[-1] = math.nan  # on one rank only
            else:
                gradient[-1] = math.nan
            return loss

        patch.setattr(train.Run, "backward", spoiled)
        with raises(FloatingPointError, match=r"h\.0\.mlp\.c_fc\.bias: bias 63"):
            run(options(folder / "broken", "block-adamw", cache), partial=False)
        patch.undo()
        if rank == 0:
            patch.setattr(Checkpoints, "save", no_room)
        with raises(CheckpointError, match="no room"):
            run(options(folder / "full", "block-adamw", cache), partial=False)


def no_room(*_):
    raise CheckpointError("no room")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All runs on two processes, started once."""
    folder = tmp_path_factory.mktemp("ranks")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in OURS:  # on one process, which also fills the cache
        run(options(folder / "one", name, folder / "cache"))
    torch.set_num_threads(threads)
    kill_the_first_of_two(folder, folder / "cache")
    assert not dist.is_initialized()
    run_on_two_ranks(partial(of_both_kinds, folder=folder, cache=folder / "cache"))
    return folder


def losses(folder, kind, name):
    return list(losses_of(folder / kind / name / "log.jsonl").values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OURS)
def test_two_processes_give_the_losses_of_one(folder, kind, name):
    one, two = losses(folder, "one", name), losses(folder, kind, name)
    assert len(two) == STEPS
    # Orthogonalization amplifies rounding; test_divided_work.py compares in float64, to 1e-11.
    rounding = 1e-3 if name == "block-muon" else 1e-4
    assert two == pytest.approx(one, abs=rounding)
    assert abs(one[-1] - one[0]) > 0.02
    ends = [read_log(folder / where / name / "log.jsonl")[-1]["loss"] for where in ("one", kind)]
    assert ends[1] == pytest.approx(ends[0], abs=rounding)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_losses_of_a_whole_one(folder, kind):
    for name in ("block-adamw", "block-sgd"):
        assert losses(folder, f"{kind}-resumed", name) == losses(folder, kind, name)
    for name in ("block-adamw-block", "block-muon"):
        assert losses(folder, f"{kind}-resumed", name) == losses(folder, f"{kind}-scales", name)
        assert (
            losses(folder, f"{kind}-scales", name)[2:] != losses(folder, kind, name)[2:]
        )  # the scales do something
        kinds = [line["kind"] for line in read_log(folder / f"{kind}-resumed" / name / "log.jsonl")]
        assert kinds.count("scales") == 2
        assert kinds.count("resumed") == 1


def test_killed_on_one_rank(folder):
    """The one with the log; resumed, losses and scales are those of a run that was not killed."""
    for kind in ("step", "scales", "evaluation", "end"):
        lines = [
            [line for line in read_log(folder / name / "log.jsonl") if line["kind"] == kind]
            for name in ("killed", "not-killed")
        ]
        for line in lines[0] + lines[1]:
            line.pop("seconds", None), line.pop("tokens_per_second", None)
        assert lines[0] == lines[1]
    assert [
        line["step"]
        for line in read_log(folder / "killed" / "log.jsonl")
        if line["kind"] == "resumed"
    ]


def test_block_learning_rates_do_not_depend_on_the_number_of_processes(folder, tmp_path):
    """Each measures its half of a batch, and together they have the curvature of the whole."""
    one, two = (run(many_steps(tmp_path, folder / "cache")), folder / "not-killed" / "log.jsonl")
    losses = [list(losses_of(log).values()) for log in (one, two)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    scales = [
        [line["scales"] for line in read_log(log) if line["kind"] == "scales"] for log in (one, two)
    ]
    assert min(map(len, scales)) > 15  # of 20: now and then no curvature is positive
    for a, b in zip(*scales, strict=True):
        assert b == pytest.approx(a, rel=1e-3)
    assert max(scales[0][-1].values()) > 1.04


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_files_for_accelerate_are_what_they_say(path):
    """Read as accelerate reads them; one of them has started the killed run."""
    content = yaml.safe_load(path.read_text())
    config = load_config_from_file(str(path))
    for name in content:
        assert hasattr(config, name)
    assert config.num_processes >= 2
    assert config.mixed_precision == ("no" if path.stem == "cpu_2proc" else "bf16")
    assert config.distributed_type.value == ("FSDP" if "fsdp" in path.stem else "MULTI_GPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", config.mixed_precision)
        patch.setenv("WORLD_SIZE", str(config.num_processes))
        assert parse([]).precision == config.mixed_precision


@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_model_has_the_weights_of_the_checkpoint(folder, kind):
    weights = torch.load(
        folder / kind / "block-adamw" / "checkpoints" / "step-00000004.pt", weights_only=True
    )["model"]
    model = AutoModelForCausalLM.from_pretrained(folder / kind / "block-adamw" / "model")
    found = {name.removeprefix("transformer."): w for name, w in model.state_dict().items()}
    assert found.keys() == weights.keys()
    columns = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Conv1D in transformers
    for name, value in weights.items():
        assert torch.equal(found[name], value.t() if name.endswith(columns) else value)


def test_a_sharded_checkpoint_has_whole_weights(folder):
    whole, sharded = (
        torch.load(
            folder / kind / "block-adamw" / "checkpoints" / "step-00000004.pt", weights_only=True
        )
        for kind in KINDS
    )
    assert sharded["model"].keys() == whole["model"].keys()
    for name, value in whole["model"].items():
        torch.testing.assert_close(sharded["model"][name], value, rtol=1e-3, atol=1e-4)
    assert len(sharded["random"]) == 2


def without_the_last(folder, kind, copy):
    """A copy of a run, without its last checkpoint."""
    shutil.copytree(folder / f"{kind}-resumed" / "block-adamw", copy / "block-adamw")
    (copy / "block-adamw" / "checkpoints" / "step-00000004.pt").unlink()
    return options(copy, "block-adamw", folder / "cache", "--resume")


def test_a_replicated_run_goes_on_with_one_process(folder, tmp_path):
    log = run(without_the_last(folder, "ddp", tmp_path))
    assert list(losses_of(log).values()) == pytest.approx(
        losses(folder, "one", "block-adamw"), abs=1e-4
    )
