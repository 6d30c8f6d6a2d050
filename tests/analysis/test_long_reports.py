"""Reports of large models: their cost, bounded memory, and runs that were stopped."""

import json

import pytest
import torch
from torch import nn

from blockopt.analysis import HessianOperator, Probes, hessian_report, sampled_report
from blockopt.analysis.memory import GIB, TooLargeError
from blockopt.cli.local_model import next_token_losses
from tests.helpers.small_language_models import small_model


def test_the_cost_is_told_before_and_is_close_to_what_is_done(monkeypatch):
    model, ids = small_model()
    columns, told = [], []
    original = HessianOperator.__matmul__

    def counting(self, v):
        columns.append(1 if v.ndim == 1 else v.shape[1])
        return original(self, v)

    monkeypatch.setattr(HessianOperator, "__matmul__", counting)

    def announce(cost):
        told.append((cost, sum(columns)))

    report = hessian_report(
        model,
        next_token_losses(model, ids, 8),
        probes=Probes(exact=True, num_starts=0),
        only=["mlp.*"],
        announce=announce,
    )
    ((cost, before),) = told
    assert before == 3  # two for the symmetry, one for the clock
    assert report.cost == cost
    assert cost.seconds_per_product > 0
    done = sum(columns) - before
    blocks = sum(min(20, b.dimension) + b.dimension for b in report.blocks.values())
    # The rest is for the top eigenvalue of the whole, for which 25 were foreseen
    assert blocks < done < blocks + 60
    assert cost.num_products == blocks + 25


def test_blocks_that_do_not_fit_are_refused_with_the_number(monkeypatch):
    monkeypatch.setattr("blockopt.analysis.report.free_memory", lambda device: 2**20)
    model = nn.Linear(1000, 1, bias=False)
    closure = lambda: model(torch.ones(1, 1000)).square().sum()  # noqa: E731
    with pytest.raises(
        ValueError, match=r"The largest block has 1,000 parameters: .* needs 0\.0 GiB"
    ):
        hessian_report(model, closure, probes=Probes(exact=True))
    big = nn.Linear(20_000, 1, bias=False)
    with pytest.raises(
        ValueError, match=r"Products with the block 'other' of 20,000 parameters need 0\.0 GiB"
    ):
        hessian_report(big, lambda: big(torch.ones(1, 20_000)).square().sum())


def test_what_does_not_fit_into_memory_is_left_out_and_told(monkeypatch):
    model, ids = small_model(n_inner=40)
    losses = next_token_losses(model, ids, 8)
    probes = Probes(num_probes=3, num_steps=100, num_starts=1)
    whole = hessian_report(model, losses, probes=probes)
    n, largest = whole.whole.dimension, max(b.dimension for b in whole.blocks.values())
    assert whole.notes == ()

    monkeypatch.setattr("blockopt.analysis.report.free_memory", lambda device: 101 * n)
    some = hessian_report(model, losses, probes=probes)
    assert some.whole is not None
    assert some.whole.spectrum is None
    assert len(some.whole.top) == 0
    assert "Memory did not suffice for top eigenvalues of whole." in some.notes
    traces = [[row["trace"] for row in report.rows()] for report in (some, whole)]
    assert traces[0] == pytest.approx(traces[1], rel=1e-9, abs=1e-12)

    monkeypatch.setattr("blockopt.analysis.report.free_memory", lambda device: 101 * largest)
    few = hessian_report(model, losses, probes=probes)
    assert few.whole is few.mass is None
    assert "nothing on the whole" in few.notes[0]
    assert any("spectra of" in note for note in few.notes)
    for group, block in few.blocks.items():
        known = whole.blocks[group]
        if block.exact:
            assert block.trace.value == pytest.approx(known.trace.value, abs=1e-12)
        else:
            error = 4 * (block.trace.standard_error + known.trace.standard_error)
            assert abs(block.trace.value - known.trace.value) <= error
    assert "whole" not in few.table()
    assert "off the blocks" not in few.summary()
    json.dumps(few.to_dict(), allow_nan=False)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("memory", [None, 2000])
def test_a_report_that_was_stopped_continues_with_the_same_numbers(tmp_path, monkeypatch, memory):
    if memory is not None:  # block by block, without the whole
        monkeypatch.setattr(
            "blockopt.analysis.report.free_memory", lambda device: memory * 8 + 100 * 48
        )
    model, ids = small_model()
    losses = next_token_losses(model, ids, 2)
    options = {"by": "head", "probes": Probes(num_probes=2, num_steps=3, num_starts=2)}
    options["only"] = ["attn.*"]
    untouched = hessian_report(model, losses, **options)
    path = tmp_path / "partial.pt"
    original, seen, stops = HessianOperator.__matmul__, [], [40]

    def stopping(self, v):
        seen.append(1)
        if len(seen) in stops:
            raise Stopped
        return original(self, v)

    monkeypatch.setattr(HessianOperator, "__matmul__", stopping)
    with pytest.raises(Stopped):
        hessian_report(model, losses, **options, partial=path)
    assert path.exists()
    seen.clear()
    stops.clear()
    report = hessian_report(model, losses, **options, partial=path)
    continued = len(seen)
    assert report.rows() == untouched.rows()
    seen.clear()
    hessian_report(model, losses, **options, partial=tmp_path / "other.pt")
    assert continued < len(seen)  # what was finished was not done again
    model.lm_head.weight.data[0, 0] += 1e-3
    with pytest.raises(ValueError, match="of other weights, data or options"):
        hessian_report(model, losses, **options, partial=path)
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match="no partial results that can be read"):
        hessian_report(model, losses, **options, partial=path)


@pytest.mark.parametrize("kind", ["products", "samples"])
def test_what_passes_take_counts_in_a_limit_of_memory(monkeypatch, kind):
    """Passes that take 4 GiB take 8 in float64."""
    model = nn.Linear(3, 1, bias=False)

    def loss():
        predicted = model(torch.ones(1, 3).to(model.weight))
        return nn.functional.mse_loss(predicted, torch.ones_like(predicted))

    measure, module = hessian_report, "report"
    message = r"passes through one batch take 4\.00 GiB, and 3\.00 GiB are allowed.*smaller batches"
    if kind == "samples":
        measure, module = sampled_report, "sampled_gradients"
        message = r"besides the 4\.0 GiB of a backward pass"
    monkeypatch.setattr(f"blockopt.analysis.{module}.peak_memory", lambda device: 4 * GIB)
    with pytest.raises(TooLargeError, match=message):
        measure(model, loss, max_bytes=3 * GIB)
    little, enough = (measure(model, loss, max_bytes=size * GIB) for size in (6, 9))
    assert little.rounding is None
    assert little.notes == ("Memory did not suffice to compare with float64.",)
    assert 0 <= enough.rounding < 1e-6
    assert enough.notes == ()
    model.double()
    assert measure(model, loss, max_bytes=6 * GIB).notes == ()
