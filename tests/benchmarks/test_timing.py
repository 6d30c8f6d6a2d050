"""The timing loop and the statistics that the tables are made of."""

import pytest
import torch

from benchmarks.lib.accuracy import rank_correlation
from benchmarks.lib.timing import Times, conditions, time_in_rounds


def test_calls_rotate_and_the_warm_up_does_not_count():
    called = []
    calls = {name: lambda name=name: called.append(name) for name in "abc"}
    times = time_in_rounds(calls, 3, "Calls", prepare=lambda name: called.append(f"for {name}"))
    assert [len(seconds) for seconds in times.seconds.values()] == [3, 3, 3]
    assert called[::2] == [f"for {name}" for name in called[1::2]]
    assert "".join(called[1::2]) == "cab" + "abc" + "bca" + "cab"


def test_ratios_are_taken_within_a_round():
    times = Times({"ours": [2.0, 9.0, 1.0, 4.0], "theirs": [1.0, 3.0, 1.0, 2.0]})
    assert times.milliseconds("ours") == 3000.0
    assert times.ratio("ours", "theirs") == {"median": 2.0, "low": 2.0, "high": 3.0}


def test_conditions_name_machine_and_versions():
    with conditions() as found:
        pass
    assert "cores" in found["machine"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["waiting"] is None or found["waiting"] >= 0


def test_ties_and_rounding_in_rank_correlation():
    x = torch.tensor([3.0, 1.0, 2.0, 1e-16, -1e-16])
    assert rank_correlation(x, torch.tensor([30.0, 10.0, 20.0, 0.0, 0.0])) == pytest.approx(1.0)
    assert rank_correlation(x, -x) == pytest.approx(-1.0)
