"""`python -m blockopt hessian gpt2 --text file.txt`: the arguments, what is printed, and the files that are written."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import platform
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

import blockopt
from blockopt.analysis.report import Cost, HessianReport, Matrix, hessian_report
from blockopt.analysis.spectral.density import SpectralDensity
from blockopt.analysis.tables import plain
from blockopt.blocks.groups import Level
from blockopt.cli.local_model import (
    SMALL,
    Corpus,
    LocalModel,
    load_model,
    load_text,
    next_token_losses,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_IN_A_PLOT = 13  # blocks; more of them are pooled by role
EXAMPLES = """examples:
  python -m blockopt hessian gpt2 --set n_layer=2 --set n_embd=64 --set n_head=4 --set vocab_size=256 --text book.txt
  python -m blockopt hessian ./checkpoint --text book.txt --by head --only 'h.0.attn.*' --out results
  python -m blockopt hessian llama.json --text book.txt --matrix gauss-newton --by layer --top 5
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, EXAMPLES
    add = parser.add_argument
    add(
        "model",
        help="a transformers model type (gpt2), a config.json, or a folder with one and maybe weights; local only",
    )
    add("--text", required=True, metavar="FILE", help="local text, UTF-8")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace an entry of the config; repeatable",
    )
    add(
        "--random",
        action="store_true",
        help="random weights although the folder holds a checkpoint",
    )
    add("--seed", type=int, default=0, help="of random weights and of all probes (default 0)")
    add("--length", type=int, default=64, help="tokens a sequence (default 64)")
    add("--sequences", type=int, default=8, help="sequences, spread over the text (default 8)")
    add(
        "--batch",
        type=int,
        default=8,
        help="sequences at a time; more are faster, fewer take less memory (default 8)",
    )
    add(
        "--dtype",
        choices=("float32", "float64"),
        help=f"default float64 up to {SMALL:,} parameters, float32 beyond",
    )
    add("--device", default="cpu", help="default cpu")
    add(
        "--matrix",
        choices=get_args(Matrix),
        default="hessian",
        help="default hessian; functional = hessian - gauss-newton",
    )
    add(
        "--by",
        choices=get_args(Level),
        default="role",
        help="blocks: a role of the model, a layer or a tensor, or a head",
    )
    add(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="parameters, such as 'h.0.*'; repeatable",
    )
    add(
        "--top",
        type=int,
        default=1,
        metavar="K",
        help="eigenvalues a block, the farthest from 0 (default 1)",
    )
    add(
        "--probes",
        type=int,
        default=20,
        help="random vectors a block, for traces and norms (default 20)",
    )
    add("--steps", type=int, default=30, help="Lanczos steps for a spectrum (default 30)")
    add(
        "--starts",
        type=int,
        default=3,
        help="start vectors for a spectrum (default 3; 0 for no spectra)",
    )
    add("--exact", action="store_true", help="build every diagonal block, if it fits into memory")
    add(
        "--out",
        metavar="FOLDER",
        help="write report.json, blocks.csv, spectrum.png and blocks.png there",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        SystemExit: With a message for people, if something is wrong.
    """
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            _run(options, caught)
    except (ValueError, TypeError, ImportError, FloatingPointError, OSError) as error:
        raise SystemExit(str(error)) from None
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise SystemExit(
            f"Out of memory. Try a smaller --batch or --length.\ntorch says: {error}"
        ) from None
    return 0


def _run(options: argparse.Namespace, caught: list[warnings.WarningMessage]) -> None:
    if options.batch < 1:
        raise ValueError(f"Invalid --batch {options.batch}. Must be an integer >= 1.")
    try:
        torch.empty(0, device=options.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"Invalid --device {options.device}: {str(error).splitlines()[0]}"
        ) from None
    folder = None if options.out is None else Path(options.out)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)  # now, not after an hour
    source = load_model(
        options.model, _overrides(options.set), random=options.random, seed=options.seed
    )
    corpus = load_text(
        options.text,
        source.model,
        source.folder,
        sequences=options.sequences,
        length=options.length,
    )
    number = sum(p.numel() for p in source.model.parameters())
    dtype = options.dtype or ("float64" if number <= SMALL else "float32")
    model = source.model.to(options.device, getattr(torch, dtype))
    print(
        f"{type(model).__name__} ({options.model}), {number:,} parameters in {dtype}, {source.weights}"
    )
    print(f"{options.sequences} sequences of {options.length} tokens from {options.text}")
    print(f"tokens: {corpus.tokens}", flush=True)
    report = hessian_report(
        model,
        next_token_losses(model, corpus.ids.to(options.device), options.batch),
        matrix=options.matrix,
        by=options.by,
        only=options.only,
        top=options.top,
        num_probes=options.probes,
        num_steps=options.steps,
        num_starts=options.starts,
        exact=options.exact,
        generator=torch.Generator().manual_seed(options.seed),
        progress=sys.stderr.isatty() and importlib.util.find_spec("rich") is not None,
        announce=_print_cost,
    )
    print(f"\n{report.table()}\n")
    if options.top > 1:
        print(f"{report.eigenvalue_table()}\n")
    print(report.summary())
    print(
        f"loss            {report.loss:.4f}, {report.matrix} symmetric to {report.asymmetry:.0e}, {_duration(report.seconds)}"
    )
    notes = _notes(report, dtype, caught)
    for note in notes:
        print(f"Note: {note}")
    if folder is not None:
        written = _write(folder, report, _record(options, source, corpus, dtype, number, notes))
        print(f"wrote {', '.join(map(str, written))}")


def _overrides(settings: list[str]) -> dict[str, Any]:
    """`["n_layer=2"]` as `{"n_layer": 2}`: JSON where it is JSON, else text."""
    found: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"Invalid --set {setting}. Must be KEY=VALUE, such as n_layer=2.")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def _print_cost(cost: Cost) -> None:
    seconds = cost.num_products * cost.seconds_per_product
    each = cost.seconds_per_product
    print(
        f"about {cost.num_products:,} products, {each:.2g} s for one: up to {_duration(seconds)}",
        flush=True,
    )


def _duration(seconds: float) -> str:
    """In units that people read.

    Example:
        >>> _duration(3.21), _duration(100), _duration(7300)
        ('3.2 s', '1 min 40 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return (
        f"{minutes} min {int(seconds % 60)} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60} min"
    )


def _notes(report: HessianReport, dtype: str, caught: list[warnings.WarningMessage]) -> list[str]:
    """What a reader should know: the warnings, and how far the numbers can be trusted."""
    notes = list(
        dict.fromkeys(
            str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)
        )
    )
    if dtype == "float64" and report.asymmetry > 1e-11:
        notes.append(
            "Parts of this model run in float32 in any dtype, as RMSNorm does in transformers."
        )
    return notes


