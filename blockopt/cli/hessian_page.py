"""The page of `blockopt hessian`: one HTML file that leads from a model to its learning rates."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import blockopt
from blockopt.analysis.model_report import HessianReport, place
from blockopt.analysis.plots.axes import new_figure, role_color
from blockopt.analysis.results import html_table
from blockopt.block_lr.defaults import FOR_SGD, USUAL
from blockopt.blocks import BlockGroup, Blocks, Level, block_groups

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MATRICES = {  # in words
    "hessian": "Hessian",
    "gauss-newton": "Gauss-Newton matrix",
    "functional": "functional part of the Hessian (Hessian minus Gauss-Newton matrix)",
}
ESTIMATORS = {"hessian": "hutchinson", "gauss-newton": "gauss_newton"}  # of the same traces
FEW = 8  # blocks that the text names
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
img { max-width: 100%; height: auto; margin: 1rem 0 } h2 { margin-top: 2.2rem }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
td, th { padding: 2px 8px; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left } .scroll { overflow-x: auto }
"""


def pictures(report: HessianReport, title: str) -> dict[str, bytes]:
    """Return the plots of a report as PNG files by name: of heads and spectra if it has them."""
    found = {"blocks.png": _png(report.plot("blocks", title=title))}
    if any(group.head is not None and group.layer is not None for group in report.blocks):
        found["heads.png"] = _png(report.plot("heads", title=title))
    if any(block.spectrum is not None for block in report.blocks.values()):
        found["spectrum.png"] = _png(report.plot("spectra", title=f": {title}"))
    return found


