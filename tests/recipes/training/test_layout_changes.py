"""A run that goes on with other processes: sharded, whole and replicated ones, in any order."""

import signal

import pytest

from recipes import train
from tests.helpers.faulty_ranks import at, on_rank, run_ranks, send
from tests.helpers.training import flags, losses_of, read_log

BLOCK_LR = "--curvature newton --curvature-every 2"
LAYOUTS = (("fsdp2", 2), ("one", 1), ("fsdp2", 2), ("ddp", 2), ("fsdp2", 4))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "optimizer",
    [
        f"block-adamw {BLOCK_LR}",
        f"block-muon {BLOCK_LR} --lr 1e-3",  # with 1e-2, rounding alone grows to 6e-4
        "block-adamw-block",
        "block-adamw-whitened",
        "block-sgd",
        "adamw",
    ],
)
def test_each_layout_goes_on_from_each_other(optimizer, tmp_path):
    """Three steps with each, which SIGTERM ends; the losses are those of one process."""
    options = f"--steps 15 --optimizer {optimizer} --resume"
    arguments = flags(tmp_path / "run", tmp_path / "cache", options)
    for number, (kind, ranks) in enumerate(LAYOUTS, start=1):
        preempted = on_rank(0, at(train.Run, "clip", 2, send(signal.SIGTERM)))
        last = number == len(LAYOUTS)
        endings, said = run_ranks(arguments, kind, ranks, None if last else preempted)
        assert endings == [0 if last else 143] * ranks, said
    resumed = [
        line for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "resumed"
    ]
    assert [line["step"] for line in resumed] == [3, 6, 9, 12]
    plain = flags(tmp_path / "plain", tmp_path / "cache", options)
    assert run_ranks(plain, "one", 1)[0] == [0]
    found, expected = (losses_of(tmp_path / name / "log.jsonl") for name in ("run", "plain"))
    rounding = 1e-3 if "muon" in optimizer else 1e-4  # which orthogonalization amplifies
    assert found == pytest.approx(expected, abs=rounding)