def _record(
    options: argparse.Namespace,
    source: LocalModel,
    corpus: Corpus,
    dtype: str,
    number: int,
    notes: list[str],
) -> dict[str, Any]:
    """How the numbers came about."""
    import transformers

    return {
        "options": {key: value for key, value in vars(options).items() if key != "command"},
        "model": type(source.model).__name__,
        "weights": source.weights,
        "parameters": number,
        "dtype": dtype,
        "tokens": corpus.tokens,
        "config": source.model.config.to_dict(),  # type: ignore[operator, union-attr]
        "versions": {
            "blockopt": blockopt.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "notes": notes,
    }


def _write(folder: Path, report: HessianReport, record: Mapping[str, Any]) -> list[Path]:
    paths = [folder / "report.json", folder / "blocks.csv"]
    text = json.dumps({**plain(record), "report": report.to_dict()}, indent=1, allow_nan=False)
    paths[0].write_text(text + "\n", encoding="utf-8")
    rows = report.rows()
    columns = dict.fromkeys(
        key for row in sorted(rows, key=len, reverse=True) for key in row
    )  # small blocks have fewer tops
    with paths[1].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    if importlib.util.find_spec("matplotlib") is None:
        print("Note: no plots without matplotlib: pip install 'blockopt[recipes]'.")
        return paths
    return paths + _plot(folder, report, f"{record['model']}, {record['weights']}")


def _plot(folder: Path, report: HessianReport, title: str) -> list[Path]:
    figures = {
        "spectrum.png": _spectra_figure(report, title),
        "blocks.png": _blocks_figure(report, title),
    }
    paths = []
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=130)
            paths.append(folder / name)
    return paths