def page(
    report: HessianReport,
    record: Mapping[str, Any],
    model: nn.Module,
    blocks: Mapping[str, Blocks],
    plots: Mapping[str, bytes],
) -> str:
    """Return the page; pictures are inside it, and it loads nothing.

    Args:
        report: What was measured.
        record: How, as `describe_measurement` returns it.
        model: The model.
        blocks: Its blocks, as the report cut them.
        plots: What `pictures` returned.
    """
    options, title = record["options"], f"Curvature of {record['model']}"
    data = f"{options['sequences']} sequences of {options['length']} tokens of {options['text']}"
    body = [
        f"<h1>{html.escape(title)}</h1>",
        _paragraph(
            f"{options['model']}: {record['parameters']:,} parameters in {record['dtype']}, "
            f"{record['weights']}. Measured is the {MATRICES[report.matrix]} of "
            f"the loss, {report.loss:.4f}, on {data}, in {len(report.blocks):,} blocks by "
            f"{report.by}."
        ),
        *_in_short(report, model, blocks),
        *_sharp_and_flat(report, plots),
        *_block_lr(report, model, blocks),
        *_differences(report, plots),
        "<h2>How far to trust it</h2>",
        _trust(report, record),
        f"<h2>All blocks</h2><div class='scroll'>{report.to_html()}</div>",
    ]
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _in_short(report: HessianReport, model: nn.Module, blocks: Mapping[str, Blocks]) -> list[str]:
    """The statement that the page leads to: sharp heads, flat roles, and what BlockLR does."""
    means, heads = mean_by_role(report), head_curvatures(report)
    order = _by_size(means)
    sharp = sorted(heads, key=heads.__getitem__, reverse=True)[:3]
    text = ""
    if sharp:
        named = "; ".join(f"{g.role}, {place(g)} ({_with_error(report, g)})" for g in sharp)
        text = f"These heads are sharp, by mean curvature: {named}. "
    flat = order[::-1][: min(3, len(order) // 2)]  # at most half of them
    if flat:
        named = ", ".join(f"{role} ({means[role]:.2g})" for role in flat)
        text += f"These roles are flat: {named}. "
    scales = role_scales(report, model, blocks)
    if scales:
        slow, fast = min(scales, key=scales.__getitem__), max(scales, key=scales.__getitem__)
        text += (
            f"BlockLR would slowly bring the learning rate of {slow} to {scales[slow]:.2g} times "
            f"what it is, and that of {fast} to {scales[fast]:.2g} times."
        )
    return ["<h2>In short</h2>", _paragraph(text)] if text else []


def _by_size(means: Mapping[str, float]) -> list[str]:
    """Return roles from sharp to flat: curvature far below zero is not flat."""
    return sorted(means, key=lambda role: abs(means[role]), reverse=True)


def mean_by_role(report: HessianReport) -> dict[str, float]:
    """Return the mean curvature of each role: trace over number of parameters."""
    return {
        role: sum(b.trace.value for b in some.values()) / sum(b.dimension for b in some.values())
        for role, some in report.by_role().items()
    }


def head_curvatures(report: HessianReport) -> dict[BlockGroup, float]:
    """Return the mean curvature of each head's matrices."""
    return {
        group: block.trace.value / block.dimension
        for group, block in report.blocks.items()
        if group.head is not None and group.layer is not None and group.role != "bias"
    }


def _sharp_and_flat(report: HessianReport, plots: Mapping[str, bytes]) -> list[str]:
    """Which heads are sharp, and which roles are flat."""
    roles = mean_by_role(report)
    order = _by_size(roles)
    ratio = _ratio(abs(roles[order[0]]), abs(roles[order[-1]]))
    text = "The mean curvature of a block is its trace over its number of parameters. "
    if len(order) > 1:
        text += (
            f"By role it is largest in size in {order[0]} ({roles[order[0]]:.2g}) and smallest in "
            f"{order[-1]} ({roles[order[-1]]:.2g})"
        )
        text += "." if ratio is None else f", a ratio of {ratio:.2g}."
    parts = ["<h2>Which blocks are sharp, and which are flat</h2>", _paragraph(text)]
    heads = head_curvatures(report)
    if heads:
        middle = {
            role: median([v for g, v in heads.items() if g.role == role])
            for role in {group.role for group in heads}
        }
        above = [group for group, mean in heads.items() if mean > middle[group.role]] or heads
        sharp = sorted(above, key=heads.__getitem__, reverse=True)[:FEW]
        rows = [
            {
                "head": f"{group.role}, {place(group)}",
                "mean curvature": heads[group],
                "±": report.blocks[group].trace.standard_error / report.blocks[group].dimension,
                "over the median of its role": _ratio(heads[group], middle[group.role]),
                "largest eigenvalue": _top(report, group),
            }
            for group in sharp
        ]
        parts += [_paragraph("The sharpest heads:"), html_table(rows)]
        parts.append(_picture(plots["heads.png"], "Each head by layer"))
    rows = [
        {
            "role": role,
            "mean curvature": roles[role],
            "size over the flattest": _ratio(abs(roles[role]), abs(roles[order[-1]])),
        }
        for role in order
    ]
    parts += [_paragraph("Roles, from sharp to flat:"), html_table(rows)]
    return parts


def _block_lr(report: HessianReport, model: nn.Module, blocks: Mapping[str, Blocks]) -> list[str]:
    """What `BlockLR` does about it: multipliers from the traces of this report."""
    found, means = role_scales(report, model, blocks), mean_by_role(report)
    if not found:
        return []
    estimator, (low, high) = ESTIMATORS[report.matrix], USUAL.bounds
    positive = {role: mean for role, mean in means.items() if mean > 0}
    before = max(positive.values()) / min(positive.values())
    moved = [mean * found[role] for role, mean in positive.items()]
    after = max(moved) / min(moved)
    rows = [
        {"role": role, "mean curvature": means[role], "learning rate times": found[role]}
        for role in sorted(found, key=found.__getitem__)
    ]
    snippet = (
        "optimizer = blockopt.BlockAdamW(blockopt.param_groups(model), lr=3e-3)\n"
        f'block_lr = blockopt.BlockLR(optimizer, model, curvature="{estimator}")'
    )
    return [
        "<h2>What BlockLR does about it</h2>",
        _paragraph(
            "With one learning rate, learning rate times mean curvature differs between roles by a "
            f"factor of {before:.2g}. For each role BlockLR aims at (curvature / reference)"
            f"^({USUAL.power:g}), within {low:g} to {high:g}, with a geometric mean of 1 over all "
            "weights. From the numbers above it gets the factors below, which leave a factor of "
            f"{after:.2g}."
        ),
        _paragraph(
            "It goes there slowly: factors begin at 1, and each refresh, every "
            f"{USUAL.every} steps, takes them {1 - USUAL.beta:.0%} of the way that is left in "
            "logarithms, and less where measurements disagree. Under SGD it aims at the power "
            f"{FOR_SGD.power:g}, and goes {1 - FOR_SGD.beta:.0%} of the way."
        ),
        _picture(_png(_scales_figure(found)), "Multipliers of the learning rate by role"),
        html_table(rows),
        f"<pre>{html.escape(snippet)}</pre>",
        _paragraph(
            "These are the factors at this one point of training. BlockLR measures them again as "
            "training goes on. Its default curvature, 'newton', also sees gradients and updates."
        ),
    ]


def role_scales(
    report: HessianReport, model: nn.Module, blocks: Mapping[str, Blocks]
) -> dict[str, float]:
    """Return the multiplier of each role, none if the report is of a part of Hessian or model."""
    curvature = mean_curvature(report, model, blocks)
    if report.matrix not in ESTIMATORS or set(curvature) != {
        n for n, p in model.named_parameters() if p.requires_grad
    }:
        return {}
    with torch.no_grad():
        scales = blockopt.block_scales(curvature, model, blocks, by="role")
    found: dict[str, float] = {}
    groups, numbers = block_groups(blocks, "role")
    for name, values in scales.items():
        for number, value in zip(numbers[name].tolist(), values.tolist()):
            found[groups[number].role] = value
    return found


def mean_curvature(
    report: HessianReport, model: nn.Module, blocks: Mapping[str, Blocks]
) -> dict[str, Tensor]:
    """Return the mean curvature of each block of each parameter that the report covers."""
    means = {g: block.trace.value / block.dimension for g, block in report.blocks.items()}
    by: Level = report.by  # type: ignore[assignment]
    groups, numbers = block_groups(blocks, by)
    found = {}
    for name, of_blocks in numbers.items():
        chosen = [groups[number] for number in of_blocks.tolist()]
        if all(group in means for group in chosen):
            found[name] = torch.tensor([means[group] for group in chosen])
    return found


def _differences(report: HessianReport, plots: Mapping[str, bytes]) -> list[str]:
    """How much blocks differ, and what lies off the diagonal."""
    parts = ["<h2>How much blocks differ</h2>"]
    spread = report.spread
    text = (
        f"Frobenius norms of blocks differ by a factor of {spread.ratio:.2g} (deviation of log10 "
        f"{spread.log10_deviation:.2f})."
    )
    if report.distance:
        found = ", ".join(f"{d.mean:.2f} on a {axis} axis" for axis, d in report.distance.items())
        text += f" The mean Jensen-Shannon distance between their spectra is {found}."
    if report.mass is not None:
        share, error = report.mass.off_diagonal[:2]
        text += (
            f" {share:.1%} ± {error:.1%} of the squared Frobenius norm lies off the diagonal "
            "blocks: what no block-wise method sees."
        )
    parts += [_paragraph(text), _picture(plots["blocks.png"], "Norms of blocks, shares of pairs")]
    if "spectrum.png" in plots:
        parts.append(_picture(plots["spectrum.png"], "Spectra"))
    return parts


def _trust(report: HessianReport, record: Mapping[str, Any]) -> str:
    text = "± and the columns that end in _error are standard errors over "
    if record["options"]["samples"] is None:
        text += "random vectors, 0 where a block was built entry by entry."
    else:
        text += (
            "sampled gradients. A top eigenvalue is the middle of a range; report.json has half of "
            "that range as residuals."
        )
    if report.rounding is not None:
        text += f" Against float64, one pass was off by {report.rounding:.1e} (relative)."
    if report.asymmetry is not None:
        text += f" Products were symmetric to {report.asymmetry:.1e}."
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    notes = "".join(_paragraph(f"Note: {note}") for note in record["notes"])
    return _paragraph(text) + notes + _paragraph(f"Measured with {versions}.")


def _scales_figure(scales: Mapping[str, float]) -> Figure:
    figure = new_figure((6.4, 0.8 + 0.3 * len(scales)))
    ax, order = figure.subplots(), sorted(scales, key=scales.__getitem__)
    for number, role in enumerate(order):
        ax.plot([1, scales[role]], [number, number], color=role_color(role, 7), linewidth=5)
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set_xscale("log")
    low, high = min(0.9, *scales.values()), max(1.1, *scales.values())
    ticks = [x for x in (0.1, 0.2, 0.5, 1, 2, 5, 10) if 0.9 * low <= x <= 1.1 * high]
    ax.set_xticks(ticks, [f"{x:g}" for x in ticks])
    ax.minorticks_off()
    ax.set_yticks(range(len(order)), order, fontsize=8)
    ax.set_xlabel("learning rate, as a multiple of the one that the optimizer has", fontsize=9)
    return figure


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _picture(png: bytes, alternative: str) -> str:
    data = base64.b64encode(png).decode()
    return f"<img alt='{html.escape(alternative)}' src='data:image/png;base64,{data}'>"


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _ratio(value: float, other: float) -> float | None:
    return value / other if other > 0 else None


def _with_error(report: HessianReport, group: BlockGroup) -> str:
    """Return the mean curvature of a block, with its standard error if it has one."""
    block = report.blocks[group]
    mean, error = (n / block.dimension for n in (block.trace.value, block.trace.standard_error))
    return f"{mean:.2g} ± {error:.1g}" if error > 0 else f"{mean:.2g}"


def _top(report: HessianReport, group: BlockGroup) -> float | None:
    top = report.blocks[group].top
    return float(top[0]) if len(top) else None
