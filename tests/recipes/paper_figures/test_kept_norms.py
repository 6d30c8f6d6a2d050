"""Norms that are kept in a file: not measured twice, and none lost to a kill."""

import torch

from blockopt.analysis.closed_forms.attention_growth import BlockPart
from recipes.paper_figures.kept_norms import KeptNorms
from recipes.paper_figures.outcome import TINY, Run

LABELS = (BlockPart("outer", "query"), "by name")
SCALES = torch.tensor([0.1, 1.0])


def measured(path, times):
    """Norms through the file, and how often they were measured."""
    calls = []

    def measure(scale, seed):
        calls.append((scale, seed))
        return {LABELS[0]: 3 * scale**2 + seed, LABELS[1]: 1e-7 * scale}

    found = [
        Run(TINY, kept=KeptNorms(path)).growth(measure, SCALES, title)
        for title in ("one", "other")
        for _ in range(times)
    ]
    return found, len(calls)


def test_what_is_in_the_file_is_not_measured_again(tmp_path):
    path = tmp_path / "norms.jsonl"
    found, calls = measured(path, 2)
    assert calls == 2 * TINY.repeats * len(SCALES)
    again, calls = measured(path, 1)
    assert calls == 0
    for data in (*found, *again):
        assert list(data.norms) == list(LABELS)
        expected = 3 * SCALES.double() ** 2 + torch.arange(2.0).double()[:, None]
        torch.testing.assert_close(data.norms[LABELS[0]], expected, rtol=1e-6, atol=0)


def test_other_sizes_are_another_setting(tmp_path):
    path = tmp_path / "norms.jsonl"
    measured(path, 1)
    kept, calls = KeptNorms(path), []
    kept.through(lambda scale, seed: calls.append(1) or {"x": 1.0}, "one: larger")(0.1, 0)
    assert calls == [1]


def test_a_line_that_was_cut_off_is_measured_again(tmp_path):
    path = tmp_path / "norms.jsonl"
    measured(path, 1)
    whole = path.read_text()
    path.write_text(whole[:-5])
    found, calls = measured(path, 1)
    assert calls == 1
    assert path.read_text() == whole
    assert found[0].norms[LABELS[1]].shape == (2, 2)
