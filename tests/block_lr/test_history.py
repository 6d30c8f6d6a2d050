"""The history of `BlockLR`: means of groups, rows, plots, the table of scales."""

import builtins
import csv
import json
import math

import pytest
import torch

import blockopt
from blockopt.block_lr import BlockLR
from blockopt.block_lr.history import History, Refresh
from blockopt.blocks import BlockGroup
from tests.block_lr.test_state import BUILD, gpt_with_dropout, run
from tests.helpers.block_lr import GPT_ROLES

pytestmark = pytest.mark.filterwarnings(
    "ignore:No block had a positive curvature",
    "ignore:The refresh of the block learning rates",
    "ignore:.*is neither cross-entropy",
)


LABELS = {
    "role": set(GPT_ROLES),
    "layer": {"embedding", "position", "norm"}
    | {f"layer {layer} {role}" for layer in (0, 1) for role in GPT_ROLES[2:]},
}


@pytest.mark.parametrize("by", ["role", "layer", "tensor", "head"])
def test_history_has_the_means_of_the_groups(by):
    seen = []

    def curvature(model, loss):
        generator = torch.Generator().manual_seed(len(seen))
        blocks = blockopt.find_blocks(model)
        seen.append(
            {
                name: torch.rand(entry.num_blocks, generator=generator)
                for name, entry in blocks.items()
            }
        )
        return seen[-1]

    _, _, block_lr = run(
        gpt_with_dropout, BUILD["block"], {"curvature": curvature, "every": 2, "by": by}
    )
    assert [refresh.step for refresh in block_lr.history] == [1, 3]
    refresh = block_lr.history[-1]
    assert refresh.curvature.keys() == refresh.scale.keys()
    last = Refresh(
        refresh.step, *({str(group): x for group, x in part.items()} for part in refresh[1:])
    )
    if by in LABELS:
        assert set(last.curvature) == LABELS[by]
    else:
        assert {label for label in last.curvature if "h.0.attn.c_attn.weight" in label} == {
            f"transformer.h.0.attn.c_attn.weight {role}" for role in ("query", "key", "value")
        }
        assert len(last.curvature) < 40
    query = {"role": "query", "layer": "layer 0 query"}.get(
        by, "transformer.h.0.attn.c_attn.weight query"
    )
    names = [f"transformer.h.{i}.attn.c_attn.weight" for i in ((0, 1) if by == "role" else (0,))]
    assert last.curvature[query] == pytest.approx(
        torch.cat([seen[-1][name][:2] for name in names]).mean().item()
    )
    scales = torch.cat([block_lr.last_scales.as_dict()[name][:2] for name in names])
    assert last.scale[query] == pytest.approx(scales.log().mean().exp().item(), rel=1e-5)
    norm = {"role": "norm", "layer": "norm"}.get(by)
    if norm:  # means are over entries, not over blocks: all norms have 16 entries
        norms = [name for name in seen[-1] if "ln_" in name and (by == "role" or "ln_f" in name)]
        assert last.curvature[norm] == pytest.approx(
            torch.cat([seen[-1][name] for name in norms]).mean().item()
        )


def test_means_are_over_entries():
    def curvature(model, loss):
        return {
            n: torch.full((b.num_blocks,), 3.0 if "c_attn" in n else 1.0)
            for n, b in blockopt.find_blocks(model).items()
        }

    _, _, block_lr = run(gpt_with_dropout, BUILD["block"], {"curvature": curvature})
    bias = 2 * 48 * 3.0 + 2 * (16 + 64 + 16) * 1.0  # fused attention; output, MLP in and out
    assert block_lr.history[0].curvature[BlockGroup("bias")] == pytest.approx(
        bias / (2 * (48 + 16 + 64 + 16))
    )


def test_history_is_written_as_rows(tmp_path):
    _, _, block_lr = run(gpt_with_dropout, BUILD["block"], {"every": 2})
    block_lr.history.to_csv(tmp_path / "history.csv")
    block_lr.history.to_json(tmp_path / "history.json")
    rows = json.loads((tmp_path / "history.json").read_text())
    with open(tmp_path / "history.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(rows) == len(table) == 2 * len(LABELS["role"])
    assert [row["step"] for row in rows[:: len(LABELS["role"])]] == [1, 3]
    for row, line in zip(rows, table):
        assert list(row) == list(line) == ["step", "block", "curvature", "scale"]
        assert {
            **line,
            "step": int(line["step"]),
            **{k: float(line[k]) for k in ("curvature", "scale")},
        } == row
    assert rows[0]["scale"] == block_lr.history[0].scale[BlockGroup(rows[0]["block"])]


@pytest.mark.parametrize("by", ["role", "tensor"])
def test_history_plots_curvature_and_scale_by_role(by, tmp_path):
    _, _, block_lr = run(
        gpt_with_dropout, BUILD["block"], {"curvature": "gauss_newton", "every": 1, "by": by}
    )
    figure = block_lr.history.plot(tmp_path / "history.png")
    assert (tmp_path / "history.png").read_bytes()[:4] == b"\x89PNG"
    left, right = figure.axes
    assert (left.get_ylabel(), right.get_ylabel()) == (
        "curvature of the block",
        "scale of the block",
    )
    assert {axes.get_xlabel() for axes in figure.axes} == {"optimizer step"}
    assert {axes.get_yscale() for axes in figure.axes} == {"log"}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == GPT_ROLES
    for axes, quantity in ((left, "curvature"), (right, "scale")):
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert len(axes.get_lines()) == len(block_lr.history[0].scale)
        if by == "role":
            assert list(lines["query"].get_xdata()) == [1, 2, 3, 4]
            assert list(lines["query"].get_ydata()) == [
                getattr(refresh, quantity)[BlockGroup("query")] for refresh in block_lr.history
            ]
    colors = {line.get_label(): line.get_color() for line in left.get_lines()}
    assert len(set(colors.values())) == len(colors)


def test_a_plot_leaves_out_what_a_log_axis_cannot_show():
    norm = BlockGroup("norm")
    history = History([Refresh(1, {norm: -1.0}, {norm: 1.0}), Refresh(2, {norm: 2.0}, {norm: 1.0})])
    values = list(history.plot().axes[0].get_lines()[0].get_ydata())
    assert math.isnan(values[0])
    assert values[1] == 2.0


def test_a_plot_without_matplotlib_or_refreshes_says_what_is_missing(monkeypatch):
    with pytest.raises(ValueError, match="No refresh to plot yet"):
        History().plot()
    history = History([Refresh(1, {BlockGroup("norm"): 1.0}, {BlockGroup("norm"): 1.0})])
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        history.plot()


def test_the_table_of_scales_is_aligned_and_narrow():
    model = gpt_with_dropout()
    block_lr = BlockLR(BUILD["block"](model), model)
    assert {line.split()[-1] for line in str(block_lr.last_scales).splitlines()} == {
        "max",
        "1",
    }  # before any refresh
    _, _, block_lr = run(gpt_with_dropout, BUILD["block"], {"every": 1, "by": "head"})
    lines = str(block_lr.last_scales).splitlines()
    assert lines == repr(block_lr.last_scales).splitlines()
    assert lines[0].split() == ["role", "blocks", "min", "median", "max"]
    assert [line.split()[0] for line in lines[1:]] == GPT_ROLES
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= 80
    queries = torch.cat(
        [s[:2] for n, s in block_lr.last_scales.as_dict().items() if "c_attn.weight" in n]
    )
    expected = [f"{float(x):.3g}" for x in (queries.min(), queries.median(), queries.max())]
    assert lines[3].split() == ["query", "4", *expected]
