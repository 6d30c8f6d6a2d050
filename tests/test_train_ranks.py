"""Two processes give the losses of one with the same global batch, replicated (DDP) and sharded (FSDP2), and resume exactly."""

import math
import os

import pytest
import torch
import torch.distributed as dist
from test_sharded import run as run_on_two
from torch.distributed.tensor import DTensor
from training import OURS, flags, losses_of, read_log, run

from recipes import train
from recipes.checkpoints import CheckpointError, Checkpoints

STEPS = 4
KINDS = ("ddp", "fsdp2")
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
FSDP2 |= {"FSDP_RESHARD_AFTER_FORWARD": "true"}
BLOCK_LR = ("--curvature", "newton", "--curvature-every", "2")


class Stopped(Exception):
    pass


def options(folder, name, cache, *more):
    return flags(folder / name, cache, "--optimizer", name, "--steps", STEPS, "--checkpoint-every", 2, "--accumulate", 2, *more)


def stopped_before(step, arguments):
    """Stop all ranks alike in the middle of a run; a kill of one process on its own is tested without ranks."""
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
        os.environ.update(FSDP2 if kind == "fsdp2" else {})
        for name in OURS:
            run(options(folder / kind, name, cache), partial=False)
        for name in ("block-adamw-block", "block-muon"):
            run(options(folder / f"{kind}-scales", name, cache, *BLOCK_LR), partial=False)
        for name, more in (("block-adamw", ()), ("block-adamw-block", BLOCK_LR), ("block-muon", BLOCK_LR), ("block-sgd", ())):
            again = options(folder / f"{kind}-resumed", name, cache, *more)
            stopped_before(3, again)
            run([*again, "--resume"], partial=False)
        ends_alike(rank, folder / kind, cache, kind)


def ends_alike(rank, folder, cache, kind):
    """What stops rank 0 stops both; what is broken on one is told on both."""
    with pytest.raises(CheckpointError, match="There is a run"):
        run(options(folder, "block-sgd", cache), partial=False)
    with pytest.raises(CheckpointError, match=r"had lr 0\.01, now 0\.5"):
        run([*options(folder, "block-sgd", cache, "--resume"), "--lr", "0.5"], partial=False)
    with pytest.MonkeyPatch.context() as patch:
        backward = train.Run.backward

        def spoiled(self, micro_batches):
            loss = backward(self, micro_batches)
            gradient = dict(self.accelerator.unwrap_model(self.model).named_parameters())["h.0.mlp.c_fc.bias"].grad
            assert isinstance(gradient, DTensor) == (kind == "fsdp2")
            if isinstance(gradient, DTensor):
                if rank == 1:
                    gradient.to_local()[-1] = math.nan  # on one rank only
            else:
                gradient[-1] = math.nan
            return loss

        patch.setattr(train.Run, "backward", spoiled)
        with pytest.raises(FloatingPointError, match=r"h\.0\.mlp\.c_fc\.bias: bias 63"):
            run(options(folder / "broken", "block-adamw", cache), partial=False)
        patch.undo()
        if rank == 0:
            patch.setattr(Checkpoints, "save", no_room)
        with pytest.raises(CheckpointError, match="no room"):
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
    assert not dist.is_initialized()
    run_on_two(of_both_kinds, folder, folder / "cache")
    return folder


def losses(folder, kind, name):
    return list(losses_of(folder / kind / name / "log.jsonl").values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OURS)
def test_two_processes_give_the_losses_of_one(folder, kind, name):
    one, two = losses(folder, "one", name), losses(folder, kind, name)
    assert len(two) == STEPS
    assert two == pytest.approx(one, abs=1e-4)
    assert abs(one[-1] - one[0]) > 0.02
    ends = [read_log(folder / where / name / "log.jsonl")[-1]["loss"] for where in ("one", kind)]
    assert ends[1] == pytest.approx(ends[0], abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_losses_of_a_whole_one(folder, kind):
    for name in ("block-adamw", "block-sgd"):
        assert losses(folder, f"{kind}-resumed", name) == losses(folder, kind, name)
    for name in ("block-adamw-block", "block-muon"):
        assert losses(folder, f"{kind}-resumed", name) == losses(folder, f"{kind}-scales", name)
        assert losses(folder, f"{kind}-scales", name)[2:] != losses(folder, kind, name)[2:]  # the scales do something
        kinds = [line["kind"] for line in read_log(folder / f"{kind}-resumed" / name / "log.jsonl")]
        assert kinds.count("scales") == 2
        assert kinds.count("resumed") == 1


def test_a_sharded_checkpoint_has_whole_weights(folder):
    whole, sharded = (
        torch.load(folder / kind / "block-adamw" / "checkpoints" / "step-00000004.pt", weights_only=True) for kind in KINDS
    )
    assert sharded["sharded"]
    assert sharded["model"].keys() == whole["model"].keys()
    for name, value in whole["model"].items():
        torch.testing.assert_close(sharded["model"][name], value, rtol=1e-3, atol=1e-4)
    assert len(sharded["random"]) == 2


def without_the_last(folder, kind):
    path = folder / f"{kind}-resumed" / "block-adamw" / "checkpoints" / "step-00000004.pt"
    path.unlink()
    return options(folder / f"{kind}-resumed", "block-adamw", folder / "cache", "--resume")


def test_a_replicated_run_goes_on_with_one_process(folder):
    log = run(without_the_last(folder, "ddp"))
    assert list(losses_of(log).values()) == pytest.approx(losses(folder, "one", "block-adamw"), abs=1e-4)


def test_a_sharded_run_does_not_go_on_without_shards(folder):
    with pytest.raises(ValueError, match="with FSDP2, and this one has whole weights"):
        run(without_the_last(folder, "fsdp2"))


def test_curvature_that_shards_lack_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(train.Accelerator, "is_fsdp2", True)
    with pytest.raises(SystemExit, match="hutchinson needs whole weights"):
        run(flags(tmp_path, tmp_path, "--curvature", "hutchinson"))
