"""Curvature over training: what is kept, when, and after a resumption."""

import functools
import json

import pytest
import torch

from blockopt import find_blocks
from blockopt.analysis import Probes, hessian_report
from blockopt.analysis.recorder import HessianRecorder
from blockopt.cli.local_model import next_token_losses
from tests.helpers.small_language_models import small_model

PROBES = Probes(top=1, num_probes=2, num_steps=4, num_starts=1)
measure = functools.partial(hessian_report, by="head", only=["attn.*"], probes=PROBES)


def trained(recorder, model, losses, steps, start=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(start + 1, steps + 1):
        optimizer.zero_grad()
        losses[0]()[0].backward()
        optimizer.step()
        recorder.step(step)


def test_records_are_the_reports_of_the_chosen_steps(tmp_path):
    model, ids = small_model()
    losses = next_token_losses(model, ids, 8)
    path = tmp_path / "hessian.json"
    recorder = HessianRecorder(model, losses, [0, 2, 3], measure=measure, path=path)
    assert recorder.step(0)
    first = measure(model, losses)
    key = model.transformer.h[0].attn.c_attn.weight.detach()[:, 6:8].clone()
    trained(recorder, model, losses, 3)
    last = measure(model, losses)
    assert [record["step"] for record in recorder.records] == [0, 2, 3]
    for record, report in ((recorder.records[0], first), (recorder.records[-1], last)):
        assert record["loss"] == report.loss
        for kept, (group, block) in zip(record["blocks"], report.blocks.items(), strict=True):
            assert kept["block"] == str(group)
            assert (kept["role"], kept["layer"], kept["head"]) == (group.role, 0, group.head)
            assert kept["trace"] == block.trace.value
            assert kept["nodes"] == block.spectrum.nodes.tolist()
    of_key = next(b for b in recorder.records[0]["blocks"] if b["role"] == "key" and b["head"] == 1)
    assert of_key["weight_norm"] == pytest.approx(float(key.norm()))
    assert json.loads(path.read_text()) == recorder.to_dict()
    assert len(recorder.to_frame()) == len(recorder.rows()) == 3 * len(first.blocks)
    axes = recorder.plot().axes
    assert {"key: spectrum of all heads", "norm of the weights"} <= {a.get_title() for a in axes}


def test_a_resumed_run_replaces_what_it_does_again(tmp_path):
    model, ids = small_model()
    losses = next_token_losses(model, ids, 8)
    path = tmp_path / "hessian.json"
    recorder = HessianRecorder(model, losses, [1, 2, 4], measure=measure, path=path)
    trained(recorder, model, losses, 4)
    again = HessianRecorder(model, losses, [1, 2, 4], measure=measure, path=path)
    assert again.records == recorder.records
    again.step(2)  # a run that goes on from step 1
    assert [record["step"] for record in again.records] == [1, 2]
    assert again.records[1]["loss"] == recorder.records[2]["loss"]  # of the weights as they are


def test_blocks_that_the_measurement_was_given():
    model, ids = small_model()
    losses = next_token_losses(model, ids, 8)
    blocks = find_blocks(model, overrides={"transformer.wpe.weight": "other"}, per_row=())
    given = functools.partial(
        hessian_report, by="head", only=["wpe.weight"], blocks=blocks, probes=PROBES
    )
    recorder = HessianRecorder(model, losses, [0], measure=given, blocks=blocks)
    recorder.step(0)
    (block,) = recorder.records[0]["blocks"]
    assert block["role"] == "other"
    norm = float(model.transformer.wpe.weight.detach().norm())
    assert block["weight_norm"] == pytest.approx(norm)
    with pytest.raises(ValueError, match=r"they have no 'transformer\.wpe\.weight other', which"):
        HessianRecorder(model, losses, [0], measure=given).step(0)


def test_errors():
    model, ids = small_model()
    losses = next_token_losses(model, ids, 8)
    for steps in ([], [-1]):
        with pytest.raises(ValueError, match="Must be integers >= 0, at least one"):
            HessianRecorder(model, losses, steps)
    recorder = HessianRecorder(model, losses, [1])
    assert not recorder.step(0)
    with pytest.raises(ValueError, match="Nothing was recorded"):
        recorder.plot()
