"""The files of `blockopt hessian`: the report as JSON, as a table, and as a page with its plots."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import platform
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import blockopt
from blockopt.analysis.formatting import plain
from blockopt.analysis.model_report import HessianReport
from blockopt.blocks import Blocks
from blockopt.cli.configs import import_transformers
from blockopt.cli.local_model import Corpus, LocalModel
from blockopt.files import whole_file, write_whole

MOST_BLOCKS = 100  # whose pairs are in report.json; a thousand blocks have a million pairs


def describe_measurement(
    options: argparse.Namespace, source: LocalModel, corpus: Corpus, dtype: str, notes: list[str]
) -> dict[str, Any]:
    """Return how the numbers came about."""
    return {
        "options": {key: value for key, value in vars(options).items() if key != "command"},
        "model": type(source.model).__name__,
        "weights": source.weights,
        "parameters": sum(p.numel() for p in source.model.parameters()),
        "dtype": dtype,
        "tokens": corpus.tokens,
        "config": source.model.config.to_dict(),  # type: ignore[operator, union-attr]
        "versions": {
            "blockopt": blockopt.__version__,
            "torch": torch.__version__,
            "transformers": import_transformers().__version__,
            "python": platform.python_version(),
        },
        "notes": notes,
    }


def write_report(
    folder: Path,
    report: HessianReport,
    record: Mapping[str, Any],
    model: nn.Module,
    blocks: Mapping[str, Blocks],
) -> list[Path]:
    """Write all files, and return their paths; partial results are no longer needed then."""
    paths = [folder / "report.json", folder / "blocks.csv"]
    described, kept = plain(record), report
    if len(report.blocks) > MOST_BLOCKS:
        pairs, kept = _pairs_apart(report)
        paths.append(folder / "pairs.pt")
        with whole_file(paths[-1]) as saved:
            torch.save(pairs, saved)
        described["pairs"] = paths[-1].name
    text = json.dumps({**described, "report": kept.to_dict()}, allow_nan=False)
    write_whole(paths[0], f"{text}\n")
    rows = report.rows()
    columns = max(rows, key=len)  # small blocks have fewer tops
    with paths[1].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(rows)
    if importlib.util.find_spec("matplotlib") is None:
        print("Note: no plots without matplotlib: pip install 'blockopt[recipes]'.")
    else:
        from blockopt.cli.hessian_page import page, pictures

        plots = pictures(report, f"{record['model']}, {record['weights']}")
        files = {**plots, "report.html": page(report, record, model, blocks, plots).encode()}
        for name, content in files.items():
            write_whole(folder / name, content)
            paths.append(folder / name)
    (folder / "partial.pt").unlink(missing_ok=True)
    return paths


def _pairs_apart(report: HessianReport) -> tuple[dict[str, Tensor | list[str]], HessianReport]:
    """Return what the report holds of pairs of blocks, in float32, and the report without it."""
    pairs: dict[str, Tensor | list[str]] = {"blocks": [str(group) for group in report.blocks]}
    none, mass = torch.zeros(0), report.mass
    if mass is not None:
        pairs["squared_norms"] = mass.matrix.float()
        pairs["standard_errors"] = mass.standard_error.float()
        mass = replace(mass, labels=(), matrix=none, standard_error=none, traces=())
    distance = {}
    for axis, found in report.distance.items():
        pairs[f"labels of distances on a {axis} axis"] = [str(label) for label in found.labels]
        pairs[f"distances on a {axis} axis"] = found.matrix.float()
        distance[axis] = replace(found, labels=(), matrix=none)
    return pairs, replace(report, mass=mass, distance=distance)