def _spectra_figure(report: HessianReport, title: str) -> Figure | None:
    """The spectrum of each block and of the whole, one below the other on a common axis; None without spectra."""
    from matplotlib.figure import Figure

    from blockopt.analysis.plots import spectral_densities

    spectra = _pooled_spectra(report)
    largest = max((float(spectrum.nodes.abs().max()) for spectrum in spectra.values()), default=0.0)
    if not largest > 0:
        return None
    exact = all(block.exact for block in report.blocks.values())
    threshold = (1e-6 if exact else 1e-4) * largest
    figure = Figure(figsize=(8, 1.4 + 0.85 * len(spectra)), layout="constrained")
    axes = figure.subplots(len(spectra), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (label, spectrum) in zip(axes, spectra.items()):
        spectral_densities({label: spectrum}, threshold=threshold, title="", ax=axis)
        axis.set_xlabel("")
        axis.set_ylabel("")
        axis.axvline(0, color="#999999", linewidth=0.5)
        axis.legend().remove()
        ends = f"{float(spectrum.nodes[0]):.2g} to {float(spectrum.nodes[-1]):.2g}"
        axis.set_title(f"{label}: {ends}", loc="left", fontsize=8, pad=2)
    caution = (
        ""
        if exact
        else "\nestimated by Lanczos steps, which do not tell apart what is near 0 in the range of a block"
    )
    axes[-1].set_xlabel(
        f"eigenvalue (linear up to {threshold:.0e}, logarithmic beyond){caution}", fontsize=9
    )
    axes[-1].tick_params(axis="x", labelsize=8, rotation=60)
    figure.supylabel("density per decade", fontsize=9)
    figure.suptitle(f"Spectra of {report.matrix} blocks: {title}", fontsize=10)
    return figure


def _blocks_figure(report: HessianReport, title: str) -> Figure:
    """The norm of each block, and the share of each pair in the whole."""
    from matplotlib.figure import Figure

    from blockopt.analysis.plots import block_mass_heatmap, role_color

    mass = _pooled_mass(report)
    labels = report.short_labels()
    shown = {
        labels[label]: block.frobenius
        for label, block in report.blocks.items()
        if block.frobenius.value > 0
    }
    height = max(2 + 0.6 * len(mass), 1 + 0.16 * len(shown))
    figure = Figure(figsize=(6.5 + 0.7 * len(mass), min(height, 60)), layout="constrained")
    norms, heat = figure.subplots(1, 2, width_ratios=(4.5, 1.2 + 0.7 * len(mass)))
    for place, (label, norm) in enumerate(shown.items()):
        color = role_color(_role(label), 7)
        norms.errorbar(
            [norm.value],
            [place],
            xerr=[norm.standard_error],
            color=color,
            marker="o",
            markersize=5,
            capsize=2,
        )
    norms.set_yticks(range(len(shown)), list(shown), fontsize=8 if len(shown) <= 40 else 6)
    norms.set_xscale("log")
    norms.grid(axis="x", alpha=0.4)
    norms.invert_yaxis()
    norms.set_title(f"Frobenius norms of {report.matrix} blocks", fontsize=10)
    matrix = torch.tensor([[mass[a][b] for b in mass] for a in mass])
    if float(matrix.sum()) > 0:
        block_mass_heatmap(list(mass), matrix, ax=heat)
    figure.suptitle(title, fontsize=10)
    return figure


def _role(label: str) -> str:
    """The role at the end of a label of any level.

    Example:
        >>> [_role(label) for label in ("query", "0.query", "h.0.attn.c_attn.weight:query", "h.0.attn.weight query head 1")]
        ['query', 'query', 'query', 'query']
    """
    words = label.split()
    return words[1] if len(words) > 1 else label.rpartition(":")[2].rpartition(".")[2]


def _pooled_spectra(report: HessianReport) -> dict[str, SpectralDensity]:
    """Those of the blocks, or of too many all eigenvalues of the blocks of a role together; and that of the whole."""
    by_role = len(report.blocks) > MOST_IN_A_PLOT
    members: dict[str, list[tuple[SpectralDensity, int]]] = {}
    names = {label: _role(label) for label in report.blocks} if by_role else report.short_labels()
    for label, block in [*report.blocks.items(), ("whole", report.whole)]:
        if block.spectrum is not None:
            members.setdefault(names.get(label, label), []).append(
                (block.spectrum, block.dimension)
            )
    pooled = {}
    for label, some in members.items():
        total = sum(dimension for _, dimension in some)
        nodes: Tensor = torch.cat([spectrum.nodes for spectrum, _ in some])
        weights = torch.cat(
            [spectrum.weights * (dimension / total) for spectrum, dimension in some]
        )
        order = nodes.argsort()
        pooled[label] = SpectralDensity(nodes[order], weights[order])
    return pooled


def _pooled_mass(report: HessianReport) -> dict[str, dict[str, float]]:
    """Squared norms by pairs of blocks, or of too many by pairs of roles."""
    by_role = len(report.blocks) > MOST_IN_A_PLOT
    names = [
        _role(label) if by_role else report.short_labels()[label] for label in report.mass.labels
    ]
    found: dict[str, dict[str, float]] = {name: dict.fromkeys(names, 0.0) for name in names}
    for a, row in zip(names, report.mass.matrix.tolist()):
        for b, value in zip(names, row):
            found[a][b] += value
    return found
